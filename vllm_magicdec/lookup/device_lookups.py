# SPDX-License-Identifier: Apache-2.0
"""How each request's own text is likely to go on, where its latest tokens are on the device alone.

Under asynchronous scheduling the host hears of a round's tokens when the next one has long begun. So this
searches without an index: every place of a request's text is compared with the text's end, which a GPU does
for a batch in the time that it takes to read their tokens. The longest match decides, of equals the latest.
Nothing is weighed: what is found is for passes that have room for it anyway (`drafting/wide_passes.py`).
"""

from dataclasses import dataclass

import torch

MAX_MATCH = 8  # tokens; longer ones count as this


@dataclass(frozen=True)
class Texts:
    """The verified tokens of a batch's requests."""

    token_ids: torch.Tensor  # [max_num_reqs, max_model_len] int32
    rows: torch.Tensor  # [num_reqs] int, whose are whose
    lens: torch.Tensor  # [num_reqs] int64, at least 1
    most: int  # no text is longer, as far as the host knows

    def tokens_at(self, places: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        """[num_reqs, n] int32, of each text and what is ahead of it; -1 before its beginning.

        Args:
            places: [num_reqs, n] int64; a text's last token is the first of `ahead`.
            ahead: [num_reqs, num_ahead] int32.
        """
        rows, within = self.rows.long().unsqueeze(1), places - self.lens.unsqueeze(1) + 1
        verified = self.token_ids[rows, places.clamp(0, self.token_ids.shape[1] - 1)]
        drafted = ahead.gather(1, within.clamp(0, ahead.shape[1] - 1))
        return torch.where(within > 0, drafted, verified).masked_fill(places < 0, -1)


class DeviceLookups:
    """Of a worker's requests; never waits for the device.

    Args:
        max_num_reqs: requests in a batch.
        max_model_len: tokens of a text.
        vocab_size: what is no token of the vocabulary (an image's placeholder) is not looked up.
        device: where the texts are.
        has_kernels: Triton's kernels search, and not many small operations.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        *,
        has_kernels: bool,
    ) -> None:
        self._vocab_size = vocab_size
        self._has_kernels = has_kernels
        if has_kernels:
            from vllm_magicdec.lookup.device_kernels import Scan

            self._scan = Scan(max_num_reqs, max_model_len, device)

    def fill(self, given: torch.Tensor, made: torch.Tensor, texts: Texts) -> torch.Tensor:
        """Look up how texts go on after what was drafted; where nothing is found, token 0.

        Args:
            given: [num_reqs, num_steps] int32, contiguous: each text's last token and its drafts; written
                after these.
            made: [num_reqs] int64, drafts of each, fewer than `num_steps`.
            texts: of these requests.

        Returns:
            [num_reqs] bool, where something was found.
        """
        if self._has_kernels:
            return self._scan.fill(given, made, texts, MAX_MATCH, self._vocab_size)
        return self._fill(given, made, texts)

    def _fill(self, given: torch.Tensor, made: torch.Tensor, texts: Texts) -> torch.Tensor:
        """See `fill`."""
        text_lens, ends = texts.lens.unsqueeze(1), (texts.lens + made).unsqueeze(1)
        places = torch.arange(texts.most, device=given.device).unsqueeze(0)
        # Where the tokens up to a place are the text's last ones, and how many; a verified one follows.
        is_same = places < text_lens - 1
        lengths = torch.zeros_like(is_same, dtype=torch.int64)
        for back in range(MAX_MATCH):
            wanted = texts.tokens_at(ends - 1 - back, given)
            is_same &= texts.tokens_at((places - back).expand_as(is_same), given) == wanted
            is_same &= places >= back
            lengths += is_same
        scores = lengths * texts.most + places
        best = scores.masked_fill_(lengths == 0, -1).amax(dim=1, keepdim=True)
        is_found = best >= 0
        follows = best.clamp(min=0) % texts.most + 1
        columns = torch.arange(given.shape[1], device=given.device).unsqueeze(0)
        # A text that repeats its end goes on with what was found before.
        period = (ends - follows).clamp(min=1)
        sources = follows + (columns - made.unsqueeze(1) - 1).remainder(period)
        found = texts.tokens_at(sources, given)
        is_token = is_found & (found >= 0) & (found < self._vocab_size)
        given.copy_(torch.where(columns > made.unsqueeze(1), found.masked_fill(~is_token, 0), given))
        return is_found.squeeze(1)
