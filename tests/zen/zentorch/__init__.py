# SPDX-License-Identifier: Apache-2.0
"""Stands in for AMD's `zentorch`, for which vLLM chooses its `ZenCpuPlatform`: linear layers in torch."""

import torch

_library = torch.library.Library("zentorch", "DEF")
_library.define(
    "zentorch_linear_unary(Tensor x, Tensor weight, Tensor? bias=None, *, "
    "bool is_weight_prepacked=False) -> Tensor"
)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_weight_prepacked: bool = False,
) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight, bias)


_library.impl("zentorch_linear_unary", _linear, "CPU")
