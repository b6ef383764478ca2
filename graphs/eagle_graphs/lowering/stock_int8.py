"""W8A8 with ONNX Runtime's own ops: a scale for each row of activations, MatMulIntegerToFloat.

A row is divided by its largest magnitude and rounded to unsigned 8 bits about the zero point 128: with signed
activations, or a scale for all rows, ONNX Runtime's product is slow, or a row's result depends on those beside it.
Weights are unsigned about 128 as well: products of unsigned by signed bytes saturate on x86 before VNNI. All inputs of
a layer share one scale, where the package's own kernels give the large ones 16 bits.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from eagle_graphs.lowering.linear import Linear, linears, remove_linear
from eagle_graphs.lowering.onnxruntime_cpu import MICROSOFT
from eagle_graphs.lowering.rewrite import Rewriter
from eagle_graphs.native.packing import quantize_rows

_ZERO_POINT = 128
_STEPS = 127
_SMALLEST = np.float32(1e-30)
"""Taken for the largest magnitude of a row of zeros."""


def quantize_linears_with_stock_ops(model: ir.Model) -> None:
    """Quantizes every linear layer in place."""
    rewriter = Rewriter(model.graph)
    rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    for linear in linears(model.graph):
        if linear.x not in rows:
            rows[linear.x] = _rounded_rows(rewriter, linear.nodes[0], linear.x)
        _quantize(rewriter, linear, *rows[linear.x])
    model.opset_imports[MICROSOFT] = 1


def _rounded_rows(rewriter: Rewriter, before: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Rows [..., K] as uint8, and the largest magnitude [..., 1] of each."""

    def one(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        return rewriter.one(before, op_type, inputs, attributes)

    magnitude = one("ReduceMax", one("Abs", x), rewriter.ints(-1), keepdims=1)
    largest = one("Max", magnitude, rewriter.constant(np.array(_SMALLEST)))
    step, zero_point = _step(rewriter), rewriter.constant(np.array(_ZERO_POINT, np.uint8))
    return one("QuantizeLinear", one("Div", x, largest), step, zero_point), largest


def _step(rewriter: Rewriter) -> ir.Value:
    return rewriter.constant(np.array(1 / _STEPS, np.float32))


def _quantize(rewriter: Rewriter, linear: Linear, rows: ir.Value, largest: ir.Value) -> None:
    integers, scale = quantize_rows(linear.matrix())
    weights = (integers.T.astype(np.int16) + _ZERO_POINT).astype(np.uint8)
    last = linear.nodes[-1]
    (product,) = rewriter.insert(
        last,
        "MatMulIntegerToFloat",
        [
            rows,
            rewriter.constant(weights),
            _step(rewriter),
            rewriter.constant(scale),
            rewriter.constant(np.array(_ZERO_POINT, np.uint8)),
            rewriter.constant(np.full(len(scale), _ZERO_POINT, np.uint8)),
        ],
        domain=MICROSOFT,
        name=linear.nodes[0].name,
    )
    y = rewriter.one(last, "Mul", [product, largest])
    if linear.bias is not None:
        y = rewriter.one(last, "Add", [y, linear.bias])
    rewriter.replace(linear.y, y)
    remove_linear(rewriter, linear)
