"""What users get wrong: each mistake ends with status 2, one clear line, and nothing left on the disk."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.commands import Outcome, assert_refused, assert_usage, eagle_export, eagle_run
from tests.models import write_tiny_head, write_tiny_target

WEIGHTS = "model.safetensors"


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Where to export to; afterwards the directory above must be as empty as before."""
    place = tmp_path / "out"
    place.mkdir()
    yield place / "bundle"
    assert list(place.iterdir()) == []


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


@pytest.fixture
def head(tiny_head: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny_head, tmp_path / "head"))


def export(target: object, head: object, out: Path, *more: object) -> Outcome:
    return eagle_export("--model", target, "--draft", head, "--out", out, *more)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


# eagle-export: options


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ("0", "a profile of 0 nodes is out of range: use 2 to 128"),
        ("1", "a profile of 1 nodes is out of range"),
        ("-4", "a profile of -4 nodes is out of range"),
        ("129", "a profile of 129 nodes is out of range"),
        ("16,8,4", "must rise and differ; found '16,8,4': write 4,8,16"),
        ("4,4,8", "must rise and differ; found '4,4,8': write 4,8"),
        ("4,eight", "separated by commas, as in 4,8,16; found '4,eight'"),
        ("4.5", "found '4.5'"),
        ("4,,8", "found '4,,8'"),
        ("", "found ''"),
    ],
)
def test_profiles_that_cannot_be(tiny_target: Path, tiny_head: Path, out: Path, profiles: str, words: str) -> None:
    assert_refused(export(tiny_target, tiny_head, out, "--profiles", profiles), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--capacity", 0], "--capacity is 0; this model takes 1 to 512 positions"),
        (["--capacity", -1], "--capacity is -1"),
        (["--capacity", 513], "--capacity is 513"),
        (["--prefill-chunk", 0], "--prefill-chunk is 0; expected 1 to the capacity, 512"),
        (["--capacity", 64, "--prefill-chunk", 65], "--prefill-chunk is 65; expected 1 to the capacity, 64"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(tiny_target: Path, tiny_head: Path, out: Path, options: list[Any], words: str) -> None:
    assert_refused(export(tiny_target, tiny_head, out, *options), words)


def int8(*more: str) -> tuple[str, ...]:
    return ("--precision", "int8", *more)


def fp8(*more: str) -> tuple[str, ...]:
    return ("--precision", "fp8", *more)


STOCK = ("--kernels", "stock")
NOTHING_MEASURED = ", which measures nothing on prompts: leave them out"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scales", "x"), "found --precision fp32" + NOTHING_MEASURED),
        (("--precision", "int4", "--calibration-data", "x"), "found --precision int4" + NOTHING_MEASURED),
        (("--precision", "int8-weights", "--scales", "x"), "found --precision int8-weights" + NOTHING_MEASURED),
        (int8(*STOCK, "--scales", "x"), "found --precision int8 --kernels stock" + NOTHING_MEASURED),
        (int8("--scales", "x", "--calibration-data", "x"), "leave the one or the other out"),
        (fp8("--scales", "x", "--calibrator", "minmax"), "leave the one or the other out"),
        (int8("--calibrator", "minmax"), "--calibrator is for --precision fp8; found --precision int8: leave it out"),
        (fp8("--head-precision", "int8"), "found --precision fp8 --head-precision int8: choose one of them"),
        (fp8("--allow-inexact"), "is for --precision int8, int8-weights and int4; found --precision fp8: leave it out"),
        (("--allow-inexact",), "found --precision fp32: leave it out"),
        (int8(*STOCK), "accept such text with --kernels stock --allow-inexact"),
    ],
    ids=str,
)
def test_options_of_precisions_that_do_not_belong_together(
    tiny_target: Path, tiny_head: Path, out: Path, options: tuple[str, ...], words: str
) -> None:
    assert_refused(export(tiny_target, tiny_head, out, *options), words)


@pytest.mark.parametrize(
    "option",
    [
        ("--backend", "tflite"),
        ("--precision", "fp4"),
        ("--calibrator", "mean"),
        ("--capacity", "many"),
        ("--quantize", "int8"),
    ],
    ids=" ".join,
)
def test_options_that_the_parser_refuses(
    tiny_target: Path, tiny_head: Path, out: Path, option: tuple[str, str]
) -> None:
    assert_usage(export(tiny_target, tiny_head, out, *option), option[0])


def test_a_missing_option(tiny_target: Path, out: Path) -> None:
    assert_usage(eagle_export("--model", tiny_target, "--out", out), "--draft")


