"""`auto`: how deep to draft, nothing included, and how many nodes to verify.

A token is worth what the answer spends on one. So an option's worth is the tokens it may be expected to commit less
rate x seconds, where `rate` is the tokens a second that the answer runs at, and the best option is the one of highest
worth: choosing so in every round gives the highest rate over all rounds (Dinkelbach, "On nonlinear fractional
programming", 1967), which choosing the highest rate of each round does not.

Before drafting its result is unknown. What drafting has lately added to the worth of a round is the estimate, kept
apart for rounds in which look-up already knew more or less. How deep to draft is decided on the trees drafted: each
says what a smaller profile would have given of it, so that two neighbours are compared on the same trees. The first
rounds of which look-up knows nothing draft with the deepest, which compares all. Later, trying what seems not to pay
has a budget, a small share of the time spent, so that it can never cost more.

Nothing here knows of graphs or clocks: costs and probabilities go in, choices come out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from eagle_runtime.costs import Costs, extension_factor

Expected = Sequence[float]
"""[M] tokens to expect of the best 1, 2, ..., M nodes of a tree, the bonus included; the first is 1."""

NOTHING = 0
"""The draft that is none."""

_BUDGET = 0.007  # share of the time for trying what seems not to pay
_MEMORY = 0.98  # weight of a round in the rate, against the next one's
_PLAIN_ROUNDS = 5  # of plain decoding that the rate counts beside those seen, since few of these say little
_GAIN_MEMORY, _GAIN_PRIOR = 48, 2  # rounds
_STEP_MEMORY, _FIRST_STEPS = 64, 4  # rounds
_SURE = (0.4, 0.7, 0.9)  # bounds between classes of look-up's first token
_PRIOR_GAIN = (0.5, 0.3, 0.12, 0.03)  # tokens that drafting adds, in each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What may be chosen, rising."""

    drafts: tuple[int, ...]
    """Profiles to draft with, by their nodes; `NOTHING` among them where a round may go without."""
    sizes: tuple[int, ...]
    """Nodes to verify."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a round's choices cost, and what a second is worth."""

    rate: float
    """Tokens a second that the answer runs at."""
    verify: Mapping[int, float]
    """Seconds of each size, drafting left out."""
    draft: Mapping[int, float]
    """Seconds of each profile where one row waits for the head."""


class Controller:
    """Chooses, and learns from what came of it.

    Args:
        options: what may be chosen.
        costs: of the options.
        preferred: the profile to draft with before comparisons have told.
    """

    def __init__(self, options: Options, costs: Costs, *, preferred: int) -> None:
        self.options, self.costs = options, costs
        self._profiles = [draft for draft in options.drafts if draft != NOTHING]
        self._preferred = preferred
        self._gains = [_Mean(prior=gain, weight=_GAIN_PRIOR, memory=_GAIN_MEMORY) for gain in _PRIOR_GAIN]
        self._steps = [_Mean(prior=0.0, weight=0, memory=_STEP_MEMORY) for _ in self._profiles]
        """What each profile's trees are worth more than those of the one before; of the first nothing."""
        self._first = _FIRST_STEPS  # rounds left that draft with the deepest whatever it costs
        self._tokens = self._seconds = self._allowance = 0.0

    def prices(self, rows: int) -> Prices:
        """Of a round in a context of `rows`. The rate is never less than plain decoding's."""
        verify = {size: self.costs.verify(size, rows) for size in self.options.sizes}
        plain_s = verify[1] if 1 in verify else self.costs.verify(1, rows)
        running = 0.0
        if self.costs.measured:
            running = (self._tokens + _PLAIN_ROUNDS) / (self._seconds + _PLAIN_ROUNDS * plain_s)
        draft = {profile: self.costs.draft(profile, rows) for profile in self._profiles}
        return Prices(rate=max(running, 1 / plain_s), verify=verify, draft=draft)

    def choose_draft(self, lookup: Expected, prices: Prices, *, waiting: int = 1) -> int:
        """The profile to draft with, or `NOTHING`.

        Args:
            lookup: what look-up alone may be expected to give; [1] where it found nothing.
            prices: of the round.
            waiting: committed rows that the head has not read.
        """
        if len(self.options.drafts) == 1:
            return self.options.drafts[0]
        depth, deepest = self.best_depth(prices), self._profiles[-1]
        if self._first and _class(lookup) == 0:
            self._first -= 1
            return deepest
        if NOTHING in self.options.drafts:
            price = prices.draft[depth] * extension_factor(waiting)
            loss = price - self._gains[_class(lookup)].value / prices.rate
            if loss > self._allowance:
                return NOTHING
            if loss > 0:
                self._allowance -= loss
                return depth
        extra = prices.draft[deepest] - prices.draft[depth]
        if extra <= self._allowance and depth != deepest:
            self._allowance -= max(extra, 0.0)
            return deepest
        return depth

    def best_depth(self, prices: Prices) -> int:
        """The profile that it pays most to draft with, if anything is drafted."""
        worth, best = 0.0, (0.0, self._profiles[0])
        for smaller, draft, step in zip(self._profiles, self._profiles[1:], self._steps[1:], strict=False):
            if step.weight < _FIRST_STEPS:
                return self._preferred if draft <= self._preferred else best[1]
            worth += step.value - prices.rate * (prices.draft[draft] - prices.draft[smaller])
            if worth > best[0]:
                best = worth, draft
        return best[1]

    def choose_size(self, expected: Expected, prices: Prices) -> int:
        """How many nodes to verify of a tree that gives `expected`; the fewer of two that are worth the same."""
        return self._best(expected, prices)[1]

    def learn_gain(self, expected: Expected, lookup: Expected, informed: Expected, prices: Prices) -> None:
        """Takes in what drafting has added to a round.

        Args:
            expected: of the tree of both, drafted with the profile that it pays most to draft with.
            lookup: of look-up alone, as `choose_draft` was told.
            informed: the same by what the head's draft has told of look-up's tokens since.
            prices: of the round.
        """
        undrafted = self.choose_size(lookup, prices)
        foregone = informed[undrafted - 1] - prices.rate * prices.verify[undrafted]
        gain = self._best(expected, prices)[0] - foregone
        self._gains[_class(lookup)].add(gain)

    def learn_steps(self, curves: Sequence[Expected], prices: Prices) -> None:
        """Takes in what each profile, up to the one drafted with, would have given of the tree, look-up left out."""
        worths = [self._best(curve, prices)[0] for curve in curves]
        for smaller, worth, step in zip(worths, worths[1:], self._steps[1:], strict=False):
            step.add(worth - smaller)

    def learn_round(self, *, tokens: int, seconds: float) -> None:
        """Takes in what a round gave, and took."""
        self._tokens = _MEMORY * self._tokens + tokens
        self._seconds = _MEMORY * self._seconds + seconds
        self._allowance = min(self._allowance + _BUDGET * seconds, _BUDGET * self._seconds)

    def _best(self, expected: Expected, prices: Prices) -> tuple[float, int]:
        """The highest worth, and the size that has it."""
        best = -math.inf, 0
        for size, seconds in prices.verify.items():
            if size <= len(expected):
                worth = expected[size - 1] - prices.rate * seconds
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
