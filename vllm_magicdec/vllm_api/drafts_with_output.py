# SPDX-License-Identifier: Apache-2.0
"""Sends drafts to the engine core with their step's output on CPUs, which saves a call to the workers.

Under synchronous scheduling, vLLM 0.32 requests drafts after it has sent the outputs to the front end. On
few cores, the front end then runs while the engine core waits and the workers idle (docs/internals.md has
numbers). The call stays on a device, where drafts may not be ready with the outputs.
"""

from typing import Any

from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

# Attribute of a step's output, then of the scheduler: a tuple of the drafts or None.
_DRAFTS = "_magicdec_drafts"


def send_drafts(runner: Any, output: Any) -> Any:
    """Attach a worker's latest drafts to the output of its runner's `sample_tokens`, and return it."""
    if runner.vllm_config.device_config.device_type != "cpu":
        return output
    if isinstance(output, AsyncModelRunnerOutput):  # from the V2 runner, complete on a CPU
        output = output.get_output()
    if isinstance(output, ModelRunnerOutput) and output.req_ids:
        setattr(output, _DRAFTS, (runner.take_draft_token_ids(),))
    return output


def keep_drafts(scheduler: Any, output: ModelRunnerOutput) -> None:
    """Keep the drafts in the scheduler until vLLM would request them."""
    setattr(scheduler, _DRAFTS, getattr(output, _DRAFTS, None))


def update_drafts(scheduler: Any) -> bool:
    """Give the scheduler the drafts of the latest output; returns False if the workers must be asked."""
    received: tuple[DraftTokenIds | None] | None = getattr(scheduler, _DRAFTS, None)
    setattr(scheduler, _DRAFTS, None)
    if received is None:
        return False
    (drafts,) = received
    if drafts is not None:
        scheduler.update_draft_token_ids(drafts)
    return True
