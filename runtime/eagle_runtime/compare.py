"""One prompt with EAGLE and with plain decoding of the same bundle: the same text, and how much sooner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import numpy.typing as npt

from eagle_runtime.answer import Generation, StreamOptions
from eagle_runtime.modes import AUTO, PLAIN
from eagle_runtime.sampler import Sampler
from eagle_runtime.sampling import Sampling
from eagle_runtime.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first token at which two answers part, and the target's own logits of both choices there.

    Of a sampled answer they are what is drawn by: processed, and with the noise of the token's position.
    """

    step: int
    eagle: int
    plain: int
    eagle_logit: float
    plain_logit: float
    third_logit: float
    """The best of all other tokens'."""

    @property
    def gap(self) -> float:
        """How far apart the two logits are."""
        return abs(self.eagle_logit - self.plain_logit)

    def is_tie(self, *, gap: float) -> bool:
        """Whether the two are the best of all, and closer than `gap`: then rounding alone may have chosen."""
        return self.gap < gap and min(self.eagle_logit, self.plain_logit) >= self.third_logit

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
    sizes = [str(profile.nodes) for profile in session.bundle.manifest.profiles]
    for profile in dict.fromkeys((*profiles, *(sizes if AUTO in profiles else ()))):
        session.generate(token_ids=token_ids, profile=profile, max_new_tokens=8, ignore_eos=True)
    session.reset()


def plain_beside(
    session: Session, eagle: Generation, prompt: Sequence[int], **options: Unpack[StreamOptions]
) -> Comparison:
    """Answers again, plainly and with the same seed, what `eagle` answered to the same prompt and options."""
    session.reset()
    options = {**options, "token_ids": prompt, "profile": PLAIN, "seed": eagle.sampling.seed}
    plain = session.generate(**options)
    difference = first_difference(session, prompt, eagle.token_ids, plain.token_ids, eagle.sampling)
    return Comparison(eagle=eagle, plain=plain, difference=difference)


def first_difference(
    session: Session,
    prompt: Sequence[int],
    eagle: Sequence[int],
    plain: Sequence[int],
    sampling: Sampling | None = None,
) -> Difference | None:
    """Where two answers to `prompt` part, with what decided there; None where they do not."""
    step = next((i for i, (a, b) in enumerate(zip(eagle, plain, strict=False)) if a != b), None)
    if step is None:
        assert len(eagle) == len(plain), "one answer ended inside the other though all tokens were equal"
        return None
    scores: npt.NDArray[np.floating] = session.logits([*prompt, *plain[:step]])
    if sampling is not None and not sampling.changes_nothing:
        manifest = session.bundle.manifest
        sampler = Sampler(
            sampling, prompt=prompt, eos_token_ids=manifest.target.eos_token_ids, capacity=manifest.limits.capacity
        )
        sampler.follow(plain[:step])
        scores = sampler.scores(scores)
    others = np.delete(scores, [eagle[step], plain[step]])
    return Difference(
        step=step,
        eagle=eagle[step],
        plain=plain[step],
        eagle_logit=float(scores[eagle[step]]),
        plain_logit=float(scores[plain[step]]),
        third_logit=float(others.max()),
    )
