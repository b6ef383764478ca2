"""The EAGLE-3 head and its variants as a module (Li et al., 2025, https://arxiv.org/abs/2503.01840, section 3)."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from eagle_exporter import attention
from eagle_exporter.draft_layer import DraftLayer, Tensors, best_children, embedding, linear, norm, rotary
from eagle_exporter.heads import Head, HeadSpec


class Eagle3Head(nn.Module):
    """Decoder layers of which the first reads [embedding of token i + 1; fused feature of token i], and an LM head.

    Forward takes and returns the tensors of `eagle_graphs.draft_ports`, in that order. Embedding and LM head are the
    target's tensors themselves, not copies, unless the checkpoint brings its own.
    """

    def __init__(
        self,
        head: Head,
        target_embedding: nn.Module,
        target_lm_head: nn.Module,
        *,
        target_embedding_scale: float,
        top_k: int,
    ) -> None:
        super().__init__()
        spec, tensors = head.spec, head.tensors
        self.spec, self.top_k = spec, top_k
        self.fuse_features = FuseFeatures(spec, tensors)
        self.embed_tokens = embedding(spec, tensors, target_embedding, target_scale=target_embedding_scale)
        self.hidden_norm = norm(spec, tensors, "layers.0.hidden_norm")
        self.input_layernorms = nn.ModuleList(
            norm(spec, tensors, f"layers.{i}.input_layernorm") for i in range(spec.layers)
        )
        self.layers = nn.ModuleList(DraftLayer(spec, tensors, index) for index in range(spec.layers))
        self.norm = norm(spec, tensors, "norm")
        self.lm_head = linear(tensors, "lm_head") if spec.own_lm_head else target_lm_head
        self.rotary_emb = rotary(spec)
        self.draft_to_target: torch.Tensor | None
        identity = torch.equal(head.draft_to_target, torch.arange(spec.draft_vocab_size))
        self.register_buffer("draft_to_target", None if identity else head.draft_to_target, persistent=False)
        self.eval()

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
        embedded = self.input_layernorms[0](self.embed_tokens(token_ids))
        feature = self.hidden_norm(hidden)
        x, residual = torch.cat((embedded, feature), dim=-1), feature if self.spec.norm_before_residual else hidden
        cos_sin = self.rotary_emb(hidden, position_ids)
        last = len(self.layers) - 1
        with attention.rows_of_pass(rows):
            for index, layer in enumerate(self.layers):
                if index > 0:
                    x = self.input_layernorms[index](residual)
                residual = layer(x, residual, cos_sin, logit_rows if index == last else None)
        normed = self.norm(residual)
        best = best_children(self.lm_head(normed), self.top_k, self.draft_to_target)
        return (normed if self.spec.norm_output else residual, *best, *rows.all_present())


class FuseFeatures(nn.Module):
    """Tapped hidden states of the target, side by side [B, Q, taps * target's width], to features [B, Q, h]."""

    def __init__(self, spec: HeadSpec, tensors: Tensors) -> None:
        super().__init__()
        self.fc = linear(tensors, "fc")
        names = [f"fc_norm.{tap}" for tap in range(len(spec.taps))] if spec.fc_norm else []
        names += ["input_norm"] if spec.norm_before_fc else []
        self.norms = nn.ModuleList(norm(spec, tensors, name) for name in names)

    def forward(self, tapped: torch.Tensor) -> torch.Tensor:
        """The features."""
        if len(self.norms):
            parts = tapped.chunk(len(self.norms), dim=-1)
            tapped = torch.cat([own(part) for own, part in zip(self.norms, parts, strict=True)], dim=-1)
        return cast(torch.Tensor, self.fc(tapped))
