"""A round's tree: drafted or not, with what look-up proposes, cut to the size that pays.

Whatever is chosen here, the text stays the target's own: choices decide what is proposed, not what is accepted. They
depend on times, so the same answer may take other rounds tomorrow. A sampled tree's shape must not depend on what is
drawn, nor its text on times: such answers do not come here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from eagle_graphs import Profile, Tree, rerank, root_only
from eagle_graphs.tree import ROOT, Candidates, candidates_from_tree, graft
from eagle_runtime.acceptance import HeadAcceptance, LookupAcceptance, children_of, values_from
from eagle_runtime.controller import NOTHING, Controller, Expected, expected_from_probabilities
from eagle_runtime.draft import Drafting
from eagle_runtime.lookup import LookupIndex, Match
from eagle_runtime.stats import PhaseClock

_NO_CANDIDATES = Candidates(tokens=np.zeros(0, np.int64), parents=np.zeros(0, np.int64), values=np.zeros(0, np.float32))


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
    drafted: Tree | None
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
        match, chances = self._look_up(tokens)
        alone = expected_from_probabilities(np.cumprod(chances))
        draft = controller.choose_draft(alone, rows=rows, waiting=self._waiting)
        drafted, shared = None, None
        if draft == NOTHING or drafter is None:
            values = np.cumsum(np.log(chances)).astype(np.float32)
            branch = np.array(match.tokens if match else (), np.int64)
            candidates, expected = graft(_NO_CANDIDATES, ROOT, branch, values), alone
        else:
            drafted = drafter.draft(tokens, self._profiles[draft], clock)
            candidates, informed, shared = self._merge(drafted, match, chances)
            expected = _expected(candidates)
            if NOTHING in controller.options.drafts and draft == controller.best_depth(rows):
                controller.learn_gain(expected, alone, informed, rows=rows)
            self._survey(draft, drafted, rows=rows)
        nodes = controller.choose_size(expected, rows=rows)
        if drafted is not None and match is None and nodes == len(drafted):
            tree = drafted  # as it came, rather than the same again
        else:
            tree = rerank(candidates, tokens[-1], nodes) if nodes > 1 else root_only(tokens[-1])
        clock.lap("tree")
        self._proposed = _Proposed(
            rows=rows,
            draft=draft,
            waiting=self._waiting,
            drafted=drafted,
            first=not self._has_drafted,
            match=match,
            shared=shared,
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

    def _merge(
        self, drafted: Tree, match: Match | None, chances: Sequence[float]
    ) -> tuple[Candidates, Expected, int | None]:
        """The head's nodes and look-up's; what look-up alone gives by what the head knows; and `_Proposed.shared`."""
        experience = self._experience
        probabilities = experience.head.probabilities(drafted)
        if match is None:
            return _with_values(drafted, values_from(drafted, probabilities)), expected_from_probabilities(()), None
        row, path, left = 0, list[int](), None
        chances = list(chances)
        for index, token in enumerate(match.tokens):
            children = children_of(drafted, row)
            same = children[drafted.tokens[children] == token]
            if not len(same):
                if len(children):
                    left = index
                    chances[index] = experience.lookup.beside(match, index, 0.0)
                break
            row = int(same[0])
            path.append(row)
            probabilities[row] = experience.lookup.beside(match, index, float(probabilities[row]))
        values = values_from(drafted, probabilities)
        rest = (values[row] + np.cumsum(np.log(chances[len(path) :]))).astype(np.float32)
        branch = np.array(match.tokens[len(path) :], np.int64)
        informed = expected_from_probabilities(np.exp(np.concatenate((values[path], rest))))
        return graft(_with_values(drafted, values), row - 1, branch, rest), informed, left

    def _survey(self, draft: int, drafted: Tree, *, rows: int) -> None:
        """Compares the profiles where the deepest was drafted."""
        profiles = [self._profiles[nodes] for nodes in self._controller.options.drafts if nodes != NOTHING]
        if len(profiles) > 1 and draft == profiles[-1].nodes:
            values = values_from(drafted, self._experience.head.probabilities(drafted))
            self._controller.learn_survey(_by_profile(drafted, values, profiles), rows=rows)


def _by_profile(drafted: Tree, values: np.ndarray, profiles: Sequence[Profile]) -> Mapping[int, Expected]:
    """What each profile would have given: its best nodes among those no deeper than it drafts."""
    curves = {}
    for profile in profiles:
        paths = np.exp(values[1:][drafted.depths[1:] <= profile.depth].astype(np.float64))
        curves[profile.nodes] = expected_from_probabilities(-np.sort(-paths)[: profile.nodes - 1])
    return curves


def _with_values(tree: Tree, values: np.ndarray) -> Candidates:
    found = candidates_from_tree(tree)
    return Candidates(tokens=found.tokens, parents=found.parents, values=values[1:])


def _expected(candidates: Candidates) -> Expected:
    return expected_from_probabilities(np.exp(-np.sort(-candidates.values.astype(np.float64))))
