"""Weights of 4 or 8 bits with ONNX Runtime's own ops; activations enter and leave them in float32.

    quantize_weights   MatMul or Gemm, and its bias   -> com.microsoft.MatMulNBits
    quantize_tables    Gather from a float table      -> com.microsoft.GatherBlockQuantized

The inputs of each output are cut into blocks of BLOCK, and a block has a scale and a zero point. Both ops keep a
matrix [N, K] alike, so that an embedding tied to the LM head has its bytes.

For the product itself MatMulNBits may round activations to 8 bits, within each block of a row. That is two to
five times as fast. With blocks of 32 its kernels for AVX-512 were seen to compute every row alike, whatever rows are
beside it (with larger blocks they do not): beside attention of which the same is true, trees are exact to the bit.
Without such attention rounding would amplify its differences, and the product is better left in float32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_graphs.lowering.linear import constant, linears, lookups, replace_linear
from eagle_graphs.lowering.onnxruntime_cpu import MICROSOFT
from eagle_graphs.lowering.rewrite import Rewriter

BLOCK = 32
_IN_FLOAT32, _IN_INT8 = 1, 4
"""Accuracy levels of MatMulNBits."""

Bytes = npt.NDArray[np.uint8]


def quantize_weights(model: ir.Model, *, bits: int, round_rows: bool) -> None:
    """Quantizes every linear layer in place.

    round_rows: whether products may round activations to 8 bits.
    """
    level = _IN_INT8 if round_rows else _IN_FLOAT32
    rewriter = Rewriter(model.graph)
    for linear in linears(model.graph):
        outputs, inputs = linear.matrix_shape
        blocks = blocks_from_matrix(linear.matrix(), bits=bits)
        replace_linear(
            rewriter,
            linear,
            "MatMulNBits",
            [linear.x, *(rewriter.constant(part) for part in blocks), None, linear.bias],
            {"N": outputs, "K": inputs, "bits": bits, "block_size": BLOCK, "accuracy_level": level},
            domain=MICROSOFT,
        )
    model.opset_imports[MICROSOFT] = 1


def quantize_tables(model: ir.Model, *, bits: int) -> None:
    """Quantizes in place the tables that token ids read, but those whose width is no multiple of BLOCK."""
    rewriter = Rewriter(model.graph)
    for node in lookups(model.graph):
        table, ids = node.inputs
        assert table is not None
        matrix = constant(table)
        if matrix.shape[1] % BLOCK:
            continue
        packed, scale, zero_point = blocks_from_matrix(matrix, bits=bits)
        (out,) = rewriter.insert(
            node,
            "GatherBlockQuantized",
            [
                rewriter.constant(packed.reshape(len(matrix), -1)),
                ids,
                rewriter.constant(scale),
                rewriter.constant(zero_point),
            ],
            {"bits": bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1},
            domain=MICROSOFT,
        )
        rewriter.replace(node.outputs[0], out)
        rewriter.graph.remove(node, safe=True)
    model.opset_imports[MICROSOFT] = 1


def blocks_from_matrix(matrix: npt.NDArray[np.float32], *, bits: int) -> tuple[Bytes, npt.NDArray[np.float32], Bytes]:
    """Quantizes and packs a matrix [N, K] as MatMulNBits reads it.

    Returns:
        The numbers [N, K / BLOCK, BLOCK * bits / 8], scales [N, K / BLOCK] and zero points
        [N, K / BLOCK * bits / 8], each quotient rounded up.
    """
    from onnxruntime.capi import _pybind_state as onnxruntime  # of the public quantizers, what does the work

    outputs, inputs = matrix.shape
    blocks = -(-inputs // BLOCK)
    packed = np.zeros((outputs, blocks, BLOCK * bits // 8), np.uint8)
    scale = np.zeros((outputs, blocks), np.float32)
    zero_point = np.zeros((outputs, -(-blocks * bits // 8)), np.uint8)
    quantize = {4: onnxruntime.quantize_matmul_4bits, 8: onnxruntime.quantize_matmul_8bits}[bits]
    quantize(packed, np.ascontiguousarray(matrix.T), scale, zero_point, BLOCK, outputs, inputs, False)
    return packed, scale, zero_point
