# SPDX-License-Identifier: Apache-2.0
"""Wrappers of single methods of one model runner, installed when its proposer or speculator is made."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_magicdec.hooking import before, instead


def bypass_rejection_sampler(
    runner: Any,
    *,
    may_skip: Callable[[SchedulerOutput], bool] | None = None,
    follow: Callable[[SchedulerOutput], object] | None = None,
) -> None:
    """Skip the rejection sampler on steps without draft tokens.

    With speculation configured, vLLM 0.32 sends every step through the rejection sampler and the padding of
    rejected tokens, 7 to 11 % of a short step on a CPU. It does so if `speculative_config` is set, which
    this hides during plain steps.

    Args:
        runner: a `CPUModelRunner` under construction.
        may_skip: for a draft with a KV cache of its own, called before a step without prompt tokens;
            whether the cache can do without it. Other steps go to the proposer.
        follow: for such a draft, called after a skipped step.
    """
    speculative_config = runner.speculative_config

    def execute(
        original: Callable[..., Any], scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        verifies = bool(scheduler_output.scheduled_spec_decode_tokens)
        is_plain = not verifies and scheduler_output.num_spec_tokens_to_schedule == 0
        if is_plain and may_skip is not None:
            num_reqs = len(scheduler_output.num_scheduled_tokens)
            has_prompt = scheduler_output.total_num_scheduled_tokens > num_reqs
            is_plain = not has_prompt and may_skip(scheduler_output)
        # Kept until the next step: the second half of this one, `sample_tokens`, reads it too.
        runner.speculative_config = None if is_plain else speculative_config
        output = original(scheduler_output, *args, **kwargs)
        if is_plain and follow is not None:
            follow(scheduler_output)
        return output

    runner.execute_model = instead(execute)(runner, runner.execute_model)


def report_finished(runner: Any, on_finish: Callable[[str, Sequence[int]], None]) -> None:
    """Call `on_finish(req_id, tokens)` before a V1 runner drops a request, in one order on all ranks.

    The tokens are all verified ones after its prompt, including those beyond the answer's end.
    """

    def report(scheduler_output: SchedulerOutput, *_: Any, **__: Any) -> None:
        for req_id in sorted(scheduler_output.finished_req_ids):
            if req_id in runner.requests:  # else it finished before its first step
                on_finish(req_id, runner.requests[req_id].output_token_ids)

    runner.execute_model = before(report)(runner, runner.execute_model)


def report_removed(req_states: Any, on_remove: Callable[[str, Sequence[int]], None]) -> None:
    """Call `on_remove(req_id, tokens after its prompt)` before a V2 runner on a CPU drops a request."""

    def report(req_id: str) -> None:
        row = req_states.req_id_to_index.get(req_id)
        if row is not None:
            begin, end = int(req_states.prompt_len.np[row]), int(req_states.total_len.gpu[row])
            on_remove(req_id, req_states.all_token_ids.gpu[row, begin:end].tolist())

    req_states.remove_request = before(report)(req_states, req_states.remove_request)
