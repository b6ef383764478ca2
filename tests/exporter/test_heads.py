"""Draft heads: what is read from a checkpoint that is whole, and what refuses one that is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads import Head, Tensors, load_head
from eagle_graphs import EagleError
from tests.models import DRAFT_VOCAB, HIDDEN, LAYERS, VOCAB, write_tiny_head

WEIGHTS = "model.safetensors"


@pytest.fixture
def directory(tiny_head: Path, tmp_path: Path) -> Path:
    """A head to change."""
    return Path(shutil.copytree(tiny_head, tmp_path / "head"))


def target(**changes: Any) -> LlamaConfig:
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    return LlamaConfig(**sizes | changes)


def load(directory: Path, **changes: Any) -> Head:
    return load_head(find_checkpoint(str(directory), what="head"), target(**changes))


def edit_config(directory: Path, **changes: Any) -> None:
    """Sets fields; `...` removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


def edit_tensors(directory: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / WEIGHTS)


# What is read


def test_a_head_as_it_is_published(tiny_head: Path) -> None:
    head, tensors = load(tiny_head), load_file(tiny_head / WEIGHTS)
    spec = head.spec
    assert (spec.kind, spec.layout, spec.position_offset) == ("eagle3", "safeailab", 0)
    assert spec.taps == (2, LAYERS // 2, LAYERS - 3)
    assert (spec.hidden_size, spec.intermediate_size, spec.draft_vocab_size) == (HIDDEN, 80, DRAFT_VOCAB)
    assert (spec.attention_heads, spec.kv_heads, spec.head_dim) == (4, 2, 16)
    assert (spec.activation, spec.norm_eps, spec.max_positions) == ("silu", 1e-5, 512)
    assert spec.rope_parameters == {"rope_theta": 10000.0, "rope_type": "default"}
    assert head.tensors.keys() == {name.replace("midlayer.", "layers.0.") for name in tensors} - {"d2t", "t2d"}
    assert all(tensor.dtype == torch.float32 for tensor in head.tensors.values())
    assert torch.equal(head.tensors["layers.0.self_attn.q_proj.weight"], tensors["midlayer.self_attn.q_proj.weight"])


def test_d2t_holds_offsets(tiny_head: Path) -> None:
    tensors = load_file(tiny_head / WEIGHTS)
    ids = load(tiny_head).draft_to_target
    assert ids.tolist() == (torch.arange(DRAFT_VOCAB) + tensors["d2t"]).tolist()
    assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()


def test_t2d_may_be_left_out(directory: Path) -> None:
    whole = load(directory).draft_to_target
    edit_tensors(directory, lambda tensors: tensors.pop("t2d"))
    assert torch.equal(load(directory).draft_to_target, whole)


def test_a_head_over_the_whole_vocabulary_needs_no_d2t(directory: Path) -> None:
    def whole(tensors: Tensors) -> None:
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = torch.ones(VOCAB, HIDDEN)

    edit_tensors(directory, whole)
    for stated in (VOCAB, ...):
        edit_config(directory, draft_vocab_size=stated)
        assert torch.equal(load(directory).draft_to_target, torch.arange(VOCAB))


def test_half_precision_is_read_as_float32(directory: Path) -> None:
    exact = load(directory).tensors["fc.weight"]
    edit_tensors(directory, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].bfloat16()}))
    found = load(directory).tensors["fc.weight"]
    assert found.dtype == torch.float32
    assert torch.equal(found, exact.bfloat16().float())


def test_shards_are_read_together(directory: Path) -> None:
    tensors, whole = load_file(directory / WEIGHTS), load(directory)
    names = sorted(tensors)
    (directory / WEIGHTS).unlink()
    save_file({name: tensors[name] for name in names[:5]}, directory / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, directory / "model-00002-of-00002.safetensors")
    found = load(directory)
    assert found.spec == whole.spec
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in whole.tensors.items())


def test_embeddings_of_its_own_are_kept(directory: Path) -> None:
    own = torch.ones(VOCAB, HIDDEN)
    edit_tensors(directory, lambda tensors: tensors.update({"embed_tokens.weight": own}))
    assert torch.equal(load(directory).tensors["embed_tokens.weight"], own)


def test_a_narrower_head_brings_its_embeddings(tmp_path: Path) -> None:
    directory, width = tmp_path / "narrow", 32
    write_tiny_head(directory, target_hidden=width)
    edit_tensors(directory, lambda tensors: tensors.update({"fc.weight": torch.ones(width, 3 * HIDDEN)}))
    with pytest.raises(EagleError, match="it is 32 wide and brings no embed_tokens, and the target's are 64 wide"):
        load(directory)
    edit_tensors(directory, lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(VOCAB, width)}))
    assert load(directory).spec.hidden_size == width


