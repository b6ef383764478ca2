"""eagle-export: a model and its EAGLE head in, a bundle out."""

from __future__ import annotations

import json
import os
import signal
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eagle_graphs import EagleError, profiles_from_text

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class Backend(str, Enum):  # noqa: UP042 - typer shows the values
    """Backends that engines are made for."""

    ONNXRUNTIME = "onnxruntime"


class Precision(str, Enum):  # noqa: UP042
    """Precisions of weights and arithmetic."""

    FP32 = "fp32"


@app.command()
def export(
    model: Annotated[str, typer.Option(help="Target: a Hugging Face directory, a .gguf file or a Hub id.")],
    draft: Annotated[str, typer.Option(help="EAGLE-3 head: a directory or a Hub id.")],
    profiles: Annotated[str, typer.Option(help="Tree sizes to verify, root included, rising.")] = "4,8,16",
    out: Annotated[Path | None, typer.Option(help="Bundle to write.  [default: MODEL-eagle]")] = None,
    backend: Annotated[Backend, typer.Option(help="What will run the graphs.")] = Backend.ONNXRUNTIME,
    precision: Annotated[Precision, typer.Option(help="Of weights and arithmetic.")] = Precision.FP32,
    capacity: Annotated[int | None, typer.Option(help="Tokens of context.  [default: 2048]")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="Prompt tokens a pass.  [default: 256]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")] = False,
) -> None:
    """Exports a model with its EAGLE draft head into one bundle, and proves it equal to the original."""
    sizes = profiles_from_text(profiles)
    console = Console(stderr=True)
    _quiet_libraries()
    try:
        from eagle_exporter.pipeline import ExportOptions
        from eagle_exporter.pipeline import export as run_export
        from eagle_exporter.report import Steps
    except ImportError as error:
        raise EagleError(
            f"exporting needs {error.name}, which is not installed: pip install 'eagle-aot[export,cpu]'"
        ) from None
    directory = out if out is not None else Path(f"{Path(model).absolute().name.removesuffix('.gguf')}-eagle")
    options = ExportOptions(
        model=model, draft=draft, profiles=sizes, out=directory, capacity=capacity, prefill_chunk=prefill_chunk
    )
    report = run_export(options, Steps(console))
    report.print(console)
    console.print(f"wrote {directory}/ : try  eagle-run {directory} --prompt 'Hello'", highlight=False, markup=False)
    if as_json:
        print(json.dumps(report.to_dict()))


def _quiet_libraries() -> None:
    """One voice on the terminal: no progress bars or advice from the libraries below."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def main() -> None:
    """The command; a user's mistake gives one line and status 2."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that it cleans up as on Ctrl-C
    try:
        app()
    except EagleError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
