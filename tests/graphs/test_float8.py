"""The pass for 8-bit floats, its graph run in ONNX Runtime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from eagle_graphs.lowering.float8 import LARGEST, quantize_float8
from eagle_graphs.lowering.linear import linears
from eagle_graphs.session_config import SESSION_CONFIG
from tests.graphs.small_graphs import LINEAR_FORMS, linear_form, model, ops, weights

E4M3 = ml_dtypes.float8_e4m3fn
ROUNDED = ["DequantizeLinear", "QuantizeLinear"]


def run(graph: ir.Model, feeds: dict[str, np.ndarray], *, config: dict[str, str]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    for name, value in config.items():
        options.add_session_config_entry(name, value)
    proto = ir.to_proto(graph).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    results: list[np.ndarray] = session.run(None, feeds)
    return results


def rounded(numbers: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """As E4M3 times a scale; what lies beyond its range is cut off."""
    result: np.ndarray = np.clip(numbers / scale, -LARGEST, LARGEST).astype(E4M3).astype(np.float32) * scale
    return result


@pytest.mark.parametrize("config", [{}, SESSION_CONFIG], ids=["as it is", "as bundles run"])
@pytest.mark.parametrize("largest", [4.0, 1.0], ids=["all in range", "cut off"])
@pytest.mark.parametrize("form", LINEAR_FORMS)
def test_every_form_of_a_linear_layer(form: str, largest: float, config: dict[str, str]) -> None:
    graph, matrix, arrays, x = linear_form(form)
    (linear,) = linears(graph.graph)
    scale = float(np.float32(largest / LARGEST))
    before = ops(graph)
    quantize_float8(graph, {linear.name: scale})
    assert sorted(ops(graph)) == sorted([*ROUNDED, "DequantizeLinear", *before])
    weight_scale = np.abs(matrix).max(axis=1, keepdims=True) / np.float32(LARGEST)
    wanted = rounded(x, np.float32(scale)) @ rounded(matrix, weight_scale).T + arrays.get("b", np.float32(0))
    (found,) = run(graph, {"x": x}, config=config)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_layers_that_read_the_same_rows_round_them_once() -> None:
    graph = model(
        "agraph (float[R, 64] x) => (float[R, 16] a, float[R, 16] b) {a = MatMul(x, u) b = MatMul(x, v)}",
        u=weights(64, 16),
        v=weights(64, 16),
    )
    quantize_float8(graph, {linear.name: 0.01 for linear in linears(graph.graph)})
    assert sorted(ops(graph)) == sorted([*ROUNDED, "DequantizeLinear", "DequantizeLinear", "MatMul", "MatMul"])


def test_layers_without_a_scale_stay() -> None:
    graph, *_ = linear_form("MatMul")
    quantize_float8(graph, {"another": 1.0})
    assert ops(graph) == ["MatMul"]
