# SPDX-License-Identifier: Apache-2.0
"""Policies: who chooses where the draft looks."""

import torch

from vllm_magicdec.policies.streamingllm import StreamingLLM
from vllm_magicdec.view import PageBudget, PagePolicy

_POLICIES = {"streamingllm": StreamingLLM}


def make_policy(name: str, budget: PageBudget, device: torch.device) -> PagePolicy:
    """The policy that `draft_kv_policy` names."""
    return _POLICIES[name](budget, device)
