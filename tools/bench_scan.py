"""Where EAGLE pays: speed-ups over plain decoding of the same bundle, one circumstance changed at a time.

    python tools/bench_scan.py BUNDLE [BUNDLE ...] [--axes prompt,answer,temperature,top-p,threads,category,bundle]
                               [--profiles 4,8,16,auto] [--out scan.json] [--plot scan.svg]

    prompt       tokens of the prompt, which the other prompts' texts lengthen
    answer       new tokens
    temperature  0 is greedy; both decoders draw with the same seed
    top-p        at temperature 1
    threads      of ONNX Runtime, up to one a core
    category     of the shipped prompts
    bundle       the bundles named, such as one of each precision; the first is the one for all else

The decoders of a point answer each prompt in turn (tools/bench.py), so that ratios hold on a noisy machine. Below each
table stands where no fixed tree pays, which is where `auto` should decode plainly.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from bench import (
    GREEDY,
    HERE,
    PLAINLY,
    Setting,
    Tally,
    check_plot,
    decoders_from_option,
    in_turn,
    read_prompts,
    spread,
)
from rich.console import Console
from rich.table import Table

from eagle_graphs import EagleError
from eagle_graphs.command_line import run_command
from eagle_runtime import Session
from eagle_runtime.compare import warm_up
from eagle_runtime.huge_pages import restart_with_huge_pages
from eagle_runtime.modes import AUTO, PLAIN

AXES = ("prompt", "answer", "temperature", "top-p", "threads", "category", "bundle")
PROMPT_TOKENS = (64, 256, 1024, 4096)
NEW_TOKENS = (16, 64, 256)
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
TOP_P = (0.5, 0.9, 1.0)
Messages = list[dict[str, str]]
Prompt = tuple[str, Messages]
"""Category and conversation."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A circumstance."""

    axis: str
    value: str
    bundle: Path
    threads: int | None = None
    setting: Setting = GREEDY
    new_tokens: int
    prompt_tokens: int | None = None
    category: str | None = None


@app.command()
def scan(
    bundles: list[Path],
    axes: Annotated[str, typer.Option(help="Divided by commas.")] = ",".join(AXES),
    profiles: Annotated[str | None, typer.Option(help="As 4,auto-lookup; default: the bundle's, and auto.")] = None,
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts.")] = HERE / "prompts.jsonl",
    limit: Annotated[int, typer.Option(min=1, help="Prompts of a point, spread over the file.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Where the answer's length is not what changes.")] = 64,
    out: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw it: .svg or .png.")] = None,
) -> None:
    """Scans a bundle."""
    check_plot(plot_file)
    texts = read_prompts(prompts)
    wanted = axes_from_option(axes)
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    for point in points(bundles, wanted, sorted({category for category, _ in texts}), max_new_tokens):
        print(f"{point.axis} {point.value} ...", file=sys.stderr, flush=True)
        found = measure(point, texts, profiles, limit)
        if found:
            rows.setdefault(point.axis, {})[point.value] = found
    for axis, values in rows.items():
        print_axis(axis, values)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    if plot_file is not None and rows:
        plot(rows, plot_file)


def axes_from_option(text: str) -> list[str]:
    """Names in the order given. Raises EagleError on one that there is not."""
    axes = [name.strip() for name in text.split(",")]
    for name in axes:
        if name not in AXES:
            raise EagleError(f"--axes names {name!r}; expected some of {', '.join(AXES)}")
    return axes


def points(bundles: Sequence[Path], axes: Sequence[str], categories: Sequence[str], new_tokens: int) -> Iterator[Point]:
    """All circumstances, axis by axis."""
    first, cores = bundles[0], len(os.sched_getaffinity(0))
    for axis in axes:
        if axis == "prompt":
            for count in PROMPT_TOKENS:
                yield Point(axis=axis, value=str(count), bundle=first, new_tokens=new_tokens, prompt_tokens=count)
        elif axis == "answer":
            for count in NEW_TOKENS:
                yield Point(axis=axis, value=str(count), bundle=first, new_tokens=count)
        elif axis == "temperature":
            for temperature in TEMPERATURES:
                yield sampled(axis, f"{temperature:g}", first, new_tokens, temperature, None)
        elif axis == "top-p":
            for top_p in TOP_P:
                yield sampled(axis, f"{top_p:g}", first, new_tokens, 1.0, top_p)
        elif axis == "threads":
            for threads in sorted({1, *(2**power for power in range(1, cores.bit_length())), cores}):
                if threads <= cores:
                    yield Point(axis=axis, value=str(threads), bundle=first, new_tokens=new_tokens, threads=threads)
        elif axis == "category":
            for category in categories:
                yield Point(axis=axis, value=category, bundle=first, new_tokens=new_tokens, category=category)
        else:
            for bundle in bundles:
                yield Point(axis=axis, value=str(bundle), bundle=bundle, new_tokens=new_tokens)


