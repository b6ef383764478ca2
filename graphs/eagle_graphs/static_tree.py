"""Static trees: the same nodes every round, each the n-th best child of its parent (EAGLE-1).

N  nodes of the tree, root included     Q  nodes that a level expands
M  their children                       S  nodes expanded so far, the root left out
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from eagle_graphs.dynamic_tree import Expand, Outputs
from eagle_graphs.profiles import Path, Profile
from eagle_graphs.tree import ROOT, Ids, Mask, Tree, depths_and_ancestors, tree_from_parents


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticLevel:
    """The nodes of one depth that have children, and these. Rows are those of the tree."""

    expanded: Ids
    """[Q] rows"""
    mask: Mask
    """[Q, S] which of the nodes expanded so far each of them descends from or is."""
    children: Ids
    """[M] rows"""
    parents: Ids
    """[M] index of each child's parent in `expanded`."""
    ranks: Ids
    """[M] each child's rank among its parent's children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTree:
    """A static tree's shape. Row 0 is the root; the others follow the order of the paths."""

    parents: Ids
    """[N] row of each node's parent; -1 for the root."""
    levels: tuple[StaticLevel, ...]
    """By depth; the first expands the root."""


@lru_cache(maxsize=16)
def static_tree(paths: tuple[Path, ...]) -> StaticTree:
    """The tree over `paths`, in which parents stand before their children."""
    row = {(): 0} | {path: number for number, path in enumerate(paths, start=1)}
    parents = np.array([ROOT, *(row[path[:-1]] for path in paths)], np.int64)
    _, ancestors = depths_and_ancestors(parents)
    levels = []
    so_far = np.zeros(0, np.int64)
    for depth in range(max(map(len, paths))):
        below = [path for path in paths if len(path) == depth + 1]
        expanded = np.unique([row[path[:-1]] for path in below])
        if depth > 0:
            so_far = np.concatenate((so_far, expanded))
        levels.append(
            StaticLevel(
                expanded=expanded,
                mask=ancestors[expanded][:, so_far],
                children=np.array([row[path] for path in below], np.int64),
                parents=np.searchsorted(expanded, [row[path[:-1]] for path in below]).astype(np.int64),
                ranks=np.array([path[-1] for path in below], np.int64),
            )
        )
    return StaticTree(parents=parents, levels=tuple(levels))


def grow_static(extension: Outputs, root: int, profile: Profile, expand: Expand) -> Tree:
    """The tree below the token `root` whose nodes the profile names by their ranks; see `dynamic_tree.grow`."""
    shape = static_tree(profile.paths)
    tokens, values = np.zeros(profile.nodes, np.int64), np.zeros(profile.nodes, np.float32)
    hidden = np.zeros((profile.nodes, extension["hidden_out"].shape[1]), np.float32)
    tokens[0] = root
    for depth, level in enumerate(shape.levels):
        rows = level.expanded
        outputs = expand(tokens[rows], hidden[rows], level.mask, depth) if depth > 0 else extension
        tokens[level.children] = outputs["topk_ids"][level.parents, level.ranks]
        logprobs = outputs["topk_logprobs"][level.parents, level.ranks]
        values[level.children] = values[rows[level.parents]] + logprobs
        hidden[level.children] = outputs["hidden_out"][level.parents]
    return tree_from_parents(tokens, shape.parents, values)
