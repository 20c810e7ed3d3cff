# SPDX-License-Identifier: Apache-2.0
"""The training loss of a draft."""

import torch
from torch import Tensor


def mixed_loss(draft_logits: Tensor, target_logits: Tensor, omega: float) -> tuple[Tensor, Tensor]:
    """Compute SPIRe's MixedLoss, a weighted sum of distillation loss and rejection probability.

    Args:
        draft_logits: logits of q, `[..., vocab_size]`.
        target_logits: logits of p, `[..., vocab_size]`.
        omega: weight of the distillation loss, 0 to 1.

    Returns:
        The means of `omega * KL(p, q) + (1 - omega) * (1 - sum(min(p, q)))` and of the expected acceptance
        `sum(min(p, q))` at temperature 1 (Leviathan et al. 2023), float32 scalars.
    """
    log_q = draft_logits.float().log_softmax(-1)
    log_p = target_logits.float().log_softmax(-1)
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1).mean()
    acceptance = torch.minimum(p, log_q.exp()).sum(-1).mean()
    return omega * divergence + (1 - omega) * (1 - acceptance), acceptance.detach()
