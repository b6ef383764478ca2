"""Accepting: which path of a verified tree the target itself would have taken."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_graphs import Tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A path through a tree and the token that the target drew at its end."""

    path: list[int]
    """Rows from the root on."""
    bonus: int
    checked: int
    """Nodes that were compared: the children of every node on the path."""


def walk_greedy(tree: Tree, argmax_ids: npt.NDArray[np.int64]) -> Walk:
    """Follows the target's argmax from the root while it is a child; the first that is not is the bonus token.

    argmax_ids: [N], for each row of the tree.
    """
    path, checked = [0], 0
    while True:
        children = np.flatnonzero(tree.parents == path[-1])
        checked += len(children)
        drawn = int(argmax_ids[path[-1]])
        match = children[tree.tokens[children] == drawn]
        if not len(match):
            return Walk(path=path, bonus=drawn, checked=checked)
        path.append(int(match[0]))
