"""What only a GPU can show of a bundle: that its engines run, are lossless, and how fast they are.

    python tools/gpu_checks.py BUNDLE [--device cpu]

Every engine of the bundle that runs on the GPU here, and its portable graphs in ONNX Runtime, answers a few prompts
plainly, with each profile, with auto and drafting step by step: texts must be plain decoding's. It samples, too, twice
with one seed: texts must be the same. The times are told. `--device cpu` lets the host play the GPU, to try the script
itself: only the portable graphs run then. tools/gpu_checks.sh calls it with the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from eagle_runtime.measure import ProfileRun, measure
from eagle_runtime.session import DraftingMode

PROMPTS = Path(__file__).with_name("prompts.jsonl")
STEPWISE: DraftingMode = "stepwise"
SAMPLED = "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One engine's answers."""

    name: str
    skipped: str | None = None
    """Why it did not run."""
    failed: str | None = None
    """What went wrong while it ran."""
    runs: dict[str, ProfileRun] = field(default_factory=dict)
    """By profile, and how it was used."""
    differing: dict[str, int] = field(default_factory=dict)
    """Of the same keys: prompts whose text is not the expected one."""

    @property
    def right(self) -> bool:
        """Whether it ran, or had to be skipped, and every text was the expected one."""
        return self.failed is None and not any(self.differing.values())


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


@contextmanager
def opened(bundle: Bundle, memory: DeviceMemory, drafting: DraftingMode) -> Iterator[Session]:
    """A session. Raises EagleError where something else than the bundle's engine would run."""
    profile = str(bundle.manifest.profiles[0].nodes)
    with Session(bundle, profile=profile, threads=None, kernels="auto", drafting=drafting, memory=memory) as session:
        if session.fallback is not None:
            raise EagleError(session.fallback)
        yield session


def check(
    name: str,
    bundle: Bundle,
    memory: Callable[[], DeviceMemory],
    prompts: list[list[dict[str, str]]],
    *,
    new_tokens: int,
) -> Checked:
    """Every profile on every prompt. Whatever is wrong is told, since the other engines have their turn."""
    profiles = [str(profile.nodes) for profile in bundle.manifest.profiles]
    room = max(bundle.manifest.limits.capacity - new_tokens, 1)  # a small cache takes the beginning of a prompt
    runs: dict[str, ProfileRun] = {}
    expected: dict[str, ProfileRun] = {}
    begun = False
    try:
        with opened(bundle, memory(), "compiled") as session:
            begun = True
            tokens = [session.tokenizer.encode(messages[-1]["content"]).ids[:room] for messages in prompts]
            run = partial(measure, session, tokens, max_new_tokens=new_tokens)
            runs |= run(["plain", *profiles, "auto"])
            expected |= dict.fromkeys(runs, runs["plain"])
            for profile in profiles:
                sampled = f"{profile} {SAMPLED}"
                expected[sampled], runs[sampled] = (run([profile], temperature=1.0, seed=0)[profile] for _ in range(2))
        with opened(bundle, memory(), STEPWISE) as session:
            found = measure(session, tokens, profiles, max_new_tokens=new_tokens)
        runs |= {f"{profile} {STEPWISE}": run for profile, run in found.items()}
        expected |= {f"{profile} {STEPWISE}": runs["plain"] for profile in found}
    except EagleError as error:
        return Checked(name=name, failed=str(error)) if begun else Checked(name=name, skipped=str(error))
    except Exception as error:  # of a library's: which ones it has is not ours to know
        return Checked(name=name, failed=f"{type(error).__name__}: {error}")
    differing = {
        how: sum(ours != theirs for ours, theirs in zip(run.token_ids, expected[how].token_ids, strict=True))
        for how, run in runs.items()
    }
    return Checked(name=name, runs=runs, differing=differing)


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
    prompts = read_prompts(count)
    results = [check(name, alone, memory, prompts, new_tokens=new_tokens) for name, alone in alternatives(bundle)]
    table = Table("engine", "profile", "tokens/s", "accepted", "speed-up", "texts that differ")
    console = Console()
    for result in results:
        for verdict, why in (("skipped", result.skipped), ("failed", result.failed)):
            if why is not None:
                console.print(f"{verdict} {result.name}: {why}", highlight=False, markup=False)
        for profile, run in result.runs.items():
            rate = run.stats.tokens_per_s
            speedup = rate / result.runs["plain"].stats.tokens_per_s
            table.add_row(
                result.name,
                profile,
                f"{rate:.1f}",
                f"{run.stats.accepted_length:.2f}",
                f"{speedup:.2f}x",
                f"{result.differing[profile]} of {len(run.token_ids)}",
            )
    console.print(table)
    sys.exit(0 if any(result.runs for result in results) and all(result.right for result in results) else 1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
