"""Linear layers in half precision, INT8 and INT4, in standard ONNX: what compilers for GPUs build fast products of.

    use_half_products            Cast, product, Cast
    quantize_int8                QuantizeLinear and DequantizeLinear in front of the product: a static scale for a
                                 layer's inputs, one for each output of its weights
    quantize_weights_in_blocks   DequantizeLinear of 4-bit weights, a scale for BLOCK inputs; a product in half precision

(`float8` is the fourth.) All that lies between the products, norms, rotary, activations, residuals, logits, stays in
float32: a compiler fuses it into few kernels whose traffic is nothing beside the weights', and no residual overflows.
Q/DQ in float32 around a product in float32 still becomes an 8-bit product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_graphs.errors import EagleError
from eagle_graphs.lowering.linear import Linear, constant, linears, lookups, remove_linear
from eagle_graphs.lowering.rewrite import Rewriter

BLOCK = 32
"""Inputs that a scale of an INT4 weight is for."""
_LARGEST_INT4, _LARGEST_INT8 = 7, 127  # the lowest numbers are left out, to be symmetric

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticInt8:
    """How the inputs of one linear layer become integers: x / smoothing / scale, rounded.

    The weights take over `smoothing` (SmoothQuant, Xiao et al., 2023, https://arxiv.org/abs/2211.10438).
    """

    scale: float
    smoothing: Floats
    """[K], above 0"""


def use_half_products(model: ir.Model, dtype: ir.DataType) -> None:
    """Puts the linear layers whose weights are float32, and the embedding tables, in `dtype`, in place.

    Raises EagleError where a weight is beyond the type's range.
    """
    rewriter = Rewriter(model.graph)
    for linear in linears(model.graph):
        weight = rewriter.constant(_half(constant(linear.weight), dtype, linear.name))
        _replace_by_half_product(rewriter, linear, weight, dtype)
    for node in lookups(model.graph):
        assert node.inputs[0] is not None
        table = rewriter.constant(_half(constant(node.inputs[0]), dtype, "the embedding"))
        rows = rewriter.one(node, "Gather", [table, node.inputs[1]])
        rewriter.replace(node.outputs[0], rewriter.one(node, "Cast", [rows], {"to": ir.DataType.FLOAT.value}))
        rewriter.graph.remove(node, safe=True)


def quantize_int8(model: ir.Model, layers: Mapping[str, StaticInt8]) -> None:
    """Quantizes the linear layers named, in place."""
    rewriter = Rewriter(model.graph)
    for linear in linears(model.graph):
        if (how := layers.get(linear.name)) is not None:
            node = linear.nodes[0]
            weight = _int8_weight(rewriter, linear, linear.matrix() * how.smoothing)
            node.replace_input_with(0, _int8_rows(rewriter, linear, how))
            node.replace_input_with(1, weight)


def quantize_weights_in_blocks(model: ir.Model, dtype: ir.DataType) -> None:
    """Quantizes to INT4, in place, the weights of the linear layers whose inputs are a multiple of BLOCK."""
    rewriter = Rewriter(model.graph)
    for linear in linears(model.graph):
        matrix = linear.matrix()
        outputs, inputs = matrix.shape
        if inputs % BLOCK:
            continue
        blocks = matrix.reshape(outputs, -1, BLOCK)
        scale = _half(np.abs(blocks).max(axis=2) / _LARGEST_INT4, dtype, linear.name)
        integers = _integers(blocks, scale.astype(np.float32)[:, :, None], _LARGEST_INT4).reshape(outputs, inputs)
        stored = _as_stored(linear, integers).astype(ml_dtypes.int4)
        weight = rewriter.one(
            linear.nodes[0],
            "DequantizeLinear",
            [rewriter.constant(stored), rewriter.constant(_as_stored(linear, scale))],
            {"axis": 1 if linear.rows_are_outputs else 0, "block_size": BLOCK},
        )
        _replace_by_half_product(rewriter, linear, weight, dtype)


def _replace_by_half_product(rewriter: Rewriter, linear: Linear, weight: ir.Value, dtype: ir.DataType) -> None:
    """A product in `dtype`, which carries the layer's name, and a bias behind it in float32."""
    first, last = linear.nodes[0], linear.nodes[-1]
    x = rewriter.one(first, "Cast", [linear.x], {"to": dtype.value})
    attributes = {"transB": 1} if linear.rows_are_outputs else {}
    (y,) = rewriter.insert(last, first.op_type, [x, weight], attributes, name=first.name)
    y = rewriter.one(last, "Cast", [y], {"to": ir.DataType.FLOAT.value})
    if linear.bias is not None:
        y = rewriter.one(last, "Add", [y, linear.bias])
    rewriter.replace(linear.y, y)
    remove_linear(rewriter, linear)


def _int8_rows(rewriter: Rewriter, linear: Linear, how: StaticInt8) -> ir.Value:
    node = linear.nodes[0]
    smooth = rewriter.one(node, "Mul", [linear.x, rewriter.constant((1 / how.smoothing).astype(np.float32))])
    parameters = rewriter.constant(np.array(how.scale, np.float32)), rewriter.constant(np.array(0, np.int8))
    rows = rewriter.one(node, "QuantizeLinear", [smooth, *parameters])
    return rewriter.one(node, "DequantizeLinear", [rows, *parameters])


def _int8_weight(rewriter: Rewriter, linear: Linear, matrix: Floats) -> ir.Value:
    scale = np.abs(matrix).max(axis=1) / _LARGEST_INT8
    integers = _as_stored(linear, _integers(matrix, scale[:, None], _LARGEST_INT8).astype(np.int8))
    steps = np.where(scale > 0, scale, 1).astype(np.float32)
    axis = 0 if linear.rows_are_outputs else 1
    constants = [rewriter.constant(integers), rewriter.constant(steps)]
    return rewriter.one(linear.nodes[0], "DequantizeLinear", constants, {"axis": axis})


def _integers(weights: Floats, scale: Floats, largest: int) -> Floats:
    steps = np.divide(weights, scale, out=np.zeros_like(weights), where=scale > 0)
    return np.rint(steps).clip(-largest, largest)


def _as_stored(linear: Linear, matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A matrix [N, ...] in the layer's own order of axes."""
    return np.ascontiguousarray(matrix if linear.rows_are_outputs else matrix.T)


def _half(array: npt.NDArray[Any], dtype: ir.DataType, where: str) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        half: npt.NDArray[Any] = array.astype(dtype.numpy())
    if not np.isfinite(half.astype(np.float32)).all():
        raise EagleError(f"a weight of {where} is larger than {dtype.name.lower()} can hold: use --precision bf16")
    return half
