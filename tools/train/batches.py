"""Batches of conversations of like length, and their order, which follows from the seed alone.

A conversation of tokens t_0 ... t_(n-1) whose answer starts at index a has the draft rows (f_i, t_(i+1)). The first
row that drafts is a - 1: it pairs the feature of the prompt's last token with the answer's first token, which
verification has drawn already, and is to say t_(a+1). In a batch that row is at the same column in every
conversation: prompts are padded on the left, answers on the right, so that all but the keys of step 1 is computed for
answers alone.

    B  conversations    C  columns: P of prompts, R of answer rows    h  width of a hidden state
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tools.train.answers import Answer
from tools.train.features import Features

SORTED = 1024
"""Conversations among which batches are made of those of like length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some conversations, aligned at the first row that drafts."""

    tokens: torch.Tensor
    """[B, C + steps + 1] the token at each column; 0 where there is none."""
    features: torch.Tensor
    """[B, C + steps + 1, taps + 1, h] tapped hidden states and, last, the LM head's input, in bfloat16."""
    pad: torch.Tensor
    """[B] columns of padding before the conversation's first token."""
    ends: torch.Tensor
    """[B] column behind its last token."""
    prompt_rows: int
    """P: column of the first row that drafts."""
    answer_rows: int
    """R: rows that draft, in the longest answer."""

    @property
    def labels(self) -> int:
        """Rows that have a label in step 1."""
        return int((self.ends - self.prompt_rows - 2).sum())


def usable(answers: Sequence[Answer]) -> list[int]:
    """Numbers of those that have at least one row with a label."""
    return [number for number, answer in enumerate(answers) if len(answer.answer) >= 2]


def order(answers: Sequence[Answer], numbers: Sequence[int], *, rows: int, seed: int, epoch: int) -> list[list[int]]:
    """Batches of at most `rows` answer rows, padding counted, which together hold each of `numbers` once."""
    random = np.random.default_rng([seed, epoch])
    shuffled = random.permutation(np.asarray(numbers))
    batches: list[list[int]] = []
    for start in range(0, len(shuffled), SORTED):
        part = sorted(shuffled[start : start + SORTED].tolist(), key=lambda number: len(answers[number].answer))
        batch: list[int] = []
        for number in part:
            if batch and (len(batch) + 1) * (len(answers[number].answer) - 1) > rows:
                batches.append(batch)
                batch = []
            batch.append(number)
        batches.append(batch)
    return [batches[place] for place in random.permutation(len(batches))]


def make_batch(
    answers: Sequence[Answer], numbers: Sequence[int], features: Features, *, steps: int, device: str
) -> Batch:
    """The conversations of these numbers. steps: of the training-time test, for which tokens must reach."""
    chosen = [answers[number] for number in numbers]
    prompt = max(answer.start for answer in chosen) - 1
    rows = max(len(answer.answer) for answer in chosen) - 1
    width = prompt + rows + steps + 1
    tokens = torch.zeros(len(chosen), width, dtype=torch.int64)
    states = torch.zeros(len(chosen), width, *features.row, dtype=torch.bfloat16)
    pad = torch.tensor([prompt + 1 - answer.start for answer in chosen])
    for place, (answer, own) in enumerate(zip(chosen, features.of(numbers), strict=True)):
        columns = slice(int(pad[place]), int(pad[place]) + len(answer.tokens))
        tokens[place, columns] = torch.tensor(answer.tokens)
        states[place, columns] = own
    ends = pad + torch.tensor([len(answer.tokens) for answer in chosen])
    return Batch(
        tokens=tokens.to(device),
        features=states.to(device),
        pad=pad.to(device),
        ends=ends.to(device),
        prompt_rows=prompt,
        answer_rows=rows,
    )
