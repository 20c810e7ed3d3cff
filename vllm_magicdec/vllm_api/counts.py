# SPDX-License-Identifier: Apache-2.0
"""How counts travel: from a worker with its step's output, and to the front end with the step's statistics.

Both go wherever vLLM's own executors bring them, to other hosts too: pickled from a worker, by msgpack from
an engine core. See `adaptive/metrics.py` for what is counted.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_magicdec.adaptive.metrics import Changes, Counts, CountsLogger, attach, counts_of

_CHANGES = "_magicdec_changes"  # of a worker, on a step's output


def send(counts: Counts, output: Any) -> Any:
    """Let a worker's changes travel with a step's output.

    Args:
        counts: of this worker.
        output: of the runner's `sample_tokens`; what has none yet keeps none.

    Returns:
        The output to return instead.
    """
    if not isinstance(output, ModelRunnerOutput | AsyncModelRunnerOutput):
        return output
    changes = counts.take()
    if changes is None:
        return output
    if isinstance(output, ModelRunnerOutput):
        return _with_changes(output, changes)
    get_output = output.get_output

    def get_output_with_changes() -> ModelRunnerOutput:
        del output.get_output  # a cycle, which would keep the output and its buffers until it is collected
        return _with_changes(get_output(), changes)

    output.get_output = get_output_with_changes
    return output


def _with_changes(output: ModelRunnerOutput, changes: Changes) -> ModelRunnerOutput:
    if output is EMPTY_MODEL_RUNNER_OUTPUT:  # everybody's
        output = copy(output)
    setattr(output, _CHANGES, changes)
    return output


def pass_on(scheduler: Scheduler, output: ModelRunnerOutput, outputs: Iterable[EngineCoreOutputs]) -> None:
    """From a worker's output, and the engine core itself, to what the front end gets of the step."""
    counts = counts_of(scheduler)
    changes: Changes | None = getattr(output, _CHANGES, None)
    if changes is not None:
        counts.join(changes)
    for one in outputs:
        if one.scheduler_stats is not None:
            latest = counts.take()
            if latest is not None:
                attach(one.scheduler_stats, latest)
            return


def add_logger(manager: StatLoggerManager, vllm_config: VllmConfig) -> None:
    """Give a front end the logger that shows them: the first one, because others would trip over them."""
    kinds = [type(logger) for logger in manager.stat_loggers if isinstance(logger, PrometheusStatLogger)]
    logger = CountsLogger(vllm_config, manager.engine_indexes, kinds[0] if kinds else PrometheusStatLogger)
    manager.stat_loggers.insert(0, logger)
