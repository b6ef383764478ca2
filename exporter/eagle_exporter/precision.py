"""The precisions that a bundle can have, which options go with each, and whose kernels run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eagle_graphs import EagleError
from eagle_graphs.native import library_path

Precision = Literal["fp32", "int8", "int8-weights", "int4", "fp8"]
Kernels = Literal["native", "stock"]

WEIGHT_BITS: dict[Precision, int] = {"int8-weights": 8, "int4": 4}
"""Of the precisions that quantize weights alone."""
FP8_NOTE = (
    "fp8 is for GPUs: on a CPU ONNX Runtime rounds to 8 bits and computes in float32, which shows what the precision "
    "costs in quality, and is slower than fp32"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How weights and activations are kept. Raises EagleError on options that do not belong together."""

    precision: Precision = "fp32"
    kernels: Literal["native", "stock", "auto"] = "auto"
    """Of attention and quantized products; auto for all that can be had."""
    allow_inexact: bool = False
    """Make int8 of stock kernels, whose trees may say another text than plain decoding."""
    calibrator: Literal["minmax", "percentile", "entropy"] | None = None
    """Of fp8's static scales; None for minmax."""
    calibration_data: Path | None = None
    """Prompts to calibrate on, as JSON Lines; None for those shipped."""
    scales: Path | None = None
    """calibration.json of an earlier export, to quantize as that did."""

    def __post_init__(self) -> None:
        chosen = f"--precision {self.precision}" + (f" --kernels {self.kernels}" if self.kernels != "auto" else "")
        if self.allow_inexact and (self.precision, self.kernels) != ("int8", "stock"):
            raise EagleError(f"--allow-inexact is for --precision int8 --kernels stock; found {chosen}: leave it out")
        if self.calibrator is not None and self.precision != "fp8":
            raise EagleError(f"--calibrator is for --precision fp8; found {chosen}: leave it out")
        if not self.calibrated and (self.calibration_data is not None or self.scales is not None):
            raise EagleError(
                f"--calibration-data and --scales are for --precision int8 (native kernels) and fp8; found {chosen}, "
                "which measures nothing on prompts: leave them out"
            )
        if self.scales is not None and (self.calibration_data is not None or self.calibrator is not None):
            raise EagleError(
                "--scales takes what an earlier export measured, and --calibration-data and --calibrator measure anew: "
                "give the one or the other"
            )

    @property
    def quantized(self) -> bool:
        """Whether anything is rounded beyond float32."""
        return self.precision != "fp32"

    @property
    def calibrated(self) -> bool:
        """Whether what activations look like is measured on prompts."""
        return self.precision == "fp8" or (self.precision == "int8" and self.kernels != "stock")

    def notes(self) -> tuple[str, ...]:
        """What the user should know of the choice."""
        return (FP8_NOTE,) if self.precision == "fp8" else ()


def choose_kernels(how: Quantization) -> tuple[Kernels, ...]:
    """The sets of kernels to make engines for, best first, where "auto" asks for all that can be had.

    Raises EagleError where the native library is needed and missing, or its exactness would be lost unasked.
    """
    built = library_path() is not None
    if how.kernels == "native" and not built:
        raise EagleError(
            "--kernels native needs the library of native CPU ops, which was not built: install eagle-aot where there "
            "is a C++ compiler, or from a wheel"
        )
    if how.precision == "int8":
        if how.kernels == "stock" and how.allow_inexact:
            return ("stock",)
        if how.kernels == "stock" or not built:
            raise EagleError(
                "--precision int8 needs the library of native CPU ops, since with ONNX Runtime's own attention a "
                "tree's text would not be plain decoding's: install eagle-aot where there is a C++ compiler, export "
                "with --precision fp32, or accept such text with --kernels stock --allow-inexact"
            )
        return ("native",)
    if how.kernels == "stock" or not built:
        return ("stock",)
    return ("native",) if how.kernels == "native" else ("native", "stock")
