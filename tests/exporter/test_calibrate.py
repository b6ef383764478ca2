"""The calibration of an earlier export, for the graphs and precisions that it is of."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import onnx_ir as ir
import pytest

from eagle_calibration.observe import ObservedRows
from eagle_calibration.plan import plan_layers
from eagle_calibration.scales import find_scales
from eagle_exporter.calibrate import Calibration, calibrate, write_calibration
from eagle_exporter.heads import HeadSpec
from eagle_exporter.precision import Precision, Quantization
from eagle_graphs import EagleError
from eagle_graphs.lowering.linear import linears
from tests.graphs.small_graphs import linear_form


@pytest.fixture
def graphs() -> dict[str, ir.Model]:
    return {"target": linear_form("MatMul")[0], "draft": linear_form("Gemm")[0]}


def found(precision: Precision, graphs: dict[str, ir.Model]) -> Calibration:
    """What is found where no layer was seen."""
    layers = {name: linears(graph.graph) for name, graph in graphs.items()}
    if precision == "fp8":
        return {name: find_scales(layer, ObservedRows(), "entropy") for name, layer in layers.items()}
    return {name: plan_layers(layer, ObservedRows()) for name, layer in layers.items()}


def reuse(path: Path, precision: Precision, head: Precision, graphs: dict[str, ir.Model]) -> Calibration:
    how = Quantization(precision=precision, head_precision=head, scales=path)
    return calibrate(how, graphs, {}, cast(HeadSpec, None), ())  # nothing is run, so the head does not matter


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_it_is_taken_for_the_graphs_that_need_it(
    precision: Precision, graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    earlier, path = found(precision, graphs), tmp_path / "calibration.json"
    write_calibration(path, earlier)
    assert reuse(path, precision, precision, graphs) == earlier
    assert reuse(path, precision, "fp32", graphs) == {"target": earlier["target"]}


@pytest.mark.parametrize(("written", "wanted"), [("int8", "fp8"), ("fp8", "int8")])
def test_that_of_another_precision_is_refused(
    written: Precision, wanted: Precision, graphs: dict[str, ir.Model], tmp_path: Path
) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, found(written, graphs))
    with pytest.raises(EagleError, match=f"is no calibration of {wanted}"):
        reuse(path, wanted, "fp32", graphs)


def test_that_of_another_model_is_refused(graphs: dict[str, ir.Model], tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    write_calibration(path, found("fp8", graphs))
    other = {"target": graphs["target"], "draft": linear_form("Gemm of columns")[0]}
    linears(other["draft"].graph)[0].nodes[0].name = "another"
    with pytest.raises(EagleError, match=r"is of another model: its draft has .* where this one has \('another', 40"):
        reuse(path, "fp8", "fp8", other)
