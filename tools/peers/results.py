"""What a run of bench_peers.py found: its arithmetic, its table and its plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One answer of one engine."""

    tokens: list[int]
    """New ones."""
    prefill_s: float
    """The prompt's pass, which also gives the first token."""
    decode_s: float
    """All tokens but the first."""

    @property
    def tokens_per_s(self) -> float:
        """Of decoding; 0 where the first token was the last."""
        return (len(self.tokens) - 1) / self.decode_s if len(self.tokens) > 1 else 0.0


@dataclass(slots=True, kw_only=True)
class Engine:
    """One way of running one engine: a row of the table."""

    peer: str
    name: str
    plain: bool
    """Without speculation."""
    runs: list[Run] = field(default_factory=list)
    """Of each prompt, in their order."""

    def __str__(self) -> str:
        return f"{self.peer}, {self.name}"

    @property
    def tokens_per_s(self) -> float:
        """Median over the prompts."""
        return statistics.median(run.tokens_per_s for run in self.runs)


def median_ratio(of: Sequence[Run], to: Sequence[Run]) -> float:
    """How many times as fast `of` is as `to`: a median over the prompts, without those with nothing to decode."""
    pairs = zip(of, to, strict=True)
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in pairs if a.tokens_per_s and b.tokens_per_s]
    return statistics.median(ratios) if ratios else math.nan


def identical_share(runs: Sequence[Run], reference: Sequence[Run]) -> float:
    """The share of prompts that both answer with the same tokens."""
    return statistics.fmean(run.tokens == other.tokens for run, other in zip(runs, reference, strict=True))


def best_of_each_peer(engines: Sequence[Engine]) -> dict[str, Engine]:
    """Its fastest setting."""
    best: dict[str, Engine] = {}
    for engine in engines:
        if engine.peer not in best or engine.tokens_per_s > best[engine.peer].tokens_per_s:
            best[engine.peer] = engine
    return best


def summary(engines: Sequence[Engine], *, eagle: Engine, plain: Engine) -> list[dict[str, Any]]:
    """A row of each engine, this project's EAGLE and plain decoding among them.

    What speculates is compared with plain decoding of the same peer where that ran: does it say the same?
    """
    best = best_of_each_peer(engines)
    plainly = {engine.peer: engine for engine in reversed(engines) if engine.plain}
    return [
        {
            "peer": engine.peer,
            "setting": engine.name,
            "best": best[engine.peer] is engine,
            "tokens_per_s": round(engine.tokens_per_s, 2),
            "first_token_ms": round(1e3 * statistics.median(run.prefill_s for run in engine.runs), 1),
            "eagle_ratio": round(median_ratio(eagle.runs, engine.runs), 3),
            "plain_ratio": round(median_ratio(plain.runs, engine.runs), 3) if engine.plain else None,
            "identical": None
            if engine.plain or engine.peer not in plainly
            else round(identical_share(engine.runs, plainly[engine.peer].runs), 3),
        }
        for engine in engines
    ]


def summary_table(rows: Sequence[Mapping[str, Any]], *, title: str, eagle: str) -> Table:
    table = Table(title=title)
    columns = ("tokens/s", "first token, ms", f"EAGLE ({eagle}) is", "our plain is", "same as its plain")
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(
            f"{row['peer']}, {row['setting']}",
            f"{row['tokens_per_s']:.1f}",
            f"{row['first_token_ms']:.0f}",
            f"{row['eagle_ratio']:.2f}x",
            "" if row["plain_ratio"] is None else f"{row['plain_ratio']:.2f}x",
            "" if row["identical"] is None else f"{row['identical']:.0%}",
            style="bold" if row["best"] else "",
        )
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexity:
    """Of one build of the model, beside the original in float32, on the same text."""

    name: str
    perplexity: float
    change: float
    """Relative to the original's; 0.01 is one percent more."""
    agreement: float
    """Share of places at which both find the same token likeliest."""


def perplexity_from_scores(
    name: str, scores: Sequence[Mapping[str, Any]], original: Sequence[Mapping[str, Any]]
) -> Perplexity:
    """From the answers of Worker.score for each window of the text."""
    found, reference = (
        math.exp(statistics.fmean(nll for score in side for nll in score["nll"])) for side in (scores, original)
    )
    pairs = [zip(a["likeliest"], b["likeliest"], strict=True) for a, b in zip(scores, original, strict=True)]
    agreement = statistics.fmean(a == b for pair in pairs for a, b in pair)
    return Perplexity(name=name, perplexity=found, change=found / reference - 1, agreement=agreement)


def perplexity_table(rows: Sequence[Perplexity], *, title: str) -> Table:
    table = Table(title=title)
    for column in ("", "perplexity", "against float32", "same likeliest token"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(row.name, f"{row.perplexity:.3f}", f"{row.change:+.2%}", f"{row.agreement:.1%}")
    return table


def plot(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str, own: str) -> None:
    """Bars of tokens a second, the fastest on top; needs matplotlib. `own` is this project's name among the peers."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ordered = sorted(rows, key=lambda row: row["tokens_per_s"])
    figure = Figure(figsize=(8, 0.6 + 0.34 * len(ordered)), layout="constrained")
    axes = figure.subplots()
    colours = ["#c44e52" if row["peer"] == own else "#8c9fb8" for row in ordered]
    labels = [f"{row['peer']}, {row['setting']}" for row in ordered]
    bars = axes.barh(labels, [row["tokens_per_s"] for row in ordered], color=colours)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_xlabel("tokens a second, median over the prompts")
    axes.set_title(title, fontsize="medium")
    axes.spines[["top", "right"]].set_visible(False)
    with rc_context({"svg.fonttype": "none"}):  # letters stay letters
        figure.savefig(path)
