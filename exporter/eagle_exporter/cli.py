"""eagle-export: a model and its EAGLE head in, a bundle out."""

from __future__ import annotations

import json
import os
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eagle_exporter.gpu_options import GpuOptions, gpu_precision
from eagle_exporter.precision import Quantization, cpu_precision
from eagle_graphs import EagleError, Profile, paths_from_json, profiles_from_text, static_profile
from eagle_graphs.command_line import clean_up_when_terminated, run_command
from eagle_graphs.machines import MACHINES, Machine
from eagle_graphs.tensorrt.build import build_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


DYNAMIC, STATIC = "dynamic", "static"
DEFAULT_PROFILES = "4,8,16"
PLAN = "Planning"


class Backend(str, Enum):  # noqa: UP042 - typer shows the values
    """Backends that engines are made for."""

    ONNXRUNTIME = "onnxruntime"
    TENSORRT_RTX = "tensorrt-rtx"
    TENSORRT = "tensorrt"


class Precision(str, Enum):  # noqa: UP042
    """Precisions of weights and arithmetic."""

    FP32 = "fp32"
    INT8 = "int8"
    INT8_WEIGHTS = "int8-weights"
    INT4 = "int4"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class Attention(str, Enum):  # noqa: UP042
    """Whose attention an engine has."""

    NATIVE = "native"
    PLUGIN = "plugin"


class Kernels(str, Enum):  # noqa: UP042
    """Whose attention and quantized products run on the CPU."""

    AUTO = "auto"
    NATIVE = "native"
    STOCK = "stock"


class Calibrator(str, Enum):  # noqa: UP042
    """How a static scale is found."""

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    ENTROPY = "entropy"


class Lookup(str, Enum):  # noqa: UP042
    """What a head reads of an embedding table."""

    RAW = "raw"
    SCALED = "scaled"


