"""How far a quantized model is from the original on running text that no calibration saw.

The text is the reference documentation that every Python carries: English prose and code, the same everywhere, and
some 700 kB of it, so that no data set has to be fetched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pydoc_data.topics import topics
from typing import Any

import torch


def evaluation_text() -> str:
    """Every seventh topic, in their order."""
    return "\n\n".join(topics[name] for name in sorted(topics)[::7])


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A quantized model beside the original, token by token of the same text."""

    tokens: int
    perplexity: float
    original_perplexity: float
    divergence: float
    """Mean Kullback-Leibler divergence from the original's distribution, in nats."""
    agreement: float
    """Share of places at which both find the same token likeliest."""

    @property
    def perplexity_change(self) -> float:
        """Relative; 0.01 is one percent more."""
        return self.perplexity / self.original_perplexity - 1

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"perplexity_change": self.perplexity_change}

    def sentence(self) -> str:
        """For the user."""
        return (
            f"against float32 on {self.tokens} tokens of text: perplexity {self.perplexity:.2f} for "
            f"{self.original_perplexity:.2f} ({self.perplexity_change:+.2%}), likeliest token the same at "
            f"{self.agreement:.1%}, divergence {self.divergence:.4f}"
        )


Logits = Callable[[Sequence[int]], torch.Tensor]
"""From the tokens of a text to the logits [L, V] behind each."""


def compare_quality(tokens: Sequence[int], original: Logits, quantized: Logits, *, window: int) -> Quality:
    """Reads `tokens` with both models, in pieces of `window`."""
    sums = torch.zeros(4, dtype=torch.float64)
    count = 0
    for start in range(0, len(tokens), window):
        piece = tokens[start : start + window]
        if len(piece) < 2:
            continue
        following = torch.tensor(piece[1:])[:, None]
        exact, found = (logits(piece)[:-1].float().log_softmax(dim=-1) for logits in (original, quantized))
        sums += torch.stack(
            [
                -found.gather(1, following).sum(),
                -exact.gather(1, following).sum(),
                (exact.exp() * (exact - found)).sum(),
                (exact.argmax(dim=1) == found.argmax(dim=1)).sum(),
            ]
        ).double()
        count += len(following)
    likelihood, original_likelihood, divergence, agreement = (sums / max(count, 1)).tolist()
    return Quality(
        tokens=count,
        perplexity=_exponential(likelihood),
        original_perplexity=_exponential(original_likelihood),
        divergence=divergence,
        agreement=agreement,
    )


def _exponential(x: float) -> float:
    """e to the `x`; infinity where that is no float."""
    return math.exp(x) if x < 700 else math.inf
