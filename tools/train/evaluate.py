"""`python -m tools.train eval`: what a head accepts, by position, profile and category; its confidence."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from eagle_calibration.prompts import load_prompts
from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads import load_head
from eagle_exporter.pipeline import head_module
from eagle_exporter.target import Target, load_target
from eagle_exporter.tokenizer import prompt_tokens
from eagle_graphs import EagleError, Profile, profiles_from_text, static_profile
from tools.train.answers import Answer
from tools.train.data import MAX_GIVEN_PROMPT
from tools.train.features import hidden_states
from tools.train.held_out import rounds_of
from tools.train.plots import plot_calibration
from tools.train.replay import Replay, Text
from tools.train.torch_slots import TorchSlots
from tools.train.write import Plan, write

DEPTH = 4
CHAIN = Profile(nodes=DEPTH + 1, top_k=1, depth=DEPTH)
GUESSES = 8
"""Children of a root whose confidence is compared with their acceptance."""
BINS = 10
SLOTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """What to measure, on what."""

    head: str
    model: str
    prompts: Path
    profiles: str
    static: bool
    limit: int | None
    new_tokens: int
    out: Path | None
    """Directory for report.json and calibration.png."""


@dataclass(slots=True)
class _Tally:
    tokens: int = 0
    rounds: int = 0

    @property
    def length(self) -> float:
        return self.tokens / max(1, self.rounds)


@dataclass(slots=True, kw_only=True)
class Report:
    """What was measured. Names of shapes are "chain", profile sizes and "static"."""

    tallies: dict[str, dict[str, _Tally]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(_Tally)))
    """By category and shape."""
    accepted: list[int] = field(default_factory=lambda: [0] * DEPTH)
    """Chains from every place whose first, second ... token was accepted."""
    tried: list[int] = field(default_factory=lambda: [0] * DEPTH)
    """Those whose tokens before it were."""
    guesses: list[list[float]] = field(default_factory=lambda: [[0.0, 0, 0] for _ in range(BINS)])
    """By the draft's probability: sum of it, accepted guesses, guesses."""

    def lengths(self) -> dict[str, dict[str, float]]:
        """Accepted length by category, "all" last, and shape."""
        table = {
            name: {shape: tally.length for shape, tally in row.items()} for name, row in sorted(self.tallies.items())
        }
        overall: dict[str, _Tally] = defaultdict(_Tally)
        for row in self.tallies.values():
            for shape, tally in row.items():
                overall[shape].tokens += tally.tokens
                overall[shape].rounds += tally.rounds
        return table | {"all": {shape: tally.length for shape, tally in overall.items()}}

    def by_position(self) -> list[float]:
        """Acceptance of a chain's tokens, each given those before it."""
        return [right / total if total else 0.0 for right, total in zip(self.accepted, self.tried, strict=True)]

    def calibration(self) -> list[tuple[float, float, int]]:
        """Mean probability, share accepted and number of the guesses of each bin that has any."""
        return [(total / count, right / count, int(count)) for total, right, count in self.guesses if count]

    def to_dict(self) -> dict[str, Any]:
        return {
            "accepted_length": self.lengths(),
            "acceptance_by_position": self.by_position(),
            "calibration": self.calibration(),
        }


def evaluate(options: EvalOptions, console: Console) -> Report:
    """Measures, and prints the tables."""
    shapes = {"chain": CHAIN} | {str(profile.nodes): profile for profile in profiles_from_text(options.profiles)}
    if options.static:
        shapes["static"] = static_profile()
    categories, conversations = read_categories(options.prompts, options.limit)
    checkpoint = find_checkpoint(options.model, what="target")
    target = load_target(checkpoint)
    head = load_head(find_checkpoint(options.head, what="head"), target.config)
    top_k = max(GUESSES, *(profile.top_k for profile in shapes.values()))
    module = head_module(head, target, top_k=top_k)
    answers = greedy_answers(target, conversations, options.new_tokens, console)
    target.model.set_attn_implementation("sdpa")
    report = Report()
    with torch.inference_mode():
        for answer in track(answers, description="drafting", console=console):
            states = hidden_states(target.model, [answer.tokens], head.spec.taps, torch.float32)[0]
            text = Text(tokens=torch.tensor(answer.tokens), start=answer.start, tapped=states[:, : len(head.spec.taps)])
            if text.roots:
                _measure(report, categories[answer.index], Replay(module, head.spec, text), text, shapes)
    _print(report, list(shapes), console)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "report.json").write_text(json.dumps(report.to_dict(), indent=1))
        if not plot_calibration(report.calibration(), options.out / "calibration.png"):
            console.print("no plot: pip install 'eagle-aot[train]' draws it", markup=False)
    return report


