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

    hidden [n, h], weight [W, h]. Products run in the dtype of `hidden`, everything else in float32.
    """
    loss, best = _CrossEntropy.apply(hidden, weight, labels)
    return loss, best


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: Labels
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cast = weight.to(hidden.dtype)
        logits = hidden @ cast.t()  # [n, W]; each chunk of it becomes its gradient
        loss, best = hidden.new_zeros((), dtype=torch.float32), torch.empty_like(labels.ids)
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            part, best[rows] = _into_gradient(logits[rows], labels.part(rows), len(hidden))
            loss += part
        grad_hidden = logits @ cast if ctx.needs_input_grad[0] else None
        grad_weight = (logits.t() @ hidden).to(weight.dtype) if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*(None if saved is None else saved * grads[0].to(saved.dtype) for saved in ctx.saved_tensors), None)


def _into_gradient(logits: torch.Tensor, labels: Labels, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """These rows' part of the mean over `count` rows, and their best ids; puts the gradient into `logits`."""
    law = logits.softmax(dim=-1, dtype=torch.float32)
    peak, best = law.max(dim=-1)
    normaliser = logits.gather(1, best[:, None])[:, 0].float() - peak.log()  # log of the sum of exponentials
    if labels.law is None:
        ids = labels.ids[:, None]
        said = logits.gather(1, ids)[:, 0].float()
        law.scatter_add_(1, ids, torch.full_like(ids, -1, dtype=law.dtype))
    else:
        said = torch.linalg.vecdot(labels.law.float(), logits.float())
        law -= labels.law
    logits.copy_(law.div_(count))
    return (normaliser - said).sum() / count, best


def feature_loss(hidden: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """EAGLE-1's regression: mean SmoothL1 between the head's features and the target's, both [n, h]."""
    return F.smooth_l1_loss(hidden, features)
