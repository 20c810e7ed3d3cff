# SPDX-License-Identifier: Apache-2.0
"""Transport of counts from workers to the engine core, and on to the front end.

They travel with a step's output (pickled) and with the step's statistics (msgpack), also between hosts. See
`adaptive/metrics.py` for what is counted.
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

_CHANGES = "_magicdec_changes"  # attribute of a step's output


def send(counts: Counts, output: Any) -> Any:
    """Attach a worker's changes to the output of the runner's `sample_tokens`, and return it."""
    if not isinstance(output, ModelRunnerOutput | AsyncModelRunnerOutput):
        return output
    if (changes := counts.take()) is None:
        return output
    if isinstance(output, ModelRunnerOutput):
        return _with_changes(output, changes)
    get_output = output.get_output

    def get_output_with_changes() -> ModelRunnerOutput:
        del output.get_output  # breaks a cycle that would keep the output's buffers alive
        return _with_changes(get_output(), changes)

    output.get_output = get_output_with_changes
    return output


def _with_changes(output: ModelRunnerOutput, changes: Changes) -> ModelRunnerOutput:
    if output is EMPTY_MODEL_RUNNER_OUTPUT:  # a shared object
        output = copy(output)
    setattr(output, _CHANGES, changes)
    return output


def pass_on(scheduler: Scheduler, output: ModelRunnerOutput, outputs: Iterable[EngineCoreOutputs]) -> None:
    """Move counts of a worker and the engine core to the step's statistics for the front end."""
    counts = counts_of(scheduler)
    if (changes := getattr(output, _CHANGES, None)) is not None:
        counts.join(changes)
    stats = next((one.scheduler_stats for one in outputs if one.scheduler_stats is not None), None)
    if stats is not None and (latest := counts.take()) is not None:
        attach(stats, latest)


def add_logger(manager: StatLoggerManager, vllm_config: VllmConfig) -> None:
    """Add the logger of counts to a front end, before all others, which cannot handle them."""
    types = [type(logger) for logger in manager.stat_loggers if isinstance(logger, PrometheusStatLogger)]
    logger = CountsLogger(vllm_config, manager.engine_indexes, types[0] if types else PrometheusStatLogger)
    manager.stat_loggers.insert(0, logger)