@pytest.mark.parametrize("taps", [[0, 3, 6], [1, 1, 1]])
def test_taps_may_be_stated(directory: Path, taps: list[int]) -> None:
    edit_config(directory, eagle_feature_layers=taps)
    assert load(directory).spec.taps == tuple(taps)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"rope_theta": 10000.0, "rope_type": "default"}),
        ({"rope_theta": 1000000}, {"rope_theta": 1e6, "rope_type": "default"}),
        ({"rope_theta": None, "rope_scaling": None}, {"rope_theta": 10000.0, "rope_type": "default"}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0},
        ),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_theta": 5e5, "rope_type": "default"},
        ),
    ],
    ids=["default", "theta", "null", "type", "rope_type", "rope_parameters"],
)
def test_rope_in_every_form(directory: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    edit_config(directory, **config)
    assert load(directory).spec.rope_parameters == expected


def test_sizes_that_follow_from_others(directory: Path) -> None:
    edit_config(directory, head_dim=..., rms_norm_eps=..., hidden_act=..., max_position_embeddings=...)
    spec = load(directory).spec
    assert (spec.head_dim, spec.norm_eps, spec.activation, spec.max_positions) == (16, 1e-6, "silu", 2048)


# What is refused


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_size": ...}, "hidden_size None; expected a positive whole number"),
        ({"hidden_size": True}, "hidden_size True"),
        ({"intermediate_size": "80"}, "intermediate_size '80'"),
        ({"num_attention_heads": 0}, "num_attention_heads 0"),
        ({"num_key_value_heads": 3}, "its 4 attention heads do not share 3 key heads"),
        ({"num_key_value_heads": ...}, r"k_proj.weight has shape \[32, 128\]; expected \[64, 128\]"),
        ({"head_dim": 32}, r"q_proj.weight has shape \[64, 128\]|\w+_proj.weight has shape"),
        ({"draft_vocab_size": 95}, r"d2t has shape \[96\]; expected \[95\]"),
        ({"draft_vocab_size": ...}, r"d2t has shape \[96\]; expected \[320\]"),
        ({"head_dim": 12}, "its attention heads are 12 wide; ONNX Runtime takes multiples of 8"),
        ({"use_sliding_window": True}, "it attends through a sliding window"),
        ({"sliding_window": 64}, "it attends through a sliding window"),
        ({"attention_bias": True}, "its config says attention_bias, and it brings no biases"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized heads cannot be exported"),
        ({"fc_injection": "staged"}, "the flag fc_injection, which this version does not know"),
        ({"partial_rotary_factor": 0.5}, "rotates a part of each head only"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "positions of images"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'; this version knows default"),
        ({"hidden_act": "swoosh"}, "hidden_act 'swoosh', which transformers does not know"),
        ({"hidden_act": 3}, "hidden_act 3, which"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps 'small'; expected a positive number"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps -1.0"),
        ({"rope_theta": "1e4"}, "rope_theta '1e4'"),
        ({"rope_scaling": "linear"}, "rope_scaling 'linear'; expected an object"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral'; this version knows"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "incomplete rope_scaling: Missing required keys"),
        ({"eagle_feature_layers": 2}, "eagle_feature_layers 2; expected a list of layer numbers"),
        ({"eagle_feature_layers": [2, 3]}, r"fc.weight has shape \[64, 192\]; expected \[64, 128\]"),
        ({"eagle_feature_layers": [2, 3, 7]}, r"hidden states \[2, 3, 7\]"),
        ({"eagle_feature_layers": [2, 3, "3"]}, r"eagle_feature_layers \[2, 3, '3'\]; expected a list"),
        ({"eagle_feature_layers": [2, 3, True]}, r"eagle_feature_layers \[2, 3, True\]"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be(directory: Path, config: dict[str, Any], words: str) -> None:
    edit_config(directory, **config)
    with pytest.raises(EagleError, match=f"^head: .*{words}"):
        load(directory)


def _shift(tensors: Tensors, amount: int) -> None:
    tensors["d2t"][:] = amount


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("norm.weight"), "no norm.weight"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "no midlayer.hidden_norm.weight"),
        (lambda t: t.update({"fc.bias": torch.ones(64)}), "unknown fc.bias"),
        (lambda t: t.update({"fc_norm.0.weight": torch.ones(64)}), "unknown fc_norm.0.weight"),
        (
            lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}),
            "no midlayer.self_attn.k_norm.weight",
        ),
        (lambda t: t.update({"embed_tokens.weight": torch.ones(9, 64)}), r"embed_tokens.weight has shape \[9, 64\]"),
        (lambda t: t["fc.weight"].view(-1)[5:6].fill_(torch.inf), "fc.weight holds NaN or infinite values"),
        (lambda t: t.pop("d2t"), "no d2t, which says what its 96 draft tokens are among the target's 320"),
        (lambda t: _shift(t, 300), "d2t leads to ids 300 to 395, 96 of 96 distinct; the target has 320"),
        (lambda t: _shift(t, -1), "d2t leads to ids -1 to 94"),
        (lambda t: t["d2t"].copy_(-torch.arange(96)), "d2t leads to ids 0 to 0, 1 of 96 distinct"),
        (lambda t: t["t2d"].logical_not_(), r"t2d \(shape \[320\]\) and d2t name different tokens"),
        (lambda t: t.clear(), "is no EAGLE head of a known layout"),
    ],
    ids=[
        *("no norm", "no hidden_norm", "bias", "fc_norm", "q_norm", "embeddings", "infinite", "no d2t", "d2t too high"),
        *("d2t negative", "d2t repeats", "t2d", "nothing"),
    ],
)
def test_tensors_that_do_not_fit(directory: Path, edit: Callable[[Tensors], object], words: str) -> None:
    edit_tensors(directory, edit)
    with pytest.raises(EagleError, match=f"^head: .*{words}"):
        load(directory)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 32}, r"fc.weight has shape \[64, 192\]; expected \[64, 96\]"),
        ({"vocab_size": 1000}, r"t2d \(shape \[320\]\) and d2t name different tokens of 1000"),
        ({"vocab_size": 100}, "the target has 100 tokens: is it the head of another model"),
        ({"num_hidden_layers": 2}, r"hidden states \[2, 1, -1\]; expected indices of 0 to 2"),
    ],
    ids=str,
)
def test_the_head_of_another_target(tiny_head: Path, changes: dict[str, int], words: str) -> None:
    with pytest.raises(EagleError, match=words):
        load(tiny_head, **changes)


