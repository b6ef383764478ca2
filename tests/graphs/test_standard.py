"""The lowering to standard ONNX, run by ONNX Runtime, against the op's numpy definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_graphs import tree_attention as op
from eagle_graphs.lowering.standard import lower_for_standard_onnx
from tests.graphs.test_lowering import (
    FRONTS,
    SCALE,
    SHAPES,
    WINDOWS,
    Neutral,
    Shape,
    expected,
    random_inputs,
    session_of,
    shapes,
)

CAPPED = {"softcap": 0.8}


def lowered(shape: Shape, front: str, dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Model:
    model = Neutral(shape, front).model()
    lower_for_standard_onnx(model, capacity=shape.capacity, dtype=dtype)
    return model


def check(shape: Shape, front: str, seed: int = 0) -> None:
    inputs = random_inputs(shape, front, seed)
    found = session_of(lowered(shape, front)).run(["out", "present_key", "present_value"], inputs)
    for array, wanted in zip(found, expected(shape, front, inputs), strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_definition(shape: Shape, front: str) -> None:
    check(shape, front)


@settings(max_examples=30, deadline=None)
@given(shapes(), st.sampled_from(FRONTS), st.integers(0, 2**16))
def test_equals_the_definition_over_random_shapes(shape: Shape, front: str, seed: int) -> None:
    check(shape, front, seed)


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_windows_count_positions(shape: Shape, window: int) -> None:
    check(replace(shape, attributes={"sliding_window": window}), "rotary")


@pytest.mark.parametrize("name", ["first token", "prefill", "verification", "draft level"])
def test_what_attention_does_not_express_is_written_out(name: str) -> None:
    check(replace(SHAPES[name], attributes=CAPPED), "rotary")
    check(replace(SHAPES[name], sinks=True), "rotary")
    check(replace(SHAPES[name], sinks=True, attributes={**CAPPED, "sliding_window": 5}), "split rows")


@pytest.mark.parametrize("attributes", [{}, CAPPED], ids=["attention", "written out"])
def test_in_half_precision_only_attention_and_its_cache_are(attributes: dict[str, float]) -> None:
    shape = replace(SHAPES["verification"], attributes=attributes)
    inputs = random_inputs(shape, "rotary", seed=1)
    for name in ("past_key", "past_value"):
        inputs[name] = inputs[name].astype(np.float16)
    model = lowered(shape, "rotary", ir.DataType.FLOAT16)
    out, *present = session_of(model).run(["out", "present_key", "present_value"], inputs)
    wanted, *_ = expected(
        shape,
        "rotary",
        {name: array.astype(inputs["query"].dtype) for name, array in inputs.items() if name.startswith("past")}
        | {name: array for name, array in inputs.items() if not name.startswith("past")},
    )
    assert out.dtype == np.float32
    assert {array.dtype for array in present} == {np.dtype(np.float16)}
    np.testing.assert_allclose(out, wanted, atol=4e-3)


@pytest.mark.parametrize("attributes", [{}, {"sliding_window": 3}], ids=["full", "window"])
def test_padding_that_sees_itself_changes_no_other_row(attributes: dict[str, float]) -> None:
    shape = Shape(committed=9, new=6, after=6, heads=4, kv_heads=2, attributes=attributes)
    inputs = random_inputs(shape, "heads", seed=2)
    wanted, *_ = expected(shape, "heads", inputs)
    padded = {
        name: np.pad(inputs[name], ((0, 0), (0, 0), (0, 2), (0, 0)), constant_values=7)
        for name in ("query", "key", "value")
    }
    mask = np.zeros((1, 8, 8), np.bool_)
    mask[:, :6, :6], mask[:, 6, 6], mask[:, 7, 7] = inputs["tree_mask"], True, True
    out, *_ = session_of(lowered(shape, "heads")).run(None, inputs | padded | {"tree_mask": mask})
    np.testing.assert_allclose(out[:, :6], wanted, rtol=1e-4, atol=1e-5)
    assert np.isfinite(out).all()


def test_layers_share_the_mask_of_their_window() -> None:
    model = Neutral(SHAPES["verification"], "split rows").model()
    first = next(node for node in model.graph if node.op_type == op.NAME)
    for number, window in enumerate((4, 0, 4, 9), start=2):
        attributes = {"scale": SCALE * number, "sliding_window": window}
        other = ir.node(op.NAME, first.inputs, attributes, domain=op.DOMAIN, num_outputs=3)
        for copy, original in zip(other.outputs, first.outputs, strict=True):
            copy.shape = original.shape
        model.graph.insert_after(first, other)
        model.graph.outputs.append(other.outputs[0])
    lower_for_standard_onnx(model, capacity=64)
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    assert sorted(node.name or "" for node in nodes) == [f"attention.{number}" for number in range(5)]
    assert len({node.inputs[3] for node in nodes}) == 3


def test_the_graph_is_standard_onnx_of_fixed_capacity() -> None:
    model = lowered(SHAPES["verification"], "rotary", ir.DataType.FLOAT16)
    assert dict(model.opset_imports) == {"": 24}
    shapes = {value.name: list(value.shape or ()) for value in (*model.graph.inputs, *model.graph.outputs)}
    assert shapes["past_key"] == shapes["present_value"] == [1, 3, SHAPES["verification"].capacity, 16]
    (attention,) = [node for node in model.graph if node.op_type == "Attention"]
    assert {value.name for value in attention.inputs[1:3]} == {"present_key", "present_value"}
