"""Attention of a Hugging Face model, replaced by `eagle::TreeAttention` without touching the model.

`transformers` calls attention through a registry; one function is registered there. While a graph is
traced it emits the op; otherwise it computes the same in torch, so that one module is both the graph's
source and its reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle_graphs import tree_attention as op

IMPLEMENTATION = "eagle_tree"


@dataclass(slots=True, kw_only=True)
class Rows:
    """Where the rows of one pass stand, for every layer's attention."""

    tree_mask: torch.Tensor
    """[B, Q, S] bool"""
    kv_length: torch.Tensor
    """[B] int64"""
    past: Sequence[torch.Tensor]
    """Key and value cache of layer 0, of layer 1, ...: each [B, Hkv, C, D]."""
    present: list[torch.Tensor | None] = field(init=False)

    def __post_init__(self) -> None:
        self.present = [None] * len(self.past)

    def all_present(self) -> tuple[torch.Tensor, ...]:
        """The caches after the pass. Every layer must have attended once."""
        missing = [index // 2 for index, value in enumerate(self.present) if value is None]
        assert not missing, f"layers {sorted(set(missing))} did not attend through the registry"
        return tuple(value for value in self.present if value is not None)


_rows: ContextVar[Rows] = ContextVar("rows")


@contextmanager
def rows_of_pass(rows: Rows) -> Iterator[None]:
    """Within it, attention reads and fills `rows`."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, layer: int, scale: float
) -> torch.Tensor:
    """Attends for one layer of the pass under way: [B, Hq, Q, D] and twice [B, Hkv, Q, D] to [B, Q, Hq, D]."""
    rows = _rows.get()
    past_key, past_value = rows.past[2 * layer : 2 * layer + 2]
    arguments = (query, key, value, past_key, past_value, rows.tree_mask, rows.kv_length)
    if torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting():
        slots, heads, new_rows, head_dim = query.shape
        out, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            f"{op.DOMAIN}::{op.NAME}",
            arguments,
            {"scale": scale},
            dtypes=(query.dtype, past_key.dtype, past_value.dtype),
            shapes=((slots, new_rows, heads, head_dim), tuple(past_key.shape), tuple(past_value.shape)),
            version=op.VERSION,
        )
    else:
        out, present_key, present_value = _tree_attention_in_torch(*arguments, scale=scale)
    rows.present[2 * layer : 2 * layer + 2] = [present_key, present_value]
    return out


def _tree_attention_in_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    tree_mask: torch.Tensor,
    kv_length: torch.Tensor,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    new_rows, total = tree_mask.shape[1:]
    present_key, present_value = past_key.clone(), past_value.clone()
    out = []
    for slot, length in enumerate(kv_length.tolist()):
        end = length + total
        present_key[slot, :, end - new_rows : end] = key[slot]
        present_value[slot, :, end - new_rows : end] = value[slot]
        mask = torch.cat((torch.ones(new_rows, length, dtype=torch.bool), tree_mask[slot]), dim=1)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[slot], present_key[slot, :, :end], present_value[slot, :, :end], mask, scale=scale, enable_gqa=True
        )
        out.append(attended.transpose(0, 1))
    return torch.stack(out), present_key, present_value


def _attend_for_transformers(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_ignored: Any,  # dropout and backend hints; what would change the result is refused in target.py
) -> tuple[torch.Tensor, None]:
    scale = float(scaling) if scaling is not None else query.shape[-1] ** -0.5
    return tree_attention(query, key, value, layer=int(module.layer_idx), scale=scale), None  # type: ignore[arg-type]


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    return None


def register() -> None:
    """Makes `attn_implementation="eagle_tree"` known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend_for_transformers)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _no_mask)
