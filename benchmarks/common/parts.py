# SPDX-License-Identifier: Apache-2.0
"""Split the time of a step into its parts, inside the worker of an engine on a CPU.

The functions are sent to the worker, which computes synchronously there.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

PARTS = ("linear", "attention", "model", "sampling", "runner")
"""Linear layers and unembedding; attention; the rest of the model; sampling; the rest of the runner."""


class PartTimers:
    """Seconds of each part by phase, `target` or `draft`, without those of the parts inside it."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open: list[str] = []
        self._since = 0.0
        self._phase = "target"

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, timed as a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._switch_to(f"{self._phase} {part}")
            try:
                return function(*args, **kwargs)
            finally:
                self._switch_to(None)

        return call

    def drafting(self, propose: Callable[..., Any]) -> Callable[..., Any]:
        """Return the drafter's function, in which all parts are those of the draft."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._phase = "draft"
            try:
                return self.timed("runner", propose)(*args, **kwargs)
            finally:
                self._phase = "target"

        return call

    def _switch_to(self, part: str | None) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        if part is None:
            self._open.pop()
        else:
            self._open.append(part)
        self._since = now


def install_part_timers(worker: Any) -> None:
    """Time the parts of every step of this worker."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.linear import LinearBase

    runner = worker.model_runner
    worker.part_timers = timers = PartTimers()
    drafter = getattr(runner, "drafter", None)
    models = {id(model): model for model in (runner.model, getattr(drafter, "model", None)) if model}
    for model in models.values():
        for module in model.modules():
            if isinstance(module, LinearBase):
                module.forward = timers.timed("linear", module.forward)
        model.compute_logits = timers.timed("linear", model.compute_logits)
        model.forward = timers.timed("model", model.forward)
    for layer in get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase).values():
        layer.impl.forward = timers.timed("attention", layer.impl.forward)
    runner._sample = timers.timed("sampling", runner._sample)
    if drafter is not None:
        if hasattr(drafter, "_sample_draft_tokens"):  # not of vLLM's lookups
            drafter._sample_draft_tokens = timers.timed("sampling", drafter._sample_draft_tokens)
        drafter.propose = timers.drafting(drafter.propose)
    worker.execute_model = timers.timed("runner", worker.execute_model)
    worker.sample_tokens = timers.timed("runner", worker.sample_tokens)


def take_parts(worker: Any) -> dict[str, float]:
    """Return the milliseconds since the last call, by phase and part."""
    timers = worker.part_timers
    seconds, timers.seconds = timers.seconds, Counter()
    return {part: 1000 * value for part, value in seconds.items()}