def sampled(axis: str, value: str, bundle: Path, new_tokens: int, temperature: float, top_p: float | None) -> Point:
    """A point at a temperature; at 0 a greedy one."""
    setting = Setting(temperature=temperature, top_p=top_p, verify_mode="deterministic") if temperature else GREEDY
    return Point(axis=axis, value=value, bundle=bundle, new_tokens=new_tokens, setting=setting)


def measure(point: Point, texts: Sequence[Prompt], profiles: str | None, limit: int) -> dict[str, dict[str, Any]]:
    """By decoder, what it gave at this point; nothing where the cache is too small for it.

    Where the answer's length is what changes, answers go on past their end.
    """
    chosen = spread([text for text in texts if point.category in (None, text[0])], limit)
    with Session.open(point.bundle, threads=point.threads) as session:
        manifest = session.bundle.manifest
        names = profiles or ",".join([*(str(profile.nodes) for profile in manifest.profiles), AUTO])
        decoders = [decoder for decoder in decoders_from_option(names) if decoder != PLAINLY]
        if not decoders:
            raise EagleError(f"--profiles is {names!r}: name one that is compared with plain decoding")
        asked = [session.encode(messages=messages) for _, messages in chosen]
        if point.prompt_tokens is not None:
            asked = [lengthened(session, texts, messages, point.prompt_tokens) for _, messages in chosen]
        if max(map(len, asked)) + point.new_tokens > manifest.limits.capacity:
            return {}
        warm_up(session, asked[0], [PLAIN, *(decoder.profile for decoder in decoders)])
        tallies = {decoder: Tally() for decoder in decoders}
        for number, tokens in enumerate(asked):
            answers = in_turn(
                session,
                tokens,
                point.setting,
                decoders,
                number,
                max_new_tokens=point.new_tokens,
                seed=number,
                ignore_eos=point.axis == "answer",
            )
            plain = answers[PLAINLY]
            for decoder, tally in tallies.items():
                eagle = answers[decoder]
                tally.add(eagle.stats, plain.stats, identical=eagle.token_ids == plain.token_ids)
    return {str(decoder): tally.to_dict() for decoder, tally in tallies.items()}


def lengthened(session: Session, texts: Sequence[Prompt], messages: Messages, tokens: int) -> list[int]:
    """The prompt as so many tokens: the other prompts' texts stand before it, or its beginning is cut off."""
    notes = "\n\n".join(others[-1]["content"] for _, others in texts if others is not messages)
    before = session.tokenizer.encode(notes or messages[-1]["content"], add_special_tokens=False).ids
    asked = session.encode(messages=messages)
    rest = max(tokens - len(asked), 0)
    return (before * (rest // len(before) + 1))[:rest] + asked[max(len(asked) - tokens, 0) :]


def print_axis(axis: str, values: dict[str, dict[str, dict[str, Any]]]) -> None:
    """A row for each value: plain decoding's speed, and every decoder's speed-up with its accepted length."""
    decoders = list(dict.fromkeys(name for found in values.values() for name in found))
    table = Table(title=axis)
    table.add_column("")
    for column in ("plain tok/s", *decoders):
        table.add_column(column, justify="right")
    for value, found in values.items():
        plain = next(iter(found.values()))["plain_tokens_per_s"]
        cells = {name: f"{row['speedup']:.2f}x ({row['accepted_length']:.2f})" for name, row in found.items()}
        table.add_row(value, f"{plain:.1f}", *(cells.get(name, "-") for name in decoders))
    console = Console(highlight=False)
    console.print(table)
    different = [value for value, found in values.items() if any(row["identical_share"] < 1 for row in found.values())]
    if different:
        console.print(f"texts differ from plain decoding's at {', '.join(different)}: see the bundle's exactness class")
    trees = {value: fixed(found) for value, found in values.items() if fixed(found)}
    off = [value for value, rows in trees.items() if not any(row["speedup"] > 1 for row in rows)]
    if trees:
        console.print(f"no fixed tree pays at: {', '.join(off) or 'none of these'}\n")


def fixed(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of decoders whose tree is always the same."""
    return [row for name, row in found.items() if name.isdecimal()]


def plot(rows: dict[str, dict[str, dict[str, dict[str, Any]]]], path: Path) -> None:
    """A panel for each axis, a line for each decoder; needs matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(3, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.6 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True).flatten()
    for panel, (axis, values) in zip(panels, rows.items(), strict=False):
        for decoder in dict.fromkeys(name for found in values.values() for name in found):
            speedups = [found[decoder]["speedup"] if decoder in found else None for found in values.values()]
            panel.plot(list(values), speedups, marker="o", label=decoder, linewidth=2 if decoder == AUTO else 1)
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set_title(axis, fontsize="medium")
        panel.tick_params(axis="x", labelrotation=30 if axis in ("category", "bundle") else 0)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(rows) :]:
        panel.set_axis_off()
    panels[0].legend(fontsize="small")
    figure.supylabel("times the speed of plain decoding", fontsize="medium")
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(path)


if __name__ == "__main__":
    restart_with_huge_pages()
    run_command(app)
