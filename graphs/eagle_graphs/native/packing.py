"""Weights of the ops QuantLinear and QuantEmbedding: quantized, packed as the kernels read them, and the ops in numpy.

A weight W [N, K] becomes symmetric int8 with one scale per row (an output of the layer). It is stored as uint8,
128 + int8, because the CPU's dot products of bytes want one unsigned operand, and in the order in which they consume
it: blocks of 16 rows, within a block 4 numbers of every row after another.

    packed [ceil(N/16), P/4, 16, 4]    packed[n // 16, k // 4, n % 16, k % 4] = 128 + int8 of W[n, k]

P is K rounded up to a multiple of 64. The padding is 128, which stands for zero.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Float = npt.NDArray[np.float32]
Int8 = npt.NDArray[np.int8]
Packed = npt.NDArray[np.uint8]
Prologue = Literal["none", "rms_norm", "silu_mul", "gelu_tanh_mul"]

LARGEST = {8: 127, 16: 127 * 256 + 127}
"""The largest magnitude of an activation's integer, by its bits."""
_LANES = 16


def quantize_rows(weight: Float, scale: Float | None = None) -> tuple[Int8, Float]:
    """Symmetric int8: `weight` [N, K] is about the result [N, K] times its scales [N].

    A scale is the row's largest magnitude / 127 (so nothing is cut off), unless `scale` [N] gives it; then what lies
    beyond 127 scales is cut off. Rounds half to even. A row whose scale is 0 becomes zeros.
    """
    if scale is None:
        scale = (np.abs(weight).max(axis=1) / 127).astype(np.float32)
    steps = np.divide(weight, scale[:, None], out=np.zeros_like(weight), where=scale[:, None] > 0)
    return np.clip(np.rint(steps), -127, 127).astype(np.int8), scale


def pack(values: Int8) -> Packed:
    """int8 [N, K] in the kernels' order, [ceil(N/16), P/4, 16, 4]."""
    rows, depth = values.shape
    padded = np.full((_up(rows, 16), _up(depth, 64)), 128, np.uint8)
    padded[:rows, :depth] = values.view(np.uint8) + np.uint8(128)
    return np.ascontiguousarray(padded.reshape(len(padded) // 16, 16, -1, 4).transpose(0, 2, 1, 3))


def unpack(packed: Packed, rows: int, depth: int) -> Int8:
    """The int8 [rows, depth] that `pack` was given."""
    values = packed.transpose(0, 2, 1, 3).reshape(packed.shape[0] * 16, -1) - np.uint8(128)
    return values[:rows, :depth].view(np.int8)


def quant_linear(
    x: Float,
    packed: Packed,
    weight_scale: Float,
    bias: Float | None = None,
    residual: Float | None = None,
    norm_weight: Float | None = None,
    order: npt.NDArray[np.int32] | None = None,
    *,
    depth: int,
    prologue: Prologue = "none",
    epsilon: float = 0.0,
    wide: int = 0,
) -> Float:
    """The op QuantLinear, in its float operations and their order: bits agree but for the prologues' exponentials.

    `x` is [..., K], or [..., 2K] for `silu_mul` and `gelu_tanh_mul`, which apply the function to the first half and
    multiply by the second; K is `depth`. The result is [..., N], N being the length of `weight_scale`. A row with a NaN
    or an infinity gives NaN. The first `wide` inputs, in the weight's `order`, have 16 bits, the others 8.
    """
    weight = unpack(packed, len(weight_scale), depth).astype(np.float64)  # products are exact
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        numbers = _prologue(x.reshape(-1, x.shape[-1]), prologue, norm_weight, np.float32(epsilon))
        if order is not None:
            numbers = numbers[:, order]
        y = np.zeros((len(numbers), len(weight_scale)), np.float32)
        for bits, part in ((16, slice(0, wide)), (8, slice(wide, depth))):
            if numbers[:, part].shape[1]:
                y = y + _product(numbers[:, part], weight[:, part], bits)
        y = y * weight_scale
    if bias is not None:
        y = y + bias
    y = y.reshape(*x.shape[:-1], len(weight_scale))
    return y if residual is None else y + residual


def quant_embedding(
    ids: npt.NDArray[np.int64],
    packed: Packed,
    weight_scale: Float,
    order: npt.NDArray[np.int32] | None = None,
    *,
    depth: int,
) -> Float:
    """The op QuantEmbedding: rows `ids` [B, Q] of the weight, as float [B, Q, K]. Bits agree."""
    values = unpack(packed, len(weight_scale), depth)[ids]
    if order is not None:
        values = values[..., np.argsort(order)]
    return values.astype(np.float32) * weight_scale[ids][..., None]


def _prologue(x: Float, prologue: Prologue, norm_weight: Float | None, epsilon: np.float32) -> Float:
    if prologue == "none":
        return x
    if prologue == "rms_norm":
        assert norm_weight is not None
        inverse: Float = np.float32(1) / np.sqrt(_sum_of_squares(x) / np.float32(x.shape[1]) + epsilon)
        return x * inverse[:, None] * norm_weight
    gate, up = np.split(x, 2, axis=1)
    inner = gate if prologue == "silu_mul" else np.float32(1.59576912) * (gate + np.float32(0.044715) * gate**3)
    activated: Float = gate / (1 + np.exp(-np.maximum(inner, np.float32(-88)))) * up
    return activated


def _sum_of_squares(x: Float) -> Float:
    """[M] of [M, K]: 16 sums, one for every 16th number, then added in pairs."""
    squares = np.zeros((len(x), _up(x.shape[1], _LANES)), np.float32)
    squares[:, : x.shape[1]] = x * x
    sums = np.zeros((len(x), _LANES), np.float32)
    for start in range(0, squares.shape[1], _LANES):
        sums = sums + squares[:, start : start + _LANES]
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    return sums[:, 0]


def _product(x: Float, weight: npt.NDArray[np.float64], bits: int) -> Float:
    """[M, N] of rows [M, K], rounded to `bits` with a scale each, and integers [N, K]; NaN for a row not finite."""
    largest = np.float32(LARGEST[bits])
    highest = np.abs(x).max(axis=1, keepdims=True)
    inverse = largest / highest
    finite, zero = np.isfinite(highest), np.isinf(inverse)
    scale = np.where(finite, np.where(zero, np.float32(0), highest / largest), np.float32(np.nan))
    values = np.rint(np.where(finite & ~zero, x * inverse, np.float32(0))).astype(np.float64)
    if bits == 8:
        return (values @ weight.T).astype(np.float32) * scale
    high = np.floor((values + 128) / 256)
    low = values - 256 * high
    product: Float = (high @ weight.T).astype(np.float32) * np.float32(256) + (low @ weight.T).astype(np.float32)
    return product * scale


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
