"""A head in one vocabulary of terms, whatever its layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

Tensors = dict[str, torch.Tensor]
Kind = Literal["eagle1", "eagle3"]

UNKNOWN = 0
"""A size that the config states wrongly, or that only the target could tell: nothing is compared with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What a head's fit depends on in its target."""

    name: str
    layers: int
    hidden_size: int
    vocab_size: int
    rope_theta: float | None
    """None where its layers differ in it, or have none."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> TargetShape:
        """From the target's config."""
        rope = getattr(config, "rope_parameters", None) or {}
        return cls(
            name=config.model_type,
            layers=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
            vocab_size=int(config.vocab_size),
            rope_theta=rope.get("rope_theta"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the user states by hand against the checkpoint; None leaves the checkpoint's."""

    taps: tuple[int, ...] | None = None
    rope_theta: float | None = None
    position_offset: int | None = None
    scaled_embedding: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head's architecture and its conventions. Sizes are numbers of elements."""

    kind: Kind
    layout: str
    """Family and checkpoint layout that were detected."""
    taps: tuple[int, ...]
    """Indices into `hidden_states` of the target: k is the input of layer k, the number of layers the output of the
    final norm. Empty where only the target could tell and there is none."""
    position_offset: int
    """Position of the draft row that holds feature 0."""
    layers: int
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    draft_vocab_size: int
    activation: str
    norm_eps: float
    rope_parameters: dict[str, Any]
    """In the form of transformers' configs: rope_type, rope_theta and what the type needs."""
    max_positions: int
    norm_before_residual: bool = False
    """The first layer's residual is the normed feature rather than the feature itself."""
    norm_before_fc: bool = False
    """One norm over all tapped states side by side, before `fc`."""
    fc_norm: bool = False
    """A norm for each tapped state, before `fc`."""
    norm_output: bool = False
    """The recurrent feature is the output of the final norm rather than its input."""
    own_embedding: bool = False
    """Whether the checkpoint brings embed_tokens; else the target's serve."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied as the target multiplies its own (Gemma by the root of its width, Granite by
    embedding_multiplier). Trainers of the SafeAILab, SpecForge, speculators and AngelSlim layouts copy the table from
    the target's checkpoint and look it up as it is; ModelOpt's gives a head what the target's first layer reads."""
    own_lm_head: bool = False
    """Whether the checkpoint brings an LM head; else the target's serves."""
    notes: tuple[str, ...] = ()
    """What a user should know of this layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A head's spec and its tensors in float32, under the names of its module."""

    spec: HeadSpec
    tensors: Tensors
    draft_to_target: torch.Tensor
    """[draft_vocab_size] int64: the target's id of each draft id."""


@dataclass(slots=True, kw_only=True)
class Reading:
    """A checkpoint as far as it can be understood, and every reason why it does not fit."""

    spec: HeadSpec | None = None
    """None where no layout is recognised."""
    tensors: Tensors = field(default_factory=dict)
    draft_to_target: torch.Tensor | None = None
    """None where the draft vocabulary is the target's, or its map is faulty."""
    problems: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """Elements of all weights."""
        return sum(tensor.numel() for tensor in self.tensors.values())
