"""Which layout a checkpoint has: several signs together, from names, shapes and config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from eagle_exporter.heads import angelslim, modelopt, safeailab, specforge, speculators
from eagle_exporter.heads.source import Source
from eagle_exporter.heads.spec import HeadSpec, Tensors

Reader = Callable[[Source], HeadSpec]

_LAYER = re.compile(r"(midlayer|layers\.\d+)\.(self_attn|mlp)\.")
_IGNORED = re.compile(r"verifier_norm\.weight|verifier_lm_head\.weight|.*rotary_emb\.inv_freq")
"""The target's own tensors, which some trainers save beside the head, and rope tables that follow from the config."""


def read_layout(tensors: Tensors, config: Mapping[str, Any]) -> tuple[Reader, bool] | None:
    """The family that reads the checkpoint and whether its layer is called `midlayer`; None where none fits."""
    spellings = {match[1] for match in map(_LAYER.match, tensors) if match is not None}
    if not spellings or not (_is_head_config(config) or "fc.weight" in tensors or _reads_without_norm(tensors)):
        return None
    architectures = " ".join(map(str, config.get("architectures") or []))
    if "midlayer" in spellings:
        if "eagle_config" in config or config.keys() & {"fc_norm", "norm_output"} or "fc_norm.0.weight" in tensors:
            return specforge.read, True
        if "Eagle3LlamaForCausalLM" in architectures:
            return angelslim.read, True
        return safeailab.read_eagle3, True
    if config.keys() & {"speculators_model_type", "transformer_layer_config"}:
        return speculators.read, False
    return (modelopt.read if _is_eagle3(tensors) else safeailab.read_eagle1), False


def in_module_names(tensors: Tensors, *, midlayer: bool) -> Tensors:
    """The tensors by the names that the head's module has."""
    return {
        name.replace("midlayer.", "layers.0.", 1) if midlayer else name: tensor
        for name, tensor in tensors.items()
        if not _IGNORED.fullmatch(name)
    }


def in_checkpoint_name(name: str, *, midlayer: bool) -> str:
    """The name in the checkpoint of a tensor of the module."""
    return name.replace("layers.0.", "midlayer.", 1) if midlayer else name


def _is_head_config(config: Mapping[str, Any]) -> bool:
    signs = {"draft_vocab_size", "eagle_config", "speculators_model_type", "eagle_aux_hidden_state_layer_ids"}
    return bool(config.keys() & signs)


def _reads_without_norm(tensors: Tensors) -> bool:
    """Whether the first layer has no input norm, which every model's layer has and EAGLE-1's has not."""
    return "layers.0.self_attn.o_proj.weight" in tensors and "layers.0.input_layernorm.weight" not in tensors


def _is_eagle3(tensors: Tensors) -> bool:
    """Whether numbered layers are EAGLE-3's: most signs that are there decide, so that one fault does not mislead."""
    query, fc = tensors.get("layers.0.self_attn.q_proj.weight"), tensors.get("fc.weight")
    norm = tensors.get("layers.0.post_attention_layernorm.weight")
    signs = ["layers.0.hidden_norm.weight" in tensors, "norm.weight" in tensors]
    if norm is not None and query is not None:
        signs.append(2 * len(norm) in query.shape)
    if norm is not None and fc is not None:
        signs.append(not _is_pair(fc, len(norm)))
    return 2 * sum(signs) >= len(signs)


def _is_pair(fc: torch.Tensor, hidden: int) -> bool:
    """Whether fc takes an embedding and one feature of the head's own width."""
    return sorted(fc.shape) == [hidden, 2 * hidden]
