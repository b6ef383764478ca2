"""This project beside other engines: the same checkpoint, prompts, numbers of tokens and threads, greedy.

    python tools/bench_peers.py BUNDLE [--peers llama.cpp,openvino] [--out peers.json] [--plot peers.svg]
    python tools/bench_peers.py BUNDLE --quality

Every engine is a process of its own and computes only while it is asked. They take turns prompt by prompt, each
prompt beginning with another one, so that a noisy machine is unfair to none: read the ratios, which are medians over
the prompts of ratios within one. Tokens a second are those after the first over their time. A peer's environment, its
build of the checkpoint and what it prints lie in build/peers; llama.cpp is compiled there, which takes a few minutes.

--quality measures how far the peers' builds are from the checkpoint in float32, on the text of an export's report,
and no times.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from bench import check_plot, read_prompts, spread
from peers.catalogue import (
    EAGLE,
    SETTINGS,
    Builds,
    Setting,
    chosen_settings,
    cpu_model,
    eagle_worker,
    environments,
    peer_worker,
)
from peers.client import Worker
from peers.results import (
    Engine,
    Perplexity,
    Run,
    perplexity_from_scores,
    perplexity_table,
    plot,
    summary,
    summary_table,
)
from rich.console import Console
from rich.progress import track

from eagle_graphs import EagleError
from eagle_graphs.command_line import run_command
from eagle_runtime import Session
from eagle_runtime.modes import AUTO, PLAIN

HERE = Path(__file__).parent
ROOT = HERE.parent / "build" / "peers"
WARM_UP_TOKENS = 16
WINDOW = 512
"""Of the evaluation text, in tokens; it and their number are those of an export's report."""
EVALUATED_TOKENS = 8 * WINDOW
ORIGINAL = "safetensors"
"""The build that is no more than the checkpoint in float32."""
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench_peers(
    bundle: Path,
    peers: Annotated[str, typer.Option(help="Names, divided by commas, or 'all'.")] = "all",
    model: Annotated[
        Path | None, typer.Option(help="The bundle's checkpoint as a GGUF file; default: the demo's.")
    ] = None,
    profiles: Annotated[str, typer.Option(help="The bundle's, divided by commas; the first is EAGLE's.")] = AUTO,
    prompts: Annotated[Path, typer.Option(help="JSONL of prompts.")] = HERE / "prompts.jsonl",
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts, spread over the file.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: one a core.")] = None,
    quality: Annotated[bool, typer.Option("--quality", help="Perplexities instead of times.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Draw it: .svg or .png.")] = None,
) -> None:
    """Compares a bundle with other engines."""
    check_plot(plot_file)
    settings = chosen_settings(peers)
    threads = threads or len(os.sched_getaffinity(0))
    console = Console(stderr=True, highlight=False)
    known = environments()
    pythons: dict[str, Path] = {}

    def python(peer: str) -> Path:
        if peer not in pythons:
            console.print(f"environment of {peer} ...")
            pythons[peer] = known[peer].python(ROOT)
        return pythons[peer]

    builds = Builds(model or demo_model(), ROOT, python)
    with Session.open(bundle, profile=PLAIN) as session:
        ends = sorted(session.bundle.manifest.target.eos_token_ids)
        asked = [session.encode(messages=messages) for _, messages in spread(read_prompts(prompts), limit)]

    def start(setting: Setting) -> Worker:
        path = getattr(builds, setting.model)()
        console.print(f"starting {setting} ...")
        return peer_worker(
            setting, python=python(setting.peer), model=path, threads=threads, ends=ends, logs=ROOT / "logs"
        )

    facts: dict[str, Any] = {
        "machine": {"processor": cpu_model(), "cores": os.cpu_count(), "system": platform.platform()},
        "checkpoint": builds.checkpoint.name,
        "threads": threads,
        "requirements": {name: known[name].requirements for name in dict.fromkeys(s.peer for s in settings)},
    }
    if quality:
        scores = measure_quality(bundle, settings, start)
        Console(highlight=False).print(perplexity_table(scores, title=f"perplexity, {builds.checkpoint.stem}"))
        write(out, facts | {"quality": [asdict(row) for row in scores]})
        return

    def start_own(profile: str) -> Worker:
        return eagle_worker(profile, bundle=bundle, threads=threads, ends=ends, logs=ROOT / "logs")

    with ExitStack() as stack:
        engines = [
            (own_engine(profile), stack.enter_context(start_own(profile)))
            for profile in dict.fromkeys([*profiles.split(","), PLAIN])
        ]
        for setting in settings:
            engine = Engine(peer=setting.peer, name=setting.name, plain=setting.plain)
            engines.append((engine, stack.enter_context(start(setting))))
        measure_times(engines, asked, max_new_tokens, console)

    measured = [engine for engine, _ in engines]
    plain = next(engine for engine in measured if engine.plain)
    rows = summary(measured, eagle=measured[0], plain=plain)
    title = f"{builds.checkpoint.stem}, {len(asked)} prompts, up to {max_new_tokens} tokens, {threads} threads"
    Console(highlight=False, width=120).print(summary_table(rows, title=title, eagle=measured[0].name))
    write(out, facts | {"max_new_tokens": max_new_tokens, "summary": rows, "engines": [asdict(e) for e in measured]})
    if plot_file is not None:
        plot(rows, plot_file, title=title, own=EAGLE)


