"""What a session is asked, by keyword, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from eagle_runtime.generate import FinishReason, Round
from eagle_runtime.logprobs import TokenLogprobs
from eagle_runtime.processors import Processor
from eagle_runtime.sampling import Sampling, SamplingOptions
from eagle_runtime.stats import Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """A finished answer."""

    text: str
    token_ids: list[int]
    """New tokens; the last one is what ended the answer (EOS, or the end of a stop string), if something did."""
    finish_reason: FinishReason
    """stop: an end-of-sequence token or a stop string; length: max_new_tokens or the cache's end; cancelled."""
    stats: Stats
    sampling: Sampling
    """The options, and the seed of the draws: both together give the same answer again."""
    logprobs: list[TokenLogprobs] | None = None
    """Of each new token, where they were asked for."""


class StreamOptions(SamplingOptions, total=False):
    """The keyword arguments of `Session.stream`."""

    messages: Sequence[Mapping[str, str]] | None
    token_ids: Sequence[int] | None
    max_new_tokens: int
    stop_strings: Sequence[str]
    ignore_eos: bool
    profile: str | None
    lookup: bool | None
    on_round: Callable[[Round], None] | None
    logprobs: int | None
    processors: Sequence[Processor]
