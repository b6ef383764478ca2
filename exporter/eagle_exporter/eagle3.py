"""The EAGLE-3 head as a module (Li et al., 2025, "EAGLE-3", section 3)."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from eagle_exporter import attention
from eagle_exporter.heads import Head, HeadSpec


class Eagle3Head(nn.Module):
    """One decoder layer over [embedding of token i + 1; fused feature of token i], and its own LM head.

    Forward takes and returns the tensors of `eagle_graphs.draft_ports`, in that order. The embedding
    is the target's tensor itself, not a copy, unless the checkpoint brings its own.
    """

    def __init__(self, head: Head, embed_tokens: nn.Embedding, *, target_hidden: int, top_k: int) -> None:
        super().__init__()
        spec = head.spec
        config = _llama_config(spec)
        self.spec, self.top_k = spec, top_k
        self.embed_tokens = embed_tokens
        self.fc = nn.Linear(3 * target_hidden, spec.hidden_size, bias=False)
        self.input_layernorm = LlamaRMSNorm(spec.hidden_size, spec.norm_eps)
        self.hidden_norm = LlamaRMSNorm(spec.hidden_size, spec.norm_eps)
        self.self_attn = _Attention(spec)
        self.post_attention_layernorm = LlamaRMSNorm(spec.hidden_size, spec.norm_eps)
        self.mlp = LlamaMLP(config)
        self.norm = LlamaRMSNorm(spec.hidden_size, spec.norm_eps)
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.draft_to_target: torch.Tensor
        self.register_buffer("draft_to_target", head.draft_to_target, persistent=False)
        tensors = dict(head.tensors)
        own = tensors.pop("embed_tokens.weight", None)
        if own is not None and not torch.equal(own, embed_tokens.weight.to(own.dtype)):
            self.embed_tokens = nn.Embedding(own.shape[0], own.shape[1], _weight=own)
        tensors["embed_tokens.weight"] = self.embed_tokens.weight
        self.load_state_dict(tensors, strict=True)
        self.eval().requires_grad_(False)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        tree_mask: torch.Tensor,
        kv_length: torch.Tensor,
        logit_rows: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The draft pass over Q rows."""
        rows = attention.Rows(tree_mask=tree_mask, kv_length=kv_length, past=past)
        with attention.rows_of_pass(rows):
            embedded = self.input_layernorm(self.embed_tokens(token_ids))
            x = torch.cat((embedded, self.hidden_norm(hidden)), dim=-1)
            x = hidden + self.self_attn(x, self.rotary_emb(hidden, position_ids))
        x = x.flatten(0, 1).index_select(0, logit_rows)
        x = x + self.mlp(self.post_attention_layernorm(x))
        logits = self.lm_head(self.norm(x))
        best = logits.topk(self.top_k, dim=-1)
        logprobs = best.values - logits.logsumexp(dim=-1, keepdim=True)
        return (x, self.draft_to_target[best.indices], logprobs, *rows.all_present())


class _Attention(nn.Module):
    def __init__(self, spec: HeadSpec) -> None:
        super().__init__()
        self.spec = spec
        queries, keys = spec.attention_heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(2 * spec.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * spec.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * spec.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, spec.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos_sin: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        slots, new_rows, _ = x.shape
        split = (slots, new_rows, -1, self.spec.head_dim)
        query = self.q_proj(x).view(split).transpose(1, 2)
        key = self.k_proj(x).view(split).transpose(1, 2)
        value = self.v_proj(x).view(split).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *cos_sin)
        out = attention.tree_attention(query, key, value, layer=0, scale=self.spec.head_dim**-0.5)
        result: torch.Tensor = self.o_proj(out.reshape(slots, new_rows, -1))
        return result


def _llama_config(spec: HeadSpec) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.attention_heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        hidden_act=spec.activation,
        rms_norm_eps=spec.norm_eps,
        rope_parameters=spec.rope_parameters,
        max_position_embeddings=spec.max_positions,
        mlp_bias=False,
    )
