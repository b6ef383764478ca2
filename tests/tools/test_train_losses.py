"""The trainer's losses against values worked out by hand, and against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train.losses import CHUNK, Labels, cross_entropy, feature_loss

ROWS, HIDDEN, VOCAB = CHUNK + 37, 24, 50  # more than one chunk, and a part of one


def test_cross_entropy_by_hand() -> None:
    """Logits (0, ln 2, ln 5): probabilities 1/8, 2/8, 5/8."""
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(2)], [math.log(5)]])
    loss, best = cross_entropy(hidden, weight, Labels(ids=torch.tensor([1]), law=None))
    assert loss.item() == pytest.approx(math.log(4))
    assert best.tolist() == [2]
    law = torch.tensor([[0.5, 0.0, 0.5]])
    loss, _ = cross_entropy(hidden, weight, Labels(ids=torch.tensor([0]), law=law))
    assert loss.item() == pytest.approx(0.5 * math.log(8) + 0.5 * math.log(8 / 5))


def test_the_gradient_by_hand() -> None:
    """Of the logits it is softmax minus law: (1/8, 2/8 - 1, 5/8)."""
    weight = torch.tensor([[0.0], [math.log(2)], [math.log(5)]], requires_grad=True)
    cross_entropy(torch.tensor([[1.0]]), weight, Labels(ids=torch.tensor([1]), law=None))[0].backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[:, 0], torch.tensor([0.125, -0.75, 0.625]))


@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy_is_torch_s(soft: bool) -> None:
    torch.manual_seed(0)
    ids, law = torch.randint(VOCAB, (ROWS,)), torch.randn(ROWS, VOCAB).softmax(-1) if soft else None
    found = _with_gradients(lambda hidden, weight: cross_entropy(hidden, weight, Labels(ids=ids, law=law))[0])
    target = ids if law is None else law
    expected = _with_gradients(lambda hidden, weight: F.cross_entropy(hidden @ weight.t(), target))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_best_ids_are_the_largest_logits() -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(ROWS, HIDDEN), torch.randn(VOCAB, HIDDEN)
    _, best = cross_entropy(hidden, weight, Labels(ids=torch.zeros(ROWS, dtype=torch.int64), law=None))
    assert torch.equal(best, (hidden @ weight.t()).argmax(-1))


def test_no_row_with_a_label_is_no_loss() -> None:
    weight = torch.randn(VOCAB, HIDDEN, requires_grad=True)
    labels = Labels(ids=torch.zeros(0, dtype=torch.int64), law=None)
    loss, _ = cross_entropy(torch.zeros(0, HIDDEN), weight, labels)
    loss.backward()
    assert loss.item() == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_feature_loss_by_hand() -> None:
    """SmoothL1: half the square below a difference of one, the difference less a half above it."""
    loss = feature_loss(torch.tensor([[0.5, 3.0]]), torch.tensor([[0.0, 1.0]]))
    assert loss.item() == pytest.approx((0.125 + 1.5) / 2)


def _with_gradients(loss_of) -> list[Tensor]:  # type: ignore[no-untyped-def]
    torch.manual_seed(2)
    hidden, weight = (torch.randn(size, HIDDEN, requires_grad=True) for size in (ROWS, VOCAB))
    loss = loss_of(hidden, weight)
    (loss * 3).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad]
