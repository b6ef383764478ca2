"""Weights and activations of 8-bit floats (E4M3), as QuantizeLinear and DequantizeLinear around the float layers.

That is the form from which a compiler for GPUs builds 8-bit products. Activations have one scale a tensor, fixed by
calibration, weights one for each output. Embedding tables stay in float32: ONNX Runtime's Gather takes no 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from eagle_graphs.lowering.linear import Linear, linears
from eagle_graphs.lowering.rewrite import Rewriter

LARGEST = 448.0
"""The largest number of E4M3; what lies beyond becomes it."""
_E4M3 = ir.DataType.FLOAT8E4M3FN.numpy()


def quantize_float8(model: ir.Model, scales: Mapping[str, float]) -> None:
    """Quantizes in place the linear layers named.

    scales: what the inputs of each layer are divided by.
    """
    rewriter = Rewriter(model.graph)
    rounded: dict[tuple[ir.Value, float], ir.Value] = {}
    for linear in linears(model.graph):
        if (scale := scales.get(linear.name)) is None:
            continue
        node, key = linear.nodes[0], (linear.x, scale)
        if key not in rounded:
            rounded[key] = _rounded_rows(rewriter, node, *key)
        node.replace_input_with(0, rounded[key])
        node.replace_input_with(1, _rounded_weights(rewriter, linear))


def _rounded_rows(rewriter: Rewriter, before: ir.Node, x: ir.Value, scale: float) -> ir.Value:
    parameters = rewriter.constant(np.array(scale, np.float32)), rewriter.constant(np.array(0, _E4M3))
    rows = rewriter.one(before, "QuantizeLinear", [x, *parameters])
    return rewriter.one(before, "DequantizeLinear", [rows, *parameters])


def _rounded_weights(rewriter: Rewriter, linear: Linear) -> ir.Value:
    matrix, outputs = linear.matrix(), 0 if linear.rows_are_outputs else 1
    scale = np.maximum(np.abs(matrix).max(axis=1) / LARGEST, np.finfo(np.float32).tiny).astype(np.float32)
    numbers = (matrix / scale[:, None]).astype(_E4M3)
    weights = rewriter.constant(numbers if linear.rows_are_outputs else np.ascontiguousarray(numbers.T))
    return rewriter.one(linear.nodes[0], "DequantizeLinear", [weights, rewriter.constant(scale)], {"axis": outputs})
