"""Linear layers for GPUs, run by ONNX Runtime, against numpy: what each precision rounds, and nothing else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from eagle_graphs import EagleError
from eagle_graphs.lowering import products
from eagle_graphs.lowering.linear import linears
from eagle_graphs.session_config import SESSION_CONFIG
from tests.graphs.small_graphs import LINEAR_FORMS, linear_form, model, ops, weights

HALF = ir.DataType.FLOAT16
form = pytest.mark.parametrize("name", LINEAR_FORMS)


def layer(name: str) -> tuple[ir.Model, np.ndarray, np.ndarray, np.ndarray]:
    """A graph of one layer, its input, its weights [N, K] and its bias."""
    graph, matrix, arrays, x = linear_form(name)
    return opset_24(graph), x, matrix, arrays.get("b", np.zeros(40, np.float32))


def opset_24(graph: ir.Model) -> ir.Model:
    graph.opset_imports[""] = 24
    return graph


def run(graph: ir.Model, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    for name, value in SESSION_CONFIG.items():
        options.add_session_config_entry(name, value)
    proto = ir.to_proto(graph).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    results: list[np.ndarray] = session.run(None, feeds)
    return results


@form
def test_half_products_round_inputs_and_weights(name: str) -> None:
    graph, x, matrix, bias = layer(name)
    (exact,) = run(graph, {"x": x})
    products.use_half_products(graph, HALF)
    assert linears(graph.graph) == []
    (found,) = run(graph, {"x": x})
    wanted = x.astype(np.float16).astype(np.float32) @ matrix.T.astype(np.float16).astype(np.float32) + bias
    np.testing.assert_allclose(found, wanted, atol=2e-3 * np.abs(wanted).max())
    np.testing.assert_allclose(found, exact, atol=4e-3 * np.abs(exact).max())


@form
def test_fp8_rounds_to_e4m3(name: str) -> None:
    graph, x, matrix, bias = layer(name)
    scale = float(np.abs(x).max()) / 448
    products.quantize_fp8(graph, {linear.name: scale for linear in linears(graph.graph)})
    (found,) = run(graph, {"x": x})

    def rounded(array: np.ndarray) -> np.ndarray:
        return array.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)

    steps = (np.abs(matrix).max(axis=1, keepdims=True) / 448).astype(np.float32)
    wanted = rounded(x / np.float32(scale)) * np.float32(scale) @ (rounded(matrix / steps) * steps).T + bias
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@form
def test_int8_smooths_inputs_before_it_rounds_them(name: str) -> None:
    graph, x, matrix, bias = layer(name)
    x[..., 7] *= 50  # an input that is always large
    smoothing = np.ones(96, np.float32)
    smoothing[7] = 50
    scale = float(np.abs(x / smoothing).max()) / 127
    how = products.StaticInt8(scale=scale, smoothing=smoothing)
    products.quantize_int8(graph, {linear.name: how for linear in linears(graph.graph)})
    (found,) = run(graph, {"x": x})
    steps = np.abs(matrix * smoothing).max(axis=1, keepdims=True) / 127
    integers = np.rint(x / smoothing / np.float32(scale)).clip(-128, 127) * np.float32(scale)
    wanted = integers @ (np.rint(matrix * smoothing / steps) * steps).T + bias
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-2)


@form
def test_int4_has_a_scale_for_each_block(name: str) -> None:
    graph, x, matrix, bias = layer(name)
    products.quantize_weights_in_blocks(graph, HALF)
    assert linears(graph.graph) == []
    (found,) = run(graph, {"x": x})
    blocks = matrix.reshape(40, 3, 32)
    steps = (np.abs(blocks).max(axis=2, keepdims=True) / 7).astype(np.float16).astype(np.float32)
    rounded = (np.rint(blocks / steps).clip(-7, 7) * steps).reshape(40, 96)
    wanted = x.astype(np.float16).astype(np.float32) @ rounded.T + bias
    np.testing.assert_allclose(found, wanted, atol=4e-3 * np.abs(wanted).max())


def test_weights_that_no_block_divides_are_left_for_half_precision() -> None:
    text = "agraph (float[R, 40] x) => (float[R, 8] y) {y = MatMul(x, w)}"
    graph = opset_24(model(text, w=weights(40, 8)))
    products.quantize_weights_in_blocks(graph, HALF)
    assert ops(graph) == ["MatMul"]


def test_a_layer_of_zeros_stays_one() -> None:
    for change in (
        lambda graph: products.quantize_fp8(graph, {"layer": 1.0}),
        lambda graph: products.quantize_int8(
            graph, {"layer": products.StaticInt8(scale=1.0, smoothing=np.ones(32, np.float32))}
        ),
        lambda graph: products.quantize_weights_in_blocks(graph, HALF),
    ):
        text = "agraph (float[R, 32] x) => (float[R, 8] y) {y = MatMul(x, w)}"
        graph = opset_24(model(text, w=np.zeros((32, 8), np.float32)))
        graph.graph[0].name = "layer"
        change(graph)
        (found,) = run(graph, {"x": weights(4, 32)})
        np.testing.assert_array_equal(found, np.zeros((4, 8)))


def test_a_weight_that_half_precision_does_not_hold_is_refused_by_name() -> None:
    graph = model("agraph (float[R, 32] x) => (float[R, 8] y) {y = MatMul(x, w)}", w=1e6 * weights(32, 8))
    graph.graph[0].name = "model.layers.0.mlp"
    with pytest.raises(EagleError, match=r"model.layers.0.mlp is larger than float16 can hold: use --precision bf16"):
        products.use_half_products(graph, HALF)
    products.use_half_products(graph, ir.DataType.BFLOAT16)


def test_layers_that_read_the_same_rows_are_joined() -> None:
    text = """
        agraph (float[B, Q, 64] x) => (float[B, Q, 33] a, float[B, Q, 16] b, float[B, Q, 16] c) {
            a = MatMul(x, u) p = MatMul(x, v) b = Add(p, d) n = Neg(x) c = MatMul(n, w)
        }
    """
    graph = model(text, u=weights(64, 33), v=weights(64, 16), w=weights(64, 16), d=weights(16))
    feeds = {"x": weights(1, 5, 64)}
    before = run(graph, feeds)
    graph.graph[0].name = "q_proj"
    products.merge_products(graph)
    assert linears(graph.graph)[0].name == "q_proj"
    assert ops(graph).count("MatMul") == 2
    for found, wanted in zip(run(graph, feeds), before, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_layers_that_follow_one_another_directly() -> None:
    text = "agraph (float[B, Q, 32] x) => (float[B, Q, 16] y) {h = MatMul(x, u) z = Add(h, b) y = MatMul(z, w)}"
    for change in (
        products.merge_products,
        lambda graph: products.use_half_products(graph, HALF),
        lambda graph: products.quantize_weights_in_blocks(graph, HALF),
        lambda graph: products.quantize_fp8(graph, {"first": 0.05, "second": 0.5}),
    ):
        graph = opset_24(model(text, u=weights(32, 32), w=weights(32, 16), b=weights(32)))
        graph.graph[0].name, graph.graph[2].name = "first", "second"
        feeds = {"x": weights(1, 5, 32)}
        (exact,) = run(graph, feeds)
        change(graph)
        (found,) = run(graph, feeds)
        assert np.abs(found - exact).max() < 0.3 * np.abs(exact).max()


def test_embedding_tables_are_kept_in_half_precision() -> None:
    text = "agraph (int64[B, Q] input_ids) => (float[B, Q, 16] e) {e = Gather(t, input_ids)}"
    table = weights(48, 16)
    graph = model(text, t=table)
    products.use_half_products(graph, HALF)
    (found,) = run(graph, {"input_ids": np.array([[0, 47, 9]])})
    np.testing.assert_array_equal(found[0], table.astype(np.float16).astype(np.float32)[[0, 47, 9]])
