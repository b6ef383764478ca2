"""eagle-build: engines of a bundle's portable graphs, on the machine that will run them. Needs no torch."""

from __future__ import annotations

import json
import time
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eagle_graphs.command_line import clean_up_when_terminated, run_command
from eagle_graphs.tensorrt.build import build_options
from eagle_graphs.tensorrt.bundle import add_engines, choose_portable, graphs_for, log_path, read_manifest
from eagle_graphs.tensorrt.progress import BuildProgress
from eagle_graphs.tensorrt.report import print_reports

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Library(str, Enum):  # noqa: UP042 - typer shows the values
    """Whose engines."""

    TENSORRT_RTX = "tensorrt-rtx"
    TENSORRT = "tensorrt"


class Attention(str, Enum):  # noqa: UP042
    """Whose attention an engine has."""

    NATIVE = "native"
    PLUGIN = "plugin"


@app.command()
def build(
    bundle: Annotated[Path, typer.Argument(help="Bundle made with eagle-export --portable.")],
    backend: Annotated[Library, typer.Option(help="Whose engines to build.")],
    precision: Annotated[
        str | None, typer.Option(help="Of the portable graphs to build from.", show_default="the only one")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPUs to build for, as sm89,sm120: TensorRT-RTX. Of plugins, where it is unknown.",
            show_default="all that it has",
        ),
    ] = None,
    strip_weights: Annotated[
        bool, typer.Option("--strip-weights", help="Leave the weights out; they are read from the portable graphs.")
    ] = False,
    builder_level: Annotated[
        int | None, typer.Option(help="0 builds fast, 5 runs fast.", show_default="the library's")
    ] = None,
    attention: Annotated[
        Attention, typer.Option(help="native: the library's own; plugin: the package's, for TensorRT.")
    ] = Attention.NATIVE,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON on standard output.")] = False,
) -> None:
    """Builds engines for GPUs from a bundle's portable graphs and adds them to it."""
    console = Console(stderr=True)
    portable = choose_portable(read_manifest(bundle), precision)
    options = build_options(
        backend.value,
        precision=portable.precision,
        gpu=gpu,
        strip_weights=strip_weights,
        level=builder_level,
        attention=attention.value,
    )
    graphs_for(portable, options.attention)  # which says what is missing, before anything is shown or built
    started = time.perf_counter()
    with BuildProgress(console) as progress:
        reports = add_engines(bundle, portable, options, progress=progress, log=log_path(bundle, backend.value))
    print_reports(console, reports)
    console.print(f"built in {time.perf_counter() - started:.0f} s; added to {bundle}/", highlight=False, markup=False)
    if as_json:
        print(json.dumps([report.to_dict() for report in reports]))


def main() -> None:
    """The command; a user's mistake gives one line and status 2."""
    clean_up_when_terminated()
    run_command(app)


if __name__ == "__main__":
    main()
