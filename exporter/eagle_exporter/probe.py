"""The probe: does a head draft best under the conventions that its checkpoint states?

A wrong tap, rope base or position leaves a head that runs, fits every shape, and drafts badly. So before anything is
compiled, chains are drafted in torch from every place of the target's own greedy answers, under the stated
conventions and under their neighbours, and the tokens that the target would accept are counted. No tree is needed for
this comparison: in all conventions the same places are drafted from.

Lengths of one prompt's places depend on each other, those of different prompts do not; so conventions are compared
prompt by prompt. One beats another **clearly** if its mean length is 3% above the other's, and by three standard
errors of the prompts' differences. A mean length below 1.1 is **about 1**: a head that always says the most frequent
word is accepted that often.

A uniform shift of all positions changes nothing under rotary embeddings, which see differences only: that row of the
table equals the stated one, up to rounding, for every head that this version loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from eagle_exporter.draft_layer import rotary
from eagle_exporter.heads import HeadSpec, TargetShape
from eagle_exporter.heads.config import DEFAULT_ROPE_THETA
from eagle_exporter.heads.source import tap_problems
from eagle_exporter.proof import own_attention
from eagle_exporter.target import Target
from eagle_graphs import EagleError

DEPTH = 4
"""Tokens of a drafted chain."""
CLEAR_GAIN = 0.03
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
        return torch.arange(self.first - 1, len(self.tokens) - 1 - DEPTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedConvention:
    """One convention and what was accepted under it."""

    name: str
    option: str
    """The option that sets it; empty for the stated one."""
    lengths: tuple[float, ...]
    """Accepted length of each prompt: 1 and the accepted part of a chain, averaged over its places."""

    @property
    def length(self) -> float:
        """Mean of the prompts; 0 where no answer was long enough to draft in."""
        return fmean(self.lengths) if self.lengths else 0.0

    def gain_over(self, other: ProbedConvention) -> tuple[float, float]:
        """Mean difference of the prompts' lengths, and its standard error (infinite for a single prompt)."""
        differences = [a - b for a, b in zip(self.lengths, other.lengths, strict=True)]
        error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("inf")
        return (fmean(differences) if differences else 0.0), error

    def clearly_beats(self, other: ProbedConvention) -> bool:
        """See the module."""
        gain, error = self.gain_over(other)
        return gain > CLEAR_GAIN * other.length and gain > CLEAR_ERRORS * error


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
        better = [other for other in self.conventions[1:] if other.clearly_beats(self.stated)]
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
                    "gain": round(gain, 4),
                    "standard_error": round(error, 4) if error < float("inf") else None,
                    "by_prompt": [round(length, 4) for length in convention.lengths],
                }
            )
        return {"places": self.places, "depth": DEPTH, "conventions": rows, "problem": self.problem()}


def read_answers(target: Target, prompts: Sequence[Sequence[int]], greedy: Sequence[Sequence[int]]) -> list[Answer]:
    """The target's greedy answers with its hidden states; those too short to draft in are left out."""
    answers = []
    for prompt, answer in zip(prompts, greedy, strict=True):
        tokens = torch.tensor([*prompt, *answer])
        with own_attention(target), torch.no_grad():
            result = target.model(tokens[None], output_hidden_states=True, use_cache=False)
        read = Answer(tokens=tokens, first=len(prompt), hidden_states=result.hidden_states)
        if len(read.starts):
            answers.append(read)
    return answers


def run_probe(module: nn.Module, spec: HeadSpec, target: TargetShape, answers: Sequence[Answer]) -> Probe:
    """Drafts with `module`, the head of `spec`, under its conventions and their neighbours. None of both is changed."""
    own_rotary = module.rotary_emb
    found = []
    try:
        for name, option, convention in conventions(spec, target):
            module.rotary_emb = rotary(convention)
            lengths = tuple(1 + float(_accepted(module, convention, answer).mean()) for answer in answers)
            found.append(ProbedConvention(name=name, option=option, lengths=lengths))
    finally:
        module.rotary_emb = own_rotary
    return Probe(conventions=tuple(found), places=sum(len(answer.starts) for answer in answers))


def conventions(spec: HeadSpec, target: TargetShape) -> list[tuple[str, str, HeadSpec]]:
    """Name, option and spec of the stated convention and of each neighbour that differs from it and can be."""
    theta = float(spec.rope_parameters["rope_theta"])
    stated = f"{_taps(spec.taps)}, rope theta {theta:g}, positions from {spec.position_offset}"
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
    return found


def _taps(taps: tuple[int, ...]) -> str:
    return f"taps {','.join(map(str, taps))}"


@torch.no_grad()
def _accepted(module: nn.Module, spec: HeadSpec, answer: Answer) -> torch.Tensor:
    """[places] tokens that the target accepts of the chain drafted at each."""
    tokens, starts = answer.tokens, answer.starts
    rows = len(tokens) - 1
    fuse = module.fuse_features
    assert isinstance(fuse, nn.Module)
    features = fuse(torch.cat([answer.hidden_states[tap] for tap in spec.taps], dim=-1))
    capacity = rows + DEPTH * len(starts)
    caches = [torch.zeros(1, spec.kv_heads, capacity, spec.head_dim) for _ in range(2 * spec.layers)]

    accepted = torch.zeros(len(starts))
    alive = torch.arange(len(starts))
    new_tokens, hidden, positions, logit_rows = tokens[1:], features[0, :rows], torch.arange(rows), starts
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    for level in range(DEPTH):
        hidden_out, ids, _, *caches = module(
            new_tokens[None],
            hidden[None],
            positions[None] + spec.position_offset,
            mask[None],
            torch.zeros(1, dtype=torch.int64),
            logit_rows,
            *caches,
        )
        coming = tokens[starts[alive] + 2 + level]
        right = ids[:, 0] == coming
        alive = alive[right]
        accepted[alive] += 1
        if not len(alive):
            break
        seen = mask[logit_rows][right]
        mask = torch.cat((seen, torch.eye(len(alive), dtype=torch.bool)), dim=1)
        new_tokens, hidden, positions = coming[right], hidden_out[right], starts[alive] + 1 + level
        logit_rows = torch.arange(len(alive))
    return accepted