def own_engine(profile: str) -> Engine:
    """This project with one of the bundle's profiles."""
    name = profile if profile in (PLAIN, AUTO) else f"profile {profile}"
    return Engine(peer=EAGLE, name=name, plain=profile == PLAIN)


def measure_times(
    engines: Sequence[tuple[Engine, Worker]], prompts: Sequence[Sequence[int]], max_new_tokens: int, console: Console
) -> None:
    """All engines answer a prompt before any answers the next, each prompt beginning with another engine."""
    for _, worker in engines:
        worker.generate(prompts[0], WARM_UP_TOKENS)
    for number, tokens in enumerate(track(prompts, description="prompts", console=console)):
        first = number % len(engines)
        for engine, worker in [*engines[first:], *engines[:first]]:
            engine.runs.append(Run(**worker.generate(tokens, max_new_tokens)))


def measure_quality(bundle: Path, settings: Sequence[Setting], start: Callable[[Setting], Worker]) -> list[Perplexity]:
    """Of the bundle, as its export found it, and of each peer's builds."""
    from eagle_calibration.evaluation import evaluation_text

    with Session.open(bundle, profile=PLAIN) as session:
        text = evaluation_text()[: 16 * EVALUATED_TOKENS]
        tokens = session.tokenizer.encode(text, add_special_tokens=False).ids[:EVALUATED_TOKENS]
    windows = [tokens[i : i + WINDOW] for i in range(0, len(tokens), WINDOW)]

    def scores(setting: Setting) -> list[dict[str, Any]]:
        with start(setting) as worker:
            return [worker.score(window) for window in windows]

    original = next(setting for setting in SETTINGS if setting.model == ORIGINAL)
    reference = scores(original)
    rows = [perplexity_from_scores(str(original), reference, reference)]
    rows += own_quality(bundle)
    builds: dict[str, Setting] = {}
    for setting in settings:
        builds.setdefault(setting.model, setting)
    rows += [
        perplexity_from_scores(str(setting), scores(setting), reference)
        for name, setting in builds.items()
        if name != ORIGINAL
    ]
    return rows


def own_quality(bundle: Path) -> list[Perplexity]:
    """What the bundle's export measured on the same text; nothing for float32."""
    report = json.loads((bundle / "export-report.json").read_text("utf-8"))
    found = report.get("quality")
    if found is None:
        return []
    return [
        Perplexity(
            name=f"{EAGLE}, {report['precision']}",
            perplexity=found["perplexity"],
            change=found["perplexity_change"],
            agreement=found["agreement"],
        )
    ]


def demo_model() -> Path:
    """The checkpoint of `make demo`."""
    done = subprocess.run([sys.executable, str(HERE / "demo" / "find_model.py")], capture_output=True, text=True)
    if done.returncode:
        raise EagleError(f"{done.stderr.strip()}; or name the bundle's checkpoint with --model")
    return Path(done.stdout.strip())


def write(path: Path | None, found: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    run_command(app)
