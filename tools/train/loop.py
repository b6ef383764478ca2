"""Training: batches in, a head out; stopped at any time, it goes on from its last checkpoint to the same bits.

progress   tokens trained on / tokens to train on. Learning rate and number of steps follow from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from eagle_graphs import EagleError
from tools.train.answers import Answer
from tools.train.batches import make_batch, order, usable
from tools.train.features import Features
from tools.train.held_out import DEPTH, HeldOut, held_out
from tools.train.model import DraftHead
from tools.train.objective import Objective
from tools.train.optimizers import optimizers_for
from tools.train.options import Options

HELD_OUT_CONVERSATIONS = 48
"""At most, spread over all of them."""


@dataclass(slots=True, kw_only=True)
class Point:
    """What was seen since the last point, and on the held-out conversations."""

    tokens: int
    loss: float
    acceptance: list[float]
    """Share of step 1's, 2's ... rows whose best token was the data's."""
    held_out: HeldOut | None


@dataclass(slots=True)
class _Since:
    """Sums since the last point."""

    tokens: int = 0
    loss: float = 0.0
    right: Counter[int] = field(default_factory=Counter)
    counted: Counter[int] = field(default_factory=Counter)

    def add(self, tokens: int, loss: float, right: list[int], counted: list[int]) -> None:
        self.tokens += tokens
        self.loss += loss * tokens
        self.right.update(dict(enumerate(right)))
        self.counted.update(dict(enumerate(counted)))

    def point(self, tokens: int, held_out: HeldOut | None) -> Point:
        acceptance = [self.right[step] / max(1, count) for step, count in sorted(self.counted.items())]
        return Point(tokens=tokens, loss=self.loss / self.tokens, acceptance=acceptance, held_out=held_out)


@dataclass(slots=True, kw_only=True)
class Run:
    """The state of a training run besides the head."""

    optimizers: list[torch.optim.Optimizer]
    random: torch.Generator
    tokens: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains one head on one data set."""

    def __init__(
        self,
        head: DraftHead,
        answers: Sequence[Answer],
        features: Features,
        lm_head: torch.Tensor,
        options: Options,
        *,
        device: str = "cpu",
    ) -> None:
        """lm_head: [V, h] of the target, for its distributions."""
        self.head, self.options, self.device = head.to(device), options, device
        self._answers, self._features = answers, features
        self._training = [number for number in usable(answers) if not answers[number].held_out]
        held_out = [number for number in usable(answers) if answers[number].held_out]
        greedy = [number for number in held_out if answers[number].greedy] or held_out
        self._checked = greedy[:: max(1, -(-len(greedy) // HELD_OUT_CONVERSATIONS))]
        if not self._training:
            raise EagleError("the data holds no conversation to train on: make more of it")
        self._objective = Objective(self.head, lm_head, options)
        self.run = Run(
            optimizers=optimizers_for(self.head, options), random=torch.Generator().manual_seed(options.seed)
        )

    def train(self, on_step: Callable[[int], None], on_point: Callable[[Point], None]) -> None:
        """To the end. on_step gets the tokens of each batch; on_point each measurement, after which to save."""
        run, options = self.run, self.options
        since = _Since()
        while run.tokens < options.tokens:
            batches = order(self._answers, self._training, rows=options.batch, seed=options.seed, epoch=run.epoch)
            for numbers in batches[run.batch :]:
                checks = run.tokens * options.checks // options.tokens
                tokens = self._step(numbers, since)
                run.tokens, run.batch = run.tokens + tokens, run.batch + 1
                on_step(tokens)
                if run.tokens * options.checks // options.tokens > checks:
                    point = since.point(run.tokens, self.measure())
                    since = _Since()
                    run.history.append(asdict(point))
                    on_point(point)
                if run.tokens >= options.tokens:
                    return
            run.epoch, run.batch = run.epoch + 1, 0

    def measure(self) -> HeldOut | None:
        """Acceptance of chains on held-out conversations, greedy ones if there are any; None where there is none."""
        if not self._checked:
            return None
        with self._precision():
            batches = order(self._answers, self._checked, rows=self.options.batch, seed=0, epoch=0)
            return held_out(
                self.head,
                (make_batch(self._answers, part, self._features, steps=DEPTH, device=self.device) for part in batches),
                self._objective.draft_id_of,
            )

    def _step(self, numbers: Sequence[int], since: _Since) -> int:
        """One step of the optimizer; returns the batch's tokens."""
        run, options = self.run, self.options
        progress = run.tokens / options.tokens
        for optimizer in run.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * options.lr_share(progress)
        steps = 1 if self.head.shape.kind == "eagle1" else options.steps_at(progress)
        batch = make_batch(self._answers, numbers, self._features, steps=steps, device=self.device)
        with self._precision():
            loss, right, counted = self._objective(batch, steps, run.random)
        self.head.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), options.clip)
        for optimizer in run.optimizers:
            optimizer.step()
        since.add(batch.labels, float(loss.detach()), right, counted)
        return batch.labels

    def _precision(self) -> torch.autocast:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.options.bf16)
