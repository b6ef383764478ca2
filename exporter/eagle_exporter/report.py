"""What an export says of itself: progress lines while it runs, the report at its end."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle_calibration.evaluation import Quality
from eagle_exporter.parity import TOLERANCE, OutputParity, check_tolerance
from eagle_exporter.probe import DEPTH, Probe
from eagle_exporter.proof import Agreement
from eagle_graphs.manifest import Exactness
from eagle_graphs.tensorrt.progress import BuildProgress
from eagle_graphs.tensorrt.report import EngineReport, print_reports

_PACKAGES = ("eagle-aot", "torch", "transformers", "onnx", "onnxscript", "onnx-ir", "onnxruntime", "tokenizers")


class Steps:
    """Runs the steps of an export, one progress line each, and keeps their times."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Runs the block as the step `name`."""
        started = time.perf_counter()
        with self._console.status(f"{name} ..."):
            yield
        self._finish(name, started)

    @contextmanager
    def building(self, name: str) -> Iterator[BuildProgress]:
        """The same, with bars for what a library says of its progress."""
        started = time.perf_counter()
        with BuildProgress(self._console) as progress:
            yield progress
        self._finish(name, started)

    def _finish(self, name: str, started: float) -> None:
        self._seconds[name] = time.perf_counter() - started
        self._console.print(f"[green]done[/green]  {name:<46} {self._seconds[name]:6.1f} s", highlight=False)

    def say(self, notes: Sequence[str]) -> None:
        """Prints what the user should know of the export."""
        for note in notes:
            self._console.print(f"[yellow]note[/yellow]  {note}", highlight=False)

    def check_parity(self, parity: Sequence[OutputParity], *, quantized: Mapping[str, float]) -> None:
        """Prints the parity table; raises EagleError where an output is out of tolerance."""
        self._console.print(parity_table(parity, quantized=quantized))
        check_tolerance(parity, quantized=quantized)

    def check_probe(self, probe: Probe, *, accept: bool) -> None:
        """Prints the probe's table; raises EagleError where it speaks against the head, unless that is accepted."""
        self._console.print(probe_table(probe))
        if not accept:
            probe.check()
        elif (problem := probe.problem()) is not None:
            self._console.print(f"[yellow]accepted[/yellow]  {problem}", highlight=False)

    def done(self) -> dict[str, float]:
        """Seconds of each finished step."""
        return dict(self._seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The contents of export-report.json."""

    steps: dict[str, float]
    """Seconds."""
    probe: Probe
    precision: str
    head_precision: str
    parity: dict[str, list[OutputParity]]
    """Of each set of kernels, as the next two."""
    exactness: dict[str, Exactness]
    agreement: dict[str, Agreement]
    quality: Quality | None
    """Of a quantized bundle's target."""
    measured: dict[str, Any]
    """Stats of each profile on the exporting machine."""
    default_profile: str
    engines: list[EngineReport]
    """Built for GPUs."""
    taps: tuple[int, ...]
    head_layout: str
    notes: tuple[str, ...]
    """What is special about this target's graph, and about the precision."""
    versions: dict[str, str]
    sizes: dict[str, int]
    """Bytes of each file."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return data | {
            "tolerance": TOLERANCE,
            "probe": self.probe.to_dict(),
            "parity": {name: [entry.to_dict() for entry in entries] for name, entries in self.parity.items()},
            "exactness": {name: asdict(exactness) for name, exactness in self.exactness.items()},
            "agreement": {name: agreement.to_dict() for name, agreement in self.agreement.items()},
            "engines": [engine.to_dict() for engine in self.engines],
            "quality": None if self.quality is None else self.quality.to_dict(),
            "peak_memory_bytes": peak_memory(),
        }

    def print(self, console: Console) -> None:
        """The readable form."""
        table = Table("profile", "tokens/s", "accepted length", "acceptance", title="measured here")
        for name, stats in self.measured.items():
            mark = " (fastest)" if name == self.default_profile else ""
            table.add_row(
                name + mark,
                f"{stats['tokens_per_s']:.1f}",
                f"{stats['accepted_length']:.2f}",
                f"{stats['acceptance_rate']:.0%}",
            )
        if self.measured:
            console.print(table)
        print_reports(console, self.engines)
        for kernels, exactness in self.exactness.items():
            agreement = self.agreement[kernels]
            console.print(
                f"{kernels} kernels: {exactness.sentence()}; greedy equals torch on {agreement.tokens} tokens of "
                f"{agreement.alike(agreement.from_torch)} of {agreement.prompts} prompts, and plain decoding on "
                f"{agreement.alike(agreement.from_plain)}",
                highlight=False,
                style="yellow" if exactness.kind == "statistical" else "",
            )
        if self.quality is not None:
            console.print(self.quality.sentence(), highlight=False)
        size = sum(self.sizes.values()) / 1e6
        console.print(
            f"{size:.0f} MB, {sum(self.steps.values()):.0f} s, {peak_memory() / 1e9:.1f} GB of memory at most",
            highlight=False,
        )


def parity_table(parity: Sequence[OutputParity], *, quantized: Mapping[str, float]) -> Table:
    """Every output's worst element, and its error over all elements."""
    tolerance = "; ".join((f"{TOLERANCE:g}", *(f"of {graph}: rms {most:g}" for graph, most in quantized.items())))
    title = f"against torch (tolerance {tolerance})"
    table = Table("graph", "output", "compared", "rms", "worst", "relative", "at", title=title)
    for entry in parity:
        allowed = quantized.get(entry.graph)
        if allowed is not None and entry.output.endswith("_ids"):
            continue  # rounding changes close choices; a distance between ids says nothing
        style = "red" if (entry.relative > TOLERANCE if allowed is None else entry.rms > allowed) else ""
        table.add_row(
            entry.graph,
            entry.output,
            f"{entry.compared:,}",
            f"{entry.rms:.2g}",
            f"{entry.worst:.2g}",
            f"{entry.relative:.2g}",
            entry.where,
            style=style,
        )
    return table


def probe_table(probe: Probe) -> Table:
    """Accepted length under each convention."""
    table = Table("convention", "accepted", "expected", "against the stated one", title="probe: lengths of chains")
    for convention in probe.conventions:
        gain, error = convention.gain_over(probe.stated)
        against = "" if convention is probe.stated else f"{gain:+.3f} ± {error:.3f}"
        style = "red" if convention.clearly_beats(probe.stated) else ""
        table.add_row(
            convention.name, f"{convention.length:.2f}", f"{convention.expected_length:.3f}", against, style=style
        )
    table.caption = f"up to {DEPTH} tokens from each of {probe.places} places"
    return table


def versions() -> dict[str, str]:
    """Versions of what made the bundle."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def peak_memory() -> int:
    """Bytes that this process, or the runtime it started, held at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    peaks = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return max(peaks) * unit
