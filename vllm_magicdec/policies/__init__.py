# SPDX-License-Identifier: Apache-2.0
"""Policies: who chooses where the draft looks."""

from importlib.metadata import entry_points

from vllm_magicdec.policies.base import Observation, PagePolicy, TokenPolicy
from vllm_magicdec.policies.snapkv import SnapKV
from vllm_magicdec.policies.streamingllm import StreamingLLM

__all__ = ["Observation", "PagePolicy", "TokenPolicy", "find_policy", "policy_names"]

ENTRY_POINTS = "vllm_magicdec.policies"

_OWN: dict[str, type[PagePolicy] | type[TokenPolicy]] = {"streamingllm": StreamingLLM, "snapkv": SnapKV}


def policy_names() -> list[str]:
    """What `draft_kv_policy` may name: the plugin's own policies, then those of other packages."""
    return [*_OWN, *sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - set(_OWN))]


def find_policy(name: str) -> type[PagePolicy] | type[TokenPolicy]:
    """The class that `draft_kv_policy` names.

    Raises:
        ValueError: there is none, or it is not a policy.
    """
    if name in _OWN:
        return _OWN[name]
    points = entry_points(group=ENTRY_POINTS, name=name)
    if not points:
        raise ValueError(f"draft_kv_policy={name!r} is unknown; use one of {', '.join(policy_names())}")
    policy = next(iter(points)).load()
    if not (isinstance(policy, type) and issubclass(policy, PagePolicy | TokenPolicy)):
        raise ValueError(
            f"draft_kv_policy={name!r} names {policy!r}, which is no subclass of PagePolicy or TokenPolicy"
        )
    return policy
