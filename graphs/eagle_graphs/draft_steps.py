"""A round of drafting on a device: the head's passes, and between them small graphs without weights.

Every tensor that one of them hands to another has a name, and stays where it is. Pass 0 of the head is the extension,
pass i the i-th level below the root; step i stands behind pass i, and the last one gives the tree.

    pass i   takes  token_ids.i  hidden.i  tree_mask.i         (0: from the host; tree_mask.1 is the identity)
             gives  hidden_out.i  topk_ids.i  topk_logprobs.i
    step i   takes  what pass i gave, and what the steps before it left
             gives  token_ids.i+1  hidden.i+1  tree_mask.i+1, and for later steps values.i+1  indices.i+1 (of the nodes
                    that are expanded) and candidates.i  candidate_values.i
    last     takes  root  committed  and all that was left; gives the tree and position_ids, the target's

Of a static tree, whose masks are known beforehand, a step in between takes hidden_out.i and topk_ids.i and gives
token_ids.i+1 and hidden.i+1 alone; the last one takes topk_ids and topk_logprobs of all passes.

A compiled round (`ports.draft_round_ports`) does the same in one graph. There the head's weights stand in each
profile's graph: on a CPU they are one mapped file, a GPU would hold them several times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_graphs.ports import GraphPorts, Port
from eagle_graphs.profiles import Profile
from eagle_graphs.static_tree import static_tree
from eagle_graphs.tree import Mask

FROM_HEAD = ("hidden_out", "topk_ids", "topk_logprobs")
"""What a pass of the head gives the step behind it."""
TO_HEAD = ("token_ids", "hidden", "tree_mask")
"""What a step gives the next pass of the head."""
TREE = ("tokens", "parents", "values", "depths", "mask")
"""Outputs of the last step that make a `Tree`."""
_FROM_HOST = (Port(name="root", dtype="int64", axes=(1, 1)), Port(name="committed", dtype="int64", axes=(1,)))
"""What the last step takes besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLevel:
    """A pass of the head below the root's children."""

    rows: int
    """Q"""
    after: int
    """S"""
    mask: Mask | None
    """[Q, S] where it is known before the round; otherwise the step in front gives it."""


def draft_levels(profile: Profile) -> tuple[DraftLevel, ...]:
    """The passes behind the extension: of the levels that have children."""
    if profile.paths:
        masks = [level.mask for level in static_tree(profile.paths).levels[1:]]
        return tuple(DraftLevel(rows=mask.shape[0], after=mask.shape[1], mask=mask) for mask in masks)
    width = profile.top_k
    return tuple(
        DraftLevel(rows=width, after=width * level, mask=np.eye(width, dtype=np.bool_) if level == 1 else None)
        for level in range(1, profile.depth)
    )


def draft_step_ports(profile: Profile, *, hidden_width: int, top_k: int) -> tuple[GraphPorts, ...]:
    """Ports of the steps of a profile, all sizes fixed: one for each level.

    hidden_width: of the head. top_k: children of a row that the head gives, those of the profile or more.
    """
    ports = (_StaticPorts if profile.paths else _Ports)(profile, hidden_width, top_k)
    between = (
        GraphPorts(inputs=ports.between_inputs(step), outputs=ports.between_outputs(step))
        for step in range(profile.depth - 1)
    )
    return *between, GraphPorts(inputs=ports.last_inputs(), outputs=ports.last_outputs())


class _Ports:
    def __init__(self, profile: Profile, hidden_width: int, top_k: int) -> None:
        self._depth, self._nodes, self._width = profile.depth, profile.nodes, profile.top_k
        self._hidden_width, self._top_k = hidden_width, top_k
        self._rows = (1, *(level.rows for level in draft_levels(profile)))
        """Of the extension, of which one is asked for, and of each level."""

    def between_inputs(self, step: int) -> tuple[Port, ...]:
        given = self._from_head(step)
        if step == 0:
            return given[:2]  # all children of the root are expanded, whatever their values
        return (*given, self._above(step), *([self._mask(step)] if step > 1 else []))

    def between_outputs(self, step: int) -> tuple[Port, ...]:
        level = step + 1
        expanded = self._expanded(level)
        if step == 0:
            return expanded
        return (*expanded, self._mask(level), self._above(level), self._indices(level), *self._candidates(step))

    def last_inputs(self) -> tuple[Port, ...]:
        last = self._depth - 1
        first = self._from_head(0)[1:]
        if last == 0:
            return (*_FROM_HOST, *first)
        left = [port for level in range(1, last) for port in (*self._candidates(level), self._indices(level + 1))]
        above = [self._above(last)] if last > 1 else []
        return (*_FROM_HOST, *first, *left, *self._from_head(last)[1:], *above)

    def last_outputs(self) -> tuple[Port, ...]:
        dtypes = {"values": "float32", "mask": "bool"}
        row = (1, self._nodes)
        tree = (
            Port(name=name, dtype=dtypes.get(name, "int64"), axes=(*row, self._nodes) if name == "mask" else row)
            for name in TREE
        )
        return (*tree, Port(name="position_ids", dtype="int64", axes=row))

    def _from_head(self, step: int) -> tuple[Port, ...]:
        rows = self._rows[step]
        return (
            Port(name=f"hidden_out.{step}", dtype="float32", axes=(rows, self._hidden_width)),
            Port(name=f"topk_ids.{step}", dtype="int64", axes=(rows, self._top_k)),
            Port(name=f"topk_logprobs.{step}", dtype="float32", axes=(rows, self._top_k)),
        )

    def _expanded(self, level: int) -> tuple[Port, Port]:
        rows = self._rows[level]
        return (
            Port(name=f"token_ids.{level}", dtype="int64", axes=(1, rows)),
            Port(name=f"hidden.{level}", dtype="float32", axes=(1, rows, self._hidden_width)),
        )

    def _above(self, level: int) -> Port:
        """Values of the rows of a level; those of the first are in what the extension gave."""
        if level == 1:
            return self._from_head(0)[2]
        return Port(name=f"values.{level}", dtype="float32", axes=(1, self._width))

    def _mask(self, level: int) -> Port:
        return Port(name=f"tree_mask.{level}", dtype="bool", axes=(1, self._width, self._width * level))

    def _indices(self, level: int) -> Port:
        return Port(name=f"indices.{level}", dtype="int64", axes=(1, self._width))

    def _candidates(self, level: int) -> tuple[Port, Port]:
        axes = (1, self._width**2)
        return (
            Port(name=f"candidates.{level}", dtype="int64", axes=axes),
            Port(name=f"candidate_values.{level}", dtype="float32", axes=axes),
        )


class _StaticPorts(_Ports):
    def between_inputs(self, step: int) -> tuple[Port, ...]:
        return self._from_head(step)[:2]

    def between_outputs(self, step: int) -> tuple[Port, ...]:
        return self._expanded(step + 1)

    def last_inputs(self) -> tuple[Port, ...]:
        return (*_FROM_HOST, *(port for step in range(self._depth) for port in self._from_head(step)[1:]))
