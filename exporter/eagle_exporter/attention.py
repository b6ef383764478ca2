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

from eagle_graphs import EagleError
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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    layer: int,
    scale: float,
    softcap: float = 0.0,
    sliding_window: int = 0,
) -> torch.Tensor:
    """Attends for one layer of the pass under way: [B, Hq, Q, D] and twice [B, Hkv, Q, D] to [B, Q, Hq, D]."""
    rows = _rows.get()
    past_key, past_value = rows.past[2 * layer : 2 * layer + 2]
    arguments = [query, key, value, past_key, past_value, rows.tree_mask, rows.kv_length]
    arguments += [sinks] if sinks is not None else []
    attributes: dict[str, Any] = {"scale": scale}
    attributes |= {"softcap": softcap} if softcap else {}
    attributes |= {"sliding_window": sliding_window} if sliding_window else {}
    if torch.onnx.is_in_onnx_export() or torch.compiler.is_exporting():
        slots, heads, new_rows, head_dim = query.shape
        out, present_key, present_value = torch.onnx.ops.symbolic_multi_out(
            f"{op.DOMAIN}::{op.NAME}",
            arguments,
            attributes,
            dtypes=(query.dtype, past_key.dtype, past_value.dtype),
            shapes=((slots, new_rows, heads, head_dim), tuple(past_key.shape), tuple(past_value.shape)),
            version=op.VERSION,
        )
    else:
        out, present_key, present_value = _tree_attention_in_torch(*arguments, **attributes)
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
    sinks: torch.Tensor | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    sliding_window: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    new_rows, total = tree_mask.shape[1:]
    group = query.shape[1] // key.shape[1]
    present_key, present_value = past_key.clone(), past_value.clone()
    out = []
    for slot, length in enumerate(kv_length.tolist()):
        end = length + total
        present_key[slot, :, end - new_rows : end] = key[slot]
        present_value[slot, :, end - new_rows : end] = value[slot]
        mask = torch.cat((torch.ones(new_rows, length, dtype=torch.bool), tree_mask[slot]), dim=1)
        if sliding_window:
            mask &= mask.flip(1).cumsum(1).flip(1) <= sliding_window
        keys, values = (cache[slot, :, :end].repeat_interleave(group, dim=0) for cache in (present_key, present_value))
        scores = query[slot] @ keys.transpose(1, 2) * scale  # [Hq, Q, length + S]
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, new_rows, 1)), dim=2)
        attended = scores.softmax(dim=2)[:, :, :end] @ values
        out.append(attended.transpose(0, 1))
    return torch.stack(out), present_key, present_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """What stands for the mask of a layer, on its way from transformers' mask registry to the attention."""

    sliding_window: int
    """Positions, as in TreeAttention; 0 for none."""


_HINTS = frozenset(
    {
        *("dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("position_ids", "sliding_window", "use_cache"),
    }
)
"""Arguments of attention that change nothing here: the window is the mask's, as in transformers' eager attention."""


def settings_from_arguments(
    query: torch.Tensor,
    mask: object,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> dict[str, Any]:
    """TreeAttention's settings from what transformers passes. Raises EagleError, by name, on what it cannot do."""
    unknown = sorted(name for name, value in more.items() if name not in _HINTS and value is not None)
    if unknown:
        raise EagleError(f"its attention takes {', '.join(unknown)}, which the graphs do not express")
    if more.get("is_causal") is False:
        raise EagleError("its attention is not causal")
    if not isinstance(mask, Mask):
        raise EagleError("it makes its attention masks itself, so that a tree's cannot take their place")
    return {
        "sinks": s_aux,
        "scale": float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        "softcap": float(softcap or 0.0),
        "sliding_window": mask.sliding_window,
    }


def _attend_for_transformers(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    settings = settings_from_arguments(query, attention_mask, **arguments)
    return tree_attention(query, key, value, layer=int(module.layer_idx), **settings), None  # type: ignore[arg-type]


def _mask_for_transformers(*, local_size: int | None = None, **_shape: Any) -> Mask:
    return Mask(sliding_window=local_size or 0)


def register() -> None:
    """Makes `attn_implementation="eagle_tree"` known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend_for_transformers)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask_for_transformers)
