"""Slots in torch: any device, any precision, and 8-bit products on CPUs where there is no library of kernels.

What makes it fast on a CPU:

- **8-bit products.** A pass over 64 rows is bound by arithmetic, not by reading weights, and VNNI multiplies 8-bit
  integers four times as fast as fp32. Weights have a scale for each output, activations one for each row (token).
- **One cache of fixed size**, bf16, written in place. A slot whose sequence has ended is filled again at once.
- **Slots of like length stand together**: attention runs over groups, each as wide as its longest sequence.
- **One thread a process**: small products lose more to threads that wait for each other than they gain.

    B  slots      C  capacity in tokens      H  query heads (Hkv of keys)      D  width of a head      G  H / Hkv
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle_exporter.attention import Mask, settings_from_arguments
from eagle_exporter.target import Target
from eagle_graphs import EagleError, KVGeometry
from tools.train.slots import TOP_K, Best, Precision

IMPLEMENTATION = "train_slots"
GROUP = 16
"""Slots that attend together."""
STRIDE = 32
"""Steps between two layouts of the caches."""


class Int8Linear(nn.Module):
    """A linear layer with 8-bit weights and activations: y = (x_q @ w_q) * scale of the row * scale of the output."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(dim=1).clamp(min=1e-8) / 127
        quantized = (linear.weight / scale[:, None]).round().to(torch.int8)
        self.register_buffer("weight", quantized.t().contiguous())  # [in, out]
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = rows.abs().amax(dim=1, keepdim=True).clamp_(min=1e-8) / 127
        quantized = (rows / scale).round_().to(torch.int8)
        out = torch._int_mm(quantized, self.weight).float().mul_(self.scale).mul_(scale)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], -1)