# eagle-export: where to


def test_a_directory_that_is_no_bundle_is_left_alone(tiny_target: Path, tiny_head: Path, tmp_path: Path) -> None:
    place = tmp_path / "web"
    place.mkdir()
    contents = {"manifest.json": '{"manifest_version": 3, "name": "a browser extension"}', "notes.txt": "mine"}
    for name, text in contents.items():
        (place / name).write_text(text)
        assert_refused(export(tiny_target, tiny_head, place), f"--out {place} exists and is not a bundle")
    assert {path.name: path.read_text() for path in place.iterdir()} == contents
    assert list(tmp_path.iterdir()) == [place]


def test_places_that_cannot_be_written(tiny_target: Path, tiny_head: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place, words in [
        (tmp_path / "file", "exists and is not a bundle"),
        (tmp_path / "link", "exists and is not a bundle"),
        (tmp_path / "file" / "bundle", "cannot be written"),
        (tmp_path / "file" / "below" / "bundle", "cannot be written (Not a directory)"),
        (Path("/proc/eagle/bundle"), "cannot be written"),
        (tmp_path / ("x" * 300), "cannot be written (File name too long)"),
    ]:
        assert_refused(export(tiny_target, tiny_head, place), f"--out {place}", words)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "link"}


@pytest.mark.parametrize(
    ("model", "out"),
    [("tiny-1.5B", "tiny-1.5B-eagle"), ("tiny-1.5B/", "tiny-1.5B-eagle"), ("some/model-0.6B", "model-0.6B-eagle")],
)
def test_the_bundle_is_named_after_the_model(
    tiny_target: Path, tiny_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_target, "tiny-1.5B")
    Path(out).write_text("in the way")
    assert_refused(eagle_export("--model", model, "--draft", tiny_head), f"/{out} exists and is not a bundle")


def test_a_bundle_is_replaced_and_only_by_a_whole_one(
    tiny_bundle: Path, tiny_head: Path, tmp_path: Path, head: Path
) -> None:
    place, model = tmp_path / "out" / "bundle", tmp_path / "small"
    write_tiny_target(model, num_hidden_layers=3)
    shutil.copytree(tiny_bundle, place)
    before = (place / "manifest.json").read_bytes()
    (head / WEIGHTS).unlink()
    sizes = ["--profiles", 2, "--capacity", 8, "--prefill-chunk", 4]  # answers end before what is compared with torch
    assert_refused(export(model, head, place, *sizes), "no .safetensors")
    assert (place / "manifest.json").read_bytes() == before

    outcome = export(model, tiny_head, place, *sizes, "--accept-probe", "--json")
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["taps"] == [2, 1, 0]
    assert json.loads((place / "manifest.json").read_text())["limits"]["capacity"] == 8
    assert eagle_run(place, "--prompt", "a", "--raw", "--profile", "2", "--verify").status == 0
    assert list(place.parent.iterdir()) == [place]


# eagle-export: which model


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


# eagle-run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "x", "--profile", "5"], "profile '5' is not in the bundle; it has auto, plain, lookup, 4, 8, 16"),
        (["--prompt", "x", "--profile", "plain", "--lookup"], 'use the profile "lookup"'),
        (["--prompt", "x", "--profile", "lookup", "--no-lookup"], 'use the profile "plain"'),
        (
            ["--prompt", "x", "--lookup", "--temperature", "1", "--verify-mode", "sampled"],
            "whose trees the head must draw: use deterministic, or no look-up",
        ),
        (["--prompt", "x", "--tune"], "--tune measures and ends: give no prompt"),
        (["--prompt", "x", "--profile", ""], "profile '' is not in the bundle"),
        (["--prompt", "x", "--threads", "0"], "threads is 0; expected 1 or more"),
        (["--prompt", "x", "--threads", "99999999999"], "threads is 99999999999; expected at most"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens is 0; expected"),
        (["--prompt", "x", "--max-new-tokens", "-3"], "max_new_tokens is -3"),
        (["--prompt", "x", "--stop", ""], "stop holds ''"),
        (["--prompt", "x", "--messages", "m.json"], "give one of --prompt, --messages and '-'"),
        (["--prompt", "x", "-"], "give one of --prompt, --messages and '-'"),
        (["--messages", "m.json", "-"], "give one of --prompt, --messages and '-'"),
        (["hello"], "the second argument is 'hello'; it may only be '-'"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "  \n"], "the prompt is empty"),
        (["-"], "the prompt is empty"),
        (["--prompt", "word " * 200], "tokens, the bundle's capacity is 160: shorten it"),
        (["--prompt", os.fsdecode(b"\xff")], "the prompt is not UTF-8 text"),
        (["--prompt", "x" * 9, "--raw", "--messages", "m.json"], "give one of"),
        (["--raw", "--messages", "m.json"], "--raw continues a text as it is; it does not go with --messages"),
        (["--json"], "need a prompt: add --prompt, --messages or '-'"),
        (["--compare"], "need a prompt"),
        (["--raw"], "need a prompt"),
        (["--messages", "absent.json"], "absent.json cannot be read: No such file or directory"),
        (["--messages", "."], ". cannot be read: Is a directory"),
    ],
    ids=lambda value: " ".join(value)[:40].encode("ascii", "replace").decode() if isinstance(value, list) else None,
)
def test_what_cannot_be_run(tiny_bundle: Path, options: list[str], words: str) -> None:
    assert_refused(eagle_run(tiny_bundle, *options), words)


