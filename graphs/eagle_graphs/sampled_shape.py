"""The shape of a sampled tree, which is fixed before anything is drawn.

A node's number of children must not depend on what was drawn for it: pruning children afterwards biases the text.
So each profile has one shape, made as if the r-th child of any node were accepted with the same probability.
"""

from __future__ import annotations

import heapq
import math
from functools import lru_cache

import numpy as np

from eagle_graphs.profiles import Profile
from eagle_graphs.tree import ROOT, Candidates, Ids, Tree, rerank

ACCEPTED_FIRST = 0.6
"""Assumed probability that a node's first child is accepted, and of each next one if none before it was."""


@lru_cache(maxsize=64)
def shape_from_profile(profile: Profile) -> Tree:
    """The shape of a profile's sampled trees: the nodes likeliest to be reached, `profile.top_k` children at most."""
    parents: list[int] = []
    values: list[float] = []
    first, other = math.log(ACCEPTED_FIRST), math.log(1 - ACCEPTED_FIRST)
    best = [(-first, 0, ROOT, 0, 1)]  # (-value, order, parent, rank among siblings, depth)
    while len(parents) < profile.nodes - 1:
        negative, order, parent, rank, depth = heapq.heappop(best)
        node = len(parents)
        parents.append(parent)
        values.append(-negative)
        if rank + 1 < profile.top_k:
            heapq.heappush(best, (negative - other, order + 1, parent, rank + 1, depth))
        if depth < profile.depth:
            heapq.heappush(best, (negative - first, order + profile.top_k, node, 0, depth + 1))
    nodes = np.arange(len(parents))
    drafted = Candidates(tokens=nodes, parents=np.array(parents), values=np.array(values, np.float32))
    return rerank(drafted, ROOT, profile.nodes)


def inner_rows(shape: Tree) -> list[Ids]:
    """For each level from the root's on: the rows that have children, which the head reads in one pass."""
    inner = np.isin(np.arange(len(shape)), shape.parents)
    levels = (np.flatnonzero((shape.depths == level) & inner) for level in range(int(shape.depths.max())))
    return [rows for rows in levels if len(rows)]


def sampled_levels(profile: Profile) -> list[tuple[int, int]]:
    """Q and S of the head's pass over each level below the root."""
    passes, seen = [], 0
    for rows in inner_rows(shape_from_profile(profile))[1:]:
        seen += len(rows)
        passes.append((len(rows), seen))
    return passes
