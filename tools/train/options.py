"""How a head is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from eagle_graphs import EagleError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a head is trained."""

    tokens: int
    """Rows with a label to train on, those of step 1 counted."""
    batch: int = 2048
    """Answer rows of a batch, padding counted."""
    optimizer: Literal["muon", "adamw"] = "muon"
    """Of the matrices between hidden states; vectors and the LM head have AdamW."""
    lr: float = 1e-3
    """AdamW's."""
    muon_lr: float = 0.02
    warmup: float = 0.03
    """Share of the run in which the learning rate rises; then it falls as a cosine to a twentieth."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Largest norm of the gradient."""
    unroll: int = 5
    """Steps of the training-time test; EAGLE-1 has one."""
    ramp: float = 0.4
    """Share of the run in which the number of steps rises from one."""
    decay: float = 1.0
    """Weight of a step's loss against that of the step before."""
    thin: float = 0.8
    """Share of the rows that go on to the next step."""
    noise: float = 0.1
    """Half-width of the uniform noise on EAGLE-1's features."""
    labels: Literal["target", "data"] = "target"
    """The target's own distribution, or the token that the data has."""
    bf16: bool = True
    seed: int = 0
    checks: int = 20
    """How often the head is measured on held-out conversations and saved."""

    def __post_init__(self) -> None:
        for name, low, high in (
            *(("tokens", 1, math.inf), ("batch", 1, math.inf), ("unroll", 1, 16), ("lr", 0, 1), ("muon_lr", 0, 1)),
            *(("warmup", 0, 1), ("ramp", 0, 1), ("decay", 0, 10), ("thin", 0.01, 1), ("clip", 0, math.inf)),
            ("checks", 1, math.inf),
        ):
            if not low <= getattr(self, name) <= high:
                raise EagleError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected {low} to {high}")

    def steps_at(self, progress: float) -> int:
        """Unrolled steps: one more with each equal part of the ramp, all of them after it."""
        return self.unroll if progress >= self.ramp else 1 + int(progress / self.ramp * (self.unroll - 1))

    def lr_share(self, progress: float) -> float:
        """The learning rates against their largest."""
        if progress < self.warmup:
            return progress / self.warmup * 0.95 + 0.05
        done = (progress - self.warmup) / max(1e-9, 1 - self.warmup)
        return 0.525 + 0.475 * math.cos(math.pi * min(done, 1.0))
