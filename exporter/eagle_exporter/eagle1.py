"""The EAGLE-1/2 head as a module (Li et al., 2024, https://arxiv.org/abs/2401.15077, section 3)."""

from __future__ import annotations

import torch
from torch import nn

from eagle_exporter import attention
from eagle_exporter.draft_layer import DraftLayer, best_children, embedding, linear, norm, rotary
from eagle_exporter.heads import Head


class Eagle1Head(nn.Module):
    """x = fc([embedding of token i + 1; feature of token i]), decoder layers, and the target's LM head on their output.

    The feature is what the target's LM head reads, and the output is a guess at the next one. The first layer has no
    input norm and there is no final norm. Forward takes and returns the tensors of `eagle_graphs.draft_ports`, in that
    order.
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
        self.top_k = top_k
        self.fuse_features = nn.Identity()
        self.embed_tokens = embedding(spec, tensors, target_embedding, target_scale=target_embedding_scale)
        self.fc = linear(tensors, "fc")
        self.input_layernorms = nn.ModuleList(
            norm(spec, tensors, f"layers.{i}.input_layernorm") if i else nn.Identity() for i in range(spec.layers)
        )
        self.layers = nn.ModuleList(DraftLayer(spec, tensors, index) for index in range(spec.layers))
        self.lm_head = linear(tensors, "lm_head") if spec.own_lm_head else target_lm_head
        self.rotary_emb = rotary(spec)
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
        x = self.fc(torch.cat((self.embed_tokens(token_ids), hidden), dim=-1))
        cos_sin = self.rotary_emb(hidden, position_ids)
        last = len(self.layers) - 1
        with attention.rows_of_pass(rows):
            for index, layer in enumerate(self.layers):
                x = layer(self.input_layernorms[index](x), x, cos_sin, logit_rows if index == last else None)
        return (x, *best_children(self.lm_head(x), self.top_k, None), *rows.all_present())
