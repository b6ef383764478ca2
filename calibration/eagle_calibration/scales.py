"""Static scales of activations for 8-bit floats, one for each linear layer, by ONNX Runtime's calibrators.

What a layer's inputs are divided by is the range that a calibrator finds for them over the largest number of E4M3:

    minmax       the largest magnitude seen
    percentile   the magnitude that 99.999% of the rows' numbers stay below
    entropy      the range whose 128 steps keep most of the numbers' distribution (smallest Kullback-Leibler divergence)

The first looks at all rows that went through a layer, the others at those drawn from them.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from eagle_calibration.observe import ObservedRows
from eagle_graphs.errors import EagleError
from eagle_graphs.lowering.float8 import LARGEST
from eagle_graphs.lowering.linear import Linear

Calibrator = Literal["minmax", "percentile", "entropy"]

PERCENTILE = 99.999
BINS = 2048
"""Of the histogram of a layer's inputs."""
STEPS = 128
"""Numbers that the entropy calibrator has for a range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScale:
    """One linear layer."""

    name: str
    inputs: int
    outputs: int
    scale: float | None
    """What its inputs are divided by; None where no row was seen, and the layer stays in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """All linear layers of a graph."""

    calibrator: Calibrator
    layers: tuple[LayerScale, ...]

    def known(self) -> dict[str, float]:
        """The scales by layer, as the lowering takes them."""
        return {layer.name: layer.scale for layer in self.layers if layer.scale is not None}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def find_scales(layers: Sequence[Linear], observed: ObservedRows, calibrator: Calibrator) -> Scales:
    """The scales for `layers`, by what was observed at their names. Layers that read the same rows have the same."""
    alike: dict[Any, list[Linear]] = defaultdict(list)
    for layer in layers:
        alike[layer.x].append(layer)
    scales: dict[str, float | None] = {}
    for group in alike.values():
        scale = _scale(observed, group[0].name, calibrator)
        scales |= {layer.name: scale for layer in group}
    return Scales(
        calibrator=calibrator,
        layers=tuple(
            LayerScale(
                name=layer.name,
                inputs=layer.matrix_shape[1],
                outputs=layer.matrix_shape[0],
                scale=scales[layer.name],
            )
            for layer in layers
        ),
    )


def _scale(observed: ObservedRows, name: str, calibrator: Calibrator) -> float | None:
    if (rows := observed.rows(name)) is None:
        return None
    limit = observed.largest(name) if calibrator == "minmax" else _limit(rows, calibrator)
    return max(limit / LARGEST, float(np.finfo(np.float32).tiny))


def _limit(rows: torch.Tensor, calibrator: Calibrator) -> float:
    from onnxruntime.quantization.calibrate import HistogramCollector

    collector = HistogramCollector(
        calibrator, symmetric=True, num_bins=BINS, num_quantized_bins=STEPS, percentile=PERCENTILE, scenario="same"
    )
    with redirect_stdout(io.StringIO()):  # the collector prints its settings
        collector.collect({"rows": rows.numpy()})
        low, high, *_ = collector.compute_collection_result()["rows"]
    return max(abs(float(low)), abs(float(high)))


def scales_from_file(path: Path) -> dict[str, Scales]:
    """Scales by graph, as an earlier export kept them. Raises EagleError where the file holds none."""
    try:
        data = json.loads(path.read_text("utf-8"))
        found = {
            graph: Scales(
                calibrator=scales["calibrator"], layers=tuple(LayerScale(**layer) for layer in scales["layers"])
            )
            for graph, scales in data.items()
        }
        if any(scale.calibrator not in get_args(Calibrator) for scale in found.values()):
            raise ValueError("unknown calibrator")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EagleError(
            f"--scales {path} is no calibration of fp8 ({type(error).__name__}: {error}); an export with --precision "
            "fp8 writes one as calibration.json into its bundle"
        ) from None
    return found