def test_files_that_are_not_safetensors(directory: Path) -> None:
    (directory / "head.gguf").write_bytes(b"GGUF")
    with pytest.raises(EagleError, match=r"head\.gguf is a GGUF file; name a directory"):
        load(directory / "head.gguf")
    (directory / WEIGHTS).write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(EagleError, match=f"{WEIGHTS} cannot be read .*: download it again"):
        load(directory)
    (directory / WEIGHTS).unlink()
    with pytest.raises(EagleError, match=r"has no .safetensors file, nor a .bin file$"):
        load(directory)


def test_the_layout_of_another_kind_is_told_by_all_its_signs(directory: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("midlayer.")]:
            tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)

    edit_tensors(directory, rename)
    assert load(directory).spec.layout == "modelopt"
    edit_tensors(directory, lambda tensors: tensors.pop("norm.weight"))
    with pytest.raises(EagleError, match=r"not those of an EAGLE-3 head: no norm.weight"):
        load(directory)


class Gadget:
    """Writes a file into the working directory when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path("unpickled"),))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"fc.weight": Gadget()}, "is damaged, or holds more than tensors, which is not loaded"),
        ({"fc.weight": 3}, "holds something other than named tensors"),
        ([torch.ones(2)], "holds something other than named tensors"),
        (None, "is damaged, or holds more than tensors"),
    ],
    ids=["code", "number", "list", "garbage"],
)
def test_a_bin_file_that_holds_more_than_tensors(
    directory: Path, content: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    (directory / WEIGHTS).unlink()
    if content is None:
        (directory / "pytorch_model.bin").write_bytes(b"\x80\x02garbage")
    else:
        torch.save(content, directory / "pytorch_model.bin")
    with pytest.raises(EagleError, match=words):
        load(directory)
    assert not Path("unpickled").exists()


def test_a_shard_that_is_missing(directory: Path) -> None:
    index = {"weight_map": {"fc.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EagleError, match=r"names model-00001-of-00002.safetensors, which is missing"):
        load(directory)
    (directory / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(EagleError, match="is not an index of weights"):
        load(directory)


def test_all_reasons_are_given_at_once(directory: Path) -> None:
    edit_config(directory, hidden_act="swoosh")
    edit_tensors(directory, lambda t: (t.pop("d2t"), t.pop("lm_head.weight"), t["fc.weight"].fill_(torch.nan)))
    with pytest.raises(EagleError) as raised:
        load(directory, num_hidden_layers=1)
    for words in ("swoosh", "no d2t", "no lm_head.weight", "fc.weight holds NaN", "hidden states [2, 0, -2]"):
        assert words in str(raised.value)
