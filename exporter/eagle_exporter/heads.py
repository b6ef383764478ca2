"""Draft-head checkpoints: which layout a checkpoint has, whether it is whole, and what it means.

The layout is detected from tensor names and shapes, never from a name alone, and a tensor that is
missing, unknown or of the wrong shape refuses the head: a head that is loaded wrongly still "works",
at an accepted length of 1. Each layout is one function from tensors and config to an `Eagle3Spec`
and renamed tensors, so that another layout is another function.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from transformers import LlamaConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle_exporter.checkpoint import Checkpoint
from eagle_graphs import EagleError

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head, in one vocabulary of terms whatever its layout."""

    kind: Literal["eagle3"]
    layout: str
    taps: tuple[int, ...]
    """Indices into `hidden_states` of the target; k is the input of layer k."""
    position_offset: int
    """Position of the draft row that holds feature 0."""
    hidden_size: int
    intermediate_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    draft_vocab_size: int
    activation: str
    norm_eps: float
    rope_parameters: dict[str, Any]
    max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A head's spec and its tensors in float32, under the names of `Eagle3Head`."""

    spec: HeadSpec
    tensors: Tensors
    draft_to_target: torch.Tensor
    """[draft_vocab_size] int64: the target's id of each draft id."""


def load_head(checkpoint: Checkpoint, target: PretrainedConfig) -> Head:
    """Reads, detects and checks a head for `target`. Raises EagleError on whatever does not fit."""
    if checkpoint.gguf_file is not None:
        raise EagleError(f"head: {checkpoint.gguf_file} is a GGUF file; name a directory with safetensors files")
    config = checkpoint.config()
    tensors = _read_tensors(checkpoint.directory)
    if "midlayer.self_attn.q_proj.weight" in tensors:
        return _from_safeailab_eagle3(tensors, config, target)
    found = ", ".join(sorted(tensors)[:6])
    if "layers.0.self_attn.q_proj.weight" in tensors and "fc.weight" in tensors:
        raise EagleError(
            f"head: {checkpoint.name} has the tensors of an EAGLE-1/2, speculators or ModelOpt head "
            f"({found}, ...), which this version does not load; it loads EAGLE-3 heads in SafeAILab's layout"
        )
    raise EagleError(
        f"head: {checkpoint.name} is no EAGLE-3 head in SafeAILab's layout (no midlayer.* tensors); found {found}, ..."
    )


def _read_tensors(directory: Path) -> Tensors:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        hint = " (there is a .bin file: convert it to safetensors)" if list(directory.glob("*.bin")) else ""
        raise EagleError(f"head: {directory} has no .safetensors file{hint}")
    tensors: Tensors = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except (SafetensorError, OSError) as error:
            raise EagleError(f"head: {path} cannot be read ({error}): download it again") from None
    return tensors


