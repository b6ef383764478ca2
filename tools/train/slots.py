"""What writes data: a batch of slots, each with a sequence of its own length, that all take one token a pass.

On a CPU with the library of kernels `native_slots` does it, everywhere else `torch_slots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Precision = Literal["int8", "bf16", "fp32"]
TOP_K = 50
"""Tokens that can be drawn; fewer where the vocabulary is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The likeliest next tokens of each slot, in falling order."""

    ids: npt.NDArray[np.int64]
    """[B, K]"""
    scores: npt.NDArray[np.float32]
    """[B, K] logits, or those less a number that is the same in all of a row."""


class Slots(Protocol):
    """A target over B sequences with their caches."""

    lengths: npt.NDArray[np.int64]
    """[B] tokens of each slot's sequence that are in the cache."""

    def step(self, tokens: Sequence[int]) -> Best:
        """Appends one token to each slot; the next ones, valid until the next step."""
        ...

    def keep_prefix(self) -> None:
        """What the slots hold, the same tokens in all of them, is what every sequence begins with from now on."""
        ...

    def restart(self, slot: int) -> None:
        """Empties a slot but for the prefix."""
        ...
