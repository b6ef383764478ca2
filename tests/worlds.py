"""Targets and heads of a few tokens with rational laws, what rounds of EAGLE give with them, and wrong rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
import torch

from eagle_graphs import Tree, profile_from_nodes, tree_from_parents
from eagle_graphs.sampled_shape import shape_from_profile
from eagle_runtime.accept import accept_child

Context = tuple[int, ...]
Rule = Callable[[Any, Any, Sequence[int], Callable[[int, Any], bool]], tuple[int | None, Any]]
ANSWER = 3
"""Tokens whose joint law is compared."""


@dataclass(frozen=True)
class World:
    """Random laws of the next token after each context. support: tokens that the head can draw."""

    vocab: int
    support: int
    seed: int

    def p(self, context: Context) -> np.ndarray:
        """[vocab] of the target."""
        return self._law(context, self.vocab, 1)

    def q(self, context: Context) -> np.ndarray:
        """[vocab] of the head, zero outside the support."""
        return self._law(context, self.support, 2)

    def _law(self, context: Context, positive: int, which: int) -> np.ndarray:
        random = np.random.default_rng([self.seed, which, *context, len(context)])
        weights = np.zeros(self.vocab, np.int64)
        chosen = random.permutation(self.vocab)[:positive]
        weights[chosen] = random.integers(1, 10, positive)
        return np.array([Fraction(int(weight), int(weights.sum())) for weight in weights], dtype=object)

    @cached_property
    def joint(self) -> dict[Context, Fraction]:
        """The target's law of ANSWER tokens."""
        laws: dict[Context, Fraction] = {(): Fraction(1)}
        for _ in range(ANSWER):
            laws = {(*c, x): prob * self.p(c)[x] for c, prob in laws.items() for x in range(self.vocab)}
        return laws


SHAPES: dict[str, list[int]] = {
    "root": [-1],
    "one": [-1, 0],
    "chain": [-1, 0, 1],
    "siblings": [-1, 0, 0],
    "siblings, one child": [-1, 0, 0, 1],
    "siblings, the second's child": [-1, 0, 0, 2],
    "siblings on two levels": [-1, 0, 0, 1, 1],
    "three siblings": [-1, 0, 0, 0],
    "profile of 4": shape_from_profile(profile_from_nodes(4)).parents.tolist(),
}


def shaped(parents: Sequence[int]) -> Tree:
    return tree_from_parents(np.full(len(parents), -1), np.array(parents))


def most_children(parents: Sequence[int]) -> int:
    return max((parents.count(row) for row in range(len(parents))), default=0)


# Wrong rules of accepting: each but for one line what `accept_child` is


def not_renormalised(p: Any, q: Any, children: Sequence[int], coin: Callable[..., bool]) -> tuple[int | None, Any]:
    """The residual stays as small as it is."""
    for child in children:
        if coin(child, min(1, p[child] / q[child])):
            return child, p
        residual = np.maximum(p - q, 0)
        p = residual if residual.sum() > 0 else p
        q = q.copy()
        q[child] = 0
        q = q / q.sum() if q.sum() > 0 else q
    return None, p


def not_removed(p: Any, q: Any, children: Sequence[int], coin: Callable[..., bool]) -> tuple[int | None, Any]:
    """A rejected sibling keeps its share of q."""
    for child in children:
        if coin(child, min(1, p[child] / q[child])):
            return child, p
        residual = np.maximum(p - q, 0)
        p = residual / residual.sum() if residual.sum() > 0 else p
    return None, p


@dataclass(frozen=True)
class Rules:
    """How a round goes; the defaults are right."""

    accept: Rule = accept_child
    stale: bool = False
    """A leaf's bonus is drawn from what its parent's rejections left."""
    pruned: bool = False
    """The head draws one more child than the shape has and drops the one that it deems least likely."""


RIGHT = Rules()
WRONG = {
    "residual not renormalised": Rules(accept=not_renormalised),
    "sibling's q not removed": Rules(accept=not_removed),
    "stale residual at the last level": Rules(stale=True),
    "children pruned after they were drawn": Rules(pruned=True),
}
WRONG_SHAPES = {
    "residual not renormalised": "three siblings",
    "sibling's q not removed": "three siblings",
    "stale residual at the last level": "siblings on two levels",
    "children pruned after they were drawn": "siblings",
}


def prune(drawn: Sequence[int], q: np.ndarray) -> list[int]:
    """The children without the one of least probability."""
    least = min(drawn, key=lambda token: q[token])
    return [token for token in drawn if token != least]


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of counts against expected counts; cells of fewer than 5 are one cell."""
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] == 0:
        assert counts[-1] == 0, "what is impossible happened"
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))
