"""Choosing how each linear layer is quantized, by the error that its own outputs would have.

Weights have 8 bits and a scale for each output. Activations have scales for each row, so that a row is quantized
alike whatever runs beside it. A few inputs of a layer are far larger than the others, in every row: under one scale
they leave the others few of their 8 bits. So the inputs are ordered by size, and the first ones, as many as it takes,
get 16 bits and a scale of their own. What then remains is about the error of the weights. A layer whose weights alone
hurt stays in float32.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle_calibration.observe import ObservedRows
from eagle_graphs.errors import EagleError
from eagle_graphs.lowering import QuantizedLayer
from eagle_graphs.lowering.linear import Linear
from eagle_graphs.native.packing import LARGEST, quantize_rows
from eagle_graphs.native_ops import WIDE_MULTIPLE

ERROR_RATIO = 2.5
"""Inputs are given 16 bits until the error is at most so many times that of the weights alone."""
LEAST_ERROR = 1e-6
"""Error that is always small enough; the weights alone may have none."""
KEPT_ERROR = 0.02
"""Error of the weights alone above which a layer stays in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One linear layer. Errors are sums of squares over that of the exact outputs; None where no row was seen."""

    name: str
    inputs: int
    outputs: int
    float32: bool
    """Whether it is left as it is."""
    wide: int
    """Inputs, the first of `order`, that have 16 bits."""
    order: tuple[int, ...]
    """The inputs by falling size; empty where they stay as they are."""
    error: float | None
    error_of_8_bits: float | None
    """Were all inputs under one scale."""
    error_of_weights: float | None
    """Were the inputs exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All linear layers of a graph."""

    layers: tuple[LayerPlan, ...]

    def quantized(self) -> dict[str, QuantizedLayer]:
        """The layers to quantize, as the lowering takes them."""
        return {
            layer.name: QuantizedLayer(wide=layer.wide, order=np.array(layer.order, np.int32) if layer.order else None)
            for layer in self.layers
            if not layer.float32
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def plan_layers(layers: Sequence[Linear], observed: ObservedRows) -> Plan:
    """The plan for `layers`, by what was observed at their names. Layers that read the same rows are planned alike."""
    alike: dict[Any, list[Linear]] = defaultdict(list)
    for layer in layers:
        alike[layer.x].append(layer)
    plans = {plan.name: plan for group in alike.values() for plan in _plan(group, observed.rows(group[0].name))}
    return Plan(layers=tuple(plans[layer.name] for layer in layers))


def _plan(group: Sequence[Linear], rows: torch.Tensor | None) -> list[LayerPlan]:
    matrices = [torch.tensor(layer.matrix()) for layer in group]
    inputs = matrices[0].shape[1]
    if rows is None or rows.shape[1] != inputs:
        everything = -(-inputs // WIDE_MULTIPLE) * WIDE_MULTIPLE
        return [
            _layer(layer, len(m), inputs, everything, (), (None,) * 3) for layer, m in zip(group, matrices, strict=True)
        ]
    order = rows.abs().amax(dim=0).argsort(descending=True)
    errors = [_Errors(rows[:, order], matrix[:, order]) for matrix in matrices]
    widths = list(_widths(inputs))
    enough = (w for w in widths if all(e.of(w) <= max(ERROR_RATIO * e.of_weights, LEAST_ERROR) for e in errors))
    wide = next(enough, widths[-1])
    kept = tuple(order.tolist()) if 0 < wide < inputs else ()
    return [
        _layer(layer, len(matrix), inputs, wide, kept, (error.of(wide), error.of(0), error.of_weights))
        for layer, matrix, error in zip(group, matrices, errors, strict=True)
    ]


def _layer(
    layer: Linear, outputs: int, inputs: int, wide: int, order: tuple[int, ...], errors: tuple[float | None, ...]
) -> LayerPlan:
    error, error_of_8_bits, error_of_weights = errors
    return LayerPlan(
        name=layer.name,
        inputs=inputs,
        outputs=outputs,
        float32=error_of_weights is not None and error_of_weights > KEPT_ERROR,
        wide=wide,
        order=order,
        error=error,
        error_of_8_bits=error_of_8_bits,
        error_of_weights=error_of_weights,
    )


def _widths(inputs: int) -> Iterator[int]:
    """Numbers of wide inputs to try, rising; the last one is all."""
    everything, wide = -(-inputs // WIDE_MULTIPLE) * WIDE_MULTIPLE, 0
    while wide < everything:
        yield wide
        wide += max(WIDE_MULTIPLE, wide // 4 // WIDE_MULTIPLE * WIDE_MULTIPLE)
    yield everything


class _Errors:
    """Errors of a layer's outputs; rows [R, K] and weights [N, K] have the inputs in the plan's order."""

    def __init__(self, rows: torch.Tensor, weights: torch.Tensor) -> None:
        integers, scale = quantize_rows(weights.numpy())
        self._rows, self._exact = rows, rows @ weights.T
        self._rounded = torch.from_numpy(integers).float() * torch.from_numpy(scale)[:, None]
        self.of_weights = self._relative(rows)

    def of(self, wide: int) -> float:
        """With 16 bits for the first `wide` inputs."""
        parts = (round_rows(self._rows[:, :wide], bits=16), round_rows(self._rows[:, wide:], bits=8))
        return self._relative(torch.cat(parts, dim=1))

    def _relative(self, rows: torch.Tensor) -> float:
        error = (rows @ self._rounded.T - self._exact).square().sum()
        return float(error / self._exact.square().sum().clamp_min(1e-30))


def round_rows(rows: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Rows [R, K] as the kernel sees them: integers of so many bits times a scale for each row."""
    if rows.shape[1] == 0:
        return rows
    scale = rows.abs().amax(dim=1, keepdim=True) / LARGEST[bits]
    return torch.where(scale > 0, rows / scale, 0).round() * scale


def plans_from_file(path: Path) -> dict[str, Plan]:
    """Plans by graph, as an earlier export kept them. Raises EagleError where the file holds none."""
    try:
        data = json.loads(path.read_text("utf-8"))
        return {
            graph: Plan(layers=tuple(_checked(LayerPlan(**layer)) for layer in plan["layers"]))
            for graph, plan in data.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EagleError(
            f"--scales {path} is no calibration of int8 ({type(error).__name__}: {error}); an export with --precision "
            "int8 writes one as calibration.json into its bundle"
        ) from None


def _checked(layer: LayerPlan) -> LayerPlan:
    """The layer with its order as a tuple. Raises ValueError where it is no order, or `wide` no number of inputs."""
    order = tuple(layer.order)
    if order and sorted(order) != list(range(layer.inputs)):
        raise ValueError(f"the order of {layer.name} does not name each input once")
    if layer.wide % WIDE_MULTIPLE or not 0 <= layer.wide < layer.inputs + WIDE_MULTIPLE:
        raise ValueError(f"{layer.name} has {layer.wide} inputs of 16 bits")
    return replace(layer, order=order)
