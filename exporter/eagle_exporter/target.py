"""The target: a causal language model of transformers, with its features tapped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from eagle_exporter import attention
from eagle_exporter.checkpoint import Checkpoint
from eagle_graphs import EagleError, KVGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A loaded target."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    kv: KVGeometry

    @property
    def config(self) -> PretrainedConfig:
        """The model's config."""
        return cast(PretrainedConfig, self.model.config)


def load_target(checkpoint: Checkpoint) -> Target:
    """Loads the model in float32 with TreeAttention. Raises EagleError on what cannot be exported."""
    attention.register()
    extra: dict[str, Any] = {"trust_remote_code": False}
    weights: dict[str, Any] = {"use_safetensors": True}  # nothing is unpickled
    if checkpoint.gguf_file:
        extra["gguf_file"], weights = checkpoint.gguf_file, {}
    try:
        config = AutoConfig.from_pretrained(checkpoint.directory, **extra)
        check_supported(config)
        model, loading = AutoModelForCausalLM.from_pretrained(
            checkpoint.directory,
            dtype=torch.float32,
            attn_implementation=attention.IMPLEMENTATION,
            output_loading_info=True,
            **extra,
            **weights,
        )
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.directory, **extra)
    except EagleError:
        raise
    except Exception as error:  # whatever the libraries below raise on a file that is damaged or unknown to them
        reason = next(iter(str(error).strip().splitlines()), "no message")
        raise EagleError(
            f"target: transformers cannot load {checkpoint.name}: {reason} ({type(error).__name__})"
        ) from None
    check_complete(loading)
    model.eval().requires_grad_(False)
    check_finite(model, what="target")
    if not getattr(tokenizer, "is_fast", False):
        raise EagleError(f"target: {checkpoint.name} has no fast tokenizer (tokenizer.json), which the runtime needs")
    return Target(
        model=model, tokenizer=tokenizer, eos_token_ids=_eos_token_ids(model), kv=_kv_geometry(cast(Any, config))
    )


def check_supported(config: PretrainedConfig) -> None:
    """Raises EagleError, naming the reason, on an architecture whose attention the graphs do not express yet."""
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder")
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        reasons.append("it takes more than text")
    if getattr(config, "kv_lora_rank", None):
        reasons.append("it uses multi-head latent attention")
    layers = set(getattr(config, "layer_types", None) or [])
    if any("sliding" in kind or "chunked" in kind for kind in layers) or (
        not layers and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    ):
        reasons.append("it attends through a sliding window")
    if any("linear" in kind or "mamba" in kind or "conv" in kind for kind in layers) or hasattr(config, "ssm_cfg"):
        reasons.append("it has layers without attention")
    if getattr(config, "attn_logit_softcapping", None):
        reasons.append("it caps attention scores")
    missing = [
        field for field in ("num_hidden_layers", "num_attention_heads", "hidden_size") if not hasattr(config, field)
    ]
    if missing:
        reasons.append(f"its config has no {', '.join(missing)}")
    if reasons:
        raise EagleError(
            f"target: {name} cannot be exported: {'; '.join(reasons)}. See the support table in the README"
        )


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


def _kv_geometry(config: Any) -> KVGeometry:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return KVGeometry(layers=config.num_hidden_layers, kv_heads=kv_heads, head_dim=head_dim)


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
