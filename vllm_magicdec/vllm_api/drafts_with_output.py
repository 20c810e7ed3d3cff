# SPDX-License-Identifier: Apache-2.0
"""Sends drafts to the engine core with their step's output on CPUs, which saves a call to the workers.

Under synchronous scheduling, vLLM 0.32 requests drafts after it has sent the outputs to the front end. On
few cores, the front end then runs while the engine core waits and the workers idle (docs/internals.md has
numbers). The call stays where drafts may not be ready with the outputs (on a device, asynchronously) or
belong to an earlier step (pipelines).
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

# Attribute of a step's output, then of the scheduler: a tuple of the drafts or None.
_DRAFTS = "_magicdec_drafts"


def send_drafts(runner: Any, output: Any) -> Any:
    """Attach a worker's latest drafts to the output of its runner's `sample_tokens`, and return it."""
    if not _drafts_are_there(runner.vllm_config):
        return output
    if isinstance(output, AsyncModelRunnerOutput):  # from the V2 runner, complete on a CPU
        output = output.get_output()
    if isinstance(output, ModelRunnerOutput) and output.req_ids:
        setattr(output, _DRAFTS, (runner.take_draft_token_ids(),))
    return output


def _drafts_are_there(vllm_config: VllmConfig) -> bool:
    return (
        vllm_config.device_config.device_type == "cpu"
        and not vllm_config.scheduler_config.async_scheduling
        and vllm_config.parallel_config.pipeline_parallel_size == 1
    )


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
