"""`auto`: how deep to draft, nothing included, and how many nodes to verify.

A token is worth what the answer spends on one. So an option's worth is the tokens it may be expected to commit less
rate x seconds, where `rate` is the tokens a second that the answer runs at, and the best option is the one of highest
worth: choosing so in every round gives the highest rate over all rounds (Dinkelbach, "On nonlinear fractional
programming", 1967), which choosing the highest rate of each round does not.

Before drafting its result is unknown. What drafting has lately added to the worth of a round is the estimate, kept
apart for rounds in which look-up already knew more or less; how deep to draft is decided by surveys, rounds drafted
with the deepest profile, whose levels are compared on the same trees. Trying what seems not to pay has a budget, a
small share of the time spent, so that it can never cost more.

Nothing here knows of graphs or clocks: costs and probabilities go in, choices come out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from eagle_runtime.costs import Costs

Expected = Sequence[float]
"""[M] tokens to expect of the best 1, 2, ..., M nodes of a tree, the bonus included; the first is 1."""

NOTHING = 0
"""The draft that is none."""

_BUDGET = 0.007  # share of the time for trying what seems not to pay
_MEMORY = 0.98  # weight of a round in the rate, against the next one's
_PLAIN_ROUNDS = 5  # of plain decoding that the rate counts beside those seen, since few of these say little
_GAIN_MEMORY, _GAIN_PRIOR = 48, 2  # rounds
_SURVEY_MEMORY, _FIRST_SURVEYS = 64, 4
_SURE = (0.4, 0.7, 0.9)  # bounds between classes of look-up's first token
_PRIOR_GAIN = (0.5, 0.3, 0.12, 0.03)  # tokens that drafting adds, in each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be chosen, rising."""

    drafts: tuple[int, ...]
    """Profiles to draft with, by their nodes; `NOTHING` among them where a round may go without."""
    sizes: tuple[int, ...]
    """Nodes to verify."""


class Controller:
    """Chooses, and learns from what came of it.

    Args:
        options: what may be chosen.
        costs: of the options.
        preferred: the profile to draft with before surveys have told.
    """

    def __init__(self, options: Options, costs: Costs, *, preferred: int) -> None:
        self.options, self.costs = options, costs
        self._profiles = [draft for draft in options.drafts if draft != NOTHING]
        self._preferred = preferred
        self._gains = [_Mean(prior=gain, weight=_GAIN_PRIOR, memory=_GAIN_MEMORY) for gain in _PRIOR_GAIN]
        self._surveys = {draft: _Mean(prior=0.0, weight=0, memory=_SURVEY_MEMORY) for draft in self._profiles}
        self._tokens = self._seconds = self._allowance = 0.0

    def rate(self, rows: int) -> float:
        """Tokens a second that the answer runs at in a context of `rows`, never less than plain decoding's."""
        plain_s = self.costs.verify(1, rows)
        if not self.costs.measured:
            return 1 / plain_s
        running = (self._tokens + _PLAIN_ROUNDS) / (self._seconds + _PLAIN_ROUNDS * plain_s)
        return max(running, 1 / plain_s)

    def choose_draft(self, lookup: Expected, *, rows: int, waiting: int = 1) -> int:
        """The profile to draft with, or `NOTHING`.

        Args:
            lookup: what look-up alone may be expected to give; [1] where it found nothing.
            rows: of the context.
            waiting: committed rows that the head has not read.
        """
        if len(self.options.drafts) == 1:
            return self.options.drafts[0]
        depth = self.best_depth(rows)
        if NOTHING in self.options.drafts:
            price = self.costs.draft(depth, rows, waiting)
            loss = price - self._gains[_class(lookup)].value / self.rate(rows)
            if loss > self._allowance:
                return NOTHING
            if loss > 0:
                self._allowance -= loss
                return depth
        deepest = self._profiles[-1]
        extra = self.costs.draft(deepest, rows) - self.costs.draft(depth, rows)
        if extra <= self._allowance and depth != deepest:
            self._allowance -= max(extra, 0.0)
            return deepest
        return depth

    def best_depth(self, rows: int) -> int:
        """The profile that it pays most to draft with, if anything is drafted."""
        if min((mean.weight for mean in self._surveys.values()), default=0) < _FIRST_SURVEYS:
            return self._preferred
        rate = self.rate(rows)
        return max(self._profiles, key=lambda draft: self._surveys[draft].value - rate * self.costs.draft(draft, rows))

    def choose_size(self, expected: Expected, *, rows: int) -> int:
        """How many nodes to verify of a tree that gives `expected`; the fewer of two that are worth the same."""
        return self._best(expected, rows)[1]

    def learn_gain(self, expected: Expected, lookup: Expected, informed: Expected, *, rows: int) -> None:
        """Takes in what drafting has added to a round.

        Args:
            expected: of the tree of both.
            lookup: of look-up alone, as `choose_draft` was told.
            informed: the same by what the head's draft has told of look-up's tokens since.
            rows: of the context.
        """
        undrafted = self.choose_size(lookup, rows=rows)
        foregone = informed[undrafted - 1] - self.rate(rows) * self.costs.verify(undrafted, rows)
        gain = self._best(expected, rows)[0] - foregone
        self._gains[_class(lookup)].add(gain)

    def learn_survey(self, expected: Mapping[int, Expected], *, rows: int) -> None:
        """Takes in what each profile would have given where the deepest was drafted, look-up left out."""
        for draft, curve in expected.items():
            self._surveys[draft].add(self._best(curve, rows)[0])

    def learn_round(self, *, tokens: int, seconds: float) -> None:
        """Takes in what a round gave, and took."""
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self._allowance = min(self._allowance + _BUDGET * seconds, _BUDGET * self._seconds)

    def _best(self, expected: Expected, rows: int) -> tuple[float, int]:
        """The highest worth, and the size that has it."""
        rate, best = self.rate(rows), (-math.inf, 0)
        for size in self.options.sizes:
            if size <= len(expected):
                worth = expected[size - 1] - rate * self.costs.verify(size, rows)
                if worth > best[0]:
                    best = worth, size
        return best


class _Mean:
    """A running mean in which older values fade."""

    def __init__(self, *, prior: float, weight: int, memory: int) -> None:
        self.value, self.weight, self._memory = prior, weight, memory

    def add(self, value: float) -> None:
        self.weight = min(self.weight + 1, self._memory)
        self.value += (value - self.value) / self.weight


def _class(lookup: Expected) -> int:
    """The class of a round by how sure look-up is of its first token."""
    first = lookup[1] - lookup[0] if len(lookup) > 1 else 0.0
    return sum(first >= bound for bound in _SURE)


def expected_from_probabilities(probabilities: Iterable[float]) -> list[float]:
    """What a tree gives whose nodes are accepted with these probabilities, best first, the root left out."""
    return list(accumulate(probabilities, initial=1.0))