@app.command()
def export(
    command: typer.Context,
    draft: Annotated[str, typer.Option(help="EAGLE head: a directory or a Hub id.")],
    model: Annotated[str | None, typer.Option(help="Target: a Hugging Face directory, .gguf file or Hub id.")] = None,
    inspect: Annotated[bool, typer.Option("--inspect", help="Say what the head is and if it fits; no export.")] = False,
    profiles: Annotated[
        str | None, typer.Option(help="Sizes of dynamic trees, rising; 60:8 has eight levels.", show_default="4,8,16")
    ] = None,
    tree: Annotated[str, typer.Option(help="dynamic, static (EAGLE-1's 25 nodes), or a JSON file of paths.")] = DYNAMIC,
    out: Annotated[Path | None, typer.Option(help="Bundle to write.", show_default="MODEL-eagle")] = None,
    backend: Annotated[Backend, typer.Option(help="What will run the graphs.")] = Backend.ONNXRUNTIME,
    precision: Annotated[
        Precision | None, typer.Option(help="Of weights and arithmetic.", show_default="fp32; fp16 for TensorRT")
    ] = None,
    head_precision: Annotated[Precision | None, typer.Option(help="The head's.", show_default="as --precision")] = None,
    calibration_data: Annotated[Path | None, typer.Option(help="Prompts (JSON Lines) to calibrate on.")] = None,
    calibrator: Annotated[Calibrator | None, typer.Option(help="Of fp8's scales.", show_default="minmax")] = None,
    scales: Annotated[
        Path | None, typer.Option(help="calibration.json of an earlier export: take all that its calibration found.")
    ] = None,
    kernels: Annotated[Kernels, typer.Option(help="native: the package's own; stock: ONNX Runtime's.")] = Kernels.AUTO,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="GPUs to build for, as sm89,sm120: TensorRT-RTX. Of plugins, where it is unknown.",
            show_default="all that it has",
        ),
    ] = None,
    strip_weights: Annotated[
        bool, typer.Option("--strip-weights", help="Engines without weights; --portable.")
    ] = False,
    builder_level: Annotated[
        int | None, typer.Option(help="0 builds fast, 5 runs fast.", show_default="the library's")
    ] = None,
    attention: Annotated[
        Attention, typer.Option(help="Of engines, native: the library's own; plugin: the package's, for TensorRT.")
    ] = Attention.NATIVE,
    portable: Annotated[bool, typer.Option("--portable", help="Keep the graphs that eagle-build needs.")] = False,
    capacity: Annotated[int | None, typer.Option(help="Tokens of context.", show_default="2048")] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help="Prompt tokens a pass.", show_default="256")] = None,
    taps: Annotated[str | None, typer.Option(help="Hidden states that the head reads, as 2,15,27.")] = None,
    rope_theta: Annotated[float | None, typer.Option(help="Base of the head's rotary positions.")] = None,
    position_offset: Annotated[int | None, typer.Option(min=0, help="Position of the head's first row.")] = None,
    embedding: Annotated[
        Lookup | None, typer.Option(help="Whether a head's embeddings are multiplied as the target's are.")
    ] = None,
    accept_probe: Annotated[bool, typer.Option("--accept-probe", help="Export whatever the probe says.")] = False,
    allow_inexact: Annotated[
        bool, typer.Option("--allow-inexact", help="Quantize even where trees are not exact.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Say what the pair would gain on a machine; no export.")] = False,
    machine: Annotated[str | None, typer.Option(help="--plan: a GPU by name.", rich_help_panel=PLAN)] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s of its memory.", rich_help_panel=PLAN)] = None,
    flops: Annotated[str | None, typer.Option(help="Its TFLOP/s, as fp16=121,int8=242.", rich_help_panel=PLAN)] = None,
    memory: Annotated[float | None, typer.Option(help="Its GB.", rich_help_panel=PLAN)] = None,
    context: Annotated[int, typer.Option(help="Tokens in the cache.", rich_help_panel=PLAN)] = 1024,
    accepted_length: Annotated[
        str | None, typer.Option(help="Tokens a round, for all profiles or each.", rich_help_panel=PLAN)
    ] = None,
    acceptance: Annotated[
        str | None, typer.Option(help="Acceptance of a best, second-best, ... child.", rich_help_panel=PLAN)
    ] = None,
    efficiency: Annotated[float, typer.Option(help="Share of its limits reached.", rich_help_panel=PLAN)] = 1.0,
    overhead_us: Annotated[float, typer.Option(help="Microseconds a pass beyond.", rich_help_panel=PLAN)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on standard output.")] = False,
) -> None:
    """Exports a model with its EAGLE draft head into one bundle, and proves it equal to the original."""
    if model is None and not inspect:
        raise typer.BadParameter("it is missing; only --inspect goes without it", command, param_hint="--model")
    chosen = _profiles(profiles, tree)
    if plan and model is not None:
        precision = Precision.FP16 if precision is None else precision
        asked = _import_plan().PlanOptions(
            model=model,
            draft=draft,
            machine=_machine(machine, bandwidth, flops, memory).reaching(efficiency),
            precision=precision.value,
            head_precision=(precision if head_precision is None else head_precision).value,
            profiles=chosen,
            context=context,
            accepted_lengths=_decimals("--accepted-length", accepted_length),
            acceptance=_decimals("--acceptance", acceptance),
            overhead=overhead_us * 1e-6,
        )
        planned = _import_plan().plan(asked)
        if as_json:
            print(json.dumps(planned.to_dict()))
        else:
            planned.print(Console())
        return
    if precision is None:
        precision = Precision.FP32 if backend is Backend.ONNXRUNTIME else Precision.FP16
    head_precision = precision if head_precision is None else head_precision
    chosen_calibrator: Any = None if calibrator is None else calibrator.value
    quantization, build = Quantization(), None
    if backend is Backend.ONNXRUNTIME:
        if strip_weights or any(option is not None for option in (gpu, builder_level)):
            raise EagleError(
                "--gpu, --strip-weights and --builder-level are for --backend tensorrt-rtx and tensorrt: leave them out"
            )
        if attention is Attention.PLUGIN and not portable:
            raise EagleError(
                "--attention plugin is for engines of TensorRT, not for --backend onnxruntime: leave it out, choose "
                "--backend tensorrt, or add --portable for eagle-build to make such engines"
            )
        quantization = Quantization(
            precision=cpu_precision(precision.value),
            head_precision=cpu_precision(head_precision.value),
            kernels=kernels.value,
            allow_inexact=allow_inexact,
            calibrator=chosen_calibrator,
            calibration_data=calibration_data,
            scales=scales,
        )
    else:
        if kernels is not Kernels.AUTO or allow_inexact:
            raise EagleError("--kernels and --allow-inexact are for --backend onnxruntime: leave them out")
        build = build_options(
            backend.value,
            precision=gpu_precision(precision.value, backend.value),
            gpu=gpu,
            strip_weights=strip_weights,
            level=builder_level,
            attention=attention.value,
        )
    made_for_gpus = None
    if build is not None or portable:
        made_for_gpus = GpuOptions(
            precision=gpu_precision(precision.value, backend.value),
            head_precision=gpu_precision(head_precision.value, backend.value),
            build=build,
            keep_portable=portable,
            attention=attention.value,
            calibrator=chosen_calibrator,
            calibration_data=calibration_data,
            scales=scales,
        )
    console = Console(stderr=True)
    _quiet_libraries()
    try:
        from eagle_exporter.heads import Overrides
        from eagle_exporter.inspection import inspect_head
        from eagle_exporter.pipeline import ExportOptions
        from eagle_exporter.pipeline import export as run_export
        from eagle_exporter.report import Steps
    except ImportError as error:
        raise EagleError(
            f"exporting needs {error.name}, which is not installed: pip install 'eagle-aot[export,cpu]'"
        ) from None
    overrides = Overrides(
        taps=_numbers(taps),
        rope_theta=rope_theta,
        position_offset=position_offset,
        scaled_embedding=None if embedding is None else embedding is Lookup.SCALED,
    )
    if inspect:
        inspection = inspect_head(draft, model, overrides)
        if as_json:
            print(json.dumps(inspection.to_dict()))
        else:
            inspection.print(Console())
        sys.exit(1 if inspection.problems else 0)
    assert model is not None
    directory = out if out is not None else Path(f"{Path(model).absolute().name.removesuffix('.gguf')}-eagle")
    options = ExportOptions(
        model=model,
        draft=draft,
        profiles=chosen,
        out=directory,
        capacity=capacity,
        prefill_chunk=prefill_chunk,
        overrides=overrides,
        accept_probe=accept_probe,
        cpu=backend is Backend.ONNXRUNTIME,
        quantization=quantization,
        gpu=made_for_gpus,
    )
    report = run_export(options, Steps(console))
    report.print(console)
    hint = f"try  eagle-run {directory} --prompt 'Hello'" if options.cpu else "its engines run on GPUs"
    console.print(f"wrote {directory}/ : {hint}", highlight=False, markup=False)
    if as_json:
        print(json.dumps(report.to_dict()))


