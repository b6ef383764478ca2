"""The probe: does a head draft best under the conventions that its checkpoint states?

A wrong tap, rope base, position or embedding leaves a head that runs, fits every shape, and drafts badly. So before
anything is compiled, chains are drafted in torch from every place of the target's own greedy answers, under the stated
conventions and under their neighbours. No tree is needed for this comparison: all are drafted from the same places,
each token of a chain being the target's own. Two lengths come of it:

    accepted   1 + the best guesses that are right before the first wrong one: the accepted length of a chain
    expected   1 + the sum over the chain of the product of the probabilities that the head gives to the target's
               tokens: the accepted length of guesses drawn from the head. It moves with every probability rather than
               where two guesses change places, so that it tells two conventions apart in fewer tokens

Neighbouring places depend on each other, so lengths are averaged over blocks of 8 places and blocks are compared. One
convention **clearly beats** another if its accepted length is larger and its expected length exceeds the other's by 5%
of what that drafts, and by three standard errors of the blocks' differences. An accepted length below 1.1 is **about
1**: a head that always says the most frequent word has that.

Whether embeddings are multiplied as the target's are is asked of targets that multiply them. An EAGLE-1 head feels it;
an EAGLE-3 head norms what it looks up, so that only the norm's epsilon could tell.

A uniform shift of all positions changes nothing under rotary embeddings, which see differences only: that row of the
table equals the stated one, up to rounding, for every head that this version loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any, cast

import torch
from torch import nn

from eagle_exporter.draft_layer import Embedding, rotary
from eagle_exporter.heads import HeadSpec, TargetShape
from eagle_exporter.heads.config import DEFAULT_ROPE_THETA
from eagle_exporter.heads.source import tap_problems
from eagle_exporter.target import Target, as_transformers_runs_it
from eagle_graphs import EagleError

DEPTH = 4
"""Tokens of a drafted chain."""
ANSWER_TOKENS = 64
BLOCK = 8
"""Places of a block."""
CLEAR_GAIN = 0.05
CLEAR_ERRORS = 3.0
ABOUT_ONE = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A prompt, the target's greedy answer, and the target's hidden states over both."""

    tokens: torch.Tensor
    """[L]"""
    first: int
    """Index of the answer's first token."""
    hidden_states: tuple[torch.Tensor, ...]
    """[1, L, h] for each index of transformers' `hidden_states`."""

    @property
    def starts(self) -> torch.Tensor:
        """Draft rows from which a whole chain can be compared; row i pairs feature i with token i + 1."""
        start = self.first - 1
        return torch.arange(start, max(start, len(self.tokens) - 1 - DEPTH))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedConvention:
    """One convention and what was accepted under it."""

    name: str
    option: str
    """The option that sets it; empty for the stated one."""
    accepted: tuple[float, ...]
    """Accepted length of each block."""
    expected: tuple[float, ...]
    """Expected length of each block."""

    @property
    def length(self) -> float:
        """Mean accepted length; 0 where no answer was long enough to draft in."""
        return fmean(self.accepted) if self.accepted else 0.0

    @property
    def expected_length(self) -> float:
        """Mean expected length; 0 likewise."""
        return fmean(self.expected) if self.expected else 0.0

    def gain_over(self, other: ProbedConvention) -> tuple[float, float]:
        """Difference of the expected lengths and its standard error; infinite where there is one block or none."""
        differences = [a - b for a, b in zip(self.expected, other.expected, strict=True)]
        error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("inf")
        return self.expected_length - other.expected_length, error

    def clearly_beats(self, other: ProbedConvention) -> bool:
        """See the module."""
        gain, error = self.gain_over(other)
        drafted = other.expected_length - 1
        return self.length > other.length and gain > CLEAR_GAIN * drafted and gain > CLEAR_ERRORS * error


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """All conventions; the stated one first."""

    conventions: tuple[ProbedConvention, ...]
    places: int
    """Chains drafted under each."""

    @property
    def stated(self) -> ProbedConvention:
        """The one that the checkpoint, or the user, states."""
        return self.conventions[0]

    def problem(self) -> str | None:
        """What is wrong with the stated convention, and what to do; None where nothing is."""
        neighbours = [other for other in self.conventions[1:] if other.length >= ABOUT_ONE]
        better = [other for other in neighbours if other.clearly_beats(self.stated)]
        if better:
            best = max(better, key=lambda convention: convention.length)
            return (
                f"the head was stated to have {self.stated.name}, but with {best.name} {best.length:.2f} tokens a "
                f"round are accepted for {self.stated.length:.2f}: set {best.option}, or keep it with --accept-probe"
            )
        if self.places and self.stated.length < ABOUT_ONE:
            return (
                f"the head drafts almost nothing that the target says (accepted length {self.stated.length:.2f}): "
                "another model's head, or damaged weights? Export it all the same with --accept-probe"
            )
        return None

    def check(self) -> None:
        """Raises EagleError where the stated convention is clearly beaten or its length is about 1."""
        if (problem := self.problem()) is not None:
            raise EagleError(f"the probe: {problem}")

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        rows = []
        for convention in self.conventions:
            gain, error = convention.gain_over(self.stated)
            rows.append(
                {
                    "convention": convention.name,
                    "accepted_length": round(convention.length, 4),
                    "expected_length": round(convention.expected_length, 4),
                    "gain": round(gain, 4),
                    "standard_error": round(error, 4) if error < float("inf") else None,
                }
            )
        return {"places": self.places, "depth": DEPTH, "conventions": rows, "problem": self.problem()}


