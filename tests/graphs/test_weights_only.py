"""The passes of weight-only quantization: each alone, its graph run in ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from eagle_graphs.lowering import weights_only
from eagle_graphs.lowering.weights_only import BLOCK, blocks_from_matrix
from tests.graphs.small_graphs import LINEAR_FORMS, linear_form, model, ops, weights

Arrays = dict[str, np.ndarray]
HALF_STEP = {4: 1 / 15, 8: 1 / 255}
"""The largest error of a number, over the range of its block; a zero point that is rounded adds as much again."""


def run(graph: ir.Model, feeds: Arrays) -> list[np.ndarray]:
    proto = ir.to_proto(graph).SerializeToString()
    session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
    results: list[np.ndarray] = session.run(None, feeds)
    return results


def numbers(matrix: np.ndarray, bits: int) -> np.ndarray:
    """[N, K] what the blocks of `matrix` say."""
    packed, scale, zero_point = blocks_from_matrix(matrix, bits=bits)
    if bits == 4:
        packed, zero_point = (
            np.stack((a & 15, a >> 4), axis=-1).reshape(*a.shape[:-1], -1) for a in (packed, zero_point)
        )
    steps = packed.astype(np.float32) - zero_point[:, : packed.shape[1], None]
    return (steps * scale[:, :, None]).reshape(len(matrix), -1)[:, : matrix.shape[1]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [64, 96, 70])
def test_every_number_is_within_a_step_of_its_block(bits: int, width: int) -> None:
    matrix = weights(9, width)
    error = np.abs(numbers(matrix, bits) - matrix)
    for start in range(0, width, BLOCK):
        block = matrix[:, start : start + BLOCK]
        spread = np.maximum(block.max(axis=1), 0) - np.minimum(block.min(axis=1), 0)
        assert (error[:, start : start + BLOCK].max(axis=1) <= HALF_STEP[bits] * spread).all()


@pytest.mark.parametrize(("round_rows", "tolerance"), [(False, 1e-5), (True, 0.01)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", LINEAR_FORMS)
def test_every_form_of_a_linear_layer_becomes_one_node(
    form: str, bits: int, round_rows: bool, tolerance: float
) -> None:
    graph, matrix, arrays, x = linear_form(form)
    weights_only.quantize_weights(graph, bits=bits, round_rows=round_rows)
    assert ops(graph) == ["MatMulNBits"]
    wanted = x @ numbers(matrix, bits).T + arrays.get("b", np.float32(0))
    (found,) = run(graph, {"x": x})
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [64, 96])
def test_a_tied_embedding_has_the_lm_head_s_bytes(bits: int, width: int) -> None:
    table = weights(48, width)
    text = f"agraph (int64[B, Q] input_ids, float[R, {width}] x) => (float[B, Q, {width}] e, float[R, 48] y)"
    graph = model(f"{text} {{e = Gather(t, input_ids) y = Gemm<transB = 1>(x, t)}}", t=table)
    weights_only.quantize_weights(graph, bits=bits, round_rows=True)
    weights_only.quantize_tables(graph, bits=bits)
    assert sorted(ops(graph)) == ["GatherBlockQuantized", "MatMulNBits"]
    lookup, product = sorted(graph.graph, key=lambda node: node.op_type)
    for ours, theirs in ((0, 1), (2, 2), (3, 3)):
        tensors = [node.inputs[i].const_value for node, i in ((lookup, ours), (product, theirs))]
        assert tensors[0].tobytes() == tensors[1].tobytes()
    ids = np.array([[0, 47, 9]])
    embedded, _ = run(graph, {"input_ids": ids, "x": weights(1, width)})
    np.testing.assert_array_equal(embedded[0], numbers(table, bits)[ids[0]])


def test_a_table_of_another_width_stays() -> None:
    graph = model("agraph (int64[B, Q] input_ids) => (float[B, Q, 40] e) {e = Gather(t, input_ids)}", t=weights(9, 40))
    weights_only.quantize_tables(graph, bits=4)
    assert ops(graph) == ["Gather"]