@pytest.mark.parametrize(
    "options",
    [("--threads", "all"), ("--max-new-tokens", "1.5"), ("--creativity", "1")],
    ids=" ".join,
)
def test_what_the_parser_of_eagle_run_refuses(tiny_bundle: Path, options: tuple[str, ...]) -> None:
    assert_usage(eagle_run(tiny_bundle, *options), options[0])


def test_eagle_run_without_a_bundle() -> None:
    assert_usage(eagle_run(), "Missing argument 'bundle'")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"hello", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"{}", "holds an object"),
        (b"[]", "holds an empty list"),
        (b'["hello"]', "message 1 is a string"),
        (b'[{"role": "user"}]', 'message 1 has no "content"'),
        (b'[{"role": "user", "content": [1]}]', '"content" is a list, expected a string'),
        (b'[{"role": "robot", "content": "x"}]', 'has the role "robot"'),
        (b'[{"role": "user", "content": "\\ud800"}]', "half of a surrogate pair"),
        (b"[" * 100_000, "is not JSON"),
    ],
    ids=lambda value: value[:30].decode("ascii", "replace") if isinstance(value, bytes) else None,
)
def test_messages_that_are_no_conversation(tiny_bundle: Path, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "messages.json"
    path.write_bytes(content)
    assert_refused(eagle_run(tiny_bundle, "--messages", path), str(path), words)
    assert_refused(eagle_run(tiny_bundle, "--messages", "-", stdin=content), "standard input", words)


def test_standard_input_that_is_not_text(tiny_bundle: Path) -> None:
    assert_refused(eagle_run(tiny_bundle, "-", stdin=b"caf\xe9"), "standard input is not UTF-8 text")
    outcome = eagle_run(tiny_bundle, stdin=b"caf\xe9\n")  # a chat: the banner is out by then
    assert outcome.status == 2
    assert outcome.err == "error: standard input is not UTF-8 text\n"


SIZES = ("--capacity", "160", "--prefill-chunk", "16")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (int8("--scales", "nowhere.json"), "--scales nowhere.json is no calibration of int8"),
        (fp8("--scales", "nowhere.json"), "--scales nowhere.json is no calibration of fp8"),
        (int8("--calibration-data", "nowhere.jsonl"), "cannot read the prompts from nowhere.jsonl"),
    ],
    ids=str,
)
def test_files_of_a_calibration_that_are_not_there(
    target: Path, tiny_head: Path, tmp_path: Path, more: tuple[str, ...], words: str
) -> None:
    outcome = eagle_export(
        "--model", target, "--draft", tiny_head, "--out", tmp_path / "bundle", "--accept-probe", *SIZES, *more
    )
    assert outcome.status == 2
    assert words in outcome.err.splitlines()[-1]
    assert not (tmp_path / "bundle").exists()


def test_scales_of_another_model_are_refused(
    target: Path, tiny_head: Path, tiny_int8_bundle: Path, tmp_path: Path
) -> None:
    text = (tiny_int8_bundle / "calibration.json").read_text().replace("layers.1.", "layers.7.")
    (tmp_path / "scales.json").write_text(text)
    more = ("--accept-probe", "--precision", "int8", "--scales", tmp_path / "scales.json")
    outcome = eagle_export("--model", target, "--draft", tiny_head, "--out", tmp_path / "bundle", *SIZES, *more)
    assert outcome.status == 2
    assert "is of another model: its target has ('model.model.layers.7." in outcome.err.splitlines()[-1]
