"""The draft tree: who descends from whom, what may see what, and which nodes are worth verifying.

This is the reference that every compiled drafting graph is compared with. It is also what runs on the host, between
two passes over all weights, when nothing of it is left in the processor's caches: plain lists are faster there than
many small numpy calls.

Suffixes: N nodes of a tree (root included), M drafted candidates, K children a node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]

ROOT = -1  # the parent of what hangs directly below the root, among candidates; of the root itself, in a Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A token tree to verify. Row 0 is the root, a token that the target has already drawn.

    Parents stand before their children, so that a causal pass over the rows is never too narrow.
    """

    tokens: Ids
    """[N] token of each node."""
    parents: Ids
    """[N] row of each node's parent; -1 for the root."""
    values: Floats
    """[N] cumulative draft log-probability of the path to each node; 0 for the root."""
    depths: Ids
    """[N] distance from the root."""
    mask: Mask
    """[N, N] mask[i, j]: j is i or an ancestor of i."""

    def __len__(self) -> int:
        return len(self.tokens)

    def path_to(self, node: int) -> list[int]:
        """Rows from the root to `node`, both included."""
        return [int(row) for row in np.flatnonzero(self.mask[node])]


def tree_from_parents(tokens: Ids, parents: Ids, values: Floats | None = None) -> Tree:
    """The tree over rows whose parents stand before them; row 0 is the root."""
    depths, mask = depths_and_ancestors(parents)
    if values is None:
        values = np.zeros(len(tokens), np.float32)
    return Tree(tokens=tokens, parents=parents, values=values, depths=depths, mask=mask)


def depths_and_ancestors(parents: Ids) -> tuple[Ids, Mask]:
    """Depths [N] and the ancestor-or-self mask [N, N] of rows with these parents [N] (-1: none)."""
    rows = np.arange(len(parents))
    mask = np.eye(len(parents), dtype=np.bool_)
    depths = np.zeros(len(parents), np.int64)
    ancestor = parents
    while True:
        alive = ancestor >= 0
        if not alive.any():
            return depths, mask
        depths += alive
        mask[rows[alive], ancestor[alive]] = True
        ancestor = np.where(alive, parents[ancestor], ROOT)


_ROOT_ONLY = tree_from_parents(np.zeros(1, np.int64), np.array([ROOT], np.int64))


def root_only(token: int) -> Tree:
    """The tree of plain decoding: one node, nothing drafted."""
    one = _ROOT_ONLY
    tokens = np.array([token], np.int64)
    return Tree(tokens=tokens, parents=one.parents, values=one.values, depths=one.depths, mask=one.mask)


@lru_cache(maxsize=16)
def chain_mask(rows: int) -> Mask:
    """[rows, rows] the mask of a chain: each row sees itself and those before it. Not to be written to."""
    return np.tri(rows, dtype=np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """All nodes that drafting has seen, level by level, the root left out."""

    tokens: Ids
    """[M]"""
    parents: Ids
    """[M] index among the candidates; -1 for the root's children."""
    values: Floats
    """[M] cumulative log-probability, never above the parent's."""


def best_indices(values: Floats, count: int) -> Ids:
    """The `count` largest of `values` [M], best first; a tie goes to the lower index.

    Parents stand before their children, so that a child whose value equals its parent's (a
    log-probability of 0) can never be chosen in its parent's place.
    """
    return np.argsort(-values, kind="stable")[:count]


def rerank(candidates: Candidates, root: int, nodes: int) -> Tree:
    """The best `nodes` - 1 candidates below `root` as a tree (EAGLE-2, section 4.2).

    Rows are in depth-first order, the better sibling first: the likeliest path then comes first
    and, when it is the accepted one, its cache rows need not move.

    Raises AssertionError if there are fewer candidates, or if the choice is not connected, which values
    that grow along a path would cause.
    """
    tokens, parents, values = candidates.tokens.tolist(), candidates.parents.tolist(), candidates.values.tolist()
    return best_tree(tokens, parents, values, root, nodes)


def best_tree(tokens: Sequence[int], parents: Sequence[int], values: Sequence[float], root: int, nodes: int) -> Tree:
    """`rerank` of candidates that are in lists."""
    ranked = [-math.inf if value != value else value for value in values]  # NaN behind everything
    best = sorted(range(len(ranked)), key=ranked.__getitem__, reverse=True)[: nodes - 1]  # a tie: the lower index
    assert len(best) == nodes - 1, "too few candidates for the tree"
    children: dict[int, list[int]] = {}
    for node in reversed(best):
        children.setdefault(parents[node], []).append(node)
    order, row = [ROOT], {ROOT: 0}
    waiting = children.get(ROOT, [])
    while waiting:
        node = waiting.pop()
        row[node] = len(order)
        order.append(node)
        waiting += children.get(node, ())
    assert len(order) == nodes, "a chosen node lacks its parent"
    above, depths, seen = [ROOT], [0], [bytearray(nodes)]
    seen[0][0] = 1
    for index, node in enumerate(order[1:], 1):
        parent = row[parents[node]]
        above.append(parent)
        depths.append(depths[parent] + 1)
        ancestors = seen[parent].copy()
        ancestors[index] = 1
        seen.append(ancestors)
    return Tree(
        tokens=np.array([root, *(tokens[node] for node in order[1:])], np.int64),
        parents=np.array(above, np.int64),
        values=np.array([0.0, *(values[node] for node in order[1:])], np.float32),
        depths=np.array(depths, np.int64),
        mask=np.frombuffer(b"".join(seen), np.bool_).reshape(nodes, nodes),
    )


def cut(tree: Tree, nodes: int) -> Tree:
    """The best `nodes` of a tree's nodes, the root included: again a tree, since values fall along a path.

    Raises AssertionError if there are fewer.
    """
    return tree if nodes == len(tree) else rerank(candidates_from_tree(tree), int(tree.tokens[0]), nodes)


def candidates_from_tree(tree: Tree) -> Candidates:
    """All nodes of a tree but its root."""
    return Candidates(tokens=tree.tokens[1:], parents=tree.parents[1:] - 1, values=tree.values[1:])
