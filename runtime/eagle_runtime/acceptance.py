"""How likely proposed tokens are to be accepted, by what has been accepted so far.

A node's probability is that of its token being the target's own, given that its parent's is. The head gives one
itself, which is put right by what was observed where it gave such ones. A look-up has none: there it is the share of
tokens that were right after matches as long. So both stand on one scale, in one tree.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_graphs import Tree
from eagle_runtime.lookup import LONGEST, Match

_BOUNDS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85)  # between classes of the head's probability
_HEAD_PRIOR = 2.0  # accepted nodes that a class is given beforehand, for as many expected
_HEAD_MEMORY = 60.0  # expected nodes of a class, from which on older ones count less
_MATCH_PRIOR, _MATCH_MEMORY = 6.0, 120.0  # the same for matches, in tokens looked at
_LEAST, _MOST = 1e-9, 0.999  # of a probability: values are finite, and fall along a path whatever rounding does


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """A drafted tree as lists, root first: for so few nodes they are faster than arrays."""

    tokens: list[int]
    parents: list[int]
    probabilities: list[float]
    """What the head says of each node, given its parent; of the root 1."""

    def child(self, row: int, token: int) -> int | None:
        """The child of `row` that has this token."""
        parents, tokens = self.parents, self.tokens
        return next((i for i in range(row + 1, len(tokens)) if parents[i] == row and tokens[i] == token), None)

    def has_children(self, row: int) -> bool:
        """Whether the head proposed anything below `row`."""
        return row in self.parents


def drafted_from_tree(tree: Tree) -> Drafted:
    """The lists of a tree that the head drafted."""
    values, parents = tree.values.tolist(), tree.parents.tolist()
    probabilities = [math.exp(min(value - values[parent], 0.0)) for value, parent in zip(values, parents, strict=True)]
    probabilities[0] = 1.0
    return Drafted(tokens=tree.tokens.tolist(), parents=parents, probabilities=probabilities)


class HeadAcceptance:
    """Puts the head's probabilities right, class by class."""

    def __init__(self) -> None:
        classes = len(_BOUNDS) + 1
        self._expected, self._accepted = [_HEAD_PRIOR] * classes, [_HEAD_PRIOR] * classes

    def probabilities(self, drafted: Drafted) -> list[float]:
        """[N] each node's probability, given its parent; the root's is 1."""
        ratio = [accepted / expected for accepted, expected in zip(self._accepted, self._expected, strict=True)]
        right = [min(max(raw * ratio[bisect_left(_BOUNDS, raw)], _LEAST), _MOST) for raw in drafted.probabilities]
        right[0] = 1.0
        return right

    def learn(self, drafted: Drafted, tokens: Sequence[int]) -> int:
        """Takes in which nodes were right. tokens: what the answer went on with.

        Returns how many of the first tokens are a path of the tree.
        """
        row = 0
        for depth, token in enumerate(tokens):
            match = None
            for child in range(row + 1, len(drafted.parents)):
                if drafted.parents[child] == row:
                    self._count(drafted.probabilities[child], right=drafted.tokens[child] == token)
                    if drafted.tokens[child] == token:
                        match = child
            if match is None:
                return depth
            row = match
        return len(tokens)

    def _count(self, raw: float, *, right: bool) -> None:
        index = bisect_left(_BOUNDS, raw)
        expected, accepted = self._expected[index] + raw, self._accepted[index] + right
        surplus = max(expected / _HEAD_MEMORY, 1.0)
        self._expected[index], self._accepted[index] = expected / surplus, accepted / surplus


class LookupAcceptance:
    """The share of looked-up tokens that were right, by the length of the match.

    Each token that is right makes the match longer: token i of a match of m counts as the first one of m + i.
    """

    def __init__(self) -> None:
        lengths = range(1, LONGEST + 1)
        self._alone = _Shares([1 - 0.8 * length**-0.85 for length in lengths])
        self._beside = _Shares([length**1.5 / (length**1.5 + 8) for length in lengths])

    def alone(self, match: Match) -> list[float]:
        """The probability of each of the match's tokens, given those before it, as far as nothing else is known."""
        return [self._alone.of(match.length + index) for index in range(len(match.tokens))]

    def beside(self, match: Match, index: int) -> float:
        """The probability of token `index` where the head proposed others and not this one."""
        return self._beside.of(match.length + index)

    def agreeing(self, match: Match, index: int, head: float) -> float:
        """The probability of token `index` where the head's is `head`.

        The two are taken as independent reasons: the token is wrong if both are.
        """
        return min(1 - (1 - self._alone.of(match.length + index)) * (1 - head), _MOST)

    def learn(self, match: Match, tokens: Sequence[int], shared: int | None) -> None:
        """Takes in what the answer went on with.

        shared: how many of the match's first tokens the head proposed too, before one that it did not; None where
        nothing was drafted below.
        """
        for index, (proposed, token) in enumerate(zip(match.tokens, tokens, strict=False)):
            right = proposed == token
            self._alone.add(match.length + index, right=right)
            if index == shared:
                self._beside.add(match.length + index, right=right)
            if not right:
                return


class _Shares:
    """A running share for each length of a match."""

    def __init__(self, prior: Sequence[float]) -> None:
        self._right, self._seen = [share * _MATCH_PRIOR for share in prior], [_MATCH_PRIOR] * len(prior)

    def of(self, length: int) -> float:
        index = min(length, LONGEST) - 1
        return min(max(self._right[index] / self._seen[index], _LEAST), _MOST)

    def add(self, length: int, *, right: bool) -> None:
        index = min(length, LONGEST) - 1
        keep = min(1.0, (_MATCH_MEMORY - 1) / self._seen[index])
        self._right[index] = self._right[index] * keep + right
        self._seen[index] = self._seen[index] * keep + 1


def values_from(parents: Sequence[int], probabilities: Sequence[float]) -> list[float]:
    """[N] logarithms of the probability of each node's path. parents: [N], before their children, the root's -1."""
    values = [0.0]
    for parent, probability in zip(parents[1:], probabilities[1:], strict=True):
        values.append(values[parent] + math.log(probability))
    return values
