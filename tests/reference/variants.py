"""Every other draft head in plain torch, written to be read: EAGLE-1/2, and EAGLE-3 with all its switches.

It shares no code with the exporter. What a head is, is told by `Truth`, which the tests state beside the checkpoint
that they write, not by the checkpoint's config: so a config that is misread shows. float32, one sequence at a time.

    Q  new rows      h  head's width      t  target's width      P  rows in the cache
    H  heads         D  width of a head   W  vocabulary of the draft
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Cache = list[tuple[Tensor, Tensor]]  # keys and values of each layer, each [Hkv, P, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What a head is."""

    kind: str
    layer_names: tuple[str, ...]
    """Prefix of each layer's tensors in the checkpoint."""
    taps: tuple[int, ...]
    position_offset: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    rope: dict[str, float]
    """theta, and what else the type needs."""
    rope_type: str = "default"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    scaled_embedding: bool = False
    """It was trained on embeddings that are multiplied as the target multiplies its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantHead:
    """The arithmetic of a head on the tensors of its checkpoint, by the names that they have there."""

    truth: Truth
    tensors: dict[str, Tensor]
    target_embedding: Tensor
    """[V, h]"""
    target_lm_head: Tensor
    """[V, h]"""
    target_embedding_scale: float = 1.0
    """What the target multiplies its embeddings by."""

    def empty_cache(self) -> Cache:
        empty = torch.empty(self.truth.kv_heads, 0, self.truth.head_dim)
        return [(empty, empty) for _ in self.truth.layer_names]

    def fuse(self, tapped: list[Tensor]) -> Tensor:
        """Tapped hidden states of the target, each [Q, t], as features [Q, h]."""
        if self.truth.kind == "eagle1":
            return tapped[0]
        if self.truth.fc_norm:
            tapped = [self._norm(f"fc_norm.{i}", state) for i, state in enumerate(tapped)]
        x = torch.cat(tapped, dim=-1)
        if self.truth.norm_before_fc:
            x = self._norm("input_norm", x)
        return self._linear("fc", x)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, visible: Tensor, past: Cache
    ) -> tuple[Tensor, Tensor, Cache]:
        """Recurrent features [Q, h], log-probabilities [Q, W], and the cache with the new rows at its end.

        Row i pairs token i + 1 with the feature of token i; `visible` [Q, P + Q] bool.
        """
        embedded = F.embedding(tokens, self.tensors.get("embed_tokens.weight", self.target_embedding))
        if self.truth.scaled_embedding:
            embedded = embedded * self.target_embedding_scale
        present: Cache = []
        if self.truth.kind == "eagle1":
            x = self._linear("fc", torch.cat((embedded, hidden), dim=-1))
            for index, (name, layer_past) in enumerate(zip(self.truth.layer_names, past, strict=True)):
                read = self._norm(f"{name}.input_layernorm", x) if index else x
                x = self._layer(name, read, x, positions, visible, layer_past, present)
            logits = self._lm_head(x)
            return x, logits.log_softmax(dim=-1), present
        first = self.truth.layer_names[0]
        normed = self._norm(f"{first}.hidden_norm", hidden)
        read = torch.cat((self._norm(f"{first}.input_layernorm", embedded), normed), dim=-1)
        x = normed if self.truth.norm_before_residual else hidden
        for index, (name, layer_past) in enumerate(zip(self.truth.layer_names, past, strict=True)):
            if index:
                read = self._norm(f"{name}.input_layernorm", x)
            x = self._layer(name, read, x, positions, visible, layer_past, present)
        out = self._norm("norm", x)
        return (out if self.truth.norm_output else x), self._lm_head(out).log_softmax(dim=-1), present

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of ids of the draft's vocabulary: d2t holds offsets."""
        return draft_ids + self.tensors["d2t"][draft_ids] if "d2t" in self.tensors else draft_ids

    def _layer(
        self,
        name: str,
        read: Tensor,
        residual: Tensor,
        positions: Tensor,
        visible: Tensor,
        past: tuple[Tensor, Tensor],
        present: Cache,
    ) -> Tensor:
        query = self._turned(self._split(name, "q", read, self.truth.heads), positions)
        key = torch.cat((past[0], self._turned(self._split(name, "k", read, self.truth.kv_heads), positions)), dim=1)
        value = torch.cat((past[1], self._split(name, "v", read, self.truth.kv_heads)), dim=1)
        present.append((key, value))
        group = self.truth.heads // self.truth.kv_heads
        scores = query @ key.repeat_interleave(group, dim=0).transpose(1, 2) / math.sqrt(self.truth.head_dim)
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)  # [H, Q, P + Q]
        attended = (weights @ value.repeat_interleave(group, dim=0)).transpose(0, 1).flatten(1)
        x = residual + self._linear(f"{name}.self_attn.o_proj", attended)
        inner = self._norm(f"{name}.post_attention_layernorm", x)
        gated = F.silu(self._linear(f"{name}.mlp.gate_proj", inner)) * self._linear(f"{name}.mlp.up_proj", inner)
        return x + self._linear(f"{name}.mlp.down_proj", gated)

    def _split(self, layer: str, part: str, x: Tensor, heads: int) -> Tensor:
        """[heads, Q, D] queries, keys or values, before any rotation."""
        out = self._linear(f"{layer}.self_attn.{part}_proj", x).unflatten(-1, (heads, self.truth.head_dim))
        if f"{layer}.self_attn.{part}_norm.weight" in self.tensors:
            out = self._norm(f"{layer}.self_attn.{part}_norm", out)
        return out.transpose(0, 1)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [heads, Q, D] rotated: element j turns with element j + D/2."""
        frequencies, scale = rope_frequencies(self.truth.rope_type, self.truth.rope, self.truth.head_dim)
        angles = positions[:, None].float() * frequencies  # [Q, D/2]
        cos, sin = angles.cos() * scale, angles.sin() * scale
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _lm_head(self, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors.get("lm_head.weight", self.target_lm_head))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(dim=-1, keepdim=True) + self.truth.eps).sqrt() * self.tensors[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))


def rope_frequencies(kind: str, rope: dict[str, float], head_dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair [D/2], and the factor on cosine and sine."""
    steps = torch.arange(0, head_dim, 2).float() / head_dim
    base = rope["theta"] ** -steps
    if kind == "default":
        return base, 1.0
    factor = rope["factor"]
    if kind == "linear":
        return base / factor, 1.0
    original = rope["original_max_position_embeddings"]
    if kind == "llama3":  # slow pairs are stretched, fast ones kept, those between blended
        turns = original * base / (2 * math.pi)  # over the original length
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return base * (kept + (1 - kept) / factor), 1.0
    assert kind == "yarn"  # https://arxiv.org/abs/2309.00071, with beta_fast 32 and beta_slow 1

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(rope["theta"]))

    low, high = max(math.floor(pair_that_turns(32)), 0), min(math.ceil(pair_that_turns(1)), head_dim - 1)
    stretched = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    return base * ((1 - stretched) + stretched / factor), 0.1 * math.log(factor) + 1.0
