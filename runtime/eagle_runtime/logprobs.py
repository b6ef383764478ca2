"""Log-probabilities of committed tokens, as the target itself gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_graphs.tree import Floats
from eagle_runtime.engines import Rows
from eagle_runtime.processors import best_tokens, sum_of_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """One token's log-probability and those of the likeliest ones there.

    Of the target's own distribution, log-softmax of its raw logits: temperature, penalties and bans are not in it.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    """(token id, log-probability) of the k likeliest tokens, best first."""


def token_logprobs(logits: Floats, token: int, count: int) -> TokenLogprobs:
    """Of `token` and of the `count` likeliest. logits: [V], the target's."""
    best = logits.max()
    total = float(best) + math.log(sum_of_weights(logits, best))
    top = [(int(other), float(logits[other]) - total) for other in best_tokens(logits, count)]
    return TokenLogprobs(token_id=token, logprob=float(logits[token]) - total, top=top)


def path_logprobs(logits: Rows | None, path: Sequence[int], tokens: Sequence[int], count: int) -> list[TokenLogprobs]:
    """Of `tokens`, which the rows of `path` gave. logits: [R, V], the target's for all rows of the pass."""
    assert logits is not None, "the target was not asked for logits"
    return [token_logprobs(logits[row], token, count) for row, token in zip(path, tokens, strict=False)]
