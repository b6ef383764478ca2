"""The kernels as plugins of TensorRT (its Python plugin API, ahead of time: the engine holds their PTX).

    eagle::attend   (query, key, value, past_key, past_value, words, kv_length, write_row)
                    -> (partial, statistics, present_key, present_value)
    eagle::combine  (partial, statistics, kv_length, sinks) -> out

Two, since a plugin is one launch. Shapes are those in `kernels`; a model without sinks passes [Hq] of minus infinity,
which changes no bit. A present output is its past input: the builder's configuration needs the preview feature
ALIASED_PLUGIN_IO_10_03, and the runtime binds one buffer to both. TensorRT-RTX has no such plugins.

TensorRT passes a kernel its inputs, then integers, then its outputs: the order of the kernels' parameters. On the
device that it builds for, it times the tile heights and keeps the fastest ("tactics").

An attribute is an array of one number: TensorRT hands over every attribute as an array, and its own conversion of one
that is declared as `int` or `float` fails from NumPy 2.4 on (tensorrt/plugin/_lib.py, create_plugin).

    scale, softcap, sliding_window   those of the op; 0 for no cap, no window
    new_rows     rows of the largest pass: no higher tile is tried
    split_rows   committed rows of a split: `launch.split_rows_for`
    capability   ten times the compute capability of the GPU: 89 for 8.9

Importing this module registers the plugins, once in a process.
"""

# No `from __future__ import annotations`: TensorRT reads the plugins' annotations as types.

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorrt as trt
import tensorrt.plugin as trtp

from eagle_graphs.plugin.compile import CompiledKernel, DType, compile_attend, compile_combine
from eagle_graphs.plugin.launch import Attention, tile_heights

Implementation = tuple[str, str, trtp.KernelLaunchParams, trtp.SymIntExprs]
Integer = npt.NDArray[np.int64]
Real = npt.NDArray[np.float64]


@trtp.register("eagle::attend")
def describe_attend(
    query: trtp.TensorDesc,
    key: trtp.TensorDesc,
    value: trtp.TensorDesc,
    past_key: trtp.TensorDesc,
    past_value: trtp.TensorDesc,
    words: trtp.TensorDesc,
    kv_length: trtp.TensorDesc,
    write_row: trtp.TensorDesc,
    scale: Real,
    softcap: Real,
    new_rows: Integer,
    sliding_window: Integer,
    split_rows: Integer,
    capability: Integer,
) -> tuple[trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc, trtp.TensorDesc]:
    """Shapes and types of the outputs."""
    slots, heads, rows, width = query.shape_expr
    splits = trtp.cdiv(past_key.shape_expr[2], int(split_rows[0]))
    partial = trtp.from_shape_expr((slots, rows, heads, splits, width), dtype=trt.float32)
    statistics = trtp.from_shape_expr((slots, rows, heads, splits, 2), dtype=trt.float32)
    return partial, statistics, past_key.aliased(), past_value.aliased()


@trtp.autotune("eagle::attend")
def choices_of_attend(query, key, value, past_key, past_value, words, kv_length, write_row, new_rows, outputs):
    """Types, and the tile heights to try."""
    heights = tile_heights(int(query.shape[1]) // int(key.shape[1]), int(query.shape[3]), int(new_rows[0]))
    rows, integers, parts = ["FP16|BF16"], ["INT64"], ["FP32"]
    types = ", ".join(rows * 5 + integers * 3 + parts * 2 + rows * 2)
    return [trtp.AutoTuneCombination(types, "LINEAR", heights)]


@trtp.aot_impl("eagle::attend")
def implement_attend(
    query,
    key,
    value,
    past_key,
    past_value,
    words,
    kv_length,
    write_row,
    scale,
    softcap,
    new_rows,
    sliding_window,
    split_rows,
    capability,
    outputs,
    tactic,
) -> Implementation:
    """The kernel in tiles of height `tactic`, and its launch."""
    split = int(split_rows[0])
    attention = Attention(
        query_heads=int(query.shape[1]),
        kv_heads=int(key.shape[1]),
        head_dim=int(query.shape[3]),
        scale=float(scale[0]),
        softcap=float(softcap[0]),
        sliding_window=int(sliding_window[0]),
    )
    kernel = compile_attend(
        attention, int(capability[0]), block_m=tactic, split_rows=split, split=True, dtype=_dtype(query)
    )
    slots, _, rows, _ = query.shape_expr
    capacity = past_key.shape_expr[2]
    grid = (
        trtp.cdiv(rows * attention.group, tactic),
        trtp.cdiv(capacity, split),
        slots * attention.kv_heads,
    )
    return _implementation(kernel, grid, (rows, words.shape_expr[2], capacity))


@trtp.register("eagle::combine")
def describe_combine(
    partial: trtp.TensorDesc,
    statistics: trtp.TensorDesc,
    kv_length: trtp.TensorDesc,
    sinks: trtp.TensorDesc,
    sliding_window: Integer,
    split_rows: Integer,
    capability: Integer,
) -> trtp.TensorDesc:
    """Shape and type of the output."""
    slots, rows, heads, _, width = partial.shape_expr
    return trtp.from_shape_expr((slots, rows, heads, width), dtype=sinks.dtype)


@trtp.autotune("eagle::combine")
def choices_of_combine(partial, statistics, kv_length, sinks, outputs):
    """Types."""
    return [trtp.AutoTuneCombination("FP32, FP32, INT64, FP16|BF16, FP16|BF16", "LINEAR")]


@trtp.aot_impl("eagle::combine")
def implement_combine(
    partial, statistics, kv_length, sinks, sliding_window, split_rows, capability, outputs, tactic
) -> Implementation:
    """The kernel and its launch."""
    heads, splits, head_dim = (int(partial.shape[axis]) for axis in (2, 3, 4))
    kernel = compile_combine(
        int(capability[0]),
        query_heads=heads,
        head_dim=head_dim,
        sliding_window=int(sliding_window[0]),
        splits=splits,
        split_rows=int(split_rows[0]),
        sinks=True,
        dtype=_dtype(sinks),
    )
    slots, rows, _, parts, _ = partial.shape_expr
    return _implementation(kernel, (slots * rows * heads, 1, 1), (rows, parts))


def _implementation(kernel: CompiledKernel, grid: tuple[Any, Any, Any], scalars: tuple[Any, ...]) -> Implementation:
    parameters = trtp.KernelLaunchParams()
    parameters.grid_x, parameters.grid_y, parameters.grid_z = grid
    parameters.block_x = kernel.threads
    parameters.shared_mem = kernel.shared
    return kernel.name, kernel.ptx, parameters, trtp.SymIntExprs.from_tuple([trtp.SymInt32(each) for each in scalars])


def _dtype(tensor: trtp.TensorDesc) -> DType:
    return "bf16" if tensor.dtype == trt.bfloat16 else "fp16"
