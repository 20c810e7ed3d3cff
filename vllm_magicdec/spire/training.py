# SPDX-License-Identifier: Apache-2.0
"""Train a draft: deterministic steps, with checkpoints."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from vllm_magicdec.machine import has_slow_avx512_bf16
from vllm_magicdec.spire.model import SpireDraft
from vllm_magicdec.spire.sequences import Sequences
from vllm_magicdec.spire.settings import SpireError
from vllm_magicdec.spire.target import Target

_LAST_RATE = 0.05  # of the highest learning rate
_MEMORY_RATE = 10.0  # factor on the rate of the memory logits, whose gradients are small
_LOGGED_STEPS = 20  # between entries of the log


@dataclass(frozen=True)
class Plan:
    """Parameters of a training."""

    num_steps: int
    batch: int  # sequences per step
    sequence: int  # tokens
    learning_rate: float
    omega: float = 0.5
    seed: int = 0
    bfloat16: bool = True  # autocast to bfloat16; weights and optimizer are float32


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether matrix products are faster in bfloat16 than in float32."""
    if device.type != "cpu" or torch.cpu._is_amx_tile_supported():
        return True
    return torch.cpu._is_avx512_bf16_supported() and not has_slow_avx512_bf16()


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


class Trainer:
    """A training of a draft, in place and in float32."""

    def __init__(self, draft: SpireDraft, target: Target, sequences: Sequences, plan: Plan) -> None:
        self.draft, self._target, self._sequences, self.plan = draft, target, sequences, plan
        self._device = next(draft.parameters()).device
        self.step = 0
        self.seconds = 0.0
        self.log: list[dict[str, float]] = []
        self._recent: list[tuple[float, float]] = []
        named = list(draft.named_parameters())
        memory = [weight for name, weight in named if name.endswith("memory_logits")]
        vectors = [w for n, w in named if w.ndim < 2]
        matrices = [w for n, w in named if w.ndim >= 2 and not n.endswith("memory_logits")]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": 0.1, "scale": 1.0},
                {"params": vectors, "weight_decay": 0.0, "scale": 1.0},
                *([{"params": memory, "weight_decay": 0.0, "scale": _MEMORY_RATE}] if memory else []),
            ],
            lr=plan.learning_rate,
            betas=(0.9, 0.95),
        )

    def train_step(self) -> tuple[float, float]:
        """Train one step; return the mean loss and expected acceptance at temperature 1."""
        plan, started = self.plan, perf_counter()
        tokens = self._sequences.batch(self.step * plan.batch, plan.batch).to(self._device)
        # The chunks' offset differs between steps.
        first = int(
            np.random.default_rng([plan.seed, 1, self.step]).integers(self.draft.settings.num_draft_steps)
        )
        self._optimizer.zero_grad(set_to_none=True)
        figures = torch.zeros(2, device=self._device)
        for row in tokens.split(1):  # the logits of a whole batch may exceed a GPU's memory
            loss, acceptances = self._losses(row, first)
            (loss / plan.batch).backward()
            figures += torch.stack([loss.detach(), acceptances.mean()]) / plan.batch
        weights = [weight for weight in self.draft.parameters() if weight.grad is not None]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate() * group["scale"]
        self._optimizer.step()
        self.step += 1
        mean_loss, acceptance = figures.tolist()
        self.seconds += perf_counter() - started
        self._recent.append((mean_loss, acceptance))
        if self.step % _LOGGED_STEPS == 0 or self.step == plan.num_steps:
            means = [
                round(sum(column) / len(self._recent), 4) for column in zip(*self._recent, strict=True)
            ]
            entry = {"step": self.step, "loss": means[0], "acceptance": means[1]}
            self.log.append({**entry, "minutes": round(self.seconds / 60, 2)})
            self._recent.clear()
        return mean_loss, acceptance

    def run(
        self,
        checkpoint: Path,
        *,
        seconds_between: float,
        should_end: Callable[[], bool],
        report: Callable[[], object],
    ) -> bool:
        """Train to the end of the plan, with regular checkpoints; return whether the plan is done.

        Args:
            should_end: returns whether to stop early, after a checkpoint.
            report: called after every step.
        """
        written = perf_counter()
        while self.step < self.plan.num_steps:
            self.train_step()
            report()
            ends = should_end() or self.step >= self.plan.num_steps
            if ends or perf_counter() - written >= seconds_between:
                self.save(checkpoint)
                written = perf_counter()
            if ends:
                break
        return self.step >= self.plan.num_steps

    @torch.no_grad()
    def evaluate(self) -> list[float]:
        """Return each draft's expected acceptance at temperature 1 on held-out sequences."""
        rows = [self._losses(tokens.to(self._device), 0)[1] for tokens in self._sequences.held_out()]
        return torch.stack(rows).mean(0).tolist()

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        checkpoint = {
            "draft": self.draft.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "log": json.dumps(self.log),
            "recent": json.dumps(self._recent),
            "plan": json.dumps(asdict(self.plan)),
            "settings": json.dumps(asdict(self.draft.settings)),
        }
        partial = path.with_suffix(".part")
        torch.save(checkpoint, partial)
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Load a checkpoint; raise SpireError if it belongs to another training."""
        checkpoint = torch.load(path, map_location=self._device, weights_only=True)
        plan = asdict(self.plan)
        is_same_plan = {**plan, **json.loads(checkpoint["plan"])} == plan  # old ones lack new fields
        if not is_same_plan or checkpoint["settings"] != json.dumps(asdict(self.draft.settings)):
            raise SpireError(
                f"{path.parent} holds a training with other options, or with another default "
                "of --float32; give the same options, or another --out"
            )
        self.draft.load_state_dict(checkpoint["draft"])
        self._optimizer.load_state_dict(checkpoint["optimizer"])
        self.step, self.seconds = checkpoint["step"], checkpoint["seconds"]
        self.log = json.loads(checkpoint["log"])
        self._recent = [tuple(each) for each in json.loads(checkpoint["recent"])]

    def _losses(self, tokens: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the loss of `tokens` `[batch, length]` and each draft's acceptance `[num_draft_steps]`."""
        settings, plan = self.draft.settings, self.plan
        activations, target_logits = self._target.run(tokens, settings.aux_layers)
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=plan.bfloat16):
            logits = self.draft(tokens, activations.float(), first)
        count = logits.shape[2]
        losses, acceptances = [], []
        for step, draft_logits in enumerate(logits):
            at = first + step + settings.num_draft_steps * torch.arange(count, device=tokens.device)
            loss, acceptance = mixed_loss(draft_logits, target_logits[:, at], plan.omega)
            losses.append(loss)
            acceptances.append(acceptance)
        return torch.stack(losses).mean(), torch.stack(acceptances)

    def _rate(self) -> float:
        """Return the learning rate: a warm-up over 5 % and at most 200 steps, then a cosine."""
        plan = self.plan
        warm_up = max(1, min(200, plan.num_steps // 20))
        done = min(1.0, self.step / plan.num_steps)
        cosine = _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))
        return plan.learning_rate * min(1.0, (self.step + 1) / warm_up) * cosine
