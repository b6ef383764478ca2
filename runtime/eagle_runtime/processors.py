"""What is done to the target's logits before a token is drawn: Hugging Face's processors, in numpy.

Each changes `logits` [V] float32 in place, in Hugging Face's meaning; a banned token has -inf. `context` [n] holds all
tokens so far: the prompt, the answer and, inside a tree, the path to the node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from eagle_graphs.tree import Floats, Ids

_TINY = 1e-37  # a probability that float32 still holds


class Processor(Protocol):
    """A processor of the user's own, such as a grammar: a state that follows the tokens, and a say on the logits.

    One answer's states form a tree as its tokens do. A round advances a state along the path that it walks; a node's
    state is made from its parent's, which must stay as it was. The state after the tokens that the round commits is
    kept, the others are dropped, and nothing is ever taken back. It runs after the built-in penalties and bans and
    before temperature, top-k, top-p and min-p.
    """

    def start(self, prompt: Ids) -> Any:
        """The state before the first new token. prompt: [n]."""
        ...

    def advance(self, state: Any, token: int) -> Any:
        """The state after `token`. Must not change `state`: return another one, or the same where nothing changes."""
        ...

    def process(self, state: Any, logits: Floats) -> None:
        """Changes the logits [V] in place; -inf bans a token. At least one must stay finite, and none may be NaN."""
        ...


def add_bias(logits: Floats, bias: Mapping[int, float]) -> None:
    """Adds to the logits of single tokens (`sequence_bias` of one token each)."""
    for token, value in bias.items():
        logits[token] += value


def penalize_repetition(logits: Floats, context: Ids, penalty: float) -> None:
    """Divides positive logits of the context's tokens by `penalty` and multiplies negative ones (CTRL, 2019)."""
    seen = logits[context]
    logits[context] = np.where(seen < 0, seen * np.float32(penalty), seen / np.float32(penalty))


def penalize_counts(logits: Floats, answer: Ids, *, frequency: float, presence: float) -> None:
    """Subtracts `frequency` for each time a token stands in `answer` and `presence` if it does (OpenAI's API)."""
    tokens, counts = np.unique(answer, return_counts=True)
    logits[tokens] -= (frequency * counts + presence).astype(np.float32)


def ban_repeated_ngrams(logits: Floats, context: Ids, size: int) -> None:
    """Bans each token that would complete an n-gram of `size` tokens for the second time."""
    if len(context) < size:
        return
    grams = np.lib.stride_tricks.sliding_window_view(context, size)
    begun = context[len(context) - size + 1 :]
    logits[grams[(grams[:, :-1] == begun).all(axis=1), -1]] = -np.inf


def ban_words(logits: Floats, context: Ids, words: Sequence[Sequence[int]]) -> None:
    """Bans the last token of each word, a list of tokens, where the context ends with the others."""
    for *begun, last in words:
        if context[len(context) - len(begun) :].tolist() == begun:
            logits[last] = -np.inf


def ban_tokens(logits: Floats, tokens: Sequence[int]) -> None:
    """Bans tokens."""
    logits[list(tokens)] = -np.inf


def keep_top_k(logits: Floats, k: int) -> None:
    """Bans all but the k best tokens, and those that equal the k-th."""
    if k < len(logits):
        logits[logits < np.partition(_contenders(logits, k), -k)[-k]] = -np.inf


def keep_top_p(logits: Floats, p: float) -> None:
    """Bans the least likely tokens that sum to at most 1 - p; the best one stays (nucleus; Holtzman et al., 2020).

    Tokens that have less than their equal share of 1 - p are banned without being sorted.
    """
    top = logits.max()
    total = sum_of_weights(logits, top)
    budget = (1 - p) * total
    ids = np.flatnonzero(logits > top + math.log(max(budget / len(logits), _TINY)))
    weights = np.exp(logits[ids] - top, dtype=np.float64)
    order = np.argsort(weights, kind="stable")
    spent = total - weights.sum() + np.cumsum(weights[order])
    kept = ids[order[np.count_nonzero(spent[:-1] <= budget) :]]
    values = logits[kept]
    logits.fill(-np.inf)
    logits[kept] = values


def keep_min_p(logits: Floats, p: float) -> None:
    """Bans tokens with less than `p` of the best token's probability (Nguyen et al., 2024)."""
    logits[logits < logits.max() + math.log(max(p, _TINY))] = -np.inf


def sum_of_weights(logits: Floats, top: np.float32) -> float:
    """The sum of exp(logits - top); top: the largest, or more.

    Part by part: memory for all of a large vocabulary is new to the process each time, and costs more than the sums.
    """
    part = 1 << 14
    starts = range(0, len(logits), part)
    return sum(float(np.exp(logits[at : at + part] - top).sum(dtype=np.float64)) for at in starts)


def best_tokens(logits: Floats, k: int) -> Ids:
    """The k best tokens, best first; a tie goes to the lower id."""
    if k == 0:
        return np.zeros(0, np.int64)
    least = np.partition(_contenders(logits, k), -k)[-k] if k < len(logits) else -np.inf
    tokens = np.flatnonzero(logits >= least)
    return tokens[np.argsort(-logits[tokens], kind="stable")[:k]]


def _contenders(logits: Floats, k: int) -> Floats:
    """Logits among which the k best are. A bound spares most: the k-th best of the peaks of many parts."""
    peaks = np.maximum.reduceat(logits, np.arange(0, len(logits), 64))
    return logits[logits >= np.partition(peaks, -k)[-k]] if k < len(peaks) else logits
