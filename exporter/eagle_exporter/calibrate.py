"""Calibration within an export: the target's own answers run through both modules, and what each layer made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import cast

import onnx_ir as ir
import torch
from torch import nn
from transformers import PreTrainedModel

from eagle_calibration.observe import ObservedRows, observing
from eagle_calibration.plan import Plan, plan_layers, plans_from_file
from eagle_exporter.heads import HeadSpec
from eagle_exporter.probe import Answer, draft_chains
from eagle_exporter.target import as_transformers_runs_it
from eagle_graphs import EagleError
from eagle_graphs.lowering.linear import linears


def calibrate(
    graphs: Mapping[str, ir.Model], modules: Mapping[str, nn.Module], spec: HeadSpec, answers: Iterable[Answer]
) -> dict[str, Plan]:
    """How each linear layer of the neutral graphs "target" and "draft" is to be quantized."""
    layers = {name: linears(graph.graph) for name, graph in graphs.items()}
    names = {name: [layer.name for layer in found] for name, found in layers.items()}
    target = cast(PreTrainedModel, modules["target"].get_submodule("model"))
    observed = {name: ObservedRows() for name in graphs}
    for answer in answers:  # which may only now be made, by runs that are not to be observed
        with (
            as_transformers_runs_it(target),
            torch.no_grad(),
            observing(modules["target"], names["target"], observed["target"]),
            observing(modules["draft"], names["draft"], observed["draft"]),
        ):
            target(answer.tokens[None], use_cache=False)
            draft_chains(modules["draft"], spec, answer)
    return {name: plan_layers(found, observed[name]) for name, found in layers.items()}


def read_plans(path: Path, graphs: Mapping[str, ir.Model]) -> dict[str, Plan]:
    """The plans that an earlier export kept. Raises EagleError where they are not of these graphs' layers."""
    plans = plans_from_file(path)
    for name, graph in graphs.items():
        expected = [(layer.name, *layer.matrix_shape) for layer in linears(graph.graph)]
        found = [(layer.name, layer.outputs, layer.inputs) for layer in plans[name].layers] if name in plans else []
        if found != expected:
            other = next((pair for pair in zip_longest(found, expected) if pair[0] != pair[1]), None)
            raise EagleError(
                f"--scales {path} is of another model: its {name} has {other and other[0]} where this one has "
                f"{other and other[1]} (layer, outputs, inputs): leave --scales out to calibrate anew"
            )
    return {name: plans[name] for name in graphs}


def write_plans(path: Path, plans: Mapping[str, Plan]) -> None:
    """Keeps the plans, for the user and for a later export."""
    path.write_text(json.dumps({name: plan.to_dict() for name, plan in plans.items()}, indent=1) + "\n", "utf-8")


def summary(plans: Mapping[str, Plan]) -> str:
    """One line for the user."""
    layers = [layer for plan in plans.values() for layer in plan.layers]
    weights = sum(layer.inputs * layer.outputs for layer in layers)
    wide = sum(min(layer.wide, layer.inputs) * layer.outputs for layer in layers if not layer.float32)
    kept = [layer for layer in layers if layer.float32]
    left = sum(layer.inputs * layer.outputs for layer in kept) / weights
    return f"int8: {wide / weights:.0%} of the weights meet activations of 16 bits, the others of 8; " + (
        f"{left:.0%} stay in float32 ({', '.join(layer.name for layer in kept[:4])})"
        if kept
        else "none stay in float32"
    )
