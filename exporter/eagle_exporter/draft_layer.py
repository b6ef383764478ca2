"""What the head modules are made of. A module is built around its tensors, so that shared ones are never copied.

B  slots    Q  new rows    h  hidden width    w  width of the attention's input, h or 2h
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle_exporter import attention
from eagle_exporter.heads import HeadSpec

Tensors = Mapping[str, torch.Tensor]
CosSin = tuple[torch.Tensor, torch.Tensor]


class DraftLayer(nn.Module):
    """A decoder layer of the Llama kind whose attention reads what the caller gives it."""

    def __init__(self, spec: HeadSpec, tensors: Tensors, index: int) -> None:
        super().__init__()
        name = f"layers.{index}"
        self.self_attn = _Attention(spec, tensors, f"{name}.self_attn", index)
        self.post_attention_layernorm = norm(spec, tensors, f"{name}.post_attention_layernorm")
        self.mlp = _Mlp(spec, tensors, f"{name}.mlp")

    def forward(
        self, attention_input: torch.Tensor, residual: torch.Tensor, cos_sin: CosSin, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[B, Q, w] and [B, Q, h] to [B, Q, h]; with `rows`, flat indices of the new rows, to [R, h] of those alone."""
        x = residual + self.self_attn(attention_input, cos_sin)
        if rows is not None:
            x = x.flatten(0, 1).index_select(0, rows)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, spec: HeadSpec, tensors: Tensors, name: str, layer: int) -> None:
        super().__init__()
        self.head_dim, self.layer = spec.head_dim, layer
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(tensors, f"{name}.{p}_proj") for p in "qkvo")
        self.q_norm, self.k_norm = (
            norm(spec, tensors, f"{name}.{p}_norm") if f"{name}.{p}_norm.weight" in tensors else nn.Identity()
            for p in "qk"
        )

    def forward(self, x: torch.Tensor, cos_sin: CosSin) -> torch.Tensor:
        split = (*x.shape[:2], -1, self.head_dim)
        query = self.q_norm(self.q_proj(x).view(split)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(split)).transpose(1, 2)
        value = self.v_proj(x).view(split).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *cos_sin)
        out = attention.tree_attention(query, key, value, layer=self.layer, scale=self.head_dim**-0.5)
        result: torch.Tensor = self.o_proj(out.reshape(*x.shape[:2], -1))
        return result


class _Mlp(nn.Module):
    def __init__(self, spec: HeadSpec, tensors: Tensors, name: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            linear(tensors, f"{name}.{part}_proj") for part in ("gate", "up", "down")
        )
        self.activation = ACT2FN[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


def linear(tensors: Tensors, name: str) -> nn.Linear:
    """The projection `name`, with a bias where the checkpoint has one."""
    weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def norm(spec: HeadSpec, tensors: Tensors, name: str) -> LlamaRMSNorm:
    """The RMS norm `name`."""
    weight = tensors[f"{name}.weight"]
    layer = LlamaRMSNorm(len(weight), spec.norm_eps)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


class Embedding(nn.Embedding):
    """Rows of a table [V, h]; where `scaled`, multiplied as the target multiplies those of its own table."""

    def __init__(self, table: torch.Tensor, *, target_scale: float, scaled: bool) -> None:
        super().__init__(table.shape[0], table.shape[1], _weight=table.detach())
        self.requires_grad_(False)
        self.target_scale, self.scaled = target_scale, scaled

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[B, Q] to [B, Q, h]."""
        rows = super().forward(token_ids)
        return rows * self.target_scale if self.scaled and self.target_scale != 1 else rows


def embedding(spec: HeadSpec, tensors: Tensors, target: nn.Module, *, target_scale: float) -> Embedding:
    """The head's own embedding, or the target's table. A copy of the target's table is the target's table."""
    table = target.weight
    assert isinstance(table, torch.Tensor)
    own = tensors.get("embed_tokens.weight")
    if own is not None and not torch.equal(own, table.to(own.dtype)):
        table = own
    return Embedding(table, target_scale=target_scale, scaled=spec.scaled_embedding)


def rotary(spec: HeadSpec) -> LlamaRotaryEmbedding:
    """Cosines and sines of a head's positions."""
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=spec.hidden_size,
            num_attention_heads=spec.attention_heads,
            head_dim=spec.head_dim,
            rope_parameters=dict(spec.rope_parameters),
            max_position_embeddings=spec.max_positions,
        )
    )


def best_children(
    logits: torch.Tensor, top_k: int, draft_to_target: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, K] target ids and log-probabilities of each row's best tokens, best first, from logits [R, W].

    draft_to_target: [W] the target's ids; None where the draft's are the same.
    """
    best = logits.topk(top_k, dim=-1).indices
    # Not logsumexp: ONNX Runtime's takes ten times as long as its log-softmax.
    logprobs = logits.log_softmax(dim=-1).gather(-1, best)
    return (best if draft_to_target is None else draft_to_target[best]), logprobs