def quantize(module: nn.Module) -> None:
    """Replaces every linear layer below `module` by its 8-bit form."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, Int8Linear(child))
        else:
            quantize(child)


class TorchSlots:
    """`Slots` over a model of transformers.

    A group's sequences end at the same column of its cache, so that a step writes one column and what a sequence
    lacks in length is masked at its left. Every `STRIDE` steps the caches are laid out anew. The target's model is
    changed.
    """

    def __init__(self, target: Target, *, slots: int, precision: Precision, device: str = "cpu") -> None:
        _register()
        self.model: Any = target.model.to(device)
        self.model.set_attn_implementation(IMPLEMENTATION)
        if precision == "int8":
            quantize(self.model)
        elif precision == "bf16":
            self.model.bfloat16()
        self.device, self.kv = device, target.kv
        self.lengths: npt.NDArray[np.int64] = np.zeros(slots, np.int64)
        self._lengths = torch.from_numpy(self.lengths)  # the same memory
        self._dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        self._groups: list[_Group] = []
        self._places: dict[int, tuple[_Group, int]] = {}
        self._caches = [torch.zeros(0)] * (2 * target.kv.layers)
        self._prefix: list[torch.Tensor] = []
        self._steps = 0

    def step(self, tokens: Sequence[int]) -> Best:
        """See `Slots.step`."""
        if self._steps % STRIDE == 0:
            self._arrange()
        self._steps += 1
        order = torch.tensor([slot for group in self._groups for slot in group.slots])
        positions = self._lengths[order][:, None].to(self.device)
        self._lengths += 1
        for group in self._groups:
            group.column += 1
            group.bias = group.mask(self._lengths).to(self.device, self._dtype)
        token = _slots.set(self)
        try:
            with torch.inference_mode():
                ids = torch.tensor(tokens)[order][:, None].to(self.device)
                logits = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, 0]
                best = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
        finally:
            _slots.reset(token)
        back = order.argsort()
        return Best(ids=best.indices.cpu()[back].numpy(), scores=best.values.float().cpu()[back].numpy())

    def keep_prefix(self) -> None:
        """See `Slots.keep_prefix`."""
        group, row = self._places[0]
        rows = group.rows(row, int(self.lengths[0])).to(self.device)
        self._prefix = [cache[rows] for cache in self._caches]  # [Hkv, length, D]

    def restart(self, slot: int) -> None:
        """See `Slots.restart`."""
        length = self._prefix[0].shape[1] if self._prefix else 0
        group, row = self._places[slot]
        rows = group.rows(row, length).to(self.device)
        for cache, prefix in zip(self._caches, self._prefix, strict=True):
            cache[rows] = prefix
        self.lengths[slot] = length

    def _arrange(self) -> None:
        """Groups the slots by length and makes room for `STRIDE` more tokens."""
        groups, places, sources, start = [], {}, [], 0
        for slots in self._lengths.argsort().split(GROUP):
            column = int(self._lengths[slots].max())
            group = _Group(slots=slots.tolist(), start=start, column=column, width=column + STRIDE, kv=self.kv)
            rows = torch.zeros(len(slots), self.kv.kv_heads, group.width, dtype=torch.int64)
            for row, slot in enumerate(group.slots):
                places[slot] = group, row
                if length := int(self.lengths[slot]):
                    old, old_row = self._places[slot]
                    rows[row, :, column - length : column] = old.rows(old_row, length)
            groups.append(group)
            sources.append(rows.flatten())
            start += rows.numel()
        source = torch.cat(sources).to(self.device)
        for index, cache in enumerate(self._caches):
            if len(cache):
                self._caches[index] = cache.index_select(0, source)
            else:
                self._caches[index] = torch.zeros(start, self.kv.head_dim, dtype=self._dtype, device=self.device)
        self._groups, self._places = groups, places

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, softcap: float
    ) -> torch.Tensor:
        """[B, H, 1, D] and twice [B, Hkv, 1, D] to [B, 1, H, D]."""
        slots, heads, _, head_dim = query.shape
        queries = (query * scale).to(self._dtype).view(slots * self.kv.kv_heads, -1, head_dim)  # [B * Hkv, G, D]
        new = [x.to(self._dtype).view(slots * self.kv.kv_heads, head_dim) for x in (key, value)]
        out, start = [], 0
        for group in self._groups:
            part = slice(start, start := start + len(group.slots) * self.kv.kv_heads)
            keys, values = (group.view(cache) for cache in self._caches[2 * layer : 2 * layer + 2])
            keys[:, group.column - 1], values[:, group.column - 1] = new[0][part], new[1][part]
            scores = torch.bmm(queries[part], keys.transpose(1, 2))  # [., G, W]
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            out.append(torch.bmm((scores + group.bias).softmax(dim=-1), values))
        return torch.cat(out).to(query.dtype).view(slots, 1, heads, head_dim)


@dataclass(slots=True, kw_only=True)
class _Group:
    """Slots that attend together: a stretch of every layer's cache, as [slots * Hkv, width, D]."""

    slots: list[int]
    start: int
    """Its first row of the flat cache."""
    column: int
    """Columns in use; the last one is that of every sequence's last token."""
    width: int
    kv: KVGeometry
    bias: torch.Tensor = field(init=False)
    """[slots * Hkv, 1, width] 0 where a sequence has a token, -inf elsewhere."""

    def view(self, cache: torch.Tensor) -> torch.Tensor:
        batch = len(self.slots) * self.kv.kv_heads
        return cache[self.start : self.start + batch * self.width].view(batch, self.width, -1)

    def rows(self, row: int, length: int) -> torch.Tensor:
        """[Hkv, length] rows of the flat cache that hold the last `length` tokens of one of its slots."""
        heads = self.start + (row * self.kv.kv_heads + torch.arange(self.kv.kv_heads)) * self.width
        return heads[:, None] + torch.arange(self.column - length, self.column)

    def mask(self, lengths: torch.Tensor) -> torch.Tensor:
        """`bias` for sequences of these lengths [B]."""
        columns = torch.arange(self.width)
        first = self.column - lengths[self.slots].repeat_interleave(self.kv.kv_heads)
        held = (columns >= first[:, None]) & (columns < self.column)
        return torch.zeros(held.shape).masked_fill(~held, -torch.inf)[:, None]


_slots: ContextVar[TorchSlots] = ContextVar("slots")


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **arguments: Any
) -> tuple[torch.Tensor, None]:
    slots, settings = _slots.get(), settings_from_arguments(query, mask, **arguments)
    if settings["sinks"] is not None or 0 < settings["sliding_window"] < int(slots.lengths.max()):
        raise EagleError(
            "target: its attention has sinks, or a sliding window shorter than the text, with which this tool cannot "
            "write answers; let another program write them"
        )
    out = slots.attend(
        int(cast(int, module.layer_idx)), query, key, value, scale=settings["scale"], softcap=settings["softcap"]
    )
    return out, None


def _register() -> None:
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(
        IMPLEMENTATION, lambda *, local_size=None, **_shape: Mask(sliding_window=local_size or 0)
    )
