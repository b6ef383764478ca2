"""Self-distillation: the target writes prompts and answers, or answers a file of prompts.

Every conversation has a number, and from it and the seed follow its random numbers and whether its answer is greedy:
a run that is killed and continued writes those that are missing. A target asked for the user's side of a conversation
(the chat template's header and nothing else) writes prompts of the kind that it was tuned on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tools.train.answers import Answer, Dropped, loop_start
from tools.train.slots import Best, Slots

MIN_PROMPT, MAX_PROMPT, MAX_REST = 4, 96, 160
"""Tokens of a prompt that the target writes, and at most of one whose beginning it was given."""
MIN_ANSWER = 16
"""Tokens of an answer that is cut where it begins to loop."""
PASSES = 8
"""How often a file of prompts is answered at most; greedily only the first time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be written; the same for all workers."""

    prompts: tuple[tuple[int, ...], ...]
    """Tokens of each prompt; where the target writes them itself, all that stands before what it writes."""
    closing: tuple[int, ...]
    """What stands between a prompt that the target wrote and its answer; empty where the prompts are given."""
    eos: tuple[int, ...]
    answer_tokens: int
    """An answer's limit."""
    greedy: float
    """Share of greedy answers."""
    temperature: float
    """Of the other answers. Prompts have 1."""
    top_p: float
    seed: int
    prompt_tokens: int = MAX_PROMPT
    """A written prompt's limit, a given beginning not counted."""
    cut_loops: bool = True
    """Whether an answer ends where it begins to loop."""

    @property
    def shared(self) -> int:
        """Tokens with which every prompt begins, less one, whose logits are needed."""
        first, last = min(self.prompts), max(self.prompts)
        different = [place for place, (one, other) in enumerate(zip(first, last, strict=False)) if one != other]
        common = min([len(first), *different[:1]])
        return min(common, min(map(len, self.prompts)) - 1)

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation that can come of it."""
        own = self.prompt_tokens + len(self.closing) if self.closing else 0
        return max(map(len, self.prompts)) + own + self.answer_tokens

    def conversation(self, index: int) -> Conversation | None:
        """The conversation of that number, before anything is written; None where there is none."""
        random = np.random.default_rng([self.seed, index])
        greedy = bool(random.random() < self.greedy)
        if not self.closing:
            turn, number = divmod(index, len(self.prompts))
            if turn >= PASSES:
                return None
            prompt, greedy = self.prompts[number], greedy and turn == 0
        else:
            prompt = self.prompts[random.integers(len(self.prompts)) if len(self.prompts) > 1 else 0]
        draws = random.random(self.prompt_tokens + self.answer_tokens + 1)
        start = None if self.closing else len(prompt)
        return Conversation(plan=self, index=index, tokens=list(prompt), start=start, greedy=greedy, draws=draws)


@dataclass(slots=True, kw_only=True)
class Conversation:
    """One that is being written."""

    plan: Plan
    index: int
    tokens: list[int]
    start: int | None
    """Where the answer starts; None while the prompt is written."""
    greedy: bool
    draws: np.ndarray
    """Uniform numbers, one for each token to draw."""
    header: int = field(init=False)
    """Tokens before the first that is written."""
    written: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.header = len(self.tokens)

    @property
    def temperature(self) -> float:
        """Of the next token; 0 for the likeliest."""
        if self.start is None:
            return 1.0
        return 0.0 if self.greedy else self.plan.temperature

    def append(self, token: int) -> Answer | Dropped | None:
        """Takes the next token; what came of the conversation if it is over."""
        self.written += 1
        return self._append_to_prompt(token) if self.start is None else self._append_to_answer(token)

    def _append_to_prompt(self, token: int) -> Dropped | None:
        if token == self.plan.closing[0]:
            if len(self.tokens) - self.header < MIN_PROMPT:
                return Dropped(index=self.index, why="short prompt")
            self.tokens += self.plan.closing
            self.start = len(self.tokens)
            return None
        self.tokens.append(token)
        if (
            token in self.plan.eos
            or len(self.tokens) - self.header >= self.plan.prompt_tokens
            or loop_start(self.tokens[self.header :])
        ):
            return Dropped(index=self.index, why="endless prompt")
        return None

    def _append_to_answer(self, token: int) -> Answer | Dropped | None:
        assert self.start is not None
        self.tokens.append(token)
        length = len(self.tokens) - self.start
        if self.plan.cut_loops and (loop := loop_start(self.tokens[self.start :])) is not None:
            del self.tokens[self.start + loop :]
            if loop < MIN_ANSWER:
                return Dropped(index=self.index, why="loop")
        elif token not in self.plan.eos and length < self.plan.answer_tokens:
            return None
        if len(self.tokens) - self.start < 2:
            return Dropped(index=self.index, why="empty answer")
        return Answer(index=self.index, tokens=tuple(self.tokens), start=self.start, greedy=self.greedy)


def write(slots: Slots, plan: Plan, indices: Iterator[int]) -> Iterator[Answer | Dropped]:
    """Writes the conversations of these numbers, as many at once as there are slots, in the order of their ends."""
    size = len(slots.lengths)
    for token in plan.prompts[0][: plan.shared]:
        slots.step([token] * size)
    slots.keep_prefix()
    running = [_next(plan, indices) for _ in range(size)]
    while any(running):
        lengths = slots.lengths.tolist()
        best = slots.step([each.tokens[at] if each else 0 for each, at in zip(running, lengths, strict=True)])
        temperatures = [each.temperature if each else 0.0 for each in running]
        uniforms = [each.draws[each.written] if each else 0.0 for each in running]
        drawn = draw(best, temperatures, uniforms, plan.top_p).tolist()
        for slot, each in enumerate(running):
            if each is None:
                slots.restart(slot)
            elif lengths[slot] + 1 == len(each.tokens) and (end := each.append(drawn[slot])):
                yield end
                slots.restart(slot)
                running[slot] = _next(plan, indices)


def _next(plan: Plan, indices: Iterator[int]) -> Conversation | None:
    index = next(indices, None)
    return None if index is None else plan.conversation(index)


def draw(best: Best, temperatures: Sequence[float], uniforms: Sequence[float], top_p: float) -> npt.NDArray[np.int64]:
    """[B] a token of each row, by inversion of the law of its best ones cut to the nucleus `top_p`.

    temperatures, uniforms: [B]; the likeliest token where the temperature is 0.
    """
    temperature = np.asarray(temperatures)[:, None]  # [B, 1]
    law = np.exp((best.scores - best.scores[:, :1]) / np.maximum(temperature, 1e-3))
    law /= law.sum(axis=1, keepdims=True)
    cumulative = law.cumsum(axis=1)
    nucleus = cumulative - law < top_p  # the first ones, as they are sorted
    mass = (law * nucleus).sum(axis=1, keepdims=True)
    threshold = np.asarray(uniforms)[:, None] * mass
    rank = np.minimum((cumulative <= threshold).sum(axis=1), nucleus.sum(axis=1) - 1)
    return best.ids[np.arange(len(rank)), np.where(temperature[:, 0] > 0, rank, 0)]
