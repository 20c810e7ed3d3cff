# SPDX-License-Identifier: Apache-2.0
"""vLLM's own methods with a controller, a window over the draft's KV cache, or both."""

from typing import Any

from pydantic import ValidationError
from typing_extensions import override

from vllm_magicdec.config.adaptive import DEFAULT_MAX_TOKENS, nested_lengths
from vllm_magicdec.config.fields import VllmMethodFields, default_of
from vllm_magicdec.config.given import chooses_drafts
from vllm_magicdec.config.reasons import first_problem
from vllm_magicdec.config.refusals import SPARSE_MLA_FIELDS
from vllm_magicdec.errors import MagicDecConfigError, quoted
from vllm_magicdec.views.pages import PageBudget

# Methods without a choice of the number of drafts.
_FIXED_NUMBER = {
    "extract_hidden_states": "drafts nothing",
    "dspark": "drafts blocks of the length that it was trained with",
    "ngram_gpu": "drafts the number that it was compiled for",
}
# Methods that draft token by token over a KV cache of their own.
_WINDOW_METHODS = ("draft_model", "eagle", "eagle3", "mtp")


class VllmMethodConfig(VllmMethodFields):
    """vLLM's speculative configuration of one of its own methods, with what the plugin adds.

    Raises:
        MagicDecConfigError: an addition is not possible with a field or the method.
    """

    def __init__(self, /, **given: Any) -> None:
        fields = dict(given)
        if chooses_drafts(given):
            for name in ("num_speculative_tokens_per_batch_size", "enable_adaptive_verification"):
                if fields.get(name):
                    raise MagicDecConfigError(
                        f"num_speculative_tokens='auto' and {name} both choose drafts; remove one of them"
                    )
            del fields["num_speculative_tokens"]
            fields["adaptive"] = True
            most = fields.get("max_num_speculative_tokens")
            if most or given.get("method") != "suffix":  # for which vLLM has a default
                fields["num_speculative_tokens"] = most or DEFAULT_MAX_TOKENS
        try:
            super().__init__(**fields)
        except ValidationError as error:
            problem = first_problem(error, str(given.get("method") or "speculative_config"))
            is_auto = chooses_drafts(given) and "num_speculative_tokens" in problem
            raise MagicDecConfigError(
                f"{problem}{'; set max_num_speculative_tokens' if is_auto else ''}"
            ) from None
        if self.adaptive and (reason := self._without_choice()) is not None:
            raise MagicDecConfigError(
                f"num_speculative_tokens='auto' is not possible with method={quoted(self.method)}, which "
                f"{reason}; use a number"
            )
        if self.draft_kv_budget is not None and (reason := self._without_window()) is not None:
            raise MagicDecConfigError(
                f"draft_kv_budget is not possible with method={quoted(self.method)}, which {reason}; "
                "remove it"
            )
        if self.adaptive and not self.lengths:  # a copy has them
            self.choose_among(nested_lengths(self.num_speculative_tokens))

    def _without_choice(self) -> str | None:
        if self.parallel_drafting and self.method != "dflash":
            return "drafts in parallel the number that vLLM fixes at start-up"
        return _FIXED_NUMBER.get(self.name)

    def _without_window(self) -> str | None:
        if self.method not in _WINDOW_METHODS:
            return "does not draft token by token over a KV cache of its own"
        if self.parallel_drafting:
            return "drafts all tokens in one pass"
        if self.use_gemma4_mtp():
            return "reads the target's KV cache"
        if self.use_multi_module_mtp() or self.use_step3p5_mtp():
            return "has several MTP modules"
        draft = self.draft_model_config
        if any(hasattr(draft.hf_text_config, name) for name in SPARSE_MLA_FIELDS):
            return "reads few tokens already (sparse MLA)"
        return "has recurrent state" if draft.is_hybrid or draft.has_inner_state else None

    def window(self, page_size: int, max_model_len: int) -> PageBudget:
        """Return the pages of `page_size` tokens that a draft step reads of a request.

        Raises:
            MagicDecConfigError: the budget is below one page.
        """
        assert self.draft_kv_budget is not None
        try:
            return PageBudget.from_tokens(
                budget=self.draft_kv_budget,
                min_budget=default_of("draft_kv_min_budget"),
                sink=self.draft_kv_sink,
                page_size=page_size,
                num_speculative_tokens=2,  # at least two pages of latest tokens, one of which may be new
                max_model_len=max_model_len,
            )
        except ValueError as error:
            raise MagicDecConfigError(f"{self.name}: {error}") from None

    @override
    def budget_tokens(self, context: int) -> int:
        whole, budget = super().budget_tokens(context), self.draft_kv_budget
        if budget is None:
            return whole
        least = default_of("draft_kv_min_budget")
        return min(whole, int(budget if budget >= 1 else max(least, budget * context)))
