"""The target: a causal language model of transformers, with its features tapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from eagle_exporter import attention, experts
from eagle_exporter.checkpoint import Checkpoint
from eagle_exporter.rope import settle_rope
from eagle_exporter.survey import check_supported
from eagle_graphs import EagleError, KVGeometry

_MULTIPLE = 1e-5
"""Relative difference up to which a vector is a multiple of another in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    kv: KVGeometry
    embedding_scale: float
    """What the rows of its embedding are multiplied by before the first layer: 1 for most, a root in Gemma."""

    @property
    def config(self) -> PretrainedConfig:
        """The model's config."""
        return cast(PretrainedConfig, self.model.config)


def read_config(checkpoint: Checkpoint) -> PretrainedConfig:
    """The target's config; no code of the checkpoint is run. Raises EagleError where transformers cannot read it."""
    with _one_line_for_the_user(checkpoint):
        config: PretrainedConfig = AutoConfig.from_pretrained(checkpoint.directory, **_where(checkpoint))
    return config


def load_target(checkpoint: Checkpoint) -> Target:
    """Loads the model in float32 with TreeAttention. Raises EagleError on what cannot be exported."""
    kv = check_supported(read_config(checkpoint))
    safe: dict[str, Any] = {} if checkpoint.gguf_file else {"use_safetensors": True}  # nothing is unpickled
    with _one_line_for_the_user(checkpoint):
        model, loading = AutoModelForCausalLM.from_pretrained(
            checkpoint.directory,
            dtype=torch.float32,
            attn_implementation=attention.IMPLEMENTATION,
            experts_implementation=experts.IMPLEMENTATION,
            output_loading_info=True,
            **_where(checkpoint),
            **safe,
        )
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.directory, **_where(checkpoint))
    check_complete(loading)
    model.eval().requires_grad_(False)
    check_finite(model, what="target")
    if not getattr(tokenizer, "is_fast", False):
        raise EagleError(f"target: {checkpoint.name} has no fast tokenizer (tokenizer.json), which the runtime needs")
    return Target(
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(model),
        kv=kv,
        embedding_scale=embedding_scale(model),
    )


def settle(model: PreTrainedModel, *, capacity: int) -> tuple[str, ...]:
    """Fixes what depends on the length of a text, before tracing; returns what the report should say of the model."""
    notes = [settle_rope(model, capacity=capacity)]
    if count := experts.dense_experts(model):
        notes.append(f"experts: dense, every row runs through all {count} of a layer and the router's weights choose")
    return tuple(note for note in notes if note)


def _where(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"trust_remote_code": False, **({"gguf_file": checkpoint.gguf_file} if checkpoint.gguf_file else {})}


@contextmanager
def _one_line_for_the_user(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns whatever the libraries raise on a file that is damaged or unknown to them into an EagleError."""
    try:
        yield
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "no message")
        if "trust_remote_code" in str(error):
            reason = "it brings code of its own, which an export does not run; use a model type that transformers knows"
        raise EagleError(
            f"target: transformers cannot load {checkpoint.name}: {reason} ({type(error).__name__})"
        ) from None


def check_complete(loading: Mapping[str, Any]) -> None:
    """Raises EagleError where tensors are missing, for which transformers puts random ones.

    loading: what `from_pretrained` says with `output_loading_info`.
    """
    for fault in ("missing_keys", "mismatched_keys"):
        if found := sorted(map(str, loading.get(fault, ()))):
            raise EagleError(
                f"target: the checkpoint is not whole: {fault.replace('_keys', '')} {', '.join(found[:4])}"
                f"{f' and {len(found) - 4} more' if len(found) > 4 else ''}; download it again"
            )


def check_finite(module: nn.Module, *, what: str) -> None:
    """Raises EagleError where a weight is NaN or infinite."""
    for name, tensor in module.named_parameters():
        if not torch.isfinite(tensor.sum()):
            raise EagleError(f"{what}: {name} holds NaN or infinite values; the checkpoint is damaged")


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    if eos is None:
        eos = cast(Any, model.config).eos_token_id
    return tuple(int(i) for i in (eos if isinstance(eos, list) else [eos] if eos is not None else []))


@contextmanager
def as_transformers_runs_it(model: PreTrainedModel) -> Iterator[None]:
    """Within it, the model attends and computes its experts by transformers' own plain code."""
    own = model.config._attn_implementation, model.config._experts_implementation
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own[0])
        model.set_experts_implementation(own[1])


@torch.no_grad()
def embedding_scale(model: PreTrainedModel) -> float:
    """What the model multiplies the rows of its embedding table by, wherever it does so.

    Measured on a few rows. 1 where the first layer reads something else than a multiple of them.
    """
    tokens = torch.arange(min(16, int(cast(Any, model.config).vocab_size)))
    table = cast(Any, model.get_input_embeddings()).weight
    with as_transformers_runs_it(model):
        read = model(tokens[None], output_hidden_states=True, use_cache=False).hidden_states[0][0].double()
    rows = table[tokens].double()
    scale = float((read * rows).sum() / rows.square().sum())
    is_multiple = bool((read - scale * rows).abs().max() <= _MULTIPLE * read.abs().max())
    return float(torch.tensor(scale).float()) if is_multiple else 1.0


class TargetGraph(nn.Module):
    """The module behind the target graph: the model, the head's feature fusion, argmax.

    Forward takes and returns the tensors of `eagle_graphs.target_ports`, in that order.
    """

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...], fuse_features: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.taps = taps
        self.fuse_features = fuse_features

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        tree_mask: torch.Tensor,
        kv_length: torch.Tensor,
        logit_rows: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The target's pass over Q rows."""
        rows = attention.Rows(tree_mask=tree_mask, kv_length=kv_length, past=past)
        lm_head = cast(nn.Module, self.model.get_output_embeddings())

        def keep_asked_rows(_module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            return (args[0].flatten(0, 1).index_select(0, logit_rows),)

        # Before the LM head rather than after: what the model does with its logits (caps, scales) stays its own.
        with attention.rows_of_pass(rows), lm_head.register_forward_pre_hook(keep_asked_rows):
            result = self.model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False, output_hidden_states=True
            )
        features = self.fuse_features(torch.cat([result.hidden_states[tap] for tap in self.taps], dim=-1))
        logits = result.logits
        finite = torch.isfinite(logits.sum(dim=-1))
        return (logits.argmax(dim=-1), logits, finite, features, *rows.all_present())
