"""EAGLE-2's dynamic tree, grown level by level (Li et al., 2024, https://arxiv.org/abs/2406.16858, section 4.1).

This is what a compiled round of drafting is compared with, and how a tree is drafted where there is no such graph.

K  children of a node; nodes expanded a level     Q  rows of a pass     S  rows of the tree so far
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_graphs.profiles import Profile
from eagle_graphs.tree import ROOT, Candidates, Floats, Ids, Mask, best_indices

Outputs = Mapping[str, npt.NDArray[Any]]
"""What a pass of the head says of its rows [R]: `hidden_out`, `topk_ids` and `topk_logprobs` of `draft_ports`."""

Expand = Callable[[Ids, Floats, Mask, int], Outputs]
"""(tokens [Q], hidden [Q, h], mask [Q, S], level) -> a pass of the head over nodes of a level."""


def grow(extension: Outputs, profile: Profile, expand: Expand) -> Candidates:
    """All candidates of a tree `profile.depth` levels deep: the K best of each level are expanded.

    Args:
        extension: the head's pass that ended with the root, asked for the root's row alone.
        profile: gives K and the depth.
        expand: runs the head over the K nodes of a level that are expanded.
    """
    width = profile.top_k
    level_tokens = extension["topk_ids"][0, :width].copy()
    level_values = extension["topk_logprobs"][0, :width].copy()
    tokens, values = [level_tokens], [level_values]
    parents = [np.full(width, ROOT)]

    expanded = np.arange(width)  # of the level, by index in it
    hidden: npt.NDArray[Any] = np.repeat(extension["hidden_out"][:1], width, axis=0)
    ancestors = np.zeros((width, 0), np.bool_)
    own_rows = np.eye(width, dtype=np.bool_)
    level_start = 0  # index of the level's first candidate
    for level in range(1, profile.depth):
        ancestors = np.concatenate((ancestors, own_rows), axis=1)
        outputs = expand(level_tokens[expanded], hidden, ancestors, level)

        level_values = (level_values[expanded, None] + outputs["topk_logprobs"][:, :width]).ravel()
        level_tokens = outputs["topk_ids"][:, :width].ravel()
        tokens.append(level_tokens)
        values.append(level_values)
        parents.append(np.repeat(level_start + expanded, width))
        level_start = sum(map(len, tokens[:-1]))
        expanded = best_indices(level_values, width)
        parent_rows = expanded // width
        hidden = outputs["hidden_out"][parent_rows]
        ancestors = ancestors[parent_rows]
    return Candidates(tokens=np.concatenate(tokens), parents=np.concatenate(parents), values=np.concatenate(values))
