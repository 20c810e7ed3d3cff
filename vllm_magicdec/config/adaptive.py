# SPDX-License-Identifier: Apache-2.0
"""`num_speculative_tokens: auto`: what the controller's scheduler reads of a speculative configuration."""

from pydantic import Field
from vllm.config import SpeculativeConfig
from vllm.config.utils import config

DEFAULT_MAX_TOKENS = 8  # draft tokens per round under `auto`
MOST_DRAFTS = 128  # draft tokens per round

# Methods whose drafts differ in number between requests.
_DIFFERING_METHODS = ("ngram", "suffix", "custom_class")
# Methods that accept only their maximum number; of their drafts, fewer are verified.
_FIXED_METHODS = ("suffix", "custom_class", "medusa")
# Methods without draft steps over a KV cache.
_ONE_PASS_METHODS = (*_DIFFERING_METHODS, "medusa")


@config
class AdaptiveConfig(SpeculativeConfig):
    """A speculative configuration of which a controller may choose the number of drafts."""

    max_num_speculative_tokens: int | None = Field(default=None, gt=0, le=MOST_DRAFTS)
    """Maximum number of draft tokens per round when `num_speculative_tokens` is `auto`. Default: 8, or 16
    with lookups (`draft_lookup`)."""
    adaptive: bool = False
    """Whether a controller chooses the number of draft tokens of every round, up to
    `num_speculative_tokens`."""
    lengths: tuple[int, ...] = ()
    """Numbers of draft tokens that the controller chooses from, ascending; empty without a controller."""

    @property
    def looks_up_on_host(self) -> bool:
        """Whether workers replace the controller's choice by lookups round by round."""
        return False

    @property
    def drafts_differ(self) -> bool:
        """Whether the number of drafts may differ between the requests of a step."""
        return self.looks_up_on_host or self.method in _DIFFERING_METHODS

    @property
    def drafts_all(self) -> bool:
        """Whether the workers make `num_speculative_tokens` drafts, however many are chosen."""
        return self.method in _FIXED_METHODS

    @property
    def name(self) -> str:
        """Public name of the method."""
        return str(self.method)

    def budget_tokens(self, context: int) -> int:
        """Return the maximum K/V entries that a draft step reads of a request with `context` tokens."""
        return 0 if self.method in _ONE_PASS_METHODS else context

    def choose_among(self, lengths: tuple[int, ...]) -> None:
        """Let the controller choose among `lengths`, and vLLM capture CUDA graphs for them.

        vLLM captures full graphs for the lengths in its table from batch size to drafts. Each length gets a
        batch size, the largest length first because sizes may not suffice. All larger batches get 0, so
        that vLLM adds its usual graph sizes. The controller overrides the table.

        Args:
            lengths: ascending, 0 included.
        """
        self.lengths = lengths
        *larger, least = sorted({0, *lengths}, reverse=True)
        table = [(size, size, length) for size, length in enumerate(larger, start=1)]
        self.num_speculative_tokens_per_batch_size = [*table, (len(larger) + 1, 2**20, least)]


def nested_lengths(most: int, at_most: int = MOST_DRAFTS) -> tuple[int, ...]:
    """Return numbers of drafts whose CUDA graphs do not conflict: 0, 1, 3, 7, 15, ...

    vLLM uses a graph only if the next captured number of tokens has the same number of drafts. Verifying
    these takes 1, 2, 4, 8, ... tokens per request, so vLLM's sizes, multiples of 8, suit all of them.

    Args:
        most: upper bound of the numbers, at least 1.
        at_most: how many to return, at least 2, evenly spread.
    """
    lengths = [2**power - 1 for power in range((most + 1).bit_length())]
    at_most = min(at_most, len(lengths))
    indices = (round(i * (len(lengths) - 1) / (at_most - 1)) for i in range(at_most))
    return tuple(lengths[index] for index in indices)
