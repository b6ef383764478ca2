"""From the two neutral graphs to a bundle's engines: one for each set of kernels, all over one file of weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import onnx_ir as ir

from eagle_calibration.plan import Plan
from eagle_exporter.bundle import WeightFile
from eagle_graphs import EagleError, Profile
from eagle_graphs.lowering import Tables, lower_for_native_cpu, lower_for_onnxruntime_cpu, unroll_draft
from eagle_graphs.manifest import Engine, Exactness
from eagle_graphs.native import library_path

Kernels = Literal["native", "stock"]
UNMEASURED = Exactness(kind="statistical", logit_gap=0.0, max_logit_difference=0.0, rows=0)
"""Of an engine that has not been compared yet."""


def choose_kernels(asked: str, precisions: Collection[str]) -> tuple[Kernels, ...]:
    """The sets of kernels to make engines for, best first, where "auto" asks for all that can be had.

    Raises EagleError where the native library is needed and missing.
    """
    built = library_path() is not None
    if asked == "native" and not built:
        raise EagleError(
            "--kernels native needs the library of native CPU ops, which was not built: install eagle-aot where there "
            "is a C++ compiler, or from a wheel"
        )
    if "int8" in precisions:
        if asked == "stock" or not built:
            raise EagleError(
                "--precision int8 needs the library of native CPU ops, since with ONNX Runtime's own attention a "
                "tree's text would not be plain decoding's: install eagle-aot where there is a C++ compiler, or "
                "export with --precision fp32"
            )
        return ("native",)
    if asked == "stock" or not built:
        return ("stock",)
    return ("native",) if asked == "native" else ("native", "stock")


def write_engines(
    directory: Path,
    graphs: Mapping[str, ir.Model],
    kernels: tuple[Kernels, ...],
    plans: Mapping[str, Plan],
    *,
    precision: str,
    profiles: Collection[Profile],
) -> list[Engine]:
    """Lowers and writes the neutral graphs "target" and "draft" for each of `kernels`. The graphs are used up.

    Of the lowered head, a graph of the whole round is made for every profile whose tree is dynamic.
    """
    below = f"onnxruntime-cpu-{precision}"
    (directory / below).mkdir()
    weights = WeightFile(directory / below)
    engines = []
    for kind in kernels:
        paths: dict[str, str] = {}
        tables: Tables = {}
        for name in ("target", "draft"):  # in this order: the head may share the target's embedding
            graph = graphs[name] if kind == kernels[-1] else graphs[name].clone()
            if kind == "native":
                tables |= lower_for_native_cpu(graph, plans[name].quantized() if name in plans else None, tables)
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
                kernels=kind,
                precision=precision,
                slots=1,
                target=paths["target"],
                draft=paths["draft"],
                draft_rounds=rounds,
                exactness=UNMEASURED,
            )
        )
    return engines