def _measure(report: Report, category: str, replay: Replay, text: Text, shapes: dict[str, Profile]) -> None:
    for name, profile in shapes.items():
        lengths = replay.accepted(profile)
        tally = report.tallies[category][name]
        tally.tokens += text.roots
        tally.rounds += rounds_of(lengths)
        if profile == CHAIN:
            for root, length in enumerate(lengths):
                for depth in range(min(length + 1, DEPTH, text.roots - root)):
                    report.tried[depth] += 1
                    report.accepted[depth] += depth < length
    said = text.tokens[text.start + 1 :].numpy()
    guesses, logprobs = (part[:, 0, :GUESSES] for part in (replay.first.tokens, replay.first.logprobs))
    for probability, right in zip(np.exp(logprobs).ravel(), (guesses == said[:, None]).ravel(), strict=True):
        row = report.guesses[min(int(probability * BINS), BINS - 1)]
        row[0], row[1], row[2] = row[0] + float(probability), row[1] + int(right), row[2] + 1


def read_categories(path: Path, limit: int | None) -> tuple[list[str], list[list[dict[str, str]]]]:
    """Category and messages of each prompt, spread over the file if there are more than `limit`."""
    conversations = load_prompts(path)  # which has checked every line
    lines = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]
    categories = [str(line.get("category") or "none") for line in lines]
    count = min(limit or len(lines), len(lines))
    chosen = [number * len(lines) // count for number in range(count)]
    return [categories[number] for number in chosen], [conversations[number] for number in chosen]


def greedy_answers(
    target: Target, conversations: Sequence[Sequence[dict[str, str]]], new_tokens: int, console: Console
) -> list[Answer]:
    """The target's own greedy answers in float32, in the prompts' order."""
    encoded = prompt_tokens(target.tokenizer, conversations, longest=MAX_GIVEN_PROMPT)
    if len(encoded) < len(conversations):
        raise EagleError(
            f"a prompt is longer than {MAX_GIVEN_PROMPT} tokens or shorter than 2: take it out of the file"
        )
    plan = Plan(
        prompts=tuple(map(tuple, encoded)),
        closing=(),
        eos=target.eos_token_ids,
        answer_tokens=new_tokens,
        greedy=1.0,
        temperature=1.0,
        top_p=1.0,
        seed=0,
        cut_loops=False,
    )
    slots = TorchSlots(target, slots=min(SLOTS, len(encoded)), precision="fp32")
    items = track(write(slots, plan, iter(range(len(encoded)))), "answering", total=len(encoded), console=console)
    return sorted((item for item in items if isinstance(item, Answer)), key=lambda answer: answer.index)


def _print(report: Report, shapes: list[str], console: Console) -> None:
    table = Table(title="accepted length (tokens a round, the bonus token included)")
    for column in ("", *shapes):
        table.add_column(column, justify="right" if column else "left")
    for name, row in report.lengths().items():
        table.add_row(name, *(f"{row[shape]:.2f}" for shape in shapes), style="bold" if name == "all" else "")
    console.print(table)
    chain = " ".join(f"{share:.3f}" for share in report.by_position())
    console.print(f"acceptance of a chain's tokens, given those before: {chain}", highlight=False)
    table = Table(title="the draft's confidence")
    for column in ("probability", "accepted", "guesses"):
        table.add_column(column, justify="right")
    for confidence, right, count in report.calibration():
        table.add_row(f"{confidence:.3f}", f"{right:.3f}", f"{count:,}")
    console.print(table)
