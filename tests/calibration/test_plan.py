"""Observing a model's linear layers, planning their quantization, and comparing models on text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

from eagle_calibration.evaluation import compare_quality, evaluation_text
from eagle_calibration.observe import KEPT_ROWS, ObservedRows, observing
from eagle_calibration.plan import ERROR_RATIO, Plan, plan_layers, plans_from_file, round_rows
from eagle_graphs import EagleError
from eagle_graphs.lowering.linear import Linear
from eagle_graphs.native.packing import pack, quant_linear, quantize_rows
from tests.seeded import RANDOM

INPUTS = 256


def layer(name: str, x: ir.Value, weights: np.ndarray) -> Linear:
    """A MatMul of `x` with `weights` [N, K]."""
    tensor = ir.tensor(np.ascontiguousarray(weights.T), name=f"{name}.weight")
    weight = ir.val(tensor.name, ir.DataType.FLOAT, weights.shape[::-1], const_value=tensor)
    node = ir.node("MatMul", [x, weight], name=name)
    return Linear(nodes=(node,), y=node.outputs[0], weight=weight, rows_are_outputs=False, bias=None)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def planned(rows: np.ndarray, *matrices: np.ndarray) -> Plan:
    """The plan of layers that read the same rows."""
    x, observed = ir.val("x", ir.DataType.FLOAT, ["R", rows.shape[1]]), ObservedRows()
    observed.add("layer 0", torch.from_numpy(rows))
    return plan_layers([layer(f"layer {i}", x, matrix) for i, matrix in enumerate(matrices)], observed)


def outliers(rows: int, places: Sequence[int], size: float) -> np.ndarray:
    x = normal(rows, INPUTS)
    x[:, list(places)] *= size
    return x


def test_the_large_inputs_come_first_and_get_16_bits() -> None:
    places = RANDOM.permutation(INPUTS)[:40]
    (plan,) = planned(outliers(200, places, 100), normal(64, INPUTS)).layers
    assert set(plan.order[:40]) == set(places.tolist())
    assert sorted(plan.order) == list(range(INPUTS))
    assert plan.wide == 64
    assert not plan.float32
    assert plan.error <= ERROR_RATIO * plan.error_of_weights
    assert plan.error_of_8_bits > 4 * plan.error


def test_inputs_that_are_alike_need_more_16_bits_than_a_few_large_ones() -> None:
    even, few = (planned(x, normal(64, INPUTS)).layers[0] for x in (normal(200, INPUTS), outliers(200, [3], 1000)))
    assert few.wide == 64
    assert even.error <= ERROR_RATIO * even.error_of_weights


def test_the_errors_are_the_kernel_s() -> None:
    rows, weights = outliers(100, [1, 77, 200], 300), normal(32, INPUTS)
    (plan,) = planned(rows, weights).layers
    integers, scale = quantize_rows(weights)
    order = np.array(plan.order, np.int32)
    found = quant_linear(rows, pack(integers[:, order]), scale, order=order, depth=INPUTS, wide=plan.wide)
    exact = rows @ weights.T
    assert plan.error == pytest.approx(np.square(found - exact).sum() / np.square(exact).sum(), rel=0.02)


def test_layers_that_read_the_same_rows_are_planned_alike() -> None:
    flat, weights = normal(64, INPUTS), normal(64, INPUTS)
    weights[:, 0] *= 100
    first, second = planned(outliers(200, [0], 50), flat, weights).layers
    assert (first.wide, first.order) == (second.wide, second.order)


def test_a_layer_whose_weights_alone_hurt_stays_in_float32() -> None:
    weights = normal(32, INPUTS)
    weights[:, 5] *= 1e4
    rows = normal(100, INPUTS)
    rows[:, 5] = 0
    (plan,) = planned(rows, weights).layers
    assert plan.float32
    assert planned(rows, weights).quantized() == {}


@pytest.mark.parametrize("weights", [None, np.eye(INPUTS, dtype=np.float32)], ids=["signs", "identity"])
def test_weights_that_8_bits_hold_exactly_are_planned(weights: np.ndarray | None) -> None:
    weights = np.sign(normal(64, INPUTS)) if weights is None else weights
    (plan,) = planned(normal(100, INPUTS), weights).layers
    assert plan.error_of_weights < 1e-9
    assert plan.error < 1e-5


def test_rows_that_are_not_finite_are_not_observed() -> None:
    rows = outliers(100, [7], 500)
    rows[3, 2], rows[5, 9] = np.nan, np.inf
    assert planned(rows, normal(32, INPUTS)).layers[0].order[0] == 7


def test_a_long_observation_keeps_few_rows_from_all_of_it() -> None:
    observed = ObservedRows()
    for start in range(0, 5000, 100):
        observed.add("x", torch.arange(start, start + 100.0)[:, None])
    rows = observed.rows("x")
    assert rows is not None
    assert KEPT_ROWS / 2 < len(rows) <= KEPT_ROWS
    assert rows.min() < 100
    assert rows.max() > 4800


def test_a_layer_that_never_ran_gets_16_bits_throughout() -> None:
    x = ir.val("x", ir.DataType.FLOAT, ["R", 100])
    (plan,) = plan_layers([layer("unseen", x, normal(8, 100))], ObservedRows()).layers
    assert (plan.wide, plan.order, plan.error, plan.float32) == (128, (), None, False)
    assert plan_layers([layer("unseen", x, normal(8, 100))], ObservedRows()).quantized()["unseen"].order is None


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plans = {"target": planned(outliers(50, [2], 99), normal(16, INPUTS)), "draft": Plan(layers=())}
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({name: plan.to_dict() for name, plan in plans.items()}))
    assert plans_from_file(path) == plans


@pytest.mark.parametrize("change", [{"order": [0] * INPUTS}, {"wide": 63}, {"wide": 4096}, {"wide": -64}])
def test_a_plan_that_cannot_be_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    data = {"target": planned(outliers(50, [2], 99), normal(16, INPUTS)).to_dict()}
    data["target"]["layers"][0].update(change)
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(data, default=list))
    with pytest.raises(EagleError, match="no calibration of int8"):
        plans_from_file(path)


@pytest.mark.parametrize("content", ["", "[]", '{"target": 1}', '{"target": {"layers": [{"name": "x"}]}}', None])
def test_a_file_that_is_no_plan_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EagleError, match=r"--scales .*scales.json is no calibration of int8 .* calibration.json"):
        plans_from_file(path)


def test_rows_are_rounded_by_their_own_largest() -> None:
    rows = torch.tensor([[127.0, 0.4, -2.6], [0.0, 0.0, 0.0]])
    assert round_rows(rows, bits=8).tolist() == [[127, 0, -3], [0, 0, 0]]
    assert round_rows(rows, bits=16)[0, 1] == pytest.approx(0.4, abs=127 / 32639 / 2)


def test_rows_are_observed_at_the_layers_named_and_only_inside() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(3, 300, 4)
    observed = ObservedRows()
    with torch.no_grad(), observing(model, ["2", "missing"], observed):
        model(x)
    with torch.no_grad():
        model(x)
        entered = model[1](model[0](x)).flatten(0, 1)
    rows = observed.rows("2")
    assert rows is not None
    assert KEPT_ROWS / 2 < len(rows) <= KEPT_ROWS
    torch.testing.assert_close(rows, entered[:: -(-900 // KEPT_ROWS)])
    assert observed.rows("0") is None


def test_quality_by_hand() -> None:
    """Two windows of three tokens; the models differ at one place."""
    even, sure = torch.zeros(3, 4), torch.zeros(3, 4)
    sure[0, 1] = math.log(3)
    quality = compare_quality([0, 1, 2, 0, 1, 2], lambda _: even, lambda _: sure, window=3)
    assert quality.tokens == 4
    assert quality.original_perplexity == pytest.approx(4)
    assert quality.perplexity == pytest.approx(math.sqrt(2 * 4))  # 1/2 where it is sure and right, else 1/4
    exact, found = np.full(4, 1 / 4), np.array([1, 3, 1, 1]) / 6
    assert quality.divergence == pytest.approx((exact * np.log(exact / found)).sum() / 2)
    assert quality.agreement == 0.5
    assert quality.perplexity_change == pytest.approx(math.sqrt(8) / 4 - 1)
    assert "likeliest token the same at 50.0%" in quality.sentence()


def test_there_is_text_on_every_machine() -> None:
    assert len(evaluation_text()) > 60_000
