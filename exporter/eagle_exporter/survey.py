"""What a target is made of, found out before its weights are loaded.

The config says what it cannot hide; for the rest the model is built without storage (torch's meta device) and run
once on a few rows, so that each layer's attention shows its heads, its mask and what else it asks for. What the
graphs cannot express is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle_exporter import attention, experts
from eagle_exporter.rope import settle_rope
from eagle_graphs import EagleError, KVGeometry

_SURVEY = "eagle_survey"
_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings", "vocab_size")
_KINDS = ("layer_types", "layers_block_type", "block_types")
"""Where configs list the kind of each layer."""
_ATTENTION = frozenset({"attention", "full_attention", "sliding_attention"})
_OTHER_LAYERS = {
    "state-space layers": ("state_size", "ssm_cfg", "mamba_d_state", "mamba_d_conv", "ssm_state_size"),
    "recurrent layers": ("lru_width", "rescale_every"),
    "linear attention": ("linear_num_key_heads", "linear_attn_config"),
    "convolution layers": ("conv_L_cache",),
}
"""What a config has only where the model has such layers."""


def check_supported(config: PretrainedConfig) -> KVGeometry:
    """Raises EagleError, naming the reasons, on a target that cannot be exported; returns the cache it needs."""
    reasons = _reasons_from_config(config)
    if not reasons:
        try:
            return _geometry_from_layers(_layers_of(config), int(config.num_hidden_layers))
        except EagleError as error:
            reasons = [str(error)]
    name = (getattr(config, "architectures", None) or [config.model_type])[0]
    raise EagleError(f"target: {name} cannot be exported: {'; '.join(reasons)}. See the support table in the README")


def _reasons_from_config(config: PretrainedConfig) -> list[str]:
    reasons = []
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("it is an encoder-decoder")
    more = sorted(part for part in config.sub_configs if part != "text_config")
    if more:
        reasons.append(f"it takes more than text ({', '.join(more)})")
    if getattr(config, "kv_lora_rank", None):
        reasons.append("it uses multi-head latent attention")
    named = [f"it has {kind}" for kind, signs in _OTHER_LAYERS.items() if any(hasattr(config, s) for s in signs)]
    kinds = {str(kind) for field in _KINDS for kind in getattr(config, field, None) or ()}
    if not named and (others := sorted(kinds - _ATTENTION)):
        named.append(f"it has layers of kind {', '.join(others)}")
    reasons += named
    if getattr(config, "num_kv_shared_layers", 0):
        reasons.append("some of its layers use the keys and values of others")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not reasons and model_class is None:
        reasons.append("transformers has no causal language model for it")
    if not reasons and not model_class._can_set_attn_implementation():
        reasons.append("its attention does not go through transformers' registry")
    missing = [field for field in _NEEDED if getattr(config, field, None) is None]
    if missing and not reasons:
        reasons.append(f"its config has no {', '.join(missing)}")
    return reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's attention, as it was called."""

    index: int
    kv_heads: int
    head_dim: int
    value_dim: int


_seen: ContextVar[list[_Layer]] = ContextVar("seen")


def _layers_of(config: PretrainedConfig) -> list[_Layer]:
    """Every call of attention in one pass of the model. Raises EagleError where it cannot run."""
    register()
    seen: list[_Layer] = []
    token = _seen.set(seen)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=_SURVEY, experts_implementation=experts.IMPLEMENTATION
            )
        settle_rope(model, capacity=1)
        rows = torch.zeros(1, 4, dtype=torch.int64, device="meta")
        with torch.no_grad():
            model.eval()(input_ids=rows, position_ids=rows, attention_mask=rows, use_cache=False)
    except EagleError:
        raise
    except Exception as error:  # whatever the code of a model may raise: the reason is the user's to read
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise EagleError(f"its layers cannot be traced ({reason})") from error
    finally:
        _seen.reset(token)
    if model.get_output_embeddings() is None:
        raise EagleError("it has no LM head")
    return seen


def _geometry_from_layers(layers: Sequence[_Layer], count: int) -> KVGeometry:
    indices = [layer.index for layer in layers]
    if without := sorted(set(range(count)) - set(indices)):
        raise EagleError(f"layers {_ranges(without)} of {count} have no attention that transformers' registry knows")
    if len(indices) != count or len(set(indices)) != count:
        raise EagleError(f"its {count} layers attend {len(indices)} times in a pass")
    first = layers[0]
    if first.value_dim != first.head_dim:
        raise EagleError(f"its values are {first.value_dim} wide and its keys {first.head_dim}")
    for layer in layers:
        if (layer.kv_heads, layer.head_dim, layer.value_dim) != (first.kv_heads, first.head_dim, first.value_dim):
            raise EagleError(
                f"its layers differ: layer {first.index} has {first.kv_heads} key-value heads of {first.head_dim}, "
                f"layer {layer.index} has {layer.kv_heads} of {layer.head_dim}"
            )
    return KVGeometry(layers=count, kv_heads=first.kv_heads, head_dim=first.head_dim)


def _ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as text: 0-3, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def _note_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    attention.settings_from_arguments(query, attention_mask, **arguments)
    layer = _Layer(
        index=int(module.layer_idx),  # type: ignore[arg-type]
        kv_heads=key.shape[1],
        head_dim=key.shape[3],
        value_dim=value.shape[3],
    )
    _seen.get().append(layer)
    slots, heads, rows, _ = query.shape
    return query.new_empty(slots, rows, heads, value.shape[3]), None


def _check_mask(
    *, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **_shape: Any
) -> attention.Mask:
    """Holds the mask of a layer to what TreeAttention does: earlier keys, all or those of a sliding window."""
    last = 2 * (local_size or 0) + 3
    key, query = torch.arange(last + 2), torch.tensor(last)
    visible = (key <= query) & (query - key < (local_size or len(key)))
    if not torch.equal(torch.as_tensor(mask_function(0, 0, query, key)).expand_as(key), visible):
        raise EagleError("its layers see other keys than the earlier ones, or the earlier ones of a sliding window")
    return attention.Mask(sliding_window=local_size or 0)


def register() -> None:
    """Makes the survey's attention known to transformers, and what a target is loaded with."""
    attention.register()
    experts.register()
    ALL_ATTENTION_FUNCTIONS.register(_SURVEY, _note_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_SURVEY, _check_mask)
