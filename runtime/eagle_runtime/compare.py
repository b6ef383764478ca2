"""One prompt with EAGLE and with plain decoding of the same bundle: the same text, and how much sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from eagle_runtime.session import PLAIN, Generation, Session, StreamOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token at which two answers part, and the target's own logits of both choices there."""

    step: int
    eagle: int
    plain: int
    eagle_logit: float
    plain_logit: float

    @property
    def gap(self) -> float:
        """How far apart the two logits are."""
        return abs(self.eagle_logit - self.plain_logit)

    def __str__(self) -> str:
        return (
            f"token {self.step}: EAGLE chose {self.eagle} (logit {self.eagle_logit:.6f}), "
            f"plain {self.plain} (logit {self.plain_logit:.6f}), {self.gap:.2g} apart"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both answers."""

    eagle: Generation
    plain: Generation
    difference: Difference | None

    @property
    def identical(self) -> bool:
        """Whether both have the same tokens."""
        return self.difference is None

    @property
    def speedup(self) -> float:
        """Plain decoding's time over EAGLE's, per token; 0 where there was no round."""
        plain = self.plain.stats.tokens_per_s
        return self.eagle.stats.tokens_per_s / plain if plain else 0.0

    def line(self) -> str:
        """The result on one line."""
        eagle, plain = self.eagle.stats, self.plain.stats
        return (
            f"identical: {'yes' if self.identical else 'NO'}  accepted length: {eagle.accepted_length:.2f}  "
            f"speed-up: {self.speedup:.2f}x  "
            f"(plain {plain.tokens_per_s:.1f} tok/s, eagle {eagle.tokens_per_s:.1f} tok/s)"
        )


def warm_up(session: Session, token_ids: Sequence[int], profiles: Sequence[str | None]) -> None:
    """A few rounds of each profile, so that buffers are made before anything is timed."""
    for profile in profiles:
        session.generate(token_ids=token_ids, profile=profile, max_new_tokens=8, ignore_eos=True)
    session.reset()


def plain_beside(session: Session, eagle: Generation, **options: Unpack[StreamOptions]) -> Comparison:
    """Answers again, plainly, what `eagle` answered to the same options, and compares."""
    session.reset()
    options = {**options, "profile": PLAIN, "on_round": None}
    plain = session.generate(**options)
    return Comparison(eagle=eagle, plain=plain, difference=_first_difference(session, eagle, plain, options))


def _first_difference(
    session: Session, eagle: Generation, plain: Generation, options: StreamOptions
) -> Difference | None:
    pairs: Any = zip(eagle.token_ids, plain.token_ids, strict=False)
    step = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if step is None:
        if len(eagle.token_ids) == len(plain.token_ids):
            return None
        step = min(len(eagle.token_ids), len(plain.token_ids)) - 1
    prompt = session.prompt_tokens(
        messages=options.get("messages"), token_ids=options.get("token_ids"), prompt=options.get("prompt")
    )
    logits = session.logits([*prompt, *plain.token_ids[:step]])
    found, expected = eagle.token_ids[step], plain.token_ids[step]
    return Difference(
        step=step, eagle=found, plain=expected, eagle_logit=float(logits[found]), plain_logit=float(logits[expected])
    )
