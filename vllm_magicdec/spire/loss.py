# SPDX-License-Identifier: Apache-2.0
"""What a draft is trained for: to be like its target, and to be accepted by it."""

import torch
from torch import Tensor


def mixed_loss(draft_logits: Tensor, target_logits: Tensor, omega: float) -> tuple[Tensor, Tensor]:
    """SPIRe's MixedLoss: omega times the distillation loss, and the rest the chance of a rejection.

    Args:
        draft_logits: of q, `[..., vocab_size]`.
        target_logits: of p, likewise.
        omega: 0 to 1.

    Returns:
        `omega * KL(p, q) + (1 - omega) * (1 - sum(min(p, q)))`, and the expected acceptance
        `sum(min(p, q))` at temperature 1 (Leviathan et al. 2023), both the mean over all but the
        vocabulary, float32 scalars.
    """
    log_q = draft_logits.float().log_softmax(-1)
    log_p = target_logits.float().log_softmax(-1)
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1).mean()
    acceptance = torch.minimum(p, log_q.exp()).sum(-1).mean()
    return omega * divergence + (1 - omega) * (1 - acceptance), acceptance.detach()
