"""What cannot be exported is refused by name, from the config alone; what can shows its cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from eagle_exporter import attention
from eagle_exporter.rope import settle_rope
from eagle_exporter.survey import check_supported
from eagle_graphs import EagleError, KVGeometry

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}


def config_of(model_type: str, **more: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **SIZES | more)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "it is an encoder-decoder"),
        ("bart", "it is an encoder-decoder"),
        ("mamba", "it has state-space layers"),
        ("jamba", "it has state-space layers"),
        ("falcon_h1", "it has state-space layers"),
        ("rwkv", "it has recurrent layers"),
        ("recurrent_gemma", "it has recurrent layers"),
        ("lfm2", "it has convolution layers"),
        ("qwen3_next", "it has linear attention"),
        ("minimax", "it has layers of kind linear_attention"),
        ("llama4_text", "it has layers of kind chunked_attention"),
        ("deepseek_v3", "it uses multi-head latent attention"),
        ("minicpm3", "it uses multi-head latent attention"),
        ("gemma3", "it takes more than text (vision_config)"),
        ("qwen2_audio", "it takes more than text (audio_config)"),
        ("gemma3n_text", "some of its layers use the keys and values of others"),
        ("gemma4_text", "its layers differ: layer 0 has 2 key-value heads of 256, layer 3 has 2 of 512"),
        ("bloom", "its attention does not go through transformers' registry"),
        ("falcon", "its attention does not go through transformers' registry"),
        ("diffllama", "its 4 layers attend 8 times in a pass"),
        ("xlstm", "layers 0-3 of 4 have no attention that transformers' registry knows"),
        ("bert", "its layers see other keys than the earlier ones"),
        ("vit", "transformers has no causal language model for it"),
    ],
)
def test_a_target_is_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(EagleError) as refused:
        check_supported(config_of(model_type))
    assert str(refused.value).startswith("target: ")
    assert f"cannot be exported: {reason}" in str(refused.value)
    assert str(refused.value).endswith("See the support table in the README")


@pytest.mark.parametrize(
    ("model_type", "more", "heads"),
    [
        ("llama", {}, (2, 16)),
        ("llama", {"num_key_value_heads": None}, (4, 16)),
        ("qwen3", {"head_dim": 24}, (2, 24)),
        ("mistral", {"sliding_window": 8}, (2, 16)),
        ("gemma2", {"head_dim": 32}, (2, 32)),
        ("mixtral", {}, (2, 16)),
        ("gpt2", {}, (4, 16)),
    ],
)
def test_the_cache_is_what_the_layers_write(model_type: str, more: dict[str, Any], heads: tuple[int, int]) -> None:
    expected = KVGeometry(layers=4, kv_heads=heads[0], head_dim=heads[1])
    assert check_supported(config_of(model_type, **more)) == expected


def test_no_weight_is_made() -> None:
    """A model that no machine holds is surveyed as quickly as a small one."""
    huge = config_of("llama", hidden_size=2**16, intermediate_size=2**18, num_attention_heads=512, num_hidden_layers=8)
    assert check_supported(huge).layers == 8


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"position_bias": torch.zeros(1)}, "its attention takes position_bias, which the graphs do not express"),
        ({"indices": 3, "block_indices": None}, "its attention takes indices, which"),
        ({"is_causal": False}, "its attention is not causal"),
    ],
)
def test_an_argument_that_would_change_the_result_is_refused(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(EagleError, match=reason):
        attention.settings_from_arguments(torch.zeros(1, 2, 3, 8), attention.Mask(sliding_window=0), **arguments)


def test_settings_are_what_transformers_passes() -> None:
    query, window = torch.zeros(1, 2, 3, 16), attention.Mask(sliding_window=8)
    settings = attention.settings_from_arguments(query, window, dropout=0.0, softcap=30.0, sliding_window=None)
    assert settings == {"sinks": None, "scale": 0.25, "softcap": 30.0, "sliding_window": 8}
    with pytest.raises(EagleError, match="it makes its attention masks itself"):
        attention.settings_from_arguments(query, None)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "factor": 4.0,
}
NTK = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("model_type", "rope", "capacity", "says"),
    [
        ("phi3", LONGROPE, 64, False),
        ("phi3", LONGROPE, 65, True),
        ("llama", NTK, 512, False),
        ("llama", {"rope_type": "default", "rope_theta": 1e4}, 512, False),
    ],
    ids=["longrope, short", "longrope, long", "dynamic", "default"],
)
def test_rotary_frequencies_are_settled_as_transformers_has_them_at_the_capacity(
    model_type: str, rope: dict[str, Any], capacity: int, says: bool
) -> None:
    more = {"original_max_position_embeddings": 64} if model_type == "phi3" else {}
    config = config_of(model_type, rope_parameters=rope, **more)
    own, settled = (AutoModelForCausalLM.from_config(config) for _ in range(2))
    settled.load_state_dict(own.state_dict())
    assert (settle_rope(settled, capacity=capacity) is not None) == says
    tokens = torch.arange(capacity)[None] % 300
    with torch.no_grad():
        torch.testing.assert_close(settled(input_ids=tokens).logits, own(input_ids=tokens).logits)
        same_when_short = torch.allclose(
            settled(input_ids=tokens[:, :9]).logits, own(input_ids=tokens[:, :9]).logits, atol=1e-5
        )
    assert same_when_short != says
