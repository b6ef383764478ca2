"""Drafting: the head proposes a tree of tokens, EAGLE-2's dynamic one or a static one whose shape the profile names.

Row i of the draft cache pairs the target's feature of token i with token i + 1. Between two drafts the
target has committed rows whose true features wait in `observe`'s queue; the next draft first extends
the cache over them. What the tree itself leaves in the cache is dropped.

    K  children of a node; nodes expanded a level     S  rows of the tree so far
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eagle_graphs import Candidates, Profile, Tree, rerank, tree_from_parents
from eagle_graphs.manifest import HeadInfo
from eagle_graphs.static_tree import static_tree
from eagle_graphs.tree import ROOT, Ids, Mask, best_indices
from eagle_runtime.engines import Call, Graph
from eagle_runtime.kv_pool import KVSlot
from eagle_runtime.sampled_tree import Proposal, grow_sampled
from eagle_runtime.stats import PhaseClock

_OUTPUTS = ("hidden_out", "topk_ids", "topk_logprobs")
Floats = npt.NDArray[np.float32]


class Drafting(Protocol):
    """What the loop asks of a drafter."""

    def observe(self, features: Floats) -> None:
        """Takes the target's features [rows, h] of rows just committed, in order."""
        ...

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Extends the draft state over observed rows, whole chunks only. tokens: all so far."""
        ...

    def draft(
        self, tokens: Sequence[int], profile: Profile, clock: PhaseClock, proposal: Proposal | None = None
    ) -> Tree:
        """A tree below the last of `tokens`, the root; with `proposal` a `SampledTree`, drawn by it."""
        ...

    def truncate(self, rows: int) -> None:
        """Forgets all rows from `rows` on, observed ones too."""
        ...


class Drafter:
    """Drafts with the compiled head, one call a level."""

    def __init__(self, graph: Graph, slot: KVSlot, head: HeadInfo, *, chunk: int) -> None:
        self._graph, self._slot, self._head, self._chunk = graph, slot, head, chunk
        self._observed: list[Floats] = []

    def observe(self, features: Floats) -> None:
        """See `Drafting`."""
        self._observed.append(features)

    def truncate(self, rows: int) -> None:
        """See `Drafting`."""
        if rows <= self._slot.length:
            self._observed.clear()
            self._slot.truncate(rows)
        else:
            waiting = np.concatenate(self._observed)[: rows - self._slot.length]
            self._observed = [waiting]

    def catch_up(self, tokens: Sequence[int]) -> None:
        """See `Drafting`."""
        while self._waiting() >= self._chunk and len(tokens) > self._slot.length + self._chunk:
            self._extend(tokens, self._take(self._chunk))

    def draft(
        self, tokens: Sequence[int], profile: Profile, clock: PhaseClock, proposal: Proposal | None = None
    ) -> Tree:
        """See `Drafting`. The root is the last of `tokens`; every row before it must have been observed."""
        while self._waiting() > self._chunk:
            self._extend(tokens, self._take(self._chunk))
        waiting = self._take(self._chunk)
        assert self._slot.length + len(waiting) == len(tokens) - 1, "rows were committed without being observed"
        clock.lap("tree")
        extension = self._extend(tokens, waiting)
        clock.lap("draft")
        if proposal is not None:
            tree = self._grow_sampled(extension, tokens, profile, proposal, clock)
        elif profile.paths:
            tree = self._grow_static(extension, tokens[-1], profile, clock)
        else:
            tree = rerank(self._grow(extension, profile, clock), tokens[-1], profile.nodes)
        clock.lap("tree")
        return tree

    def _waiting(self) -> int:
        return sum(map(len, self._observed))

    def _take(self, count: int) -> Floats:
        """The first `count` observed features, or all of them."""
        waiting = self._observed[0] if len(self._observed) == 1 else np.concatenate(self._observed)
        self._observed = [waiting[count:]] if len(waiting) > count else []
        return waiting[:count]

    def _extend(self, tokens: Sequence[int], features: Floats) -> Call:
        """Commits one draft row for each of `features`, with true features and the tokens that follow them."""
        rows, start = len(features), self._slot.reserve(len(features))
        call = self._graph.call(self._slot.index, outputs=_OUTPUTS, Q=rows, S=rows, R=1)
        inputs = call.inputs
        inputs["token_ids"][0] = tokens[start + 1 : start + 1 + rows]
        inputs["hidden"][0] = features
        inputs["position_ids"][0] = np.arange(start, start + rows) + self._head.position_offset
        inputs["tree_mask"][0] = np.tri(rows, dtype=np.bool_)
        inputs["kv_length"][0] = start
        inputs["logit_rows"][0] = rows - 1
        call.run()
        self._slot.commit(range(rows))
        return call

    def _grow(self, extension: Call, profile: Profile, clock: PhaseClock) -> Candidates:
        """All candidates of a tree `profile.depth` levels deep: the K best of each level are expanded."""
        width, start = profile.top_k, self._slot.reserve(profile.draft_rows)
        outputs = extension.outputs
        level_tokens = outputs["topk_ids"][0, :width].copy()
        level_values = outputs["topk_logprobs"][0, :width].copy()
        tokens, values = [level_tokens], [level_values]
        parents = [np.full(width, ROOT)]

        expanded = np.arange(width)  # of the level, by index in it
        hidden: npt.NDArray[Any] = np.repeat(outputs["hidden_out"][:1], width, axis=0)
        ancestors = np.zeros((width, 0), np.bool_)
        own_rows = np.eye(width, dtype=np.bool_)
        level_start = 0  # index of the level's first candidate
        for level in range(1, profile.depth):
            ancestors = np.concatenate((ancestors, own_rows), axis=1)
            call = self._expand(start, level_tokens[expanded], hidden, ancestors, level, clock)

            level_values = (level_values[expanded, None] + call.outputs["topk_logprobs"][:, :width]).ravel()
            level_tokens = call.outputs["topk_ids"][:, :width].ravel()
            tokens.append(level_tokens)
            values.append(level_values)
            parents.append(np.repeat(level_start + expanded, width))
            level_start = sum(map(len, tokens[:-1]))
            expanded = best_indices(level_values, width)
            parent_rows = expanded // width
            hidden = call.outputs["hidden_out"][parent_rows]
            ancestors = ancestors[parent_rows]
        self._slot.rollback()
        return Candidates(tokens=np.concatenate(tokens), parents=np.concatenate(parents), values=np.concatenate(values))

    def _grow_sampled(
        self, extension: Call, tokens: Sequence[int], profile: Profile, proposal: Proposal, clock: PhaseClock
    ) -> Tree:
        """A tree whose children are drawn by `proposal`."""
        start = self._slot.reserve(profile.nodes)

        def expand(level_tokens: Ids, hidden: Floats, mask: Mask, level: int) -> Call:
            return self._expand(start, level_tokens, hidden, mask, level, clock)

        tree = grow_sampled(tokens[-1], extension, profile, proposal, position=len(tokens), expand=expand)
        self._slot.rollback()
        return tree

    def _grow_static(self, extension: Call, root: int, profile: Profile, clock: PhaseClock) -> Tree:
        """The tree below `root` whose nodes the profile names by their ranks."""
        shape, start = static_tree(profile.paths), self._slot.reserve(profile.draft_rows)
        tokens, values = np.zeros(profile.nodes, np.int64), np.zeros(profile.nodes, np.float32)
        hidden = np.zeros((profile.nodes, self._head.hidden_size), np.float32)
        tokens[0] = root
        for depth, level in enumerate(shape.levels):
            call = extension
            if depth > 0:
                rows = level.expanded
                call = self._expand(start, tokens[rows], hidden[rows], level.mask, depth, clock)
            outputs = call.outputs
            tokens[level.children] = outputs["topk_ids"][level.parents, level.ranks]
            logprobs = outputs["topk_logprobs"][level.parents, level.ranks]
            values[level.children] = values[level.expanded[level.parents]] + logprobs
            hidden[level.children] = outputs["hidden_out"][level.parents]
        self._slot.rollback()
        return tree_from_parents(tokens, shape.parents, values)

    def _expand(
        self, start: int, tokens: Ids, hidden: npt.NDArray[Any], mask: Mask, level: int, clock: PhaseClock
    ) -> Call:
        """A pass over Q nodes of a level: tokens [Q], hidden [Q, h], mask [Q, S] over the reserved rows so far."""
        rows, seen = mask.shape
        call = self._graph.call(self._slot.index, outputs=_OUTPUTS, Q=rows, S=seen, R=rows)
        inputs = call.inputs
        inputs["token_ids"][0] = tokens
        inputs["hidden"][0] = hidden
        inputs["position_ids"][0] = start - 1 + level + self._head.position_offset
        inputs["tree_mask"][0] = mask
        inputs["kv_length"][0] = start
        inputs["logit_rows"][:] = np.arange(rows)
        clock.lap("tree")
        call.run()
        clock.lap("draft")
        return call
