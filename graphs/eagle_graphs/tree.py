"""The draft tree: who descends from whom, what may see what, and which nodes are worth verifying.

This is the numpy reference that every compiled drafting graph is compared with. It is also what
runs on the host, so nothing here loops over nodes: the loops go over depths, of which there are few.

Suffixes: N nodes of a tree (root included), M drafted candidates, K children a node.
"""

from __future__ import annotations

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
    chosen = best_indices(candidates.values, nodes - 1)
    assert len(chosen) == nodes - 1, "too few candidates for the tree"
    rank = np.full(len(candidates.values), -1, np.int64)
    rank[chosen] = np.arange(len(chosen))
    parents = candidates.parents[chosen]
    assert (rank[parents[parents >= 0]] >= 0).all(), "a chosen node lacks its parent"
    parent_rank = np.where(parents >= 0, rank[parents], ROOT)

    order, depths, mask = _depth_first(parent_rank)
    row = np.empty_like(order)
    row[order] = np.arange(1, nodes)
    ordered_parents = parent_rank[order]
    below = np.ones((nodes, nodes), np.bool_)
    below[0, 1:] = False
    below[1:, 1:] = mask
    return Tree(
        tokens=np.concatenate(([root], candidates.tokens[chosen[order]])),
        parents=np.concatenate(([ROOT], np.where(ordered_parents >= 0, row[ordered_parents], 0))),
        values=np.concatenate((np.zeros(1, np.float32), candidates.values[chosen[order]])),
        depths=np.concatenate(([0], depths + 1)),
        mask=below,
    )


def cut(tree: Tree, nodes: int) -> Tree:
    """The best `nodes` of a tree's nodes, the root included: again a tree, since values fall along a path.

    Raises AssertionError if there are fewer.
    """
    return tree if nodes == len(tree) else rerank(candidates_from_tree(tree), int(tree.tokens[0]), nodes)


def candidates_from_tree(tree: Tree) -> Candidates:
    """All nodes of a tree but its root."""
    return Candidates(tokens=tree.tokens[1:], parents=tree.parents[1:] - 1, values=tree.values[1:])


def _depth_first(parents: Ids) -> tuple[Ids, Ids, Mask]:
    """Depth-first order of nodes ranked best first, by the ranks along each node's path; depths and mask in it."""
    depths, mask = depths_and_ancestors(parents)
    paths = np.full((len(parents), int(depths.max(initial=0)) + 1), -1, np.int64)
    node, ancestor = np.nonzero(mask)
    paths[node, depths[ancestor]] = ancestor
    order = np.lexsort(paths.T[::-1])
    return order, depths[order], mask[np.ix_(order, order)]
