"""What an export makes for GPUs: portable graphs in standard ONNX, compared with torch, and engines built from them.

The comparison runs on the very files that engines are built from, by ONNX Runtime on the CPU. Only bfloat16, for which
it has no products there, is held in float32 meanwhile, each number as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass
from torch import nn

from eagle_calibration.scales import Scales, find_scales, scales_from_file
from eagle_calibration.smoothing import Smoothing, find_smoothing, smoothing_from_file
from eagle_exporter.bundle import WeightFile
from eagle_exporter.calibrate import check_layers, observe
from eagle_exporter.gpu_options import GpuOptions
from eagle_exporter.heads import HeadSpec
from eagle_exporter.parity import OutputParity
from eagle_exporter.probe import Answer
from eagle_exporter.report import Steps
from eagle_exporter.validate import compare_draft, compare_target
from eagle_graphs import GraphPorts, Profile
from eagle_graphs.lowering import draft_steps
from eagle_graphs.lowering.linear import linears
from eagle_graphs.lowering.plugin_attention import lower_for_plugins
from eagle_graphs.lowering.products import (
    merge_products,
    quantize_fp8,
    quantize_int8,
    quantize_weights_in_blocks,
    use_half_products,
)
from eagle_graphs.lowering.standard import lower_for_standard_onnx
from eagle_graphs.manifest import PluginGraphs, PortableGraphs
from eagle_graphs.tensorrt.bundle import add_engines, log_path, read_manifest, remove_portable
from eagle_graphs.tensorrt.report import EngineReport

COMPARED_PROMPTS = 3
"""The caches' whole capacity is attended to, which takes its time on a CPU."""
CALIBRATION = "gpu-calibration.json"

