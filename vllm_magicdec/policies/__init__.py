# SPDX-License-Identifier: Apache-2.0
"""Policies, which choose the parts of the KV cache that drafts read.

`base.py` defines a policy, in this package or another; `observing.py` is the base of policies that score by
a prompt's last tokens, `verification.py` of those that score by verified tokens. To add a policy, add a
file and a line in `_OWN`.
"""

from importlib.metadata import entry_points

from vllm_magicdec.policies.base import PagePolicy, Policy
from vllm_magicdec.policies.observing import Observation, TokenPolicy
from vllm_magicdec.policies.snapkv import SnapKV
from vllm_magicdec.policies.streamingllm import StreamingLLM
from vllm_magicdec.policies.verification import VerificationPolicy
from vllm_magicdec.policies.verify_topk import VerifyTopK

__all__ = ["Observation", "PagePolicy", "Policy", "TokenPolicy", "VerificationPolicy", "find_policy"]

ENTRY_POINTS = "vllm_magicdec.policies"

_OWN: dict[str, type[Policy]] = {"streamingllm": StreamingLLM, "snapkv": SnapKV, "verify-topk": VerifyTopK}


def policy_names() -> list[str]:
    """Return the valid values of `draft_kv_policy`: own policies, then those of other packages."""
    return [*_OWN, *sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - set(_OWN))]


def find_policy(name: str) -> type[Policy]:
    """Return the class that `draft_kv_policy` names; raise ValueError if it is unknown or no policy."""
    if name in _OWN:
        return _OWN[name]
    points = entry_points(group=ENTRY_POINTS, name=name)
    if not points:
        raise ValueError(f"draft_kv_policy={name!r} is unknown; use one of {', '.join(policy_names())}")
    policy = next(iter(points)).load()
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ValueError(
            f"draft_kv_policy={name!r} names {policy!r}, which is no subclass of PagePolicy, TokenPolicy "
            "or VerificationPolicy"
        )
    return policy