def read_answers(target: Target, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """The target's greedy answers with its hidden states; those too short to draft in are left out."""
    answers = []
    with as_transformers_runs_it(target.model), torch.no_grad():
        for prompt, answer in zip(prompts, _greedy(target, prompts), strict=True):
            tokens = torch.tensor([*prompt, *answer])
            result = target.model(tokens[None], output_hidden_states=True, use_cache=False)
            read = Answer(tokens=tokens, first=len(prompt), hidden_states=result.hidden_states)
            if len(read.starts):
                answers.append(read)
    return answers


def _greedy(target: Target, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """All answers in one batch, padded on the left: what rounding does to them there is of no matter here."""
    longest = max(map(len, prompts))
    pad = target.eos_token_ids[0] if target.eos_token_ids else 0
    padded = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    room = max(1, min(ANSWER_TOKENS, int(target.config.max_position_embeddings) - longest))
    out = cast(Any, target.model).generate(
        padded, attention_mask=mask, max_new_tokens=room, do_sample=False, pad_token_id=pad
    )
    answers = []
    for row in out[:, longest:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in target.eos_token_ids), len(row))
        answers.append(row[:end])
    return answers


def run_probe(module: nn.Module, spec: HeadSpec, target: TargetShape, answers: Sequence[Answer]) -> Probe:
    """Drafts with `module`, the head of `spec`, under its conventions and their neighbours. None of both is changed."""
    own_rotary, embedding = module.rotary_emb, module.embed_tokens
    assert isinstance(embedding, Embedding)
    own_scaled = embedding.scaled
    found = []
    try:
        for name, option, convention in conventions(spec, target, embedding.target_scale):
            module.rotary_emb, embedding.scaled = rotary(convention), convention.scaled_embedding
            blocks = [
                (float(accepted.mean()), float(expected.mean()))
                for answer in answers
                for accepted, expected in zip(*map(_blocks, draft_chains(module, convention, answer)), strict=True)
            ]
            accepted, expected = zip(*blocks, strict=True) if blocks else ((), ())
            found.append(ProbedConvention(name=name, option=option, accepted=accepted, expected=expected))
    finally:
        module.rotary_emb, embedding.scaled = own_rotary, own_scaled
    return Probe(conventions=tuple(found), places=sum(len(answer.starts) for answer in answers))


def conventions(spec: HeadSpec, target: TargetShape, embedding_scale: float) -> list[tuple[str, str, HeadSpec]]:
    """Name, option and spec of the stated convention and of each neighbour that differs from it and can be.

    embedding_scale: the target's.
    """
    theta = float(spec.rope_parameters["rope_theta"])
    stated = f"{_taps(spec.taps)}, rope theta {theta:g}, positions from {spec.position_offset}"
    if embedding_scale != 1:
        stated += f", {_embedding(spec.scaled_embedding, embedding_scale)}"
    found = [(stated, "", spec)]
    shifted = [tuple(tap + by for tap in spec.taps) for by in (-1, 1)]
    if spec.layout == "angelslim":
        shifted.append((2, (target.layers + 1) // 2, target.layers - 2))
    for taps in shifted:
        if spec.kind == "eagle3" and taps != spec.taps and not tap_problems(taps, target):
            found.append((_taps(taps), f"--taps {','.join(map(str, taps))}", replace(spec, taps=taps)))
    for other in dict.fromkeys((DEFAULT_ROPE_THETA, target.rope_theta)):
        if other is not None and other != theta:
            rope = spec.rope_parameters | {"rope_theta": other}
            found.append((f"rope theta {other:g}", f"--rope-theta {other:g}", replace(spec, rope_parameters=rope)))
    offset = 0 if spec.position_offset else 1
    found.append((f"positions from {offset}", f"--position-offset {offset}", replace(spec, position_offset=offset)))
    if embedding_scale != 1:
        scaled = not spec.scaled_embedding
        name, option = _embedding(scaled, embedding_scale), f"--embedding {'scaled' if scaled else 'raw'}"
        found.append((name, option, replace(spec, scaled_embedding=scaled)))
    return found


def _embedding(scaled: bool, scale: float) -> str:
    return f"embedding times {scale:g}" if scaled else "embedding as stored"


def _taps(taps: tuple[int, ...]) -> str:
    return f"taps {','.join(map(str, taps))}"


def _blocks(lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[places] as blocks of about equal size."""
    return lengths.tensor_split(max(1, len(lengths) // BLOCK))


@torch.no_grad()
def draft_chains(module: nn.Module, spec: HeadSpec, answer: Answer) -> tuple[torch.Tensor, torch.Tensor]:
    """[places] accepted and expected length of the chain drafted at each place, every token of it the target's own.

    The first pass is the head's extension over the whole answer; then each chain's rows see the rows up to their
    place and each other, as a tree's do.
    """
    tokens, starts = answer.tokens, answer.starts
    rows, places = len(tokens) - 1, len(answer.starts)
    fuse = module.fuse_features
    assert isinstance(fuse, nn.Module)
    features = fuse(torch.cat([answer.hidden_states[tap] for tap in spec.taps], dim=-1))
    caches = [torch.zeros(1, spec.kv_heads, rows + DEPTH * places, spec.head_dim) for _ in range(2 * spec.layers)]
    feed, hidden, positions, logit_rows = tokens[1:], features[0, :rows], torch.arange(rows), starts
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    accepted, expected = torch.ones(places), torch.ones(places)
    all_right, all_drawn = torch.ones(places), torch.ones(places)
    for level in range(DEPTH):
        hidden, ids, logprobs, *caches = module(
            feed[None],
            hidden[None],
            positions[None] + spec.position_offset,
            mask[None],
            torch.zeros(1, dtype=torch.int64),
            logit_rows,
            *caches,
        )
        feed = tokens[starts + 2 + level]
        all_right = all_right * (ids[:, 0] == feed)
        all_drawn = all_drawn * ((ids == feed[:, None]) * logprobs.exp()).sum(dim=-1)
        accepted, expected = accepted + all_right, expected + all_drawn
        mask = torch.cat((mask[logit_rows], torch.eye(places, dtype=torch.bool)), dim=1)
        positions, logit_rows = starts + 1 + level, torch.arange(places)
    return accepted, expected