def _profiles(sizes: str | None, tree: str) -> tuple[Profile, ...]:
    """The trees of a bundle: dynamic ones of several sizes, or one static tree."""
    if tree == DYNAMIC:
        return profiles_from_text(DEFAULT_PROFILES if sizes is None else sizes)
    if sizes is not None:
        raise EagleError(
            "--profiles gives the sizes of dynamic trees; a static tree has its own: leave one of them out"
        )
    if tree == STATIC:
        return (static_profile(),)
    try:
        text = Path(tree).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EagleError(f"--tree is {tree!r}: not 'dynamic', not 'static', and no file of paths ({error})") from None
    return (static_profile(paths_from_json(text, tree)),)


def _import_plan() -> Any:
    """The module, which needs transformers."""
    _quiet_libraries()
    try:
        from eagle_exporter import plan
    except ImportError as error:
        raise EagleError(
            f"--plan needs {error.name}, which is not installed: pip install 'eagle-aot[export]'"
        ) from None
    return plan


def _machine(name: str | None, bandwidth: float | None, flops: str | None, memory: float | None) -> Machine:
    """The machine to plan for: a known one, one stated by its numbers, or the first corrected by the second."""
    if name is None and (bandwidth is None or flops is None):
        raise EagleError(f"--plan needs --machine ({', '.join(MACHINES)}), or --bandwidth and --flops")
    if name is not None and name not in MACHINES:
        raise EagleError(
            f"--machine is {name!r}; known are {', '.join(MACHINES)}; "
            "describe another with --bandwidth, --flops and --memory"
        )
    known = MACHINES[name] if name is not None else Machine(name="this machine", bandwidth=1, memory=None, rates={})
    try:
        rates = {
            kind: float(tera) * 1e12 for kind, tera in (item.split("=") for item in (flops or "").split(",") if item)
        }
    except ValueError:
        raise EagleError(f"--flops is {flops!r}; expected TFLOP/s by arithmetic, as fp16=121,int8=242") from None
    return Machine(
        name=known.name,
        bandwidth=known.bandwidth if bandwidth is None else bandwidth * 1e9,
        memory=known.memory if memory is None else memory * 1e9,
        rates={**known.rates, **rates},
    )


def _decimals(option: str, text: str | None) -> tuple[float, ...]:
    try:
        return () if text is None else tuple(float(item) for item in text.split(","))
    except ValueError:
        raise EagleError(f"{option} takes numbers separated by commas, as in 1.7,2.0,2.2; found {text!r}") from None


def _numbers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(item) for item in text.split(","))
    except ValueError:
        raise EagleError(f"--taps are layer numbers separated by commas, as in 2,15,27; found {text!r}") from None


def _quiet_libraries() -> None:
    """One voice on the terminal: no progress bars or advice from the libraries below."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def main() -> None:
    """The command; a user's mistake gives one line and status 2."""
    clean_up_when_terminated()
    run_command(app)


if __name__ == "__main__":
    main()
