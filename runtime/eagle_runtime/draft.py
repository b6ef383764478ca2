"""Drafting: the head proposes a tree of tokens, EAGLE-2's dynamic one or a static one whose shape the profile names.

Row i of the draft cache pairs the target's feature of token i with token i + 1. Between two drafts the
target has committed rows whose true features wait in `observe`'s queue; the next draft first extends
the cache over them. What the tree itself leaves in the cache is dropped.

Where the bundle has the whole round of a profile as one graph, that is one call; else it is one call a level.

    Q  rows of a pass     S  rows of the tree so far     N  nodes of the tree, root included
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from eagle_graphs import Candidates, EagleError, Profile, Tree, rerank
from eagle_graphs.draft_steps import FROM_HEAD, TREE
from eagle_graphs.dynamic_tree import Outputs, grow
from eagle_graphs.manifest import HeadInfo
from eagle_graphs.static_tree import grow_static
from eagle_graphs.tree import Ids, Mask, chain_mask
from eagle_runtime.engines import Call, Features, Graph, Rows
from eagle_runtime.kv_pool import KVSlot
from eagle_runtime.sampled_tree import Proposal, grow_sampled
from eagle_runtime.stats import PhaseClock

Floats = npt.NDArray[np.float32]


class Drafting(Protocol):
    """What the loop asks of a drafter."""

    def observe(self, features: Rows, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Takes the target's features of the rows `path` of a pass, just committed. tokens: all so far."""
        ...

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Extends the draft state over observed rows, whole chunks only. tokens: all so far."""
        ...

    def draft(
        self, tokens: Sequence[int], profile: Profile, clock: PhaseClock, proposal: Proposal | None = None
    ) -> Tree:
        """A tree below the last of `tokens`, the root; with `proposal` a `SampledTree`, drawn by it.

        Its arrays live until the next tree is drafted.
        """
        ...

    def truncate(self, rows: int) -> None:
        """Forgets all rows from `rows` on, observed ones too."""
        ...

    def clear(self) -> None:
        """Forgets everything, also whatever a pass that failed has left."""
        ...


Rounds = Callable[[Profile], Graph | None]
"""The graph of a profile's whole round of drafting, over the same caches; None where there is none."""


def level_by_level(profile: Profile) -> None:
    """The `Rounds` of a bundle without them."""


