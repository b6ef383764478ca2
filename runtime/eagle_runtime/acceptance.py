"""How likely proposed tokens are to be accepted, by what has been accepted so far.

A node's probability is that of its token being the target's own, given that its parent's is. The head gives one
itself, which is put right by what was observed where it gave such ones. A look-up has none: there it is the share of
tokens that were right after matches as long. So both stand on one scale, in one tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eagle_graphs import Tree
from eagle_graphs.tree import Floats, Ids
from eagle_runtime.lookup import LONGEST, Match

Floats64 = npt.NDArray[np.float64]

_BOUNDS = np.array([0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85])  # between classes of the head's probability
_HEAD_PRIOR = 2.0  # accepted nodes that a class is given beforehand, for as many expected
_HEAD_MEMORY = 60.0  # expected nodes of a class, from which on older ones count less
_MATCH_PRIOR, _MATCH_MEMORY = 6.0, 120.0  # the same for matches, in tokens looked at
_LEAST, _MOST = 1e-9, 0.999  # of a probability: values are finite, and fall along a path whatever rounding does


class HeadAcceptance:
    """Puts the head's probabilities right, class by class."""

    def __init__(self) -> None:
        classes = len(_BOUNDS) + 1
        self._expected, self._accepted = np.full(classes, _HEAD_PRIOR), np.full(classes, _HEAD_PRIOR)
        self._ratio = np.ones(classes)

    def probabilities(self, tree: Tree) -> Floats64:
        """[N] each node's probability, given its parent; the root's is 1."""
        raw = _conditional(tree)
        right: Floats64 = np.clip(raw * self._ratio[np.searchsorted(_BOUNDS, raw)], _LEAST, _MOST)
        right[0] = 1.0
        return right

    def learn(self, tree: Tree, tokens: Sequence[int]) -> int:
        """Takes in which nodes of a drafted tree were right. tokens: what the answer went on with.

        Returns how many of the first tokens are a path of the tree.
        """
        raw, row = _conditional(tree), 0
        for depth, token in enumerate(tokens):
            children = np.flatnonzero(tree.parents == row)
            if not len(children):
                return depth
            classes = np.searchsorted(_BOUNDS, raw[children])
            np.add.at(self._expected, classes, raw[children])
            match = children[tree.tokens[children] == token]
            if len(match):
                self._accepted[np.searchsorted(_BOUNDS, raw[match[0]])] += 1
            self._forget()
            if not len(match):
                return depth
            row = int(match[0])
        return len(tokens)

    def _forget(self) -> None:
        surplus = np.maximum(self._expected / _HEAD_MEMORY, 1)
        self._expected /= surplus
        self._accepted /= surplus
        self._ratio = self._accepted / self._expected


def _conditional(tree: Tree) -> Floats64:
    """[N] the probability that stands behind each node's value, given its parent."""
    conditional = np.ones(len(tree))
    conditional[1:] = np.exp((tree.values[1:] - tree.values[tree.parents[1:]]).astype(np.float64))
    return conditional


class LookupAcceptance:
    """The share of looked-up tokens that were right, by the length of the match.

    Each token that is right makes the match longer: token i of a match of m counts as the first one of m + i.
    """

    def __init__(self) -> None:
        lengths = np.arange(1.0, LONGEST + 1)
        self._alone = _Shares(1 - 0.8 * lengths**-0.85)
        self._beside = _Shares(1 - 0.95 * lengths**-0.55)

    def alone(self, match: Match) -> list[float]:
        """The probability of each of the match's tokens, given those before it, as far as nothing else is known."""
        return [self._alone.of(match.length + index) for index in range(len(match.tokens))]

    def beside(self, match: Match, index: int, head: float) -> float:
        """The probability of token `index` where the head's is `head`; 0 where it is not among the head's best.

        The two are taken as independent reasons: the token is wrong if both are.
        """
        return min(1 - (1 - self._beside.of(match.length + index)) * (1 - head), _MOST)

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

    def __init__(self, prior: npt.NDArray[np.floating]) -> None:
        self._right, self._seen = (prior * _MATCH_PRIOR).tolist(), [_MATCH_PRIOR] * len(prior)

    def of(self, length: int) -> float:
        index = min(length, LONGEST) - 1
        share: float = self._right[index] / self._seen[index]
        return min(share, _MOST)

    def add(self, length: int, *, right: bool) -> None:
        index = min(length, LONGEST) - 1
        keep = min(1.0, (_MATCH_MEMORY - 1) / self._seen[index])
        self._right[index] = self._right[index] * keep + right
        self._seen[index] = self._seen[index] * keep + 1


def children_of(tree: Tree, row: int) -> Ids:
    """Rows of a node's children."""
    return np.flatnonzero(tree.parents == row)


def values_from(tree: Tree, probabilities: Floats64) -> Floats:
    """[N] values, logarithms of the probability of each node's path, from conditional probabilities [N]."""
    return (tree.mask @ np.log(probabilities)).astype(np.float32)
