"""The kernels on torch tensors: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1) on the CPU."""

from __future__ import annotations

from typing import Any

from eagle_graphs.plugin import kernels
from eagle_graphs.plugin.launch import (
    Attention,
    attend_constants,
    attend_options,
    combine_constants,
    commit_constants,
    launch_for,
)

Tensor = Any  # torch.Tensor, without importing torch


def tree_attention(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_key: Tensor,
    past_value: Tensor,
    words: Tensor,
    kv_length: Tensor,
    write_row: Tensor,
    sinks: Tensor | None = None,
    *,
    split_rows: int,
) -> Tensor:
    """`eagle::TreeAttention` in place: the new rows are written to the caches, and out [B, Q, Hq, D] is returned.

    Contiguous tensors of one device, shapes as the op's; `words` [B, Q, W] is `pack_mask` of its tree_mask,
    `write_row` [B] is kv_length + S - Q, with S at most 64 W. The cache must hold kv_length + S rows: not checked,
    since lengths are the device's.
    """
    slots, _, new_rows, _ = query.shape
    capacity = past_key.shape[2]
    launch = launch_for(attention, slots=slots, new_rows=new_rows, capacity=capacity, split_rows=split_rows)
    shape = (slots, new_rows, attention.query_heads, attention.head_dim)
    inputs = (query, key, value, past_key, past_value, words, kv_length, write_row)
    scalars = (new_rows, words.shape[2], capacity)
    compiled_for = attend_constants(attention, launch.tiles, split_rows) | attend_options(launch.tiles)
    out = query.new_empty(shape)
    if launch.splits == 1:
        outputs = (out, None, past_key, past_value)
        kernels.attend[launch.grid](*inputs, sinks, *scalars, *outputs, **compiled_for)
        return out
    partial = query.new_empty((*shape[:3], launch.splits, shape[3]), dtype=kv_length.new_empty(0).float().dtype)
    statistics = partial.new_empty((*shape[:3], launch.splits, 2))
    outputs = (partial, statistics, past_key, past_value)
    kernels.attend[launch.grid](*inputs, None, *scalars, *outputs, **compiled_for)
    constants = combine_constants(
        attention.query_heads,
        attention.head_dim,
        attention.sliding_window,
        splits=launch.splits,
        split_rows=split_rows,
    )
    kernels.combine[launch.combine_grid](
        partial, statistics, kv_length, sinks, new_rows, launch.splits, out, **constants
    )
    return out


def commit_path(path: Tensor, count: Tensor, kv_length: Tensor, cache: Tensor) -> None:
    """Moves the accepted rows of all layers behind the committed ones, in place.

    path [B, P] int64: rows to keep, counted from kv_length; count [B] int64: how many; kv_length [B] int64;
    cache [layers, 2, B, Hkv, rows, D]. A row may be named once. The lengths are left for the caller to raise.
    """
    layers, _, slots, kv_heads, rows, head_dim = cache.shape
    width = path.shape[1]
    kernels.commit_path[(layers * 2 * slots * kv_heads,)](
        path, count, kv_length, slots, width, rows, cache, **commit_constants(kv_heads, head_dim, width)
    )
