# SPDX-License-Identifier: Apache-2.0
"""Policies: who chooses where the draft looks.

`base.py` is what a policy is, here or in another package; `streamingllm.py`, `snapkv.py` and
`verify_topk.py` (on a GPU with its kernels) are one each. `observing.py` is what those share
that choose by a prompt's last tokens, `verification.py` what those share that choose by verified ones. A
new policy is a file here and a line in `_OWN`.
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
    """What `draft_kv_policy` may name: the plugin's own policies, then those of other packages."""
    return [*_OWN, *sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - set(_OWN))]


def find_policy(name: str) -> type[Policy]:
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
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ValueError(
            f"draft_kv_policy={name!r} names {policy!r}, which is no subclass of PagePolicy, TokenPolicy "
            "or VerificationPolicy"
        )
    return policy
