"""Calibration within an export: the target's own answers run through both modules, and what each layer made of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import onnx_ir as ir
import torch
from torch import nn
from transformers import PreTrainedModel

from eagle_calibration.observe import observing
from eagle_calibration.plan import Plan, plan_layers
from eagle_exporter.heads import HeadSpec
from eagle_exporter.probe import Answer, draft_chains
from eagle_exporter.target import as_transformers_runs_it
from eagle_graphs.lowering.linear import linears


def calibrate(
    graphs: Mapping[str, ir.Model], modules: Mapping[str, nn.Module], spec: HeadSpec, answers: Sequence[Answer]
) -> dict[str, Plan]:
    """How each linear layer of the neutral graphs "target" and "draft" is to be quantized."""
    layers = {name: linears(graph.graph) for name, graph in graphs.items()}
    names = {name: [layer.name for layer in found] for name, found in layers.items()}
    target = cast(PreTrainedModel, modules["target"].get_submodule("model"))
    with (
        as_transformers_runs_it(target),
        torch.no_grad(),
        observing(modules["target"], names["target"]) as rows,
        observing(modules["draft"], names["draft"]) as draft_rows,
    ):
        for answer in answers:
            target(answer.tokens[None], use_cache=False)
            draft_chains(modules["draft"], spec, answer)
    observed = {"target": rows, "draft": draft_rows}
    return {name: plan_layers(found, observed[name]) for name, found in layers.items()}


def write_plans(path: Path, plans: Mapping[str, Plan]) -> None:
    """Keeps the plans, for the user and for a later export."""
    path.write_text(json.dumps({name: plan.to_dict() for name, plan in plans.items()}, indent=1) + "\n", "utf-8")


def summary(plans: Mapping[str, Plan]) -> str:
    """One line for the user."""
    layers = [layer for plan in plans.values() for layer in plan.layers]
    weights = sum(layer.inputs * layer.outputs for layer in layers)
    parts = []
    for bits, what in ((8, "activations of 8 bits"), (16, "activations of 16 bits"), (32, "left in float32")):
        share = sum(layer.inputs * layer.outputs for layer in layers if layer.bits == bits) / weights
        if share:
            parts.append(f"{share:.0%} of the weights {'with ' if bits < 32 else ''}{what}")
    kept = [layer.name for layer in layers if layer.bits == 32]
    return f"int8: {', '.join(parts)}" + (f" ({', '.join(kept[:4])})" if kept else "")