StaticCalibration = Mapping[str, Scales | Smoothing]
"""By graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """What the portable graphs are made from and compared with, of "target" and "draft"."""

    modules: Mapping[str, nn.Module]
    ports: Mapping[str, GraphPorts]
    head: HeadSpec
    vocab_size: int
    profiles: Sequence[Profile]


def make_portable(
    directory: Path,
    options: GpuOptions,
    neutral: Mapping[str, ir.Model],
    original: Original,
    answers: Iterable[Answer],
    prompts: Sequence[Sequence[int]],
    *,
    buffer_rows: int,
    steps: Steps,
) -> tuple[PortableGraphs, list[OutputParity]]:
    """Writes the portable graphs into the bundle and compares them with torch. Raises EagleError where they differ."""
    graphs = {name: graph.clone() for name, graph in neutral.items()}
    for graph in graphs.values():
        merge_products(graph)
    calibration: StaticCalibration = {}
    if options.calibrated:
        with steps("calibrate for GPUs"):
            calibration = calibrate_static(options, graphs, original, answers)
            text = json.dumps({name: part.to_dict() for name, part in calibration.items()})
            (directory / CALIBRATION).write_text(text + "\n", "utf-8")
    with steps("lower to standard ONNX and write"):
        portable = write_portable(directory, graphs, options, calibration, original, buffer_rows=buffer_rows)
    with steps("compare with torch (portable graphs)"):
        parity = compare_portable(directory, portable, original, prompts[:COMPARED_PROMPTS], buffer_rows=buffer_rows)
    steps.check_parity(parity, quantized=options.allowed())
    return portable, parity


def build_engines(directory: Path, options: GpuOptions, out: Path, steps: Steps) -> list[EngineReport]:
    """Builds what was asked for from the portable graphs of the bundle in `directory`, to become `out`.

    Raises EagleError where the library refuses; its log is then beside `out`.
    """
    reports: list[EngineReport] = []
    (portable,) = read_manifest(directory).portable
    if (build := options.build) is not None:
        with steps.building(f"build engines ({build.backend})") as progress:
            reports = add_engines(directory, portable, build, progress=progress, log=log_path(out, build.backend))
    if not options.keep_portable:
        remove_portable(directory)
    return reports


def calibrate_static(
    options: GpuOptions, graphs: Mapping[str, ir.Model], original: Original, answers: Iterable[Answer]
) -> StaticCalibration:
    """Static scales of the layers of the graphs that need them. graphs: neutral, their products merged.

    Raises EagleError where an earlier export's scales are to be used, and are not of these graphs' layers.
    """
    layers = {name: linears(graph.graph) for name, graph in graphs.items()}
    is_fp8 = "fp8" in options.precisions.values()
    if (path := options.scales) is not None:
        read: StaticCalibration = scales_from_file(path) if is_fp8 else smoothing_from_file(path)
        for name in options.calibrated:
            check_layers(path, name, layers[name], read[name].layers if name in read else ())
        return {name: read[name] for name in options.calibrated}
    observed = observe(layers, original.modules, original.head, answers)
    if is_fp8:
        calibrator = options.calibrator or "minmax"
        return {name: find_scales(layers[name], observed[name], calibrator) for name in options.calibrated}
    return {name: find_smoothing(layers[name], observed[name]) for name in options.calibrated}


def write_portable(
    directory: Path,
    graphs: Mapping[str, ir.Model],
    options: GpuOptions,
    calibration: StaticCalibration,
    original: Original,
    *,
    buffer_rows: int,
) -> PortableGraphs:
    """Lowers the merged graphs and writes them into the bundle, all over one file of weights. The graphs are used up.

    Raises EagleError where plugins are asked for and cannot express an attention.
    """
    below, dtype = f"portable-{options.precision}", ir.DataType[options.dtype.upper()]
    (directory / below).mkdir()
    weights = WeightFile(directory / below)
    paths = {}
    for name in ("target", "draft"):
        graph = graphs[name]
        part = calibration.get(name)
        if isinstance(part, Scales):
            quantize_fp8(graph, part.known())
        elif isinstance(part, Smoothing):
            quantize_int8(graph, part.known())
        elif options.precisions[name] == "int4":
            quantize_weights_in_blocks(graph, dtype)
        use_half_products(graph, dtype)
        lowered = {name: graph}
        if options.attention == "plugin":
            lowered[f"{name}-plugin"] = graph.clone()
            lower_for_plugins(lowered[f"{name}-plugin"], capacity=buffer_rows, dtype=dtype)
        lower_for_standard_onnx(graph, capacity=buffer_rows, dtype=dtype)
        for stem, model in lowered.items():
            CommonSubexpressionEliminationPass()(model)
            weights.move_out(model)
            paths[stem] = f"{below}/{stem}.onnx"
            ir.save(model, directory / paths[stem])
    return PortableGraphs(
        precision=options.precision,
        cache_dtype=options.dtype,
        target=paths["target"],
        draft=paths["draft"],
        draft_steps=write_steps(directory, below, original.profiles, original.ports["draft"]),
        plugin=PluginGraphs(target=paths["target-plugin"], draft=paths["draft-plugin"])
        if options.attention == "plugin"
        else None,
    )


def write_steps(
    directory: Path, below: str, profiles: Iterable[Profile], draft: GraphPorts
) -> dict[str, tuple[str, ...]]:
    """Writes what stands between the head's passes into `below`, for each profile.

    draft: the head's ports. Returns the files by the profiles' nodes.
    """
    axes = {port.name: port.axes for port in (*draft.inputs, *draft.outputs)}
    hidden_width, top_k = axes["hidden"][-1], axes["topk_ids"][-1]
    assert isinstance(hidden_width, int)
    assert isinstance(top_k, int)
    written = {}
    for profile in profiles:
        graphs = draft_steps(profile, hidden_width=hidden_width, top_k=top_k)
        names = tuple(f"{below}/draft-{profile.nodes}-step-{step}.onnx" for step in range(len(graphs)))
        for name, graph in zip(names, graphs, strict=True):
            ir.save(graph, directory / name)
        written[str(profile.nodes)] = names
    return written


def compare_portable(
    directory: Path,
    portable: PortableGraphs,
    original: Original,
    prompts: Sequence[Sequence[int]],
    *,
    buffer_rows: int,
) -> list[OutputParity]:
    """How far the portable graphs are from torch."""
    in_float32 = portable.cache_dtype == "bfloat16"
    ports = {
        name: ports.with_caches("float32" if in_float32 else portable.cache_dtype).fixed(B=1, C=buffer_rows)
        for name, ports in original.ports.items()
    }
    with TemporaryDirectory() as scratch:
        paths = {"target": directory / portable.target, "draft": directory / portable.draft}
        if in_float32:
            paths = {name: _held_in_float32(path, Path(scratch)) for name, path in paths.items()}
        parity, _, features = compare_target(
            paths["target"],
            original.modules["target"],
            ports["target"],
            prompts,
            vocab_size=original.vocab_size,
        )
        return parity + compare_draft(
            paths["draft"],
            original.modules["draft"],
            ports["draft"],
            prompts,
            features,
            position_offset=original.head.position_offset,
        )


def _held_in_float32(path: Path, scratch: Path) -> Path:
    """The graph with every bfloat16 in a float32."""
    model = ir.load(path)
    held, kept = ir.DataType.BFLOAT16, ir.DataType.FLOAT
    for value in (*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()):
        if value.dtype == held:
            value.type = ir.TensorType(kept)
            if value.const_value is not None:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    for node in model.graph:
        if node.op_type == "Cast" and node.attributes["to"].as_int() == held.value:
            node.attributes["to"] = ir.AttrInt64("to", kept.value)
        for output in node.outputs:
            if output.dtype == held:
                output.type = ir.TensorType(kept)
    below = scratch / path.stem
    below.mkdir()
    WeightFile(below).move_out(model)
    ir.save(model, below / path.name)
    return below / path.name
