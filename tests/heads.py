"""Tiny random draft heads, written as each family writes its checkpoints, with the truth about each beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.models import DRAFT_VOCAB, HIDDEN, LAYERS, VOCAB
from tests.reference.variants import Truth

REFERENCE_TAPS = (2, LAYERS // 2, LAYERS - 3)
OTHER_TAPS = (1, 3, 5)  # neither the reference's nor off by one from them
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyHead:
    """One head: what it is made of, and how its family writes it. Weights follow from `seed`."""

    family: str
    kind: str = "eagle3"
    layout: str = ""
    """What the loader calls it; the family's name without one."""
    layers: int = 1
    hidden: int = HIDDEN
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    draft_vocab: int = DRAFT_VOCAB
    own_embedding: bool = False
    own_lm_head: bool = True
    qk_norm: bool = False
    biases: tuple[str, ...] = ()
    """Projections with a bias: "fc", "qkv"."""
    taps: tuple[int, ...] = REFERENCE_TAPS
    position_offset: int = 0
    rope_type: str = "default"
    rope: dict[str, float] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    scaled_embedding: bool = False
    files: str = "safetensors"
    """safetensors, sharded, bin or sharded-bin"""
    dtype: torch.dtype = torch.float32
    seed: int = 3

    def layer_names(self) -> tuple[str, ...]:
        if self.family in ("safeailab", "specforge", "angelslim") and self.kind == "eagle3":
            return ("midlayer",)
        return tuple(f"layers.{index}" for index in range(self.layers))

    def truth(self) -> Truth:
        return Truth(
            kind=self.kind,
            layer_names=self.layer_names(),
            taps=self.taps if self.kind == "eagle3" else (LAYERS,),
            position_offset=self.position_offset,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            eps=1e-5,
            rope={"theta": 20000.0, **self.rope},
            rope_type=self.rope_type,
            scaled_embedding=self.scaled_embedding,
            **dict.fromkeys(self.switches, True),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Random weights under the family's names."""
        random = torch.Generator().manual_seed(self.seed)

        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=random) * shape[-1] ** -0.5).to(self.dtype)

        def around_one(size: int) -> Tensor:
            return (1 + 0.2 * torch.randn(size, generator=random)).to(self.dtype)

        hidden, inner, eagle3 = self.hidden, 80, self.kind == "eagle3"
        rows = {"q": self.heads * self.head_dim, "k": self.kv_heads * self.head_dim, "v": self.kv_heads * self.head_dim}
        tensors = {"fc.weight": weight(hidden, 3 * HIDDEN if eagle3 else 2 * hidden)}
        if "fc" in self.biases:
            tensors["fc.bias"] = weight(hidden)
        for index, name in enumerate(self.layer_names()):
            read = 2 * hidden if eagle3 and index == 0 else hidden
            for part, size in rows.items():
                tensors[f"{name}.self_attn.{part}_proj.weight"] = weight(size, read)
                if "qkv" in self.biases:
                    tensors[f"{name}.self_attn.{part}_proj.bias"] = weight(size)
            if self.qk_norm:
                tensors |= {f"{name}.self_attn.{part}_norm.weight": around_one(self.head_dim) for part in "qk"}
            tensors[f"{name}.self_attn.o_proj.weight"] = weight(hidden, rows["q"])
            tensors[f"{name}.mlp.gate_proj.weight"] = weight(inner, hidden)
            tensors[f"{name}.mlp.up_proj.weight"] = weight(inner, hidden)
            tensors[f"{name}.mlp.down_proj.weight"] = weight(hidden, inner)
            tensors[f"{name}.post_attention_layernorm.weight"] = around_one(hidden)
            if eagle3 or index:
                tensors[f"{name}.input_layernorm.weight"] = around_one(hidden)
            if eagle3 and index == 0:
                tensors[f"{name}.hidden_norm.weight"] = around_one(hidden)
        if self.own_embedding:
            tensors["embed_tokens.weight"] = weight(VOCAB, hidden)
        if not eagle3:
            return tensors
        tensors["norm.weight"] = around_one(hidden)
        if self.own_lm_head:
            tensors["lm_head.weight"] = weight(self.draft_vocab, hidden) * 3
        if "fc_norm" in self.switches:
            tensors |= {f"fc_norm.{index}.weight": around_one(HIDDEN) for index in range(3)}
        if "norm_before_fc" in self.switches:
            tensors["input_norm.weight"] = around_one(3 * HIDDEN)
        if self.draft_vocab < VOCAB:
            ids = torch.randperm(VOCAB, generator=random)[: self.draft_vocab].sort().values
            tensors["d2t"] = ids - torch.arange(self.draft_vocab)
            tensors["t2d"] = torch.isin(torch.arange(VOCAB), ids)
        return tensors

    def config(self) -> dict[str, Any]:
        """As the family writes it."""
        return _CONFIGS[self.family](self)

    def write(self, directory: Path) -> Path:
        """Writes the checkpoint and returns its directory."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config()))
        write_tensors(directory, self.tensors(), self.files)
        return directory


def write_tensors(directory: Path, tensors: dict[str, Tensor], files: str = "safetensors") -> None:
    """In one file, or in two with an index."""
    suffix = "bin" if "bin" in files else "safetensors"
    stem = "pytorch_model" if suffix == "bin" else "model"

    def save(part: dict[str, Tensor], path: Path) -> None:
        if suffix == "bin":
            torch.save(part, path)
        else:
            save_file(part, path)

    if not files.startswith("sharded"):
        save(tensors, directory / f"{stem}.{suffix}")
        return
    names, where = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"{stem}-{number:05}-of-00002.{suffix}"
        save({name: tensors[name] for name in part}, directory / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (directory / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))


def _llama(head: TinyHead) -> dict[str, Any]:
    rope = {"rope_theta": 20000.0, "rope_scaling": None}
    if head.rope_type != "default":
        rope["rope_scaling"] = {"rope_type": head.rope_type, **head.rope}
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": head.hidden,
        "intermediate_size": 80,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.head_dim,
        "num_hidden_layers": head.layers,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        **rope,
    }


def _safeailab(head: TinyHead) -> dict[str, Any]:
    if head.kind == "eagle1":
        return _llama(head) | {"architectures": ["LlamaForCausalLM"], "bias": "fc" in head.biases}
    config = _llama(head) | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": head.draft_vocab}
    return config | ({"target_hidden_size": HIDDEN} if head.hidden != HIDDEN else {})


def _specforge(head: TinyHead) -> dict[str, Any]:
    eagle = {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head.taps],
    }
    config = _llama(head) | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": head.draft_vocab}
    return config | {"eagle_config": eagle, **dict.fromkeys(head.switches, True)}


def _angelslim(head: TinyHead) -> dict[str, Any]:
    return _llama(head) | {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": head.draft_vocab}


def _speculators(head: TinyHead) -> dict[str, Any]:
    layer = _llama(head) | {"model_type": "qwen3" if head.qk_norm else "llama"}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "a/model"}},
        "transformer_layer_config": layer,
        "draft_vocab_size": head.draft_vocab,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(head.taps),
        "embed_requires_grad": False,
        "norm_before_residual": False,
        **dict.fromkeys(head.switches, True),
    }


def _modelopt(head: TinyHead) -> dict[str, Any]:
    eagle = {
        "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in head.taps],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    }
    config = _llama(head) | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle}
    return config | {"draft_vocab_size": head.draft_vocab, "attention_bias": "qkv" in head.biases}


_CONFIGS: dict[str, Callable[[TinyHead], dict[str, Any]]] = {
    "safeailab": _safeailab,
    "specforge": _specforge,
    "angelslim": _angelslim,
    "speculators": _speculators,
    "modelopt": _modelopt,
}

HEADS = {
    "eagle1": TinyHead(
        family="safeailab", kind="eagle1", layout="safeailab-eagle1", biases=("fc", "qkv"), draft_vocab=VOCAB
    ),
    "eagle1 without biases, two layers": TinyHead(
        family="safeailab",
        kind="eagle1",
        layout="safeailab-eagle1",
        layers=2,
        own_embedding=True,
        draft_vocab=VOCAB,
        files="bin",
    ),
    "safeailab": TinyHead(family="safeailab", dtype=torch.float16),
    "safeailab, narrower, all tokens": TinyHead(
        family="safeailab", hidden=48, head_dim=24, own_embedding=True, draft_vocab=VOCAB
    ),
    "specforge": TinyHead(
        family="specforge", taps=OTHER_TAPS, rope_type="linear", rope={"factor": 2.0}, files="sharded"
    ),
    "specforge 3.1": TinyHead(
        family="specforge", switches=("fc_norm", "norm_output"), rope_type="llama3", rope=LLAMA3, files="sharded-bin"
    ),
    "speculators": TinyHead(
        family="speculators", switches=("norm_before_residual",), layers=2, taps=OTHER_TAPS, position_offset=1
    ),
    "speculators qwen3": TinyHead(
        family="speculators",
        qk_norm=True,
        switches=("norm_before_fc",),
        head_dim=24,
        biases=("qkv",),
        own_embedding=True,
        position_offset=1,
    ),
    "speculators 3.1": TinyHead(
        family="speculators",
        layers=2,
        switches=("norm_before_residual", "fc_norm", "norm_output"),
        position_offset=1,
        draft_vocab=VOCAB,
    ),
    "modelopt": TinyHead(family="modelopt", taps=OTHER_TAPS, biases=("qkv",), scaled_embedding=True),
    "modelopt with the target's lm_head": TinyHead(
        family="modelopt", own_lm_head=False, draft_vocab=VOCAB, rope_type="yarn", rope=YARN, scaled_embedding=True
    ),
    "angelslim": TinyHead(family="angelslim", head_dim=24, dtype=torch.bfloat16),
}
