"""W8A8 with ONNX Runtime's ops, its graph run there."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from eagle_graphs.lowering.stock_int8 import quantize_linears_with_stock_ops
from eagle_graphs.native.packing import quantize_rows
from tests.graphs.small_graphs import LINEAR_FORMS, linear_form, model, ops, weights

ROUNDED = ["Abs", "ReduceMax", "Max", "Div", "QuantizeLinear"]


def run(graph: ir.Model, x: np.ndarray) -> np.ndarray:
    proto = ir.to_proto(graph).SerializeToString()
    session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"x": x})
    found: np.ndarray = result
    return found


@pytest.mark.parametrize("form", LINEAR_FORMS)
def test_every_form_of_a_linear_layer(form: str) -> None:
    graph, matrix, arrays, x = linear_form(form)
    x[..., :2, :] *= 1000
    x[..., 2, :] = 0
    quantize_linears_with_stock_ops(graph)
    assert ops(graph) == [*ROUNDED, "MatMulIntegerToFloat", "Mul", *(["Add"] if "b" in arrays else [])]
    integers, scale = quantize_rows(matrix)
    largest = np.abs(x).max(axis=-1, keepdims=True)
    steps = np.rint(127 * np.divide(x, largest, out=np.zeros_like(x), where=largest > 0))
    wanted = (steps @ integers.T.astype(np.float32)) * largest / 127 * scale + arrays.get("b", np.float32(0))
    np.testing.assert_allclose(run(graph, x), wanted, rtol=1e-4, atol=1e-4)


def test_layers_that_read_the_same_rows_round_them_once() -> None:
    graph = model(
        "agraph (float[R, 64] x) => (float[R, 16] a, float[R, 16] b) {a = MatMul(x, u) b = MatMul(x, v)}",
        u=weights(64, 16),
        v=weights(64, 16),
    )
    quantize_linears_with_stock_ops(graph)
    assert sorted(ops(graph)) == sorted([*ROUNDED, *["MatMulIntegerToFloat", "Mul"] * 2])
