"""What users get wrong, in which model and head to take: status 2, one clear line, nothing left on the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import Outcome, assert_refused, eagle_export
from tests.e2e.exports import export
from tests.models import write_tiny_head

WEIGHTS = "model.safetensors"


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize("which", ["target", "head"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./absent", "there is no directory or .gguf file ./absent"),
        ("absent.gguf", "there is no file absent.gguf"),
        ("a b", "a b is neither a directory, a .gguf file nor a Hub id"),
        ("a/b/c", "there is no directory or .gguf file a/b/c"),
        ("", "its name is empty"),
        ("~nobody-here/model", "cannot be read"),
        ("x" * 5000, "File name too long"),
        (__file__, "is a file; expected a checkpoint directory"),
    ],
    ids=lambda text: text[:20],
)
def test_a_checkpoint_that_is_not_there(
    tiny_target: Path, tiny_head: Path, out: Path, which: str, name: str, words: str
) -> None:
    pair = (name, tiny_head) if which == "target" else (tiny_target, name)
    assert_refused(export(*pair, out), f"error: {which}: ", words)


def test_a_hub_id_that_cannot_be_fetched(tiny_head: Path, out: Path) -> None:
    command = [sys.executable, "-m", "eagle_exporter.cli", "--model", "some/model", "--draft", str(tiny_head)]
    done = subprocess.run(
        [*command, "--out", str(out)],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out.parent.parent)},
    )
    outcome = Outcome(status=done.returncode, out=done.stdout, err=done.stderr)
    assert_refused(outcome, "target: some/model is no local path and could not be fetched", "check the name and")


def spoil(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)


def _as_bin(directory: Path) -> None:
    torch.save(load_file(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        pytest.param(lambda d: spoil(d / "config.json", None), "config.json", id="no config"),
        pytest.param(lambda d: spoil(d / "config.json", b"{"), "config.json", id="broken config"),
        pytest.param(lambda d: spoil(d / WEIGHTS, None), "model.safetensors", id="no weights"),
        pytest.param(lambda d: spoil(d / "tokenizer.json", b"{"), "cannot load", id="broken tokenizer"),
        pytest.param(lambda d: edit_config(d, model_type="nonesuch"), "`nonesuch`", id="unknown model"),
        pytest.param(
            lambda d: edit_config(d, model_type="own", auto_map={"AutoConfig": "code.Config"}),
            "code of its own, which an export does not run",
            id="code of its own",
        ),
        pytest.param(
            lambda d: edit_tensors(d, lambda t: t["model.norm.weight"].fill_(torch.nan)),
            "model.norm.weight holds NaN",
            id="NaN",
        ),
        pytest.param(lambda d: cut(d / WEIGHTS), "cannot load", id="cut weights"),
        pytest.param(
            lambda d: edit_config(d, hidden_size="64"),
            "hidden_size",
            id="mistyped config",
        ),
        pytest.param(
            lambda d: edit_tensors(d, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
            "up_proj",
            id="no tensor",
        ),
        pytest.param(_as_bin, "safetensors", id="only .bin"),
    ],
)
def test_a_target_that_is_damaged(
    target: Path, tiny_head: Path, out: Path, edit: Callable[[Path], None], words: str
) -> None:
    edit(target)
    sizes = ["--capacity", 9999]  # would stop what is accepted, before it is traced
    assert_refused(export(target, tiny_head, out, *sizes), "error: target: ", words)


@pytest.mark.parametrize(
    "config", [{"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}, {"hidden_size": "64"}]
)
def test_an_inspection_refuses_a_config_as_an_export_does(
    target: Path, tiny_head: Path, config: dict[str, Any]
) -> None:
    edit_config(target, **config)
    outcome = eagle_export("--inspect", "--model", target, "--draft", tiny_head)
    assert_refused(outcome, "error: target: transformers cannot load")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\3\4", "is not a GGUF file (it begins with b'PK"),
        (b"GGUF", "cannot load"),
        (b"GGUF\3\0\0\0" + b"\xff" * 64, "cannot load"),
    ],
)
def test_a_gguf_file_that_is_none(tmp_path: Path, tiny_head: Path, out: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert_refused(export(path, tiny_head, out), "error: target: ", words)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "it is an encoder-decoder"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "it uses multi-head latent attention"),
        ({"model_type": "mamba2"}, "it has state-space layers"),
        ({"model_type": "gemma3", "vision_config": {}}, "it takes more than text"),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_an_architecture_that_is_not_supported(
    tmp_path: Path, tiny_head: Path, out: Path, config: dict[str, Any], words: str
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    assert_refused(export(model, tiny_head, out), "error: target: ", words, "support table in the README")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        pytest.param(lambda d: spoil(d / "config.json", None), "has no config.json", id="no config"),
        pytest.param(lambda d: spoil(d / "config.json", b"{"), "config.json is not JSON", id="broken config"),
        pytest.param(lambda d: spoil(d / WEIGHTS, None), "has no .safetensors file", id="no weights"),
        pytest.param(lambda d: cut(d / WEIGHTS), "model.safetensors cannot be read", id="cut weights"),
        pytest.param(lambda d: edit_tensors(d, lambda t: t.pop("d2t")), "it has no d2t", id="no d2t"),
        pytest.param(lambda d: edit_tensors(d, lambda t: t.pop("fc.weight")), "no fc.weight", id="no fc"),
        pytest.param(lambda d: edit_tensors(d, lambda t: t.pop("lm_head.weight")), "no lm_head.weight", id="no head"),
        pytest.param(
            lambda d: edit_tensors(d, lambda t: t.update(surprise=torch.ones(2))), "unknown surprise", id="unknown"
        ),
        pytest.param(
            lambda d: edit_tensors(d, lambda t: t.update({"fc.weight": torch.ones(64, 64)})),
            "fc.weight has shape [64, 64]; expected [64, 192]",
            id="wrong shape",
        ),
        pytest.param(
            lambda d: edit_tensors(d, lambda t: t["norm.weight"].fill_(torch.nan)), "norm.weight holds NaN", id="NaN"
        ),
        pytest.param(
            lambda d: write_tiny_head(d, target_hidden=32),
            "fc.weight has shape [32, 96]; expected [32, 192]",
            id="other width",
        ),
        pytest.param(lambda d: write_tiny_head(d, vocab=400), "the target has 320 tokens", id="larger vocabulary"),
        pytest.param(lambda d: write_tiny_head(d, vocab=200), "t2d (shape [200])", id="smaller vocabulary"),
        pytest.param(lambda d: edit_config(d, eagle_feature_layers=[2, 15, 27]), "[2, 15, 27]", id="deeper target"),
    ],
)
def test_a_head_that_does_not_fit(
    tiny_target: Path, head: Path, out: Path, edit: Callable[[Path], None], words: str
) -> None:
    edit(head)
    assert_refused(export(tiny_target, head, out), "error: ", "head", words)


def test_a_head_of_another_kind(tiny_target: Path, head: Path, out: Path) -> None:
    def as_eagle1(tensors: dict[str, torch.Tensor]) -> None:
        renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors |= renamed | {"fc.weight": torch.ones(64, 128)}

    edit_tensors(head, as_eagle1)
    assert_refused(export(tiny_target, head, out), "fc.weight has shape [64, 128]; expected [64, 192]")


def test_target_and_head_exchanged(tiny_target: Path, tiny_head: Path, out: Path) -> None:
    assert_refused(export(tiny_target, tiny_target, out), "head: tiny-target is no EAGLE head of a known layout")
    assert_refused(export(tiny_head, tiny_target, out), "error: ")
