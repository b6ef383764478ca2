"""The passes of the W8A8 lowering: each alone, its graph run before and after in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from eagle_graphs.lowering import QuantizedLayer, quantize
from eagle_graphs.lowering.linear import linears
from eagle_graphs.native import packing
from tests.graphs.native import session_options
from tests.graphs.small_graphs import LINEAR_FORMS, linear_form, model, ops, weights
from tests.seeded import RANDOM

Arrays = dict[str, np.ndarray]


def run(graph: ir.Model, feeds: Arrays) -> list[np.ndarray]:
    packed = graph.clone()
    quantize.pack_weights(packed)
    proto = ir.to_proto(packed).SerializeToString()
    session = onnxruntime.InferenceSession(proto, session_options(), providers=["CPUExecutionProvider"])
    results: list[np.ndarray] = session.run(None, feeds)
    return results


def prologues(graph: ir.Model) -> list[str]:
    return [node.attributes["prologue"].as_string() for node in graph.graph if node.op_type == "QuantLinear"]


def quantized(text: str, **initializers: np.ndarray) -> ir.Model:
    graph = model(text, **initializers)
    quantize_all(graph)
    return graph


def quantize_all(graph: ir.Model, **how: Any) -> quantize.Tables:
    return quantize.quantize_linears(graph, {linear.name: QuantizedLayer(**how) for linear in linears(graph.graph)})


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("form", LINEAR_FORMS)
def test_every_form_of_a_linear_layer_becomes_one_node(form: str, ordered: bool) -> None:
    graph, matrix, arrays, x = linear_form(form)
    (exact,) = run(graph, {"x": x})
    order = RANDOM.permutation(96).astype(np.int32) if ordered else None
    tables = quantize_all(graph, wide=64, order=order)
    assert ops(graph) == ["QuantLinear"]
    (found,) = run(graph, {"x": x})
    integers, scale = packing.quantize_rows(matrix)
    packed = packing.pack(integers if order is None else integers[:, order])
    wanted = packing.quant_linear(x, packed, scale, arrays.get("b"), order=order, depth=96, wide=64)
    np.testing.assert_array_equal(found, wanted)
    assert list(tables) == ([quantize.digest(matrix)] if ordered else [])
    assert np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


def test_layers_that_are_not_named_and_products_that_are_no_layers_stay() -> None:
    text = """
        agraph (float[B, Q, 64] x, float[B, 64, 8] moving) => (float[B, Q, 32] y, float[B, Q, 8] z, float[64, 32] s) {
            y = MatMul(x, w) z = MatMul(x, moving) s = Gemm<alpha = 2.0>(a, w)
        }
    """
    graph = model(text, w=weights(64, 32), a=weights(64, 64))
    assert [linear.weight.name for linear in linears(graph.graph)] == ["w"]
    quantize.quantize_linears(graph, {"another": QuantizedLayer()})
    assert ops(graph) == ["MatMul", "MatMul", "Gemm"]


THREE = "agraph (float[B, Q, 64] x) => (float[B, Q, 33] a, float[B, Q, 16] b, float[B, Q, 16] c)"


def test_layers_that_read_the_same_rows_are_joined_bit_for_bit() -> None:
    graph = quantized(
        THREE + "{a = MatMul(x, u) b = MatMul(x, v) c = MatMul(x, w)}",
        u=weights(64, 33),
        v=weights(64, 16),
        w=weights(64, 16),
    )
    feeds = {"x": weights(1, 5, 64)}
    before = run(graph, feeds)
    quantize.merge_shared_inputs(graph)
    assert ops(graph) == ["QuantLinear", "Split"]
    for found, wanted in zip(run(graph, feeds), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_layers_that_differ_in_bias_or_bits_are_not_joined() -> None:
    text = THREE + "{a = MatMul(x, u) p = MatMul(x, v) b = Add(p, d) c = MatMul(x, w)}"
    graph = model(text, u=weights(64, 33), v=weights(64, 16), w=weights(64, 16), d=weights(16))
    names = [linear.name for linear in linears(graph.graph)]
    quantize.quantize_linears(graph, {name: QuantizedLayer(wide=64 * (i == 0)) for i, name in enumerate(names)})
    before = run(graph, feeds := {"x": weights(1, 5, 64)})
    quantize.merge_shared_inputs(graph)
    assert ops(graph) == ["QuantLinear"] * 3
    for found, wanted in zip(run(graph, feeds), before, strict=True):
        np.testing.assert_array_equal(found, wanted)


NORM = "n = RMSNormalization<axis = -1, epsilon = 0.00001>(x, g)"


def test_a_norm_that_one_layer_reads_goes_inside() -> None:
    graph = quantized(
        f"agraph (float[B, Q, 64] x) => (float[B, Q, 32] y) {{{NORM} y = MatMul(n, w)}}",
        g=weights(64),
        w=weights(64, 32),
    )
    check(graph, quantize.absorb_norms, ["QuantLinear"], {"x": 50 * weights(1, 6, 64)})
    assert prologues(graph) == ["rms_norm"]


@pytest.mark.parametrize("other", ["z = Neg(n)", "z = Identity(n)"])
def test_a_norm_that_others_read_stays(other: str) -> None:
    text = f"agraph (float[B, Q, 64] x) => (float[B, Q, 32] y, float[B, Q, 64] z) {{{NORM} y = MatMul(n, w) {other}}}"
    graph = quantized(text, g=weights(64), w=weights(64, 32))
    quantize.absorb_norms(graph)
    assert prologues(graph) == ["none"]


@pytest.mark.parametrize("attributes", ["axis = 1", "axis = -1, stash_type = 10"])
def test_a_norm_of_another_kind_stays(attributes: str) -> None:
    body = f"n = RMSNormalization<{attributes}>(x, g) y = MatMul(n, w)"
    text = f"agraph (float[1, 64, 64] x) => (float[1, 64, 32] y) {{{body}}}"
    scale = weights(64, 64) if "axis = 1" in attributes else weights(64)
    graph = quantized(text, g=scale, w=weights(64, 32))
    quantize.absorb_norms(graph)
    assert prologues(graph) == ["none"]


def test_a_norm_without_an_epsilon_has_onnx_s() -> None:
    text = "agraph (float[B, Q, 64] x) => (float[B, Q, 32] y) {n = RMSNormalization(x, g) y = MatMul(n, w)}"
    graph = quantized(text, g=weights(64), w=weights(64, 32))
    check(graph, quantize.absorb_norms, ["QuantLinear"], {"x": weights(1, 6, 64)})


GATED = "agraph (float[B, Q, 64] x) => (float[B, Q, 32] y)"
GATES = {
    "silu_mul": "s = Sigmoid(gate) a = Mul(gate, s)",
    "gelu_tanh_mul": 'a = Gelu<approximate = "tanh">(gate)',
}


@pytest.mark.parametrize("product", ["Mul(a, up)", "Mul(up, a)"])
@pytest.mark.parametrize("name", GATES)
def test_a_gate_goes_inside_the_layer_behind_it(name: str, product: str) -> None:
    body = f"gate = MatMul(x, u) {GATES[name]} up = MatMul(x, v) m = {product} y = MatMul(m, w)"
    graph = quantized(GATED + f"{{{body}}}", u=weights(64, 128), v=weights(64, 128), w=weights(128, 32))
    quantize.merge_shared_inputs(graph)
    check(graph, quantize.absorb_gates, ["QuantLinear", "QuantLinear"], {"x": weights(1, 6, 64)})
    assert prologues(graph) == ["none", name]


def test_a_gate_whose_parts_stand_the_other_way_round_stays() -> None:
    body = f"up = MatMul(x, v) gate = MatMul(x, u) {GATES['silu_mul']} m = Mul(a, up) y = MatMul(m, w)"
    graph = quantized(GATED + f"{{{body}}}", u=weights(64, 128), v=weights(64, 128), w=weights(128, 32))
    quantize.merge_shared_inputs(graph)
    quantize.absorb_gates(graph)
    assert prologues(graph) == ["none", "none"]


RESIDUAL = "agraph (float[B, Q, 64] x, float[B, Q, 32] r) => (float[B, Q, 32] y)"


@pytest.mark.parametrize("addition", ["Add(r, p)", "Add(p, r)"])
def test_a_residual_goes_inside_bit_for_bit(addition: str) -> None:
    graph = quantized(RESIDUAL + f"{{p = MatMul(x, w) y = {addition}}}", w=weights(64, 32))
    feeds = {"x": weights(1, 6, 64), "r": weights(1, 6, 32)}
    before = run(graph, feeds)
    quantize.absorb_residuals(graph)
    assert ops(graph) == ["QuantLinear"]
    np.testing.assert_array_equal(run(graph, feeds)[0], before[0])


def test_a_residual_that_is_made_later_is_waited_for() -> None:
    graph = quantized(RESIDUAL + "{p = MatMul(x, w) q = Neg(r) y = Add(p, q)}", w=weights(64, 32))
    feeds = {"x": weights(1, 6, 64), "r": weights(1, 6, 32)}
    before = run(graph, feeds)
    quantize.absorb_residuals(graph)
    assert ops(graph) == ["Neg", "QuantLinear"]
    np.testing.assert_array_equal(run(graph, feeds)[0], before[0])


def test_two_layers_that_are_added_take_one_another_once() -> None:
    graph = quantized(
        "agraph (float[B, Q, 64] x, float[B, Q, 64] r) => (float[B, Q, 32] y)"
        "{p = MatMul(x, w) q = MatMul(r, u) y = Add(p, q)}",
        w=weights(64, 32),
        u=weights(64, 32),
    )
    feeds = {"x": weights(1, 6, 64), "r": weights(1, 6, 64)}
    before = run(graph, feeds)
    quantize.absorb_residuals(graph)
    assert ops(graph) == ["QuantLinear", "QuantLinear"]
    np.testing.assert_allclose(run(graph, feeds)[0], before[0], rtol=1e-6)


def test_a_chain_of_residuals_stays_in_order() -> None:
    body = "p = MatMul(x, w) q = MatMul(x, u) s = Neg(r) t = Add(p, s) y = Add(t, q)"
    graph = quantized(RESIDUAL + f"{{{body}}}", w=weights(64, 32), u=weights(64, 32))
    feeds = {"x": weights(1, 6, 64), "r": weights(1, 6, 32)}
    before = run(graph, feeds)
    quantize.absorb_residuals(graph)
    assert ops(graph) == ["Neg", "QuantLinear", "QuantLinear"]
    np.testing.assert_allclose(run(graph, feeds)[0], before[0], rtol=1e-6)


def test_what_is_broadcast_is_no_residual() -> None:
    graph = quantized(
        "agraph (float[B, Q, 64] x, float[32] r) => (float[B, Q, 32] y) {p = MatMul(x, w) y = Add(p, r)}",
        w=weights(64, 32),
    )
    quantize.absorb_residuals(graph)
    assert ops(graph) == ["QuantLinear", "Add"]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_tied_embedding_shares_the_lm_head_s_bytes(ordered: bool) -> None:
    table = weights(48, 128)
    graph = model(
        "agraph (int64[B, Q] input_ids) => (float[B, Q, 128] e, float[B, Q, 48] y)"
        "{e = Gather(t, input_ids) y = MatMul(e, w)}",
        t=table,
        w=np.ascontiguousarray(table.T),
    )
    feeds = {"input_ids": np.array([[0, 47, 9]])}
    exact, _ = run(graph, feeds)
    tables = quantize_all(graph, wide=64, order=RANDOM.permutation(128).astype(np.int32) if ordered else None)
    quantize.quantize_embeddings(graph, tables)
    assert ops(graph) == ["QuantEmbedding", "QuantLinear"]
    found, _ = run(graph, feeds)
    assert np.abs(found - exact).max() <= np.abs(table).max() / 127
    quantize.pack_weights(graph)
    embedding, lm_head = graph.graph
    packed = [node.inputs[1].const_value.numpy() for node in (embedding, lm_head)]
    np.testing.assert_array_equal(*packed)


def test_tables_that_the_token_ids_do_not_read_stay() -> None:
    graph = model(
        "agraph (float[B, Q] x) => (float[Q, B, 4] e) {i = Cast<to = 7>(x) j = Transpose(i) e = Gather(t, j)}",
        t=weights(9, 4),
    )
    quantize.quantize_embeddings(graph, {})
    assert ops(graph) == ["Cast", "Transpose", "Gather"]


def test_a_table_of_positions_is_no_embedding() -> None:
    text = "agraph (int64[B, Q] position_ids) => (float[B, Q, 4] e) {e = Gather(t, position_ids)}"
    graph = model(text, t=weights(9, 4))
    quantize.quantize_embeddings(graph, {})
    assert ops(graph) == ["Gather"]


def test_a_gemm_whose_bias_is_broadcast_is_no_layer() -> None:
    graph = model(LINEAR_FORMS["Gemm"][0], w=weights(40, 96), b=weights(1))
    assert linears(graph.graph) == []


def check(graph: ir.Model, change: Callable[[ir.Model], None], expected: list[str], feeds: Arrays) -> None:
    """`change` leaves the ops `expected`, and results within a few steps of the activations' rounding."""
    before = run(graph, feeds)
    change(graph)
    assert ops(graph) == expected
    for found, wanted in zip(run(graph, feeds), before, strict=True):
        assert np.abs(found - wanted).max() <= 0.02 * np.abs(wanted).max()
