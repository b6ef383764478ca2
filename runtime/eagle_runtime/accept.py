"""Accepting: which path of a verified tree the target itself would have taken.

Whatever the mode, a walk starts at the root, decides the next token at each node from the target's own distribution
there, and follows the child of that name. What differs is how the token is decided: the likeliest one (greedy), one
drawn without a look at the children (deterministic tree), or `accept_child`'s (sampled tree). The first token without
a child is the bonus token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eagle_graphs import Tree
from eagle_runtime.verify import Verified


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A path through a tree and the token that the target drew at its end."""

    path: list[int]
    """Rows from the root on."""
    bonus: int
    checked: int
    """Nodes that were compared: the children of every node on the path."""


class Accepting(Protocol):
    """How an answer's tokens are decided."""

    @property
    def needs_logits(self) -> bool:
        """Whether `walk` reads the rows' logits, not only the likeliest tokens."""
        ...

    def walk(self, tree: Tree, verified: Verified) -> Walk:
        """Walks through a tree whose root is the last token so far. Decides nothing for good before `commit`."""
        ...

    def commit(self, tokens: Sequence[int]) -> None:
        """Takes over the first tokens that the latest walk decided; the others never were."""
        ...


class Greedy:
    """The target's likeliest token, which the graph has found already. See `Accepting`."""

    needs_logits = False

    def walk(self, tree: Tree, verified: Verified) -> Walk:
        """See `Accepting`."""
        return walk_greedy(tree, verified.argmax_ids)

    def commit(self, tokens: Sequence[int]) -> None:
        """See `Accepting`. There is no state."""


def walk(tree: Tree, decide: Callable[[int], int]) -> Walk:
    """Follows what `decide` says of each row that it comes to; asked once a row, from the root on."""
    parents, path, decided = tree.parents.tolist(), [0], decide(0)
    for row, (parent, token) in enumerate(zip(parents, tree.tokens.tolist(), strict=True)):
        if token == decided and parent == path[-1]:  # a node's children stand behind it
            path.append(row)
            decided = decide(row)
    return Walk(path=path, bonus=decided, checked=sum(map(parents.count, path)))


def walk_greedy(tree: Tree, argmax_ids: npt.NDArray[np.int64]) -> Walk:
    """Follows the target's argmax. argmax_ids: [N], for each row of the tree."""
    return walk(tree, argmax_ids.tolist().__getitem__)


def accept_child(
    p: npt.NDArray[Any], q: npt.NDArray[Any], children: Sequence[int], coin: Callable[[int, Any], bool]
) -> tuple[int | None, npt.NDArray[Any]]:
    """Recursive rejection: the token of a node whose children were drawn from q in turn, without replacement.

    Child x is accepted with min(1, p(x) / q(x)); after a rejection p becomes max(0, p - q), renormalised, and q loses
    x and is renormalised too. The token that results is distributed as p, whatever q and the number of children, as
    long as that number did not depend on the draws (Leviathan et al., 2023, for one child; SpecInfer, Miao et al.,
    2024, for several; Jeon et al., "Recursive speculative decoding", 2024, without replacement).

    Args:
        p: [n] the target's distribution.
        q: [n] what the first child was drawn from, exactly; zero where it cannot come from.
        children: their indices, in the order in which they were drawn.
        coin: (index, probability) -> whether it is accepted; each time another coin.

    Returns:
        The accepted index, or None; and what p has become, from which the bonus token is to be drawn if None.
    """
    for child in children:
        if coin(child, min(1, p[child] / q[child])):
            return child, p
        residual = np.maximum(p - q, 0)
        mass = residual.sum()
        p = residual / mass if mass > 0 else p  # no mass: p is q but for rounding
        q = q.copy()
        q[child] = 0
        left = q.sum()
        q = q / left if left > 0 else q
    return None, p
