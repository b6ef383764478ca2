"""Choosing how each linear layer is quantized, by the error that its own outputs would have.

Weights have 8 bits and a scale for each output. Activations have a scale for each row, so that a row is quantized
alike whatever runs beside it, and 8 or 16 bits: 16 cost a second pass over weights that are already at hand, and
take the error of the activations, by far the larger one, away. A layer whose weights alone hurt stays in float32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eagle_calibration.observe import ObservedRows
from eagle_graphs.errors import EagleError
from eagle_graphs.lowering.linear import Linear
from eagle_graphs.lowering.native_cpu import W8A8
from eagle_graphs.lowering.quantize import groups_of
from eagle_graphs.native.packing import LARGEST, quantize_rows

FINE_ERROR = 1e-4
"""Error above which a layer's activations get 16 bits."""
KEPT_ERROR = 0.02
"""Error above which a layer stays in float32 though its activations have 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One linear layer."""

    name: str
    inputs: int
    outputs: int
    bits: int
    """Of its activations: 8 or 16; 32 where the layer stays in float32."""
    error_8: float | None
    """Sum of squares of the error of its outputs over that of the outputs; None where no row was seen."""
    error_16: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All linear layers of a graph."""

    layers: tuple[LayerPlan, ...]

    def w8a8(self) -> W8A8:
        """The plan as the lowering takes it."""
        return W8A8(
            keep={layer.name for layer in self.layers if layer.bits == 32},
            fine={layer.name for layer in self.layers if layer.bits == 16},
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def plan_layers(layers: Sequence[Linear], observed: ObservedRows) -> Plan:
    """The plan for `layers`, by what was observed at their names."""
    return Plan(layers=tuple(_plan(layer, observed.rows(layer.name)) for layer in layers))


def _plan(layer: Linear, rows: torch.Tensor | None) -> LayerPlan:
    weights = torch.from_numpy(layer.matrix())
    outputs, inputs = weights.shape
    error_8 = error_16 = None
    bits = 16
    if rows is not None and rows.shape[1] == inputs:
        integers, scale = quantize_rows(weights.numpy())
        rounded = torch.from_numpy(integers).float() * torch.from_numpy(scale)[:, None]
        exact, groups = rows @ weights.T, groups_of(layer.x, inputs)
        error_8, error_16 = (
            _relative_error(round_rows(rows, bits=bits, groups=groups) @ rounded.T, exact) for bits in (8, 16)
        )
        bits = 8 if error_8 <= FINE_ERROR else 16 if error_16 <= KEPT_ERROR else 32
    return LayerPlan(name=layer.name, inputs=inputs, outputs=outputs, bits=bits, error_8=error_8, error_16=error_16)


def round_rows(rows: torch.Tensor, *, bits: int, groups: int = 1) -> torch.Tensor:
    """Rows [R, K] as the kernel sees them: integers of so many bits times a scale for each row's group."""
    parts = rows.reshape(len(rows), groups, -1)
    scale = parts.abs().amax(dim=-1, keepdim=True) / LARGEST[bits]
    return (torch.where(scale > 0, parts / scale, 0).round() * scale).reshape(rows.shape)


def _relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).square().sum() / exact.square().sum().clamp_min(1e-30))


def plans_from_file(path: Path) -> dict[str, Plan]:
    """Plans by graph, as an earlier export kept them. Raises EagleError where the file holds none."""
    try:
        data = json.loads(path.read_text("utf-8"))
        return {
            graph: Plan(layers=tuple(LayerPlan(**layer) for layer in plan["layers"])) for graph, plan in data.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EagleError(
            f"--scales {path} is no file of scales ({type(error).__name__}: {error}); an export writes one as "
            "calibration.json into its bundle"
        ) from None
