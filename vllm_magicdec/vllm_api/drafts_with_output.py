# SPDX-License-Identifier: Apache-2.0
"""On CPUs drafts come to the engine core with their step's output, where vLLM would ask workers for them.

Scheduling synchronously, vLLM 0.32 asks once it has handed the outputs on. These wake the front end, which
on few cores runs while the engine core waits: the answer is picked up late, and meanwhile the workers
idle (docs/internals.md has numbers). Without that call the next step has begun by then.

Where drafts are still computed when the outputs are there (on a device, asynchronously), or are of another
step than the latest (in pipelines), vLLM asks.
"""

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

_DRAFTS = "_magicdec_drafts"  # on a step's output, then on the scheduler: a tuple of them, or of None


def send_drafts(runner: Any, output: Any) -> Any:
    """Let a worker's latest drafts travel with its step's output.

    Args:
        runner: vLLM's model runner.
        output: of its `sample_tokens`.

    Returns:
        The output to return instead.
    """
    if not _drafts_are_there(runner.vllm_config):
        return output
    if isinstance(output, AsyncModelRunnerOutput):  # the V2 runner's, of which a CPU has nothing left to do
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
    """Until vLLM would ask for them, which is when it looks at requests and grammars again."""
    setattr(scheduler, _DRAFTS, getattr(output, _DRAFTS, None))


def update_drafts(scheduler: Any) -> bool:
    """Give the scheduler what came with the latest output.

    Returns:
        Whether something came; otherwise the workers must be asked.
    """
    came: tuple[DraftTokenIds | None] | None = getattr(scheduler, _DRAFTS, None)
    setattr(scheduler, _DRAFTS, None)
    if came is None:
        return False
    (drafts,) = came
    if drafts is not None:
        scheduler.update_draft_token_ids(drafts)
    return True