def _from_safeailab_eagle3(tensors: Tensors, config: Mapping[str, Any], target: PretrainedConfig) -> Head:
    """SafeAILab's EAGLE-3: one `midlayer`, taps 2, n // 2 and n - 3 unless the config names others."""
    layers = int(target.num_hidden_layers)
    stated = config.get("eagle_feature_layers")
    taps = (2, layers // 2, layers - 3) if stated is None else tuple(stated) if isinstance(stated, list) else ()
    if len(taps) != 3 or not all(type(tap) is int and 0 <= tap <= layers for tap in taps):
        raise EagleError(
            f"head: it taps the target's hidden states {stated or list(taps)}; expected three of 0 to {layers} "
            f"({target.model_type} has {layers} layers): is it the head of another model?"
        )
    spec = HeadSpec(
        kind="eagle3",
        layout="safeailab",
        taps=taps,
        position_offset=0,
        hidden_size=_size(config, "hidden_size"),
        intermediate_size=_size(config, "intermediate_size"),
        attention_heads=_size(config, "num_attention_heads"),
        kv_heads=_size(config, "num_key_value_heads", default=config.get("num_attention_heads")),
        head_dim=_size(
            config, "head_dim", default=_size(config, "hidden_size") // _size(config, "num_attention_heads")
        ),
        draft_vocab_size=_size(config, "draft_vocab_size", default=config.get("vocab_size")),
        activation=_one_of(ACT2FN, config.get("hidden_act") or "silu", "hidden_act"),
        norm_eps=_number(config, "rms_norm_eps", default=1e-6),
        rope_parameters=_rope_parameters(config),
        max_positions=_size(config, "max_position_embeddings", default=2048),
    )
    if spec.attention_heads % spec.kv_heads:
        raise EagleError(f"head: its {spec.attention_heads} attention heads do not share {spec.kv_heads} key heads")
    tensors = dict(tensors)
    offsets, membership = tensors.pop("d2t", None), tensors.pop("t2d", None)
    draft_to_target = _draft_to_target(offsets, membership, spec.draft_vocab_size, int(target.vocab_size))
    _check_tensors(tensors, _shapes(spec, int(target.hidden_size), int(target.vocab_size)))
    if "embed_tokens.weight" not in tensors and spec.hidden_size != int(target.hidden_size):
        raise EagleError(
            f"head: it is {spec.hidden_size} wide and brings no embed_tokens, and the target's are "
            f"{int(target.hidden_size)} wide: is it the head of another model?"
        )
    return Head(
        spec=spec,
        tensors={name.removeprefix("midlayer."): tensor.float() for name, tensor in tensors.items()},
        draft_to_target=draft_to_target,
    )


def _size(config: Mapping[str, Any], name: str, *, default: object = None) -> int:
    value = config.get(name, default)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise EagleError(f"head: its config.json has {name} {value!r}; expected a positive whole number")
    return value


def _number(config: Mapping[str, Any], name: str, *, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise EagleError(f"head: its config.json has {name} {value!r}; expected a positive number")
    return float(value)


def _one_of(known: Container[str], value: object, name: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise EagleError(f"head: its config.json has {name} {value!r}, which transformers does not know")
    return value


def _rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope in the newer form of transformers' configs, from that form or the older one."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    stated = config.get(name) or {}
    if not isinstance(stated, dict):
        raise EagleError(f"head: its config.json has {name} {stated!r}; expected an object")
    rope = {"rope_theta": _number(config, "rope_theta", default=10000.0), **stated}
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    _one_of({"default", *ROPE_INIT_FUNCTIONS}, rope["rope_type"], "rope_type")
    try:
        LlamaConfig(rope_parameters=dict(rope))
    except KeyError as error:
        raise EagleError(f"head: its config.json has an incomplete {name}: {error.args[0]}") from None
    return rope


def _draft_to_target(
    offsets: torch.Tensor | None, membership: torch.Tensor | None, draft_vocab: int, vocab: int
) -> torch.Tensor:
    """Target ids of the draft vocabulary, from `d2t`, which holds offsets: target id = id + d2t[id]."""
    if offsets is None:
        if draft_vocab != vocab:
            raise EagleError(
                f"head: it has no d2t, which says what its {draft_vocab} draft tokens are among the target's {vocab}: "
                "the checkpoint is not whole, or the head of another model"
            )
        return torch.arange(vocab)
    if offsets.shape != (draft_vocab,):
        raise EagleError(f"head: d2t has shape {list(offsets.shape)}; expected [{draft_vocab}], the draft vocabulary")
    ids = torch.arange(draft_vocab) + offsets.long()
    distinct = len(set(ids.tolist()))
    if distinct != draft_vocab or int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise EagleError(
            f"head: d2t leads to ids {int(ids.min())} to {int(ids.max())}, {distinct} of {draft_vocab} distinct; "
            f"the target has {vocab} tokens: is it the head of another model?"
        )
    if membership is not None and (
        membership.shape != (vocab,) or not torch.equal(membership.nonzero()[:, 0], ids.sort()[0])
    ):
        raise EagleError(f"head: t2d (shape {list(membership.shape)}) and d2t name different tokens of {vocab}")
    return ids


def _shapes(spec: HeadSpec, target_hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Every tensor that SafeAILab's EAGLE-3 layout has; embed_tokens may be left out where the target's serves."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.attention_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    layer = {
        "self_attn.q_proj.weight": (queries, 2 * hidden),
        "self_attn.k_proj.weight": (keys, 2 * hidden),
        "self_attn.v_proj.weight": (keys, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "hidden_norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return {
        "fc.weight": (hidden, 3 * target_hidden),
        **{f"midlayer.{name}": shape for name, shape in layer.items()},
        "norm.weight": (hidden,),
        "lm_head.weight": (spec.draft_vocab_size, hidden),
        "embed_tokens.weight": (vocab, hidden),
    }


def _check_tensors(tensors: Tensors, expected: Mapping[str, tuple[int, ...]]) -> None:
    missing = sorted(expected.keys() - tensors.keys() - {"embed_tokens.weight"})
    unknown = sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        found = [f"no {name}" for name in missing] + [f"unknown {name}" for name in unknown]
        raise EagleError(f"head: its tensors are not those of an EAGLE-3 head: {', '.join(found)}")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise EagleError(
                f"head: {name} has shape {list(tensor.shape)}; expected {list(expected[name])} by its config and "
                "the target's: is it the head of another model?"
            )
        if not torch.isfinite(tensor.float().sum()):
            raise EagleError(f"head: {name} holds NaN or infinite values; the checkpoint is damaged")
