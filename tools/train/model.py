"""Trainable draft heads, with the tensor names of SafeAILab's checkpoints.

Both kinds pair the feature of token i with token i + 1 and have one decoder layer (Li et al., 2024,
https://arxiv.org/abs/2401.15077; 2025, https://arxiv.org/abs/2503.01840). The embedding is the target's, frozen and
shared; EAGLE-1 borrows the LM head too. The arithmetic that differs from pass to pass, attention, is in `unroll.py`.

    B  sequences                      R  rows               h  hidden width
    H  query heads (Hkv of keys)      D  width of a head    W  draft vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from eagle_graphs import EagleError

Kind = Literal["eagle1", "eagle3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a head is made of; sizes are numbers of elements. It mirrors a layer of the target."""

    kind: Kind
    taps: tuple[int, ...]
    """Indices into the target's `hidden_states`; of EAGLE-1 the last one, the LM head's input."""
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    norm_eps: float
    rope_theta: float
    max_positions: int

    def __post_init__(self) -> None:
        if not 1 <= self.draft_vocab <= self.vocab:
            raise EagleError(
                f"--draft-vocab is {self.draft_vocab}; expected 1 to {self.vocab}, the target's vocabulary"
            )


class DraftLayer(nn.Module):
    """Projections, norms and MLP of a decoder layer; its attention reads rows `width` wide."""

    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.shape = shape
        self.self_attn = _Projections(shape, width)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = _Mlp(shape)

    def keys_values(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, R, width] and positions [B, R] to keys and values, each [B, Hkv, R, D]."""
        key, value = (self._split(project(x)) for project in (self.self_attn.k_proj, self.self_attn.v_proj))
        return rotate(key, positions, self.shape.rope_theta), value

    def queries(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, H, R, D], divided by the square root of D."""
        query = rotate(self._split(self.self_attn.q_proj(x)), positions, self.shape.rope_theta)
        scale: float = self.shape.head_dim**-0.5
        return query * scale

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What follows attention: [B, H, R, D] and the residual [B, R, h] to the layer's output [B, R, h]."""
        x = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.shape.head_dim).transpose(1, 2)


class _Projections(nn.Module):
    def __init__(self, shape: Shape, width: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding of x [B, H, R, D] at positions [B, R]: element j turns with element j + D / 2."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (positions[..., None].float() * frequencies)[:, None]  # [B, 1, R, D / 2]
    cos, sin = angles.cos(), angles.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class DraftHead(nn.Module):
    """What both kinds share. Parameters are those of the checkpoint; embedding and vocabulary are buffers."""

    embedding: torch.Tensor
    draft_ids: torch.Tensor

    def __init__(self, shape: Shape, embedding: torch.Tensor, draft_ids: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("embedding", embedding, persistent=False)  # [V, h]
        self.register_buffer("draft_ids", draft_ids, persistent=False)  # [W] the target's ids, rising

    @property
    def layer(self) -> DraftLayer:
        """The decoder layer."""
        raise NotImplementedError

    @property
    def output_weight(self) -> torch.Tensor:
        """[W, h] of the LM head."""
        raise NotImplementedError

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        """Tapped hidden states [B, R, taps, h] to features [B, R, h]."""
        raise NotImplementedError

    def attention_input(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [B, R] and features [B, R, h] to the attention's input [B, R, width] and the residual [B, R, h]."""
        raise NotImplementedError

    def output_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output [..., h], which is the next feature, to the LM head's input."""
        raise NotImplementedError


class Eagle1(DraftHead):
    """x = fc([embedding; feature]); the layer without an input norm; its output is a guess at the next feature."""

    lm_head: torch.Tensor
    sees: torch.Tensor

    def __init__(
        self, shape: Shape, embedding: torch.Tensor, lm_head: torch.Tensor, *, token: bool = True, feature: bool = True
    ) -> None:
        """lm_head: [V, h]. token, feature: whether the head sees them; if not, their weights in fc are zero."""
        super().__init__(shape, embedding, torch.arange(shape.vocab))
        self.register_buffer("lm_head", lm_head, persistent=False)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([DraftLayer(shape, shape.hidden)])
        sees = torch.tensor([float(token), float(feature)]).repeat_interleave(shape.hidden)
        self.register_buffer("sees", sees, persistent=False)  # [2h]

    @property
    def layer(self) -> DraftLayer:
        (layer,) = self.layers
        assert isinstance(layer, DraftLayer)
        return layer

    @property
    def output_weight(self) -> torch.Tensor:
        return self.lm_head

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        return tapped[:, :, 0]

    def attention_input(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fc(torch.cat((F.embedding(tokens, self.embedding), hidden), dim=-1) * self.sees)
        return x, x

    def output_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Eagle3(DraftHead):
    """Attention reads [norm(embedding); norm(g)] of the fused feature g, which is the residual too; own LM head."""

    tap_scale: torch.Tensor

    def __init__(self, shape: Shape, embedding: torch.Tensor, draft_ids: torch.Tensor, tap_scale: torch.Tensor) -> None:
        """tap_scale: [taps * h] factors on the tapped hidden states, which are part of fc in a checkpoint.

        Hidden states grow from layer to layer and channel to channel; in units of their own, fc trains faster.
        """
        super().__init__(shape, embedding, draft_ids)
        self.register_buffer("tap_scale", tap_scale, persistent=False)
        self.fc = nn.Linear(len(shape.taps) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = _Midlayer(shape)
        self.norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)

    @property
    def layer(self) -> DraftLayer:
        return self.midlayer

    @property
    def output_weight(self) -> torch.Tensor:
        return self.lm_head.weight

    def fuse(self, tapped: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(tapped.flatten(2) * self.tap_scale)
        return out

    def attention_input(self, tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.midlayer.input_layernorm(F.embedding(tokens, self.embedding))
        return torch.cat((embedded, self.midlayer.hidden_norm(hidden)), dim=-1), hidden

    def output_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(hidden)
        return out


class _Midlayer(DraftLayer):
    """With a norm for each half of what its attention reads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, 2 * shape.hidden)
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, shape.norm_eps)
