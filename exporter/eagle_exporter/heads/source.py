"""What a family's reader gets, and what all EAGLE-3 families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers.activations import ACT2FN

from eagle_exporter.heads.config import ConfigReader
from eagle_exporter.heads.spec import UNKNOWN, HeadSpec, TargetShape, Tensors

EAGLE3_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(slots=True, kw_only=True)
class Source:
    """A checkpoint under the names of the head's module, its config, and the target if one is known."""

    tensors: Tensors
    config: Mapping[str, Any]
    target: TargetShape | None
    problems: list[str] = field(default_factory=list)

    def reader(self) -> ConfigReader:
        """The config, checked as it is read."""
        return ConfigReader(self.config, self.problems)

    def sizes(self, body: ConfigReader) -> dict[str, Any]:
        """The part of a spec that every family writes alike, from the object that holds it."""
        hidden, heads = body.size("hidden_size"), body.size("num_attention_heads")
        kv_heads = body.size("num_key_value_heads", default=heads)
        head_dim = body.size("head_dim", default=hidden // heads if hidden and heads else UNKNOWN)
        max_positions = body.size("max_position_embeddings", default=2048)
        if heads and kv_heads and heads % kv_heads:
            self.problems.append(f"its {heads} attention heads do not share {kv_heads} key heads")
        if head_dim % 8:
            self.problems.append(f"its attention heads are {head_dim} wide; ONNX Runtime takes multiples of 8")
        if body.flag("use_sliding_window", default="sliding_window" in body):
            self.problems.append("it attends through a sliding window, which draft graphs do not express")
        if body.flag("attention_bias") and not any(name.endswith("self_attn.q_proj.bias") for name in self.tensors):
            self.problems.append("its config says attention_bias, and it brings no biases of queries, keys and values")
        return {
            "hidden_size": hidden,
            "intermediate_size": body.size("intermediate_size"),
            "attention_heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "activation": body.name("hidden_act", ACT2FN, default="silu"),
            "norm_eps": body.number("rms_norm_eps", default=1e-6),
            "rope_parameters": body.rope_parameters(head_dim=head_dim, max_positions=max_positions),
            "max_positions": max_positions,
            "own_embedding": "embed_tokens.weight" in self.tensors,
        }

    def check_quantization(self) -> None:
        """Notes a fault where the config says that the weights are quantized."""
        if self.config.get("quantization_config"):
            self.problems.append("its config.json has a quantization_config: quantized heads cannot be exported")

    def check_target_width(self, stated: int) -> None:
        """Notes a fault where the head says that it reads features of another width than the target's."""
        if stated and self.target is not None and stated != self.target.hidden_size:
            self.problems.append(
                f"it was made for features {stated} wide, and the target's are {self.target.hidden_size} wide: "
                "is it the head of another model?"
            )


Counting = Literal["hidden_states", "boundaries", "outputs"]
"""What layer ids count: indices of transformers' `hidden_states`; boundaries, k the input of layer k (the same, but
that n is before the final norm); or outputs, k the output of layer k."""


def eagle3_taps(source: Source, ids: tuple[int, ...] | None, counting: Counting) -> tuple[int, ...]:
    """Taps as indices into `hidden_states`, from a checkpoint's ids.

    Without ids those of the EAGLE-3 reference, 2, n // 2 and n - 3 of n layers; empty where no target tells n.
    """
    taps = tuple(i + 1 for i in ids) if ids is not None and counting == "outputs" else ids
    layers = source.target.layers if source.target is not None else None
    if taps is None:
        if layers is None:
            return ()
        taps = (2, layers // 2, layers - 3)
    source.problems += tap_problems(taps, source.target)
    if counting != "hidden_states" and layers in taps:
        source.problems.append(
            "it taps the output of the target's last layer before the final norm, which transformers does not give"
        )
    return taps


def tap_problems(taps: tuple[int, ...], target: TargetShape | None) -> list[str]:
    """Why an EAGLE-3 head cannot take these hidden states."""
    if min(taps) >= 0 and (target is None or max(taps) <= target.layers):
        return []
    if target is None:
        return [f"it taps the target's hidden states {list(taps)}; expected indices from 0"]
    return [
        f"it taps the target's hidden states {list(taps)}; expected indices of 0 to {target.layers} "
        f"({target.name} has {target.layers} layers): is it the head of another model?"
    ]


def eagle3_spec(
    source: Source,
    body: ConfigReader,
    *,
    layout: str,
    taps: tuple[int, ...],
    flags: ConfigReader | None = None,
    position_offset: int = 0,
    may_borrow_lm_head: bool = False,
    scaled_embedding: bool = False,
    notes: tuple[str, ...] = (),
) -> HeadSpec:
    """The spec of an EAGLE-3 head.

    body: holds the sizes; flags: holds the switches of `EAGLE3_FLAGS`, which must agree with the tensors; None where
    the layout has no switches.
    """
    reader = source.reader()
    switches: dict[str, Any] = {name: flags is not None and flags.flag(name) for name in EAGLE3_FLAGS}
    for name, tensor in (("norm_before_fc", "input_norm.weight"), ("fc_norm", "fc_norm.0.weight")):
        if tensor in source.tensors and not switches[name]:
            source.problems.append(f"it brings {tensor}, but its config does not say {name}")
    if switches["norm_before_fc"] and switches["fc_norm"]:
        source.problems.append("its config says both norm_before_fc and fc_norm, whose order nobody defines")
    source.check_quantization()
    source.check_target_width(reader.size("target_hidden_size", default=UNKNOWN))
    return HeadSpec(
        kind="eagle3",
        layout=layout,
        taps=taps,
        position_offset=position_offset,
        layers=body.size("num_hidden_layers", default=1),
        draft_vocab_size=reader.size("draft_vocab_size", default=body.get("vocab_size")),
        own_lm_head="lm_head.weight" in source.tensors or not may_borrow_lm_head,
        scaled_embedding=scaled_embedding,
        notes=notes,
        **source.sizes(body),
        **switches,
    )
