"""The options of what an export makes for GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from eagle_graphs import EagleError
from eagle_graphs.tensorrt.build import BuildOptions
from eagle_graphs.tensorrt.library import Attention

GpuPrecision = Literal["fp16", "bf16", "fp8", "int8", "int4"]
TOLERANCE: dict[GpuPrecision, float] = {"fp16": 0.02, "bf16": 0.1, "fp8": 0.25, "int8": 0.25, "int4": 0.5}
"""Error allowed over all elements of an output, as a root mean square over that of the output in torch."""
_BESIDE_CPU: dict[str, GpuPrecision] = {
    "fp32": "fp16",
    "int8-weights": "fp16",
    "int8": "int8",
    "int4": "int4",
    "fp8": "fp8",
}


def gpu_precision(precision: str, backend: str) -> GpuPrecision:
    """Of what is made for GPUs, where `--precision` is `precision`. Raises EagleError where they do not have it."""
    if backend == "onnxruntime":
        return _BESIDE_CPU[precision]
    if precision in get_args(GpuPrecision):
        return cast(GpuPrecision, precision)
    raise EagleError(
        f"--precision {precision} is for --backend onnxruntime; {backend} takes {', '.join(get_args(GpuPrecision))}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """What to make. Raises EagleError on options that do not belong together."""

    precision: GpuPrecision
    head_precision: GpuPrecision
    build: BuildOptions | None
    """None for portable graphs alone."""
    keep_portable: bool
    """Whether the bundle holds the portable graphs; it does where engines need their weights."""
    attention: Attention = "native"
    """"plugin" for graphs with TensorRT's plugins beside the standard ones."""
    calibrator: Literal["minmax", "percentile", "entropy"] | None = None
    """Of fp8's scales; None for minmax."""
    calibration_data: Path | None = None
    """Prompts to calibrate on, as JSON Lines; None for those shipped."""
    scales: Path | None = None
    """What an earlier export's calibration found."""

    def __post_init__(self) -> None:
        found = set(self.precisions.values())
        if {"int8", "fp8"} <= found or {"fp16", "bf16"} <= found or ("bf16" in found and len(found) > 1):
            raise EagleError(
                f"{self.precision} for the target and {self.head_precision} for the head do not go together: choose "
                "one precision, or fp16 for one of the two"
            )
        if self.calibrator is not None and "fp8" not in found:
            raise EagleError(f"--calibrator is for --precision fp8; found {self.precision}: leave it out")
        if not self.calibrated and (self.scales is not None or self.calibration_data is not None):
            raise EagleError(
                f"--calibration-data and --scales are for --precision fp8 and int8; found {self.precision}, which "
                "measures nothing on prompts: leave them out"
            )
        if self.build is not None and self.build.strip_weights and not self.keep_portable:
            raise EagleError("--strip-weights leaves the weights to the portable graphs: add --portable")

    @property
    def precisions(self) -> dict[str, GpuPrecision]:
        """Of each graph."""
        return {"target": self.precision, "draft": self.head_precision}

    @property
    def calibrated(self) -> tuple[str, ...]:
        """The graphs whose activations have static scales."""
        return tuple(name for name, precision in self.precisions.items() if precision in ("fp8", "int8"))

    def allowed(self) -> dict[str, float]:
        """Of each graph, the error that its rounding explains."""
        return {name: TOLERANCE[precision] for name, precision in self.precisions.items()}

    @property
    def dtype(self) -> str:
        """Of attention, caches and the products that are not quantized."""
        return "bfloat16" if self.precision == "bf16" else "float16"
