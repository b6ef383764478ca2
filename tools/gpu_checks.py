"""What only a GPU can show of a bundle: that its engines run, are lossless, and how fast they are.

    python tools/gpu_checks.py BUNDLE [--device cpu]

Every engine of the bundle that runs on the GPU here, and its portable graphs in ONNX Runtime, answers a few prompts
plainly, with each profile and with auto: texts must be plain decoding's, and the times are told. `--device cpu` lets
the host play the GPU, to try the script itself: only the portable graphs run then. tools/gpu_checks.sh calls it with
the rest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

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

PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One engine's answers."""

    name: str
    skipped: str | None
    """Why it did not run."""
    runs: dict[str, ProfileRun]
    """By profile."""

    def differing(self) -> dict[str, int]:
        """Prompts, by profile, whose text is not plain decoding's."""
        plain = self.runs["plain"].token_ids if self.runs else []
        return {
            profile: sum(found != expected for found, expected in zip(run.token_ids, plain, strict=True))
            for profile, run in self.runs.items()
        }


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
    bundle: Bundle, memory: DeviceMemory, prompts: list[list[dict[str, str]]], *, new_tokens: int
) -> dict[str, Any]:
    """Every profile on every prompt. Raises EagleError where something else than the engine would run."""
    profiles = [str(profile.nodes) for profile in bundle.manifest.profiles]
    with Session(
        bundle, profile=profiles[0], threads=None, kernels="auto", drafting="compiled", memory=memory
    ) as session:
        if session.fallback is not None:
            raise EagleError(session.fallback)
        room = max(bundle.manifest.limits.capacity - new_tokens, 1)  # a small cache takes the beginning of a prompt
        tokens = [session.tokenizer.encode(messages[-1]["content"]).ids[:room] for messages in prompts]
        return measure(session, tokens, ["plain", *profiles, "auto"], max_new_tokens=new_tokens)


def check_all(
    bundle: Bundle, memory: Callable[[], DeviceMemory], prompts: list[list[dict[str, str]]], *, new_tokens: int
) -> list[Checked]:
    """All alternatives of a bundle; what cannot run says why."""
    found = []
    for name, alone in alternatives(bundle):
        try:
            runs, skipped = check(alone, memory(), prompts, new_tokens=new_tokens), None
        except EagleError as error:
            runs, skipped = {}, str(error)
        found.append(Checked(name=name, skipped=skipped, runs=runs))
    return found


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
    results = check_all(bundle, memory, read_prompts(count), new_tokens=new_tokens)
    table = Table("engine", "profile", "tokens/s", "accepted", "speed-up", "texts that differ")
    console = Console()
    for result in results:
        if result.skipped is not None:
            console.print(f"skipped {result.name}: {result.skipped}", highlight=False, markup=False)
        differing = result.differing()
        for profile, run in result.runs.items():
            rate = run.stats.tokens_per_s
            speedup = rate / result.runs["plain"].stats.tokens_per_s
            table.add_row(
                result.name,
                profile,
                f"{rate:.1f}",
                f"{run.stats.accepted_length:.2f}",
                f"{speedup:.2f}x",
                f"{differing[profile]} of {len(run.token_ids)}",
            )
    console.print(table)
    ran = [result for result in results if result.skipped is None]
    sys.exit(0 if ran and not any(sum(result.differing().values()) for result in ran) else 1)


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
