"""A round's tree: drafted or not, with what look-up proposes, cut to the size that pays.

Whatever is chosen here, the text stays the target's own: choices decide what is proposed, not what is accepted. They
depend on times, so the same answer may take other rounds tomorrow. A sampled tree's shape must not depend on what is
drawn, nor its text on times: such answers do not come here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from eagle_graphs import Profile, Tree, cut, root_only
from eagle_graphs.tree import best_tree
from eagle_runtime.acceptance import Drafted, HeadAcceptance, LookupAcceptance, drafted_from_tree, values_from
from eagle_runtime.controller import NOTHING, Controller, Expected, Prices, expected_from_probabilities
from eagle_runtime.draft import Drafting
from eagle_runtime.lookup import LookupIndex, Match
from eagle_runtime.stats import PhaseClock


@dataclass(slots=True, kw_only=True)
class Experience:
    """What is learned from one answer for the next."""

    controller: Controller
    head: HeadAcceptance = field(default_factory=HeadAcceptance)
    lookup: LookupAcceptance = field(default_factory=LookupAcceptance)


@dataclass(slots=True, kw_only=True)
class _Proposed:
    """What a round was made of, for learning."""

    rows: int
    draft: int
    waiting: int
    drafted: Drafted | None
    first: bool
    """Nothing was drafted before in this answer, so that many rows may have waited."""
    match: Match | None
    shared: int | None
    """The match's first tokens that the head proposed too, before one that it did not; None where there is no such."""
    nodes: int
    started: float
    draft_s: float


class Planning(Protocol):
    """What the loop asks of whoever makes the trees of an answer."""

    def propose(self, tokens: Sequence[int], drafter: Drafting | None, clock: PhaseClock) -> Tree:
        """The tree to verify below the last of `tokens`, all so far."""
        ...

    def learn(self, kept: Sequence[int], *, accepted: int, clock: PhaseClock) -> int:
        """Takes in the round of the tree proposed last.

        Args:
            kept: tokens that it committed.
            accepted: nodes of the tree among them.
            clock: has timed it.

        Returns:
            How many of the accepted nodes only look-up had proposed.
        """
        ...


