"""Calibration within an export: the target's own answers run through both modules, and what each layer made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import cast

import onnx_ir as ir
import torch
from torch import nn
from transformers import PreTrainedModel

from eagle_calibration.observe import ObservedRows, observing
from eagle_calibration.plan import LayerPlan, Plan, plan_layers, plans_from_file
from eagle_calibration.scales import LayerScale, Scales, find_scales, scales_from_file
from eagle_calibration.smoothing import SmoothedLayer
from eagle_exporter.heads import HeadSpec
from eagle_exporter.precision import Quantization
from eagle_exporter.probe import Answer, draft_chains
from eagle_exporter.target import as_transformers_runs_it
from eagle_graphs import EagleError
from eagle_graphs.lowering.linear import Linear, linears

Calibration = Mapping[str, Plan | Scales]
"""By graph: how its layers have 8-bit integers, or 8-bit floats."""


def calibrate(
    how: Quantization,
    graphs: Mapping[str, ir.Model],
    modules: Mapping[str, nn.Module],
    spec: HeadSpec,
    answers: Iterable[Answer],
) -> Calibration:
    """How each linear layer of the graphs that need it is to be quantized, by what `answers` show.

    graphs, modules: "target" and "draft", neutral.

    Raises EagleError where an earlier export's scales are to be used, and are not of these graphs' layers.
    """
    if how.scales is not None:
        return _read(how, how.scales, {name: graphs[name] for name in how.calibrated})
    layers = {name: linears(graph.graph) for name, graph in graphs.items()}
    observed = observe(layers, modules, spec, answers)
    if "fp8" in how.precisions.values():
        calibrator = how.calibrator or "minmax"
        return {name: find_scales(layers[name], observed[name], calibrator) for name in how.calibrated}
    return {name: plan_layers(layers[name], observed[name]) for name in how.calibrated}


def observe(
    layers: Mapping[str, Sequence[Linear]],
    modules: Mapping[str, nn.Module],
    spec: HeadSpec,
    answers: Iterable[Answer],
) -> dict[str, ObservedRows]:
    """The rows that enter the linear layers of "target" and "draft" while the answers run through both."""
    names = {name: [layer.name for layer in found] for name, found in layers.items()}
    target = cast(PreTrainedModel, modules["target"].get_submodule("model"))
    observed = {name: ObservedRows() for name in layers}
    for answer in answers:  # which may only now be made, by runs that are not to be observed
        with (
            as_transformers_runs_it(target),
            torch.no_grad(),
            observing(modules["target"], names["target"], observed["target"]),
            observing(modules["draft"], names["draft"], observed["draft"]),
        ):
            target(answer.tokens[None], use_cache=False)
            draft_chains(modules["draft"], spec, answer)
    return observed


def _read(how: Quantization, path: Path, graphs: Mapping[str, ir.Model]) -> Calibration:
    """What an earlier export kept."""
    read = scales_from_file if "fp8" in how.precisions.values() else plans_from_file
    calibration: Calibration = read(path)
    for name, graph in graphs.items():
        layers = calibration[name].layers if name in calibration else ()
        check_layers(path, name, linears(graph.graph), layers)
    return {name: calibration[name] for name in graphs}


def check_layers(
    path: Path, graph: str, layers: Sequence[Linear], found: Sequence[LayerPlan | LayerScale | SmoothedLayer]
) -> None:
    """Raises EagleError where what `path` holds for a graph is not of the graph's own layers."""
    expected = [(layer.name, *layer.matrix_shape) for layer in layers]
    held = [(layer.name, layer.outputs, layer.inputs) for layer in found]
    if held != expected:
        other = next((pair for pair in zip_longest(held, expected) if pair[0] != pair[1]), None)
        raise EagleError(
            f"--scales {path} is of another model: its {graph} has {other and other[0]} where this one has "
            f"{other and other[1]} (layer, outputs, inputs): leave --scales out to calibrate anew"
        )


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Keeps it, for the user and for a later export."""
    path.write_text(json.dumps({name: part.to_dict() for name, part in calibration.items()}, indent=1) + "\n", "utf-8")


def summary(calibration: Calibration) -> str:
    """One line for the user."""
    parts = list(calibration.values())
    scales = [part for part in parts if isinstance(part, Scales)]
    return _scales_summary(scales) if scales else _plan_summary([part for part in parts if isinstance(part, Plan)])


def _plan_summary(plans: Sequence[Plan]) -> str:
    layers = [layer for plan in plans for layer in plan.layers]
    weights = sum(layer.inputs * layer.outputs for layer in layers)
    wide = sum(min(layer.wide, layer.inputs) * layer.outputs for layer in layers if not layer.float32)
    kept = [layer for layer in layers if layer.float32]
    left = sum(layer.inputs * layer.outputs for layer in kept) / weights
    return f"int8: {wide / weights:.0%} of the weights meet activations of 16 bits, the others of 8; " + (
        f"{left:.0%} stay in float32 ({', '.join(layer.name for layer in kept[:4])})"
        if kept
        else "none stay in float32"
    )


def _scales_summary(scales: Sequence[Scales]) -> str:
    layers = [layer for part in scales for layer in part.layers]
    kept = [layer.name for layer in layers if layer.scale is None]
    return f"fp8: static scales of {len(layers) - len(kept)} layers by {scales[0].calibrator}; " + (
        f"{len(kept)} were never run and stay in float32 ({', '.join(kept[:4])})" if kept else "none stay in float32"
    )
