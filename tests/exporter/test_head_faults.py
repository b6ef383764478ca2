"""Each family's head with a fault: refused by name; and `--inspect`, which says what a head is and every reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads import Head, Tensors, load_head
from eagle_graphs import EagleError
from tests.commands import assert_refused, assert_usage, eagle_export
from tests.heads import HEADS, OTHER_TAPS, REFERENCE_TAPS, TinyHead, write_tensors
from tests.models import HIDDEN, LAYERS, VOCAB

FIRST = {"eagle1": "layers.0", "safeailab": "midlayer", "specforge 3.1": "midlayer", "angelslim": "midlayer"}


def target(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return LlamaConfig(**sizes | changes)


def write(directory: Path, head: TinyHead, edit: Callable[[Tensors], object] = lambda _: None, **config: Any) -> Path:
    """The head's checkpoint with its tensors and config changed; `...` removes a field."""
    directory.mkdir(parents=True)
    tensors = head.tensors()
    edit(tensors)
    write_tensors(directory, tensors)
    data = {name: value for name, value in (head.config() | config).items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(data))
    return directory


def load(directory: Path, **changes: Any) -> Head:
    return load_head(find_checkpoint(str(directory), what="head"), target(**changes))


def refused(directory: Path, **changes: Any) -> str:
    with pytest.raises(EagleError, match=r"^head: ") as raised:
        load(directory, **changes)
    return str(raised.value)