class Drafter:
    """Drafts with the compiled head: in one call where `rounds` has a graph for the tree, else in one a level."""

    def __init__(
        self,
        graph: Graph,
        slot: KVSlot,
        head: HeadInfo,
        features: Features,
        *,
        chunk: int,
        rounds: Rounds = level_by_level,
    ) -> None:
        self._graph, self._slot, self._head, self._chunk = graph, slot, head, chunk
        self._features, self._rounds = features, rounds

    def observe(self, features: Rows, path: Sequence[int], tokens: Sequence[int]) -> None:
        """See `Drafting`."""
        self._features.push(features, path)
        if len(self._features) > self._features.most // 2:
            self.catch_up(tokens)

    def truncate(self, rows: int) -> None:
        """See `Drafting`."""
        self._features.truncate(max(rows - self._slot.length, 0))
        self._slot.truncate(min(rows, self._slot.length))

    def clear(self) -> None:
        """See `Drafting`."""
        self._features.truncate(0)
        self._slot.clear()

    def catch_up(self, tokens: Sequence[int]) -> None:
        """See `Drafting`."""
        while len(self._features) >= self._chunk and len(tokens) > self._slot.length + self._chunk:
            self._extend(tokens, self._chunk)

    def draft(
        self, tokens: Sequence[int], profile: Profile, clock: PhaseClock, proposal: Proposal | None = None
    ) -> Tree:
        """See `Drafting`. The root is the last of `tokens`; every row before it must have been observed.

        Raises EagleError where the head's log-probabilities are NaN.
        """
        compiled = self._rounds(profile) if proposal is None else None
        if compiled is not None:
            call = self.run_round(compiled, tokens, profile, clock, outputs=TREE)
            clock.lap("draft")
            tree = self.tree_from(call, tokens)
            clock.lap("tree")
            return tree
        waiting = self._settle(tokens)
        clock.lap("tree")
        extension = self._extend(tokens, waiting)
        clock.lap("draft")
        if proposal is not None:
            tree = self._grow_sampled(extension, tokens, profile, proposal, clock)
        else:
            tree = self._grow(extension, tokens, profile, clock)
        clock.lap("tree")
        return tree

    def run_round(
        self,
        graph: Graph,
        tokens: Sequence[int],
        profile: Profile,
        clock: PhaseClock,
        *,
        outputs: tuple[str, ...],
        kept: tuple[str, ...] = (),
    ) -> Call:
        """Commits the rows that wait and grows a tree, with whatever else `graph` does in the same pass."""
        rows = self._settle(tokens)
        start = self._slot.reserve(rows + profile.draft_rows)
        given, index = self._features.given, self._slot.index
        call = graph.call(index, outputs=outputs, kept=kept, given=given, Q=rows, S=rows, R=1)
        self._feed(call, tokens, rows, start)
        clock.lap("tree")
        call.run()
        self._slot.commit(range(rows))
        return call

    def tree_from(self, call: Call, tokens: Sequence[int]) -> Tree:
        """The tree that a round has given. Raises EagleError where the head's log-probabilities are NaN."""
        return _checked(Tree(**{name: call.outputs[name][0] for name in TREE}), tokens)

    def _settle(self, tokens: Sequence[int]) -> int:
        """Extends the cache until what waits is no more than a chunk; returns how many rows."""
        while len(self._features) > self._chunk:
            self._extend(tokens, self._chunk)
        assert self._slot.length + len(self._features) == len(tokens) - 1, "rows were committed without being observed"
        return len(self._features)

    def _extend(self, tokens: Sequence[int], rows: int) -> Call:
        """Commits so many draft rows with the features that wait and the tokens that follow them."""
        start, given = self._slot.reserve(rows), self._features.given
        call = self._graph.call(self._slot.index, outputs=FROM_HEAD, given=given, Q=rows, S=rows, R=1)
        self._feed(call, tokens, rows, start)
        call.run()
        self._slot.commit(range(rows))
        return call

    def _feed(self, call: Call, tokens: Sequence[int], rows: int, start: int) -> None:
        """Fills in a pass over rows `start` and on, which asks for the last one."""
        self._features.feed(call, rows)
        inputs = call.inputs
        inputs["token_ids"][0] = tokens[start + 1 : start + 1 + rows]
        first = start + self._head.position_offset
        inputs["position_ids"][0] = np.arange(first, first + rows)
        inputs["tree_mask"][0] = chain_mask(rows)
        inputs["kv_length"][0] = start
        inputs["logit_rows"][0] = rows - 1

    def _grow(self, extension: Call, tokens: Sequence[int], profile: Profile, clock: PhaseClock) -> Tree:
        """The tree below the last of `tokens`."""
        start = self._slot.reserve(profile.draft_rows)

        def expand(level_tokens: Ids, hidden: Floats, mask: Mask, level: int) -> Outputs:
            return self._expand(start, level_tokens, hidden, mask, level, clock).outputs

        if profile.paths:
            tree = _checked(grow_static(extension.outputs, tokens[-1], profile, expand), tokens)
        else:
            tree = rerank(_checked(grow(extension.outputs, profile, expand), tokens), tokens[-1], profile.nodes)
        self._slot.rollback()
        return tree

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

    def _expand(
        self, start: int, tokens: Ids, hidden: npt.NDArray[Any], mask: Mask, level: int, clock: PhaseClock
    ) -> Call:
        """A pass over Q nodes of a level: tokens [Q], hidden [Q, h], mask [Q, S] over the reserved rows so far."""
        rows, seen = mask.shape
        call = self._graph.call(self._slot.index, outputs=FROM_HEAD, Q=rows, S=seen, R=rows)
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


_Valued = TypeVar("_Valued", Tree, Candidates)


def _checked(drafted: _Valued, tokens: Sequence[int]) -> _Valued:
    """`drafted`, whose values are numbers. Raises EagleError where one is NaN."""
    if math.isnan(sum(drafted.values.tolist())):
        raise EagleError(
            f"the head's log-probabilities are NaN after {len(tokens)} tokens: the head or the bundle's precision "
            "does not carry this input; use the profile plain"
        )
    return drafted
