"""Sampling options: what is done to the target's distribution before a token is drawn from it.

Names and meanings are those of Hugging Face's GenerationConfig, except that `temperature` decides whether anything is
sampled (there is no `do_sample`). The order is its too: bias, repetition penalty, frequency and presence penalty,
repeated n-grams, bad words, minimal length, suppressed tokens, processors of the user's own, temperature, top-k,
top-p, min-p.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from eagle_graphs import EagleError
from eagle_runtime.sampled_tree import Proposal

VerifyMode = Literal["deterministic", "sampled"]
_MODES = ("deterministic", "sampled")
_LEAST_TEMPERATURE = 1e-6
_OPTIONAL = ("temperature", "top_k", "top_p", "min_p", "seed")


class SamplingOptions(TypedDict, total=False):
    """The fields of `Sampling`, as keyword arguments."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    no_repeat_ngram_size: int
    logit_bias: Mapping[int, float]
    bad_words_ids: Sequence[Sequence[int]]
    suppress_tokens: Sequence[int]
    min_new_tokens: int
    seed: int | None
    verify_mode: VerifyMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Options of one answer. Raises EagleError where one is out of its range."""

    temperature: float | None = None
    """Divides the logits; None or 0 takes the likeliest token (greedy)."""
    top_k: int | None = None
    """Only the k likeliest tokens; None or 0 for all."""
    top_p: float | None = None
    """Only the likeliest tokens that hold this much probability together; None or 1 for all."""
    min_p: float | None = None
    """Only tokens with this share of the likeliest one's probability; None or 0 for all."""
    repetition_penalty: float = 1.0
    """Over 1 makes tokens of the prompt and the answer less likely; 1 changes nothing."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it stands in the answer."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit once if it stands in the answer."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice in prompt and answer; 0 for off."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Added to the logits of single tokens; -inf bans one."""
    bad_words_ids: Sequence[Sequence[int]] = ()
    """Sequences of tokens that the answer must not complete."""
    suppress_tokens: Sequence[int] = ()
    """Tokens that are never drawn."""
    min_new_tokens: int = 0
    """End-of-sequence tokens are banned before so many tokens; stop strings still end the answer."""
    seed: int | None = None
    """0 to 2^64 - 1; the same seed gives the same answer. None for a new one each time."""
    verify_mode: VerifyMode = "deterministic"
    """deterministic: EAGLE's dynamic tree; the answer is plain decoding's with the same seed, token for token.
    sampled: children drawn from the head, recursive rejection; another answer, of the same law."""

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0, math.inf, "0 or more")
        if self.temperature and self.temperature < _LEAST_TEMPERATURE:
            raise EagleError(f"temperature is {self.temperature}; expected 0 (greedy) or {_LEAST_TEMPERATURE} and more")
        _check_number("top_p", self.top_p, 0, 1, "0 to 1")
        _check_number("min_p", self.min_p, 0, 1, "0 to 1")
        _check_number("repetition_penalty", self.repetition_penalty, 0, math.inf, "more than 0")
        if not self.repetition_penalty:
            raise EagleError("repetition_penalty is 0; expected more than 0 (1 changes nothing)")
        for name in ("frequency_penalty", "presence_penalty"):
            _check_number(name, getattr(self, name), -math.inf, math.inf, "a number")
        for name in ("top_k", "no_repeat_ngram_size", "min_new_tokens"):
            _check_whole(name, getattr(self, name), 2**63)
        _check_whole("seed", self.seed, 2**64)
        for token, bias in self.logit_bias.items():
            if bias != -math.inf:
                _check_number(f"logit_bias of token {token}", bias, -math.inf, math.inf, "a number")
        if not all(len(word) for word in self.bad_words_ids):
            raise EagleError("bad_words_ids holds an empty word; expected one token or more in each: leave it out")
        if self.verify_mode not in _MODES:
            raise EagleError(f"verify_mode is {self.verify_mode!r}; expected {' or '.join(_MODES)}")
        if self.greedy:
            for name in ("top_k", "top_p", "min_p"):
                if getattr(self, name) is not None:
                    raise EagleError(f"{name} is {getattr(self, name)} but nothing is sampled: give a temperature too")
            if self.verify_mode == "sampled":
                raise EagleError('verify_mode is "sampled" but nothing is sampled: give a temperature too')

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return not self.temperature

    @property
    def changes_nothing(self) -> bool:
        """Whether the answer is what the target's own likeliest tokens are."""
        return self.greedy and not (
            self.repetition_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
            or self.no_repeat_ngram_size
            or self.logit_bias
            or self.bad_words_ids
            or self.suppress_tokens
            or self.min_new_tokens
        )

    @property
    def proposal(self) -> Proposal | None:
        """How a sampled tree is to be drawn; None for a deterministic tree."""
        if self.verify_mode == "deterministic":
            return None
        assert self.temperature, "nothing to sample"
        assert self.seed is not None, "no seed"
        return Proposal(seed=self.seed, temperature=self.temperature)

    def seeded(self) -> Sampling:
        """These options with a seed: a new one where there is none."""
        return self if self.seed is not None else dataclasses.replace(self, seed=secrets.randbits(63))

    def check_tokens(self, vocab_size: int) -> None:
        """Raises EagleError where a token of an option is not in the vocabulary."""
        words = [token for word in self.bad_words_ids for token in word]
        for name, tokens in (
            ("logit_bias", self.logit_bias),
            ("bad_words_ids", words),
            ("suppress_tokens", self.suppress_tokens),
        ):
            if outside := [token for token in tokens if not 0 <= token < vocab_size]:
                raise EagleError(f"{name} names token {outside[0]}; the vocabulary has 0 to {vocab_size - 1}")


def _check_number(name: str, value: float | None, least: float, most: float, expected: str) -> None:
    if value is None and name in _OPTIONAL:
        return
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise EagleError(f"{name} is {value!r}; expected a number")
    if not least <= value <= most:
        raise EagleError(f"{name} is {value}; expected {expected}")


def _check_whole(name: str, value: int | None, bound: int) -> None:
    if value is None and name in _OPTIONAL:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < bound:
        raise EagleError(f"{name} is {value!r}; expected a whole number of 0 to 2^{bound.bit_length() - 1} - 1")
