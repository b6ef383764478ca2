"""The precisions that a bundle can have, which options go with each, and whose kernels run it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from eagle_graphs import EagleError
from eagle_graphs.manifest import Exactness
from eagle_graphs.native import library_problem

Precision = Literal["fp32", "int8", "int8-weights", "int4", "fp8"]
Kernels = Literal["native", "stock"]

WEIGHT_BITS: dict[Precision, int] = {"int8-weights": 8, "int4": 4}
"""Of the precisions that quantize weights alone."""
ROUNDING: dict[Precision, float] = {"int8": 0.25, "int8-weights": 0.25, "fp8": 0.25, "int4": 0.5}
"""Error over all elements that an output may have, as a root mean square over that of the output in torch.

8 bits move a 135M model's features by 0.05, and 4 bits its keys and values by 0.2; a wrong position or mask by about 1.
"""
FP8_NOTE = (
    "fp8 is for GPUs: on a CPU ONNX Runtime rounds to 8 bits and computes in float32, which shows what the precision "
    "costs in quality, and is slower than fp32"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How weights and activations are kept. Raises EagleError on options that do not belong together."""

    precision: Precision = "fp32"
    """Of the target."""
    head_precision: Precision = "fp32"
    kernels: Literal["native", "stock", "auto"] = "auto"
    """Of attention and quantized products; auto for all that can be had."""
    allow_inexact: bool = False
    """Write a quantized bundle even where a tree's text may not be plain decoding's."""
    calibrator: Literal["minmax", "percentile", "entropy"] | None = None
    """Of fp8's static scales; None for minmax."""
    calibration_data: Path | None = None
    """Prompts to calibrate on, as JSON Lines; None for those shipped."""
    scales: Path | None = None
    """calibration.json of an earlier export, to quantize as that did: all that calibration found, not scales alone."""

    def __post_init__(self) -> None:
        found = set(self.precisions.values())
        if {"int8", "fp8"} <= found:
            raise EagleError(f"int8 and fp8 do not go together; found {self._chosen()}: choose one of them, or fp32")
        if self.allow_inexact and not found & {"int8", *WEIGHT_BITS}:
            raise EagleError(
                f"--allow-inexact is for --precision int8, int8-weights and int4; found {self._chosen()}: leave it out"
            )
        if self.calibrator is not None and "fp8" not in found:
            raise EagleError(f"--calibrator is for --precision fp8; found {self._chosen()}: leave it out")
        if not self.calibrated and (self.calibration_data is not None or self.scales is not None):
            raise EagleError(
                "--calibration-data and --scales are for --precision int8 with native kernels, and fp8; found "
                f"{self._chosen()}, which measures nothing on prompts: leave them out"
            )
        if self.scales is not None and (self.calibration_data is not None or self.calibrator is not None):
            raise EagleError(
                "--scales takes the calibration of an earlier export, --calibration-data and --calibrator make one: "
                "leave the one or the other out"
            )

    @property
    def precisions(self) -> dict[str, Precision]:
        """Of each graph."""
        return {"target": self.precision, "draft": self.head_precision}

    @property
    def quantized(self) -> dict[str, float]:
        """The graphs that are rounded beyond float32, and how far each may be from torch; see ROUNDING."""
        return {name: ROUNDING[precision] for name, precision in self.precisions.items() if precision != "fp32"}

    @property
    def calibrated(self) -> tuple[str, ...]:
        """The graphs for which it is measured on prompts what their activations look like."""
        measured = ("fp8",) if self.kernels == "stock" else ("fp8", "int8")
        return tuple(name for name, precision in self.precisions.items() if precision in measured)

    def check_exactness(self, exactness: Exactness) -> None:
        """Raises EagleError where a quantized target's trees were measured to be less exact than was asked for.

        INT8 promises bits, weights of few bits a gap as small as fp32's, fp8 nothing.
        """
        excluded = {"int8": ("near-tie", "statistical"), "int8-weights": ("statistical",), "int4": ("statistical",)}
        if exactness.kind in excluded.get(self.precision, ()) and not self.allow_inexact:
            reason = ", since some products stay in float32: experts, or layers that calibration left there"
            raise EagleError(
                f"in {self.precision} this model's trees are not exact: logits differ from plain decoding's by up to "
                f"{exactness.max_logit_difference:.2g}{reason if self.precision == 'int8' else ''}. Export with "
                "--precision fp32, or with --allow-inexact"
            )

    def _chosen(self) -> str:
        """The options that decide, as the user writes them."""
        words = [f"--precision {self.precision}"]
        if self.head_precision != self.precision:
            words.append(f"--head-precision {self.head_precision}")
        if self.kernels != "auto":
            words.append(f"--kernels {self.kernels}")
        return " ".join(words)


def cpu_precision(precision: str) -> Precision:
    """`--precision` for ONNX Runtime on the CPU. Raises EagleError where it is a GPU's."""
    if precision in get_args(Precision):
        return cast(Precision, precision)
    raise EagleError(
        f"--precision {precision} is for --backend tensorrt-rtx and tensorrt; onnxruntime takes "
        f"{', '.join(get_args(Precision))}"
    )


def choose_kernels(how: Quantization) -> tuple[tuple[Kernels, ...], tuple[str, ...]]:
    """The sets of kernels to make engines for, best first, and what the user should know of the choice.

    Raises EagleError where the native library is needed and cannot be used, or its exactness would be lost unasked.
    """
    precisions = how.precisions.values()
    notes = (FP8_NOTE,) if "fp8" in precisions else ()
    problem = None if how.kernels == "stock" else library_problem()
    if how.kernels == "native" and problem is not None:
        raise EagleError(f"--kernels native needs the library of native CPU ops, which cannot be used here: {problem}")
    inexact = how.precision == "int8" and how.kernels == "stock"  # a head's rounding changes no text
    if ("int8" in precisions and problem is not None) or (inexact and not how.allow_inexact):
        raise EagleError(
            f"--precision int8 needs the library of native CPU ops{'' if problem is None else f' ({problem})'}, since "
            "with ONNX Runtime's own attention a tree's text would not be plain decoding's: export with --precision "
            "fp32, or accept such text with --kernels stock --allow-inexact"
        )
    if problem is not None:
        return ("stock",), (*notes, f"graphs for ONNX Runtime's own ops alone: {problem}")
    if how.kernels == "stock":
        return ("stock",), notes
    if how.kernels == "native" or {"int8", "int8-weights"} & set(precisions):  # of int8-weights the stock product
        return ("native",), notes  # unpacks all weights in each pass
    return ("native", "stock"), notes