@pytest.mark.parametrize("name", HEADS)
def test_no_format_does_without_fc_or_an_attention(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    first = head.layer_names()[0]
    for part in ("fc.weight", f"{first}.self_attn.q_proj.weight", f"{first}.post_attention_layernorm.weight"):
        assert f"no {part}" in refused(write(tmp_path / part, head, lambda t, part=part: t.pop(part)))


@pytest.mark.parametrize("name", HEADS)
def test_a_transposed_matrix_is_named_in_every_format(name: str, tmp_path: Path) -> None:
    head = HEADS[name]
    first = head.layer_names()[0]
    for part in ("fc.weight", f"{first}.self_attn.k_proj.weight", f"{first}.mlp.down_proj.weight"):
        directory = write(tmp_path / part, head, lambda t, part=part: t.update({part: t[part].T.contiguous()}))
        assert f"{part} is transposed" in refused(directory)


@pytest.mark.parametrize("name", [n for n, head in HEADS.items() if head.kind == "eagle3" and head.own_lm_head])
def test_a_missing_lm_head_is_named(name: str, tmp_path: Path) -> None:
    message = refused(write(tmp_path / "head", HEADS[name], lambda t: t.pop("lm_head.weight")))
    expected = "it brings no lm_head, and the target's has 320 tokens" if "modelopt" in name else "no lm_head.weight"
    assert expected in message


@pytest.mark.parametrize("name", [n for n, head in HEADS.items() if head.draft_vocab < VOCAB])
def test_a_missing_d2t_is_named(name: str, tmp_path: Path) -> None:
    directory = write(tmp_path / "head", HEADS[name], lambda t: t.pop("d2t"))
    assert "it has no d2t, which says what its 96 draft tokens are" in refused(directory)


@pytest.mark.parametrize("name", HEADS)
def test_another_target_s_width_and_depth_are_named(name: str, tmp_path: Path) -> None:
    directory = HEADS[name].write(tmp_path / "head")
    message = refused(directory, hidden_size=128)
    assert "is it the head of another model?" in message
    if HEADS[name].kind == "eagle3":
        assert "fc.weight has shape" in message
        assert "expected indices of 0 to 2" in refused(directory, num_hidden_layers=2)


# What each family's config may say


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("eagle1", {"bias": False}, 'it has fc.bias, but its config says "bias": false'),
        ("eagle1 without biases, two layers", {"bias": ...}, "it has no fc.bias, and its config does not say"),
        ("eagle1", {"vocab_size": 400}, "its config has vocab_size 400, and the target has 320 tokens"),
        ("specforge", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ("specforge", {"eagle_config": {"eagle_injection": "staged"}}, "the flag eagle_injection"),
        ("specforge", {"eagle_config": []}, "eagle_config []; expected an object"),
        ("specforge", {"fc_norm": True}, "no fc_norm.0.weight, no fc_norm.1.weight, no fc_norm.2.weight"),
        ("specforge 3.1", {"fc_norm": False}, "it brings fc_norm.0.weight, but its config does not say fc_norm"),
        ("specforge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5]}}, "before the final norm"),
        ("specforge", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-2, 1, 2]}}, "hidden states [-1, 2, 3]"),
        ("speculators", {"norm_before_residual": ...}, "does not say norm_before_residual"),
        ("speculators", {"norm_before_residual": "yes"}, "norm_before_residual 'yes'; expected true or false"),
        ("speculators", {"speculators_model_type": "eagle"}, "speculators_model_type 'eagle'; this version loads"),
        ("speculators", {"norm_sideways": True}, "the flag norm_sideways, which this version does not know"),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "before the final norm"),
        ("speculators", {"transformer_layer_config": None}, "hidden_size None"),
        ("speculators qwen3", {"norm_before_fc": False}, "it brings input_norm.weight, but its config does not say"),
        ("speculators qwen3", {"fc_norm": True}, "both norm_before_fc and fc_norm"),
        ("modelopt", {"eagle_config": {"use_last_layernorm": False}}, "a head without final norm is not supported"),
        ("modelopt", {"eagle_config": {"use_mtp_layernorm": True}}, "norms of multi-token prediction"),
        ("modelopt", {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step 4"),
        ("modelopt", {"quantization_config": {"quant_algo": "FP8"}}, "quantized heads cannot be exported"),
        ("angelslim", {"target_hidden_size": 128}, "it was made for features 128 wide, and the target's are 64 wide"),
    ],
    ids=lambda value: json.dumps(value, default=str)[:50] if isinstance(value, dict) else None,
)
def test_a_config_that_does_not_fit(name: str, config: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in refused(write(tmp_path / "head", HEADS[name], **config))


def test_layers_of_another_type_than_the_config_says(tmp_path: Path) -> None:
    for name, model_type, words in (
        ("speculators", "qwen3", "type qwen3 and lack norms"),
        ("speculators qwen3", "llama", "type llama and have norms"),
        ("speculators", "gpt_oss", "model_type 'gpt_oss'; expected 'llama' or 'qwen3'"),
    ):
        layer = HEADS[name].config()["transformer_layer_config"] | {"model_type": model_type}
        directory = write(tmp_path / f"{name}-{model_type}", HEADS[name], transformer_layer_config=layer)
        assert words in refused(directory)


def test_halves_and_quantized_weights(tmp_path: Path) -> None:
    directory = write(tmp_path / "a", HEADS["modelopt"], lambda t: t.pop("layers.0.self_attn.k_proj.bias"))
    assert "no layers.0.self_attn.k_proj.bias" in refused(directory)
    directory = write(tmp_path / "b", HEADS["safeailab"], lambda t: t.update({"fc.weight": t["fc.weight"].char()}))
    assert "fc.weight holds int8: quantized heads cannot be exported" in refused(directory)


def test_what_a_head_needs_of_its_own_where_its_width_differs(tmp_path: Path) -> None:
    narrow = HEADS["safeailab, narrower, all tokens"]
    assert "it is 48 wide and brings no embed_tokens" in refused(
        write(tmp_path / "a", narrow, lambda t: t.pop("embed_tokens.weight"))
    )
    borrowing = replace(HEADS["modelopt with the target's lm_head"], hidden=48, own_embedding=True)
    assert "it is 48 wide and brings no lm_head" in refused(borrowing.write(tmp_path / "b"))
    eagle1 = replace(HEADS["eagle1"], hidden=48)
    assert "an EAGLE-1 head draws tokens with the target's LM head" in refused(eagle1.write(tmp_path / "c"))


def test_tensors_that_are_not_the_head_s_are_left_out(tmp_path: Path) -> None:
    def add(tensors: Tensors) -> None:
        tensors["verifier_lm_head.weight"] = torch.ones(VOCAB, HIDDEN)
        tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    plain = load(HEADS["speculators"].write(tmp_path / "a"))
    assert load(write(tmp_path / "b", HEADS["speculators"], add)).tensors.keys() == plain.tensors.keys()


@pytest.mark.parametrize(
    ("name", "ids", "taps"),
    [
        ("safeailab", ..., REFERENCE_TAPS),
        ("specforge", [0, 2, 4], OTHER_TAPS),
        ("modelopt", [0, 2, 4], OTHER_TAPS),
        ("speculators", [1, 3, 5], OTHER_TAPS),
    ],
)
def test_one_convention_for_the_taps(name: str, ids: Any, taps: tuple[int, ...], tmp_path: Path) -> None:
    """Ids of layer outputs are one lower than boundaries."""
    nested = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    flat = {"eagle_aux_hidden_state_layer_ids": ids}
    config = {} if ids is ... else nested if name in ("specforge", "modelopt") else flat
    assert load(write(tmp_path / "head", HEADS[name], **config)).spec.taps == taps


# --inspect


def test_inspect_says_what_each_head_is(tiny_target: Path, tmp_path: Path) -> None:
    for number, (name, head) in enumerate(HEADS.items()):
        directory = head.write(tmp_path / str(number))
        alone = eagle_export("--inspect", "--draft", directory, "--json")
        assert alone.status == 0, alone
        beside = eagle_export("--inspect", "--draft", directory, "--model", tiny_target, "--json")
        assert beside.status == 0, beside
        data = json.loads(beside.out)
        assert data["fits"] is True, name
        assert data["problems"] == json.loads(alone.out)["problems"] == []
        assert data["format"] == (head.layout or head.family)
        assert data["kind"] == ("EAGLE-1/2" if head.kind == "eagle1" else "EAGLE-3")
        if head.kind == "eagle3":
            assert data["taps"].startswith(", ".join(map(str, head.taps)) + " (indices of hidden_states")
        assert data["positions"] == f"from {head.position_offset}"
        scaled = ", multiplied as the target multiplies its own" if head.scaled_embedding else ", as it is stored"
        assert data["embedding"] == ("its own" if head.own_embedding else "the target's") + scaled
        assert data["lm_head"] == ("its own" if head.kind == "eagle3" and head.own_lm_head else "the target's")
        assert data["rope"].startswith(f"{head.rope_type}, theta 20000")
        expected = sum(t.numel() for key, t in head.tensors().items() if key not in ("d2t", "t2d"))
        assert data["parameters"] == f"{expected:,}"


def test_inspect_in_words(tiny_target: Path, tmp_path: Path) -> None:
    directory = HEADS["angelslim"].write(tmp_path / "head")
    alone = eagle_export("--inspect", "--draft", directory)
    for words in ("2, n // 2, n - 3 of the target's n layers", "96 tokens, mapped by d2t", "note: ", "--model M says"):
        assert words in " ".join(alone.out.split())
    beside = eagle_export("--inspect", "--draft", directory, "--model", tiny_target)
    for words in ("2, 3, 3 (indices of hidden_states", "96 of 320 tokens, mapped by d2t", "head fits tiny-target"):
        assert words in " ".join(beside.out.split())
    assert alone.status == beside.status == 0


def test_inspect_gives_every_reason(tiny_target: Path, tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        del tensors["d2t"], tensors["norm.weight"]
        tensors["fc.weight"] = tensors["fc.weight"].T.contiguous()

    directory = write(tmp_path / "head", HEADS["specforge"], spoil, hidden_act="swoosh")
    outcome = eagle_export("--inspect", "--draft", directory, "--model", tiny_target)
    assert outcome.status == 1
    text = " ".join(outcome.out.split())
    for words in ("head does not fit tiny-target:", "- it has no d2t", "no norm.weight", "is transposed", "swoosh"):
        assert words in text
    strange = eagle_export("--inspect", "--draft", tiny_target)
    assert strange.status == 1
    assert "is no EAGLE head of a known layout" in " ".join(strange.out.split())


def test_inspect_beside_a_model_that_cannot_be_exported(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(
        json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})
    )
    outcome = eagle_export("--inspect", "--draft", HEADS["safeailab"].write(tmp_path / "head"), "--model", model)
    assert outcome.status == 1
    assert "it is an encoder-decoder" in " ".join(outcome.out.split())


def test_inspect_without_anything_to_read(tmp_path: Path) -> None:
    assert_refused(eagle_export("--inspect", "--draft", tmp_path / "nowhere"), "head: there is no directory")
    assert_usage(eagle_export("--draft", tmp_path), "--model")
