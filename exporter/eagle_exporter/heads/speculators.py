"""The speculators project's EAGLE-3 layout (https://github.com/vllm-project/speculators), which vLLM serves."""

from __future__ import annotations

from eagle_exporter.heads.source import EAGLE3_FLAGS, Source, eagle3_spec, eagle3_taps
from eagle_exporter.heads.spec import HeadSpec

_IDS = "eagle_aux_hidden_state_layer_ids"


def read(source: Source) -> HeadSpec:
    """A nested layer config of model type llama or qwen3; layer ids are boundaries; positions start at 1."""
    top = source.reader()
    kind = top.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        source.problems.append(f"its config.json has speculators_model_type {kind!r}; this version loads 'eagle3'")
    top.refuse_unknown_flags((_IDS, *EAGLE3_FLAGS))
    body = top.section("transformer_layer_config")
    model_type, normed = body.get("model_type") or "llama", "layers.0.self_attn.q_norm.weight" in source.tensors
    if model_type not in ("llama", "qwen3"):
        body.fault("model_type", model_type, "'llama' or 'qwen3'")
    elif normed != (model_type == "qwen3"):
        source.problems.append(
            f"its layers are of type {model_type} and {'have' if normed else 'lack'} norms of queries and keys"
        )
    if "norm_before_residual" not in top:
        source.problems.append(
            "its config.json does not say norm_before_residual, and readers of this layout differ in what that means: "
            "add it"
        )
    taps = eagle3_taps(source, top.ids(_IDS), "boundaries")
    return eagle3_spec(source, body, flags=top, layout="speculators", taps=taps, position_offset=1)
