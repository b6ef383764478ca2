"""Acceptance of chains on conversations that the head was not trained on, from the passes of training.

Chains are drafted from every row by the unrolled steps. Each is fed the text's own tokens, which is what a chain is
fed as far as it is accepted. Greedy answers are needed for it to be the accepted length of greedy decoding; on sampled
ones it tells how often the best guess is the token that was drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from tools.train.batches import Batch
from tools.train.model import DraftHead
from tools.train.objective import tapped_for
from tools.train.unroll import unroll

DEPTH = 4
"""Tokens of a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What chains of `DEPTH` tokens gave."""

    length: float
    """Accepted length: tokens / rounds, the bonus token included."""
    acceptance: list[float]
    """Of the chain's first, second ... token, given that those before it were accepted."""


@torch.no_grad()
def held_out(head: DraftHead, batches: Iterable[Batch], draft_id_of: torch.Tensor) -> HeldOut:
    """Measures chains over the batches, whose tokens must reach `DEPTH` steps."""
    tokens = rounds = 0
    accepted, tried = [0] * DEPTH, [0] * DEPTH
    for batch in batches:
        lengths = torch.zeros(len(batch.tokens), batch.answer_rows, dtype=torch.int64, device=batch.tokens.device)
        alive = torch.ones_like(lengths, dtype=torch.bool)
        for step in unroll(head, batch, tapped_for(head, batch), steps=DEPTH):
            columns = batch.prompt_rows + step.rows + 1 + step.number
            alive &= columns < batch.ends[:, None]
            tried[step.number - 1] += int(alive.sum())
            alive &= best_ids(head, step.hidden) == draft_id_of[batch.tokens[:, columns]]
            accepted[step.number - 1] += int(alive.sum())
            lengths += alive
        for row, end in zip(lengths.tolist(), (batch.ends - batch.prompt_rows - 2).tolist(), strict=True):
            tokens += end
            rounds += rounds_of(row[:end])
    return HeldOut(
        length=tokens / max(1, rounds),
        acceptance=[right / total if total else 0.0 for right, total in zip(accepted, tried, strict=True)],
    )


def best_ids(head: DraftHead, hidden: torch.Tensor) -> torch.Tensor:
    """[B, R] the draft's best ids after rows [B, R, h]."""
    weight = head.output_weight.t()
    return torch.stack([(head.output_norm(rows) @ weight).argmax(dim=-1) for rows in hidden])


def rounds_of(lengths: list[int]) -> int:
    """Rounds that commit a text of as many tokens, if a chain from place i is accepted for lengths[i] tokens."""
    place = rounds = 0
    while place < len(lengths):
        place += 1 + lengths[place]
        rounds += 1
    return rounds
