"""The losses, computed without keeping logits in float32.

The LM head is most of a small draft's arithmetic. Its logits are made a stretch of rows at a time, turned into their
gradient in place, and multiplied back at once: `F.cross_entropy` after a linear layer would hold them four times over
and pass through memory as often.

    n  rows      h  hidden width      W  draft vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 128
"""Rows whose logits are handled at once: 128 x 8192 in float32 are 4 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What each row should have said: a token of the draft vocabulary, or the target's distribution over it."""

    ids: torch.Tensor
    """[n] draft ids"""
    law: torch.Tensor | None
    """[n, W] rows that sum to 1; None for the token alone."""

    def part(self, rows: slice) -> Labels:
        """Those of some rows."""
        return Labels(ids=self.ids[rows], law=None if self.law is None else self.law[rows])


def cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, labels: Labels) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy of softmax(hidden @ weight.T) over the rows, and their best ids [n].

    hidden [n, h] and weight [W, h] of one dtype, in which products run; softmax runs in float32.
    """
    loss, best = _CrossEntropy.apply(hidden, weight, labels)
    return loss, best


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: Labels
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = hidden @ weight.t()  # [n, W]; each chunk of it becomes its gradient
        loss, best = hidden.new_zeros((), dtype=torch.float32), torch.empty_like(labels.ids)
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            part, best[rows] = _into_gradient(logits[rows], labels.part(rows))
            loss += part
        ctx.count = max(1, len(hidden))
        grad_hidden = logits @ weight if ctx.needs_input_grad[0] else None
        grad_weight = logits.t() @ hidden if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(best)
        return loss / ctx.count, best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = grads[0] / ctx.count
        return (*(None if saved is None else saved * factor.to(saved.dtype) for saved in ctx.saved_tensors), None)


def _into_gradient(logits: torch.Tensor, labels: Labels) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of these rows' cross-entropies, and their best ids; puts its gradient into `logits`."""
    law = logits.softmax(dim=-1, dtype=torch.float32)
    peak, best = law.max(dim=-1)
    normaliser = logits.gather(1, best[:, None])[:, 0].float() - peak.log()  # log of the sum of exponentials
    if labels.law is None:
        ids = labels.ids[:, None]
        said = logits.gather(1, ids)[:, 0].float()
        law.scatter_add_(1, ids, torch.full_like(ids, -1, dtype=law.dtype))
    else:
        said = (labels.law * logits).sum(dim=-1, dtype=torch.float32)
        law -= labels.law
    logits.copy_(law)
    return (normaliser - said).sum(), best


def feature_loss(hidden: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """EAGLE-1's regression: mean SmoothL1 between the head's features and the target's, both [n, h]."""
    return F.smooth_l1_loss(hidden, features)
