"""Linear layers in half precision, FP8, INT8 and INT4, in standard ONNX: what compilers for GPUs make fast products of.

    merge_products               layers that read the same rows become one, and a Split
    use_half_products            Cast, product, Cast
    quantize_fp8, quantize_int8  QuantizeLinear and DequantizeLinear in front of the product: a static scale for a
                                 layer's inputs, one for each output of its weights
    quantize_weights_in_blocks   DequantizeLinear of 4-bit weights, a scale for BLOCK inputs; a product in half

All that lies between the products, norms, rotary, activations, residuals, logits, stays in
float32: a compiler fuses it into few kernels whose traffic is nothing beside the weights', and no residual overflows.
Q/DQ in float32 around a product in float32 still becomes an 8-bit product.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_graphs.errors import EagleError
from eagle_graphs.lowering.float8 import LARGEST as LARGEST_E4M3
from eagle_graphs.lowering.linear import Linear, constant, linears, lookups, remove_linear
from eagle_graphs.lowering.rewrite import Rewriter

BLOCK = 32
"""Inputs that a scale of an INT4 weight is for."""
_LARGEST_INT4, _LARGEST_INT8 = 7, 127  # the lowest numbers are left out, to be symmetric
_E4M3 = ir.DataType.FLOAT8E4M3FN.numpy()

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticInt8:
    """How the inputs of one linear layer become integers: x / smoothing / scale, rounded.

    The weights take over `smoothing` (SmoothQuant, Xiao et al., 2023, https://arxiv.org/abs/2211.10438).
    """

    scale: float
    smoothing: Floats
    """[K], above 0"""


def merge_products(model: ir.Model) -> None:
    """Joins the linear layers that read the same rows, in place, under the first one's name.

    One product is faster than three; and a compiler that joins them itself lays their weights out anew for each pass,
    so that an engine would hold them several times.
    """
    rewriter = Rewriter(model.graph)
    alike: dict[ir.Value, list[Linear]] = defaultdict(list)
    for linear in linears(model.graph):
        alike[linear.x].append(linear)
    for group in alike.values():
        if len(group) > 1:
            _merge(rewriter, group)


def _merge(rewriter: Rewriter, group: list[Linear]) -> None:
    first = group[0].nodes[0]
    matrices = [linear.matrix() for linear in group]
    joined = rewriter.constant(np.ascontiguousarray(np.concatenate(matrices).T))
    (y,) = rewriter.insert(first, "MatMul", [group[0].x, joined], name=first.name)
    if any(linear.bias is not None for linear in group):
        biases = [
            np.zeros(len(m), np.float32) if g.bias is None else constant(g.bias)
            for g, m in zip(group, matrices, strict=True)
        ]
        y = rewriter.one(first, "Add", [y, rewriter.constant(np.concatenate(biases))])
    widths = rewriter.ints(*map(len, matrices))
    parts = rewriter.insert(first, "Split", [y, widths], {"axis": -1}, outputs=len(group))
    for linear, part in zip(group, parts, strict=True):
        rewriter.replace(linear.y, part)
    for linear in group:
        remove_linear(rewriter, linear)


def use_half_products(model: ir.Model, dtype: ir.DataType) -> None:
    """Puts the linear layers whose weights are float32, and the embedding tables, in `dtype`, in place.

    Raises EagleError where a weight is beyond the type's range.
    """
    rewriter = Rewriter(model.graph)
    for linear in linears(model.graph):
        weight = rewriter.constant(_half(linear.matrix(), dtype, linear.name))
        _replace(rewriter, linear, _in_half(rewriter, linear, dtype), weight, half=True)
    for node in lookups(model.graph):
        assert node.inputs[0] is not None
        table = rewriter.constant(_half(constant(node.inputs[0]), dtype, "the embedding"))
        rows = rewriter.one(node, "Gather", [table, node.inputs[1]])
        rewriter.replace(node.outputs[0], rewriter.one(node, "Cast", [rows], {"to": ir.DataType.FLOAT.value}))
        rewriter.graph.remove(node, safe=True)


def quantize_fp8(model: ir.Model, scales: Mapping[str, float]) -> None:
    """Quantizes the linear layers named to E4M3, in place.

    scales: what the inputs of each layer are divided by.
    """
    rewriter = Rewriter(model.graph)
    for linear in linears(model.graph):
        if (scale := scales.get(linear.name)) is not None:
            x = _rounded_rows(rewriter, linear, linear.x, scale, _E4M3)
            matrix = linear.matrix()
            steps = _steps(np.abs(matrix).max(axis=1), LARGEST_E4M3)
            weight = _unpacked(rewriter, linear, (matrix / steps[:, None]).astype(_E4M3), steps)
            _replace(rewriter, linear, x, weight, half=False)


def quantize_int8(model: ir.Model, layers: Mapping[str, StaticInt8]) -> None:
    """Quantizes the linear layers named, in place."""
    rewriter = Rewriter(model.graph)
    for linear in linears(model.graph):
        if (how := layers.get(linear.name)) is not None:
            smooth = rewriter.constant((1 / how.smoothing).astype(np.float32))
            x = rewriter.one(linear.nodes[0], "Mul", [linear.x, smooth])
            x = _rounded_rows(rewriter, linear, x, how.scale, np.int8)
            matrix = linear.matrix() * how.smoothing
            steps = _steps(np.abs(matrix).max(axis=1), _LARGEST_INT8)
            integers = np.rint(matrix / steps[:, None]).clip(-_LARGEST_INT8, _LARGEST_INT8)
            _replace(rewriter, linear, x, _unpacked(rewriter, linear, integers.astype(np.int8), steps), half=False)


def quantize_weights_in_blocks(model: ir.Model, dtype: ir.DataType) -> None:
    """Quantizes to INT4, in place, the weights of the linear layers whose inputs are a multiple of BLOCK."""
    rewriter = Rewriter(model.graph)
    for linear in linears(model.graph):
        matrix = linear.matrix()
        outputs, inputs = matrix.shape
        if inputs % BLOCK:
            continue
        blocks = matrix.reshape(outputs, -1, BLOCK)
        steps = _half(_steps(np.abs(blocks).max(axis=2), _LARGEST_INT4), dtype, linear.name)
        exact = np.maximum(steps.astype(np.float32), np.finfo(np.float32).tiny)
        integers = np.rint(blocks / exact[:, :, None]).clip(-_LARGEST_INT4, _LARGEST_INT4)
        integers = integers.reshape(outputs, inputs).astype(ml_dtypes.int4)
        weight = _unpacked(rewriter, linear, integers, steps, axis=1, block_size=BLOCK)
        _replace(rewriter, linear, _in_half(rewriter, linear, dtype), weight, half=True)


def _replace(rewriter: Rewriter, linear: Linear, x: ir.Value, weight: ir.Value, *, half: bool) -> None:
    """A product of `x` and the weight [N, K], which carries the layer's name, and a bias behind it in float32.

    Weights are kept by outputs, whatever the layer's own order: so one copy of them serves kernels for one row and for
    many.
    """
    first, last = linear.nodes[0], linear.nodes[-1]
    by_inputs = rewriter.one(first, "Transpose", [weight], {"perm": [1, 0]})
    (y,) = rewriter.insert(last, "MatMul", [x, by_inputs], name=first.name)
    if half:
        y = rewriter.one(last, "Cast", [y], {"to": ir.DataType.FLOAT.value})
    if linear.bias is not None:
        y = rewriter.one(last, "Add", [y, linear.bias])
    rewriter.replace(linear.y, y)
    remove_linear(rewriter, linear)


def _in_half(rewriter: Rewriter, linear: Linear, dtype: ir.DataType) -> ir.Value:
    return rewriter.one(linear.nodes[0], "Cast", [linear.x], {"to": dtype.value})


def _rounded_rows(rewriter: Rewriter, linear: Linear, x: ir.Value, scale: float, dtype: Any) -> ir.Value:
    node = linear.nodes[0]
    parameters = rewriter.constant(np.array(scale, np.float32)), rewriter.constant(np.array(0, dtype))
    rows = rewriter.one(node, "QuantizeLinear", [x, *parameters])
    return rewriter.one(node, "DequantizeLinear", [rows, *parameters])


def _unpacked(
    rewriter: Rewriter, linear: Linear, numbers: Array, steps: Array, *, axis: int = 0, **attributes: int
) -> ir.Value:
    constants = [rewriter.constant(numbers), rewriter.constant(steps)]
    return rewriter.one(linear.nodes[0], "DequantizeLinear", constants, {"axis": axis, **attributes})


def _steps(largest: Array, largest_number: float) -> Floats:
    """Scales by which the largest magnitudes become the type's largest number; above 0 where all is 0."""
    return np.maximum(largest / largest_number, np.finfo(np.float32).tiny).astype(np.float32)


def _half(array: Array, dtype: ir.DataType, where: str) -> Array:
    with np.errstate(over="ignore"):
        half: Array = array.astype(dtype.numpy())
    if not np.isfinite(half.astype(np.float32)).all():
        raise EagleError(f"a weight of {where} is larger than {dtype.name.lower()} can hold: use --precision bf16")
    return half
