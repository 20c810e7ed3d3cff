# SPDX-License-Identifier: Apache-2.0
"""Lookups in the requests' own contexts on the device.

Under asynchronous scheduling the host learns a round's tokens long after the next one has begun. So the
device compares every position of a text with its end, which takes a GPU as long as reading the tokens. The
longest match wins, at a tie the latest. There are no probabilities: the tokens found fill draft passes that
have room for them anyway (`drafting/wide_passes.py`).
"""

import torch

from vllm_magicdec.lookup.history import Texts

MAX_MATCH = 8  # tokens; longer matches count as this


class DeviceLookups:
    """Lookups for all requests of a worker, without synchronization.

    Args:
        vocab_size: ids outside of the vocabulary (an image's placeholder) become token 0.
        has_kernels: search with Triton kernels instead of many small operations.
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

    def fill(self, drafts: torch.Tensor, num_drafted: torch.Tensor, texts: Texts) -> torch.Tensor:
        """Fill up `drafts` with the continuations of the texts, or token 0 without a match.

        Args:
            drafts: [num_reqs, num_steps] int32, contiguous: each text's last token and its drafts; the rest
                is written.
            num_drafted: [num_reqs] int64, drafts of each text, fewer than `num_steps`.

        Returns:
            [num_reqs] bool, whether there was a match.
        """
        if self._has_kernels:
            return self._scan.fill(drafts, num_drafted, texts, MAX_MATCH, self._vocab_size)
        text_lens, ends = texts.lens.unsqueeze(1), (texts.lens + num_drafted).unsqueeze(1)
        positions = torch.arange(texts.max_len, device=drafts.device).unsqueeze(0)
        # A match ends at a position that a verified token follows.
        is_same = positions < text_lens - 1
        lengths = torch.zeros_like(is_same, dtype=torch.int64)
        for back in range(MAX_MATCH):
            target = texts.tokens_at(ends - 1 - back, drafts)
            is_same &= texts.tokens_at((positions - back).expand_as(is_same), drafts) == target
            is_same &= positions >= back
            lengths += is_same
        scores = lengths * texts.max_len + positions
        best = scores.masked_fill_(lengths == 0, -1).amax(dim=1, keepdim=True)
        is_found = best >= 0
        follows = best.clamp(min=0) % texts.max_len + 1
        columns = torch.arange(drafts.shape[1], device=drafts.device).unsqueeze(0)
        # A continuation that reaches the end of the text repeats itself.
        period = (ends - follows).clamp(min=1)
        sources = follows + (columns - num_drafted.unsqueeze(1) - 1).remainder(period)
        found = texts.tokens_at(sources, drafts)
        is_token = is_found & (found >= 0) & (found < self._vocab_size)
        found.masked_fill_(~is_token, 0)
        drafts.copy_(torch.where(columns > num_drafted.unsqueeze(1), found, drafts))
        return is_found.squeeze(1)
