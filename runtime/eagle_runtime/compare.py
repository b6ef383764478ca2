"""One prompt with EAGLE and with plain decoding of the same bundle: the same text, and how much sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle_runtime.session import PLAIN, Generation, Session


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


def plain_beside(
    session: Session,
    eagle: Generation,
    token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_strings: Sequence[str] = (),
    ignore_eos: bool = False,
) -> Comparison:
    """Answers again, plainly, what `eagle` answered to the same prompt and options, and compares."""
    session.reset()
    plain = session.generate(
        token_ids=token_ids,
        profile=PLAIN,
        max_new_tokens=max_new_tokens,
        stop_strings=stop_strings,
        ignore_eos=ignore_eos,
    )
    difference = first_difference(session, token_ids, eagle.token_ids, plain.token_ids)
    return Comparison(eagle=eagle, plain=plain, difference=difference)


def first_difference(
    session: Session, prompt: Sequence[int], eagle: Sequence[int], plain: Sequence[int]
) -> Difference | None:
    """Where two answers to `prompt` part, with the target's logits there; None where they do not."""
    step = next((i for i, (a, b) in enumerate(zip(eagle, plain, strict=False)) if a != b), None)
    if step is None:
        assert len(eagle) == len(plain), "one answer ended inside the other though all tokens were equal"
        return None
    logits = session.logits([*prompt, *plain[:step]])
    return Difference(
        step=step,
        eagle=eagle[step],
        plain=plain[step],
        eagle_logit=float(logits[eagle[step]]),
        plain_logit=float(logits[plain[step]]),
    )