class Planner:
    """Proposes the trees that pay. See `Planning`.

    Args:
        experience: of earlier answers, which this one adds to.
        profiles: the bundle's.
        lookup: whether to look up at all.
    """

    def __init__(self, experience: Experience, profiles: Sequence[Profile], *, lookup: bool) -> None:
        self._experience, self._controller = experience, experience.controller
        self._profiles = {profile.nodes: profile for profile in profiles}
        self._index = LookupIndex() if lookup else None
        self._waiting, self._has_drafted = 1, False  # rows that the head has not read, once it has drafted
        self._proposed: _Proposed | None = None

    def propose(self, tokens: Sequence[int], drafter: Drafting | None, clock: PhaseClock) -> Tree:
        """See `Planning`."""
        started, controller, rows = clock.total, self._controller, len(tokens) - 1
        prices = controller.prices(rows)
        match, chances = self._look_up(tokens)
        alone = expected_from_probabilities(accumulate(chances, operator.mul))
        draft = controller.choose_draft(alone, prices, waiting=self._waiting)
        if draft == NOTHING or drafter is None:
            tree, merged = root_only(tokens[-1]), _Merged.from_chain(tokens[-1], match, chances)
            expected: Expected = alone
        else:
            tree = drafter.draft(tokens, self._profiles[draft], clock)
            merged = self._merge(tree, match, chances)
            expected = merged.expected()
            self._compare(draft, tree, merged, alone, prices)
        nodes = controller.choose_size(expected, prices)
        if match is None:
            tree = cut(tree, nodes)
        elif nodes != len(tree) or merged.changes(tree):
            tree = merged.tree(nodes)
        clock.lap("tree")
        self._proposed = _Proposed(
            rows=rows,
            draft=draft,
            waiting=self._waiting,
            drafted=merged.drafted,
            first=not self._has_drafted,
            match=match,
            shared=merged.left,
            nodes=nodes,
            started=started,
            draft_s=clock.total - started,
        )
        return tree

    def learn(self, kept: Sequence[int], *, accepted: int, clock: PhaseClock) -> int:
        """See `Planning`."""
        done, experience = self._proposed, self._experience
        assert done is not None, "nothing was proposed"
        costs, by_head = self._controller.costs, 0
        self._waiting += len(kept)
        if done.drafted is not None:
            by_head = experience.head.learn(done.drafted, kept)
            if not done.first:
                costs.observe_drafting(done.draft, done.rows, done.waiting, done.draft_s)
            self._waiting, self._has_drafted = len(kept), True
        if done.match is not None:
            experience.lookup.learn(done.match, kept, done.shared)
        seconds = clock.total - done.started
        costs.observe(f"verify {done.nodes}", done.rows, seconds - done.draft_s)
        self._controller.learn_round(tokens=len(kept), seconds=seconds)
        return max(accepted - by_head, 0)

    def _look_up(self, tokens: Sequence[int]) -> tuple[Match | None, list[float]]:
        """What look-up proposes, and the probability of each token given those before."""
        if self._index is None:
            return None, []
        self._index.extend(tokens[len(self._index) :])
        match = self._index.find(self._controller.options.sizes[-1] - 1)
        return match, self._experience.lookup.alone(match) if match else []

    def _merge(self, tree: Tree, match: Match | None, chances: Sequence[float]) -> _Merged:
        """The head's nodes and look-up's."""
        drafted, lookup = drafted_from_tree(tree), self._experience.lookup
        probabilities = self._experience.head.probabilities(drafted)
        row, branch, left = 0, list[int](), None
        rest: Sequence[int] = ()
        chances = list(chances)
        if match is not None:
            for index, token in enumerate(match.tokens):
                child = drafted.child(row, token)
                if child is None:
                    if drafted.has_children(row):
                        left = index
                        chances[index] = lookup.beside(match, index)
                    break
                row = child
                branch.append(row)
                probabilities[row] = lookup.agreeing(match, index, probabilities[row])
            rest = match.tokens[len(branch) :]
        values = values_from(drafted.parents, probabilities)
        parents = [*drafted.parents]
        for chance in chances[len(branch) :]:
            branch.append(len(parents))
            parents.append(row)
            values.append(values[row] + math.log(chance))
            row = branch[-1]
        return _Merged(
            tokens=[*drafted.tokens, *rest], parents=parents, values=values, branch=branch, left=left, drafted=drafted
        )

    def _compare(self, draft: int, tree: Tree, merged: _Merged, alone: Expected, prices: Prices) -> None:
        """Compares drafting with not drafting, and the profiles up to the drafted one on its tree.

        alone: what look-up alone was expected to give.
        """
        controller = self._controller
        profiles = [self._profiles[nodes] for nodes in controller.options.drafts if NOTHING < nodes <= draft]
        best, curves = controller.best_depth(prices), dict[int, Expected]()
        if len(profiles) > 1:
            assert merged.drafted is not None
            values = values_from(merged.drafted.parents, self._experience.head.probabilities(merged.drafted))
            curves = _by_profile(tree.depths.tolist(), values, profiles)
        if NOTHING in controller.options.drafts:
            if draft == best:
                controller.learn_gain(merged.expected(), alone, merged.expected_of_branch(), prices)
            elif best in curves and not merged.branch:
                controller.learn_gain(curves[best], alone, alone, prices)
        if curves:
            controller.learn_steps(list(curves.values()), prices)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Merged:
    """The nodes that a round may verify, as lists, root first and parents before their children."""

    tokens: list[int]
    parents: list[int]
    values: list[float]
    branch: list[int]
    """Nodes that look-up proposed, from the top."""
    left: int | None
    """See `_Proposed.shared`."""
    drafted: Drafted | None
    """Those of the head, which come first; None where it was not asked."""

    @classmethod
    def from_chain(cls, root: int, match: Match | None, chances: Sequence[float]) -> _Merged:
        """Look-up's nodes alone."""
        count = len(chances)
        parents = list(range(-1, count))
        return cls(
            tokens=[root, *(match.tokens if match else ())],
            parents=parents,
            values=values_from(parents, [1.0, *chances]),
            branch=list(range(1, count + 1)),
            left=None,
            drafted=None,
        )

    def expected(self) -> Expected:
        """What the best nodes give."""
        return expected_from_probabilities(map(math.exp, sorted(self.values[1:], reverse=True)))

    def expected_of_branch(self) -> Expected:
        """What look-up alone gives, by all that is known of its nodes."""
        return expected_from_probabilities(math.exp(self.values[row]) for row in self.branch)

    def changes(self, tree: Tree) -> bool:
        """Whether the best nodes, as many as in `tree`, are others than the drafted ones."""
        added = self.values[len(tree) :]
        return bool(added) and max(added) > min(self.values[: len(tree)])

    def tree(self, nodes: int) -> Tree:
        """The best nodes."""
        if nodes == 1:
            return root_only(self.tokens[0])
        parents = [parent - 1 for parent in self.parents[1:]]
        return best_tree(self.tokens[1:], parents, self.values[1:], self.tokens[0], nodes)


def _by_profile(depths: list[int], values: list[float], profiles: Sequence[Profile]) -> dict[int, Expected]:
    """What each profile would have given: its best nodes among those no deeper than it drafts."""
    curves: dict[int, Expected] = {}
    for profile in profiles:
        within = (value for value, depth in zip(values[1:], depths[1:], strict=True) if depth <= profile.depth)
        best = sorted(within, reverse=True)[: profile.nodes - 1]
        curves[profile.nodes] = expected_from_probabilities(map(math.exp, best))
    return curves
