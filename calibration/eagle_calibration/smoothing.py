"""Static INT8 scales of activations, one for each linear layer, with SmoothQuant in front.

Under one scale for all inputs and rows, the few inputs that are far larger than the rest leave the rest few of their
127 steps. So each input is first divided by a factor, which its weights are multiplied by:

    factor = sqrt(largest magnitude of the input / largest magnitude of its weights)

which leaves both as hard to round (Xiao et al., 2023, https://arxiv.org/abs/2211.10438, with alpha 0.5).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle_calibration.observe import ObservedRows
from eagle_graphs.errors import EagleError
from eagle_graphs.lowering.linear import Linear
from eagle_graphs.lowering.products import StaticInt8


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothedLayer:
    """One linear layer. A layer that no row ran through has no scale, and stays in half precision."""

    name: str
    inputs: int
    outputs: int
    scale: float | None
    smoothing: tuple[float, ...]
    """What each input is divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smoothing:
    """All linear layers of a graph."""

    layers: tuple[SmoothedLayer, ...]

    def known(self) -> dict[str, StaticInt8]:
        """By layer, as the lowering takes it."""
        return {
            layer.name: StaticInt8(scale=layer.scale, smoothing=np.array(layer.smoothing, np.float32))
            for layer in self.layers
            if layer.scale is not None
        }

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def find_smoothing(layers: Sequence[Linear], observed: ObservedRows) -> Smoothing:
    """The factors and scales for `layers`, by what was observed at their names."""
    return Smoothing(layers=tuple(_smoothed(layer, observed) for layer in layers))


def _smoothed(layer: Linear, observed: ObservedRows) -> SmoothedLayer:
    outputs, inputs = layer.matrix_shape
    largest = observed.largest_inputs(layer.name)
    if largest is None:
        return SmoothedLayer(name=layer.name, inputs=inputs, outputs=outputs, scale=None, smoothing=())
    rows, weights = largest.double().numpy(), np.abs(layer.matrix()).max(axis=0).astype(np.float64)
    used = (rows > 0) & (weights > 0)
    factors = np.ones(inputs)
    factors[used] = np.sqrt(rows[used] / weights[used])
    factors = np.array([float(f"{factor:.6g}") for factor in factors])
    scale = max(float((rows / factors).max()) / 127, float(np.finfo(np.float32).tiny))
    return SmoothedLayer(
        name=layer.name, inputs=inputs, outputs=outputs, scale=scale, smoothing=tuple(factors.tolist())
    )


def smoothing_from_file(path: Path) -> dict[str, Smoothing]:
    """By graph, as an earlier export kept it. Raises EagleError where the file holds none."""
    try:
        data = json.loads(path.read_text("utf-8"))
        return {
            graph: Smoothing(layers=tuple(_checked(SmoothedLayer(**layer)) for layer in part["layers"]))
            for graph, part in data.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EagleError(
            f"--scales {path} is no calibration of int8 for TensorRT ({type(error).__name__}: {error}); an export with "
            "--backend tensorrt-rtx --precision int8 writes one as gpu-calibration.json into its bundle"
        ) from None


def _checked(layer: SmoothedLayer) -> SmoothedLayer:
    smoothing = tuple(map(float, layer.smoothing))
    expected = 0 if layer.scale is None else layer.inputs
    if len(smoothing) != expected or min(smoothing, default=1.0) <= 0:
        raise ValueError(f"{layer.name} has {len(smoothing)} factors for {layer.inputs} inputs")
    return SmoothedLayer(
        name=layer.name, inputs=layer.inputs, outputs=layer.outputs, scale=layer.scale, smoothing=smoothing
    )
