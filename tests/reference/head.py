"""SafeAILab's EAGLE-3 draft head in plain torch, written to be read.

It shares no code with the exporter, so that a fault of the exported graph cannot hide in its own
reference. Everything is float32 and one sequence at a time. The design is that of EAGLE-3
(https://arxiv.org/abs/2503.01840), the tensor names those of https://github.com/SafeAILab/EAGLE.

    Q  new rows             h  hidden width            V  vocabulary of the target
    P  rows in the cache    H  heads (Hkv of keys)     W  vocabulary of the draft
                            D  width of a head
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

Cache = tuple[Tensor, Tensor]  # keys and values, each [Hkv, P, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceHead:
    """The head's weights and the arithmetic on them. It holds no state: caches go in and come out."""

    weights: dict[str, Tensor]
    embedding: Tensor
    """[V, h] the target's, which the head shares."""
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float

    @classmethod
    def load(cls, directory: str | Path, target: PreTrainedModel) -> ReferenceHead:
        """The head of a checkpoint directory (config.json, model.safetensors) beside its target."""
        config = json.loads((Path(directory) / "config.json").read_text())
        weights = load_file(Path(directory) / "model.safetensors")
        return cls(
            weights={name: value.float() if value.is_floating_point() else value for name, value in weights.items()},
            embedding=target.get_input_embeddings().weight.detach().float(),
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rope_theta=config["rope_theta"],
            eps=config["rms_norm_eps"],
        )

    def empty_cache(self) -> Cache:
        """The cache before the first row."""
        return torch.empty(self.kv_heads, 0, self.head_dim), torch.empty(self.kv_heads, 0, self.head_dim)

    def fuse(self, features: Tensor) -> Tensor:
        """[Q, 3h] tapped hidden states of the target, side by side, as the head's hidden [Q, h]."""
        return self._linear("fc", features)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, visible: Tensor, past: Cache
    ) -> tuple[Tensor, Cache]:
        """Recurrent features [Q, h] of new rows, and the cache with those rows at its end.

        Row i pairs token i + 1 (`tokens` [Q]) with the feature of token i (`hidden` [Q, h], fused or
        the head's own); `positions` [Q] are those of the features. `visible` [Q, P + Q] bool says
        which rows each new one sees.
        """
        attention_input = torch.cat(
            (
                self._norm("midlayer.input_layernorm", self.embedding[tokens]),
                self._norm("midlayer.hidden_norm", hidden),
            ),
            dim=-1,
        )  # [Q, 2h]
        attended, present = self._attention(attention_input, positions, visible, past)
        hidden = hidden + attended  # the residual is the hidden before its norm
        hidden = hidden + self._mlp(self._norm("midlayer.post_attention_layernorm", hidden))
        return hidden, present

    def log_probs(self, hidden: Tensor) -> Tensor:
        """[Q, W] log-probabilities over the draft's vocabulary of the token after each row."""
        return F.log_softmax(self._linear("lm_head", self._norm("norm", hidden)), dim=-1)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of ids of the draft's vocabulary: d2t holds offsets."""
        return draft_ids + self.weights["d2t"][draft_ids]

    def _attention(self, x: Tensor, positions: Tensor, visible: Tensor, past: Cache) -> tuple[Tensor, Cache]:
        query = self._rotate(self._heads("q_proj", x, self.heads), positions)
        key = torch.cat((past[0], self._rotate(self._heads("k_proj", x, self.kv_heads), positions)), dim=1)
        value = torch.cat((past[1], self._heads("v_proj", x, self.kv_heads)), dim=1)
        group = self.heads // self.kv_heads
        out = F.scaled_dot_product_attention(
            query, key.repeat_interleave(group, dim=0), value.repeat_interleave(group, dim=0), attn_mask=visible
        )  # [H, Q, D]
        return self._linear("midlayer.self_attn.o_proj", out.transpose(0, 1).flatten(1)), (key, value)

    def _heads(self, name: str, x: Tensor, heads: int) -> Tensor:
        """[heads, Q, D] projection of x [Q, 2h]."""
        return self._linear(f"midlayer.self_attn.{name}", x).unflatten(-1, (heads, self.head_dim)).transpose(0, 1)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [heads, Q, D]: element j turns with element j + D/2."""
        frequencies = self.rope_theta ** (-torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        angles = positions[:, None].float() * frequencies  # [Q, D/2]
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _mlp(self, x: Tensor) -> Tensor:
        gated = F.silu(self._linear("midlayer.mlp.gate_proj", x)) * self._linear("midlayer.mlp.up_proj", x)
        return self._linear("midlayer.mlp.down_proj", gated)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])
