"""What only a GPU can show of a bundle: that its engines run, are lossless, and how fast they are.

    python tools/gpu_checks.py BUNDLE [--device cpu]

Every engine of the bundle that runs on the GPU here, and its portable graphs in ONNX Runtime, answers a few prompts:

    greedy          plainly, with each profile, with auto, and with each profile drafting step by step
    sampled         plainly and with each profile, with one seed
    sampled tree    with each dynamic profile, twice with one seed

Texts must be plain decoding's, of a sampled tree the first time's. The times are told. `--device cpu` lets the host
play the GPU, to try the script itself: only the portable graphs run then. tools/gpu_checks.sh calls it with the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eagle_graphs import EagleError
from eagle_graphs.command_line import run_command
from eagle_runtime import Session
from eagle_runtime.bundle import Bundle, open_bundle
from eagle_runtime.engines.cuda import CudaMemory
from eagle_runtime.engines.memory import DeviceMemory, HostMemory
from eagle_runtime.engines.select import installed_backends, select_cuda_engine
from eagle_runtime.measure import ProfileRun, measure
from eagle_runtime.sampling import SamplingOptions

PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What one way of asking gave."""

    name: str
    run: ProfileRun
    differing: int
    """Prompts whose text is not the expected one."""


@dataclass(slots=True, kw_only=True)
class Checked:
    """One engine's answers."""

    name: str
    skipped: str | None = None
    """Why it does not run here."""
    failed: str | None = None
    """What went wrong while it was opened or ran."""
    ways: list[Way] = field(default_factory=list)

    @property
    def right(self) -> bool:
        """Whether nothing went wrong."""
        return self.failed is None and not any(way.differing for way in self.ways)


def alternatives(bundle: Bundle) -> Iterator[tuple[str, Bundle]]:
    """The bundle once for each engine for GPUs and for each set of portable graphs, with nothing else in it."""
    manifest = bundle.manifest
    for engine in manifest.engines:
        if engine.device == "cuda":
            name = f"{engine.backend} {engine.precision} {','.join(engine.architectures)}".strip()
            name += " (plugin attention)" if engine.kernels == "plugin" else ""
            portable = manifest.portable if engine.weights_stripped else ()
            yield name, replace(bundle, manifest=replace(manifest, engines=(engine,), portable=portable))
    for graphs in manifest.portable:
        name = f"onnxruntime {graphs.precision} ({graphs.cache_dtype} cache)"
        yield name, replace(bundle, manifest=replace(manifest, engines=(), portable=(graphs,)))


def check(
    name: str,
    bundle: Bundle,
    memory: Callable[[], DeviceMemory],
    prompts: list[list[dict[str, str]]],
    *,
    new_tokens: int,
) -> Checked:
    """Every way of asking. Whatever goes wrong is told, since the other engines have their turn."""
    checked = Checked(name=name)
    try:
        checked.skipped = reason_to_skip(bundle, memory)
        if checked.skipped is None:
            for way in ways(bundle, memory, prompts, new_tokens=new_tokens):
                checked.ways.append(way)
    except EagleError as error:
        checked.failed = str(error)
    except Exception as error:  # of a library's: which ones it has is not ours to know
        checked.failed = f"{type(error).__name__}: {error}"
    return checked


def reason_to_skip(bundle: Bundle, memory: Callable[[], DeviceMemory]) -> str | None:
    """Why something else than the bundle's engine would run here, or nothing. Raises EagleError without a device."""
    device = memory()
    try:
        _, fallback = select_cuda_engine(
            bundle.manifest, architecture=device.architecture, installed=installed_backends()
        )
    except EagleError as error:
        return str(error)
    finally:
        device.close()
    return fallback


def ways(
    bundle: Bundle, memory: Callable[[], DeviceMemory], prompts: list[list[dict[str, str]]], *, new_tokens: int
) -> Iterator[Way]:
    """All of them, one after the other."""
    profiles = [str(profile.nodes) for profile in bundle.manifest.profiles]
    dynamic = [str(profile.nodes) for profile in bundle.manifest.profiles if not profile.paths]
    room = max(bundle.manifest.limits.capacity - new_tokens, 1)  # a small cache takes the beginning of a prompt
    seeded: SamplingOptions = {"temperature": 1.0, "seed": 0}
    drawn: SamplingOptions = {**seeded, "verify_mode": "sampled"}
    open_session = partial(Session, bundle, profile=profiles[0], threads=None, kernels="auto")
    with open_session(drafting="compiled", memory=memory()) as session:
        tokens = [session.tokenizer.encode(messages[-1]["content"]).ids[:room] for messages in prompts]
        run = partial(measure, session, tokens, max_new_tokens=new_tokens)
        greedy = run(["plain", *profiles, "auto"])
        yield from _compared(greedy, greedy["plain"])
        sampled = run(["plain", *profiles], **seeded)
        yield from _compared(sampled, sampled["plain"], "sampled")
        first, second = (run(dynamic, **drawn) for _ in range(2))
        for name in dynamic:
            yield from _compared({name: second[name]}, first[name], "sampled tree")
    with open_session(drafting="stepwise", memory=memory()) as session:
        stepwise = measure(session, tokens, profiles, max_new_tokens=new_tokens)
        yield from _compared(stepwise, greedy["plain"], "stepwise")


def _compared(runs: Mapping[str, ProfileRun], expected: ProfileRun, how: str = "") -> Iterator[Way]:
    for name, run in runs.items():
        pairs = zip(run.token_ids, expected.token_ids, strict=True)
        yield Way(name=f"{name} {how}".strip(), run=run, differing=sum(ours != theirs for ours, theirs in pairs))


def read_prompts(count: int) -> list[list[dict[str, str]]]:
    """The first prompts of tools/prompts.jsonl as conversations."""
    lines = PROMPTS.read_text("utf-8").splitlines()[:count]
    return [json.loads(line)["messages"] for line in lines]


def main(
    directory: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the script.")] = "cuda",
    count: Annotated[int, typer.Option(help="Prompts.")] = 4,
    new_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 96,
) -> None:
    """Checks and prints; status 1 where a text differs, or nothing ran."""
    bundle = open_bundle(directory)
    memory: Callable[[], DeviceMemory] = CudaMemory if device == "cuda" else HostMemory
    prompts, console = read_prompts(count), Console()
    results = []
    for name, alone in alternatives(bundle):
        results.append(check(name, alone, memory, prompts, new_tokens=new_tokens))
        _print(results[-1], console)
    sys.exit(0 if any(result.ways for result in results) and all(result.right for result in results) else 1)


def _print(checked: Checked, console: Console) -> None:
    table = Table("profile", "tokens/s", "accepted", "speed-up", "texts that differ", title=checked.name)
    for way in checked.ways:
        plain, rate = checked.ways[0].run.stats.tokens_per_s, way.run.stats.tokens_per_s
        length, prompts = way.run.stats.accepted_length, len(way.run.token_ids)
        table.add_row(way.name, f"{rate:.1f}", f"{length:.2f}", f"{rate / plain:.2f}x", f"{way.differing} of {prompts}")
    if checked.ways:
        console.print(table)
    for verdict, why in (("skipped", checked.skipped), ("failed", checked.failed)):
        if why is not None:
            console.print(f"{verdict} {checked.name}: {why}", highlight=False, markup=False)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
