"""Whose kernels an export is for, by what was asked for and what there is; and how exact its trees must be."""

from __future__ import annotations

from typing import Any, Literal

import pytest

import eagle_graphs.native
from eagle_exporter.precision import FP8_NOTE, Precision, Quantization, choose_kernels
from eagle_graphs import EagleError
from eagle_graphs.manifest import Exactness


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({}, ("native", "stock")),
        ({"kernels": "native"}, ("native",)),
        ({"kernels": "stock"}, ("stock",)),
        ({"precision": "int4"}, ("native", "stock")),
        ({"precision": "fp8"}, ("native", "stock")),
        ({"precision": "int8-weights"}, ("native",)),
        ({"precision": "int8-weights", "kernels": "stock"}, ("stock",)),
        ({"precision": "int8"}, ("native",)),
        ({"head_precision": "int8"}, ("native",)),
        ({"head_precision": "int8", "kernels": "stock"}, ("stock",)),
        ({"precision": "int4", "head_precision": "int8"}, ("native",)),
        ({"precision": "int8", "kernels": "stock", "allow_inexact": True}, ("stock",)),
    ],
    ids=str,
)
def test_kernels_where_the_library_is_built(options: dict[str, Any], kernels: tuple[str, ...]) -> None:
    found, notes = choose_kernels(Quantization(**options))
    assert found == kernels
    assert notes == ((FP8_NOTE,) if options.get("precision") == "fp8" else ())


def test_kernels_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle_graphs.native, "library_path", lambda: None)
    kernels, (note,) = choose_kernels(Quantization())
    assert kernels == ("stock",)
    assert note.startswith("graphs for ONNX Runtime's own ops alone: it was not built")
    assert choose_kernels(Quantization(kernels="stock")) == (("stock",), ())
    for options, words in (
        (Quantization(kernels="native"), "--kernels native needs .* cannot be used here: it was not built"),
        (Quantization(precision="int8"), r"--precision int8 needs .* \(it was not built.*--allow-inexact"),
    ):
        with pytest.raises(EagleError, match=words):
            choose_kernels(options)


@pytest.mark.parametrize(
    ("precision", "kind", "passes"),
    [
        ("fp32", "statistical", True),
        ("int8", "bitwise", True),
        ("int8", "near-tie", False),
        ("int8-weights", "near-tie", True),
        ("int4", "near-tie", True),
        ("int4", "statistical", False),
        ("fp8", "statistical", True),
    ],
)
def test_the_class_that_a_precision_promises(
    precision: Precision, kind: Literal["bitwise", "near-tie", "statistical"], passes: bool
) -> None:
    exactness = Exactness(kind=kind, logit_gap=0.5, max_logit_difference=0.25, rows=9)
    if passes:
        Quantization(precision=precision).check_exactness(exactness)
    else:
        with pytest.raises(EagleError, match=f"in {precision} this model's trees are not exact: .* up to 0.25"):
            Quantization(precision=precision).check_exactness(exactness)
        Quantization(precision=precision, allow_inexact=True).check_exactness(exactness)
