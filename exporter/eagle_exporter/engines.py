"""From the two neutral graphs to a bundle's engines: one for each set of kernels, all over one file of weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx_ir as ir

from eagle_calibration.plan import Plan
from eagle_calibration.scales import Scales
from eagle_exporter.bundle import WeightFile
from eagle_exporter.calibrate import Calibration
from eagle_exporter.precision import WEIGHT_BITS, Kernels, Precision
from eagle_graphs import Profile
from eagle_graphs.lowering import Tables, lower_for_native_cpu, lower_for_onnxruntime_cpu, unroll_draft
from eagle_graphs.lowering.float8 import quantize_float8
from eagle_graphs.lowering.stock_int8 import quantize_linears_with_stock_ops
from eagle_graphs.lowering.weights_only import quantize_tables, quantize_weights
from eagle_graphs.manifest import Engine, Exactness

UNMEASURED = Exactness(kind="statistical", logit_gap=0.0, max_logit_difference=0.0, rows=0)
"""Of an engine that has not been compared yet."""


def write_engines(
    directory: Path,
    graphs: Mapping[str, ir.Model],
    kernels: tuple[Kernels, ...],
    precisions: Mapping[str, Precision],
    calibration: Calibration,
    profiles: Collection[Profile],
) -> list[Engine]:
    """Lowers and writes the neutral graphs "target" and "draft" for each of `kernels`. The graphs are used up.

    Of the lowered head, a graph of the whole round is made for every profile whose tree is dynamic.
    """
    precision = precisions["target"]
    below = f"onnxruntime-cpu-{precision}"
    (directory / below).mkdir()
    weights = WeightFile(directory / below)
    engines = []
    for kind in kernels:
        paths: dict[str, str] = {}
        tables: Tables = {}
        for name in ("target", "draft"):  # in this order: the head may share the target's embedding
            graph = graphs[name] if kind == kernels[-1] else graphs[name].clone()
            part = calibration.get(name)
            quantize_with_stock_ops(graph, precisions[name], kind, part)
            if kind == "native":
                tables |= lower_for_native_cpu(graph, part.quantized() if isinstance(part, Plan) else None, tables)
            else:
                lower_for_onnxruntime_cpu(graph)
            weights.move_out(graph)
            paths[name] = f"{below}/{name}-{kind}.onnx"
            ir.save(graph, directory / paths[name])
        rounds = {}
        for profile in (profile for profile in profiles if not profile.paths):
            rounds[str(profile.nodes)] = f"{below}/draft-round-{profile.nodes}-{kind}.onnx"
            # The draft graph, the last one, names its weights in the file by now, and so do its copies.
            ir.save(unroll_draft(graph, profile), directory / rounds[str(profile.nodes)])
        engines.append(
            Engine(
                backend="onnxruntime",
                device="cpu",
                architectures=(),
                kernels=kind,
                precision=precision,
                cache_dtype="float32",
                weights_stripped=False,
                slots=1,
                target=paths["target"],
                draft=paths["draft"],
                draft_rounds=rounds,
                draft_steps={},
                exactness=UNMEASURED,
            )
        )
    return engines


def quantize_with_stock_ops(
    graph: ir.Model, precision: Precision, kernels: Kernels, calibration: Plan | Scales | None
) -> None:
    """Quantizes a neutral graph in place as far as ops of ONNX Runtime do it."""
    if bits := WEIGHT_BITS.get(precision):
        quantize_weights(graph, bits=bits, round_rows=kernels == "native")
        quantize_tables(graph, bits=bits)
    elif precision == "int8" and kernels == "stock":
        quantize_linears_with_stock_ops(graph)
        quantize_tables(graph, bits=8)
    elif isinstance(calibration, Scales):
        quantize_float8(graph, calibration.known())
