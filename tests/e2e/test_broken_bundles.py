"""A bundle that is damaged, incomplete or not ours is refused with one line that names the culprit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_graphs.manifest import SCHEMA
from tests.commands import Outcome, assert_refused, eagle_run
from tests.conftest import ROOT

ENGINE = "onnxruntime-cpu-fp32"
FILES = [
    "tokenizer.json",
    "chat_template.jinja",
    "export-report.json",
    f"{ENGINE}/target-native.onnx",
    f"{ENGINE}/draft-native.onnx",
    f"{ENGINE}/target-stock.onnx",
    f"{ENGINE}/draft-stock.onnx",
    f"{ENGINE}/draft-round-4-native.onnx",
    f"{ENGINE}/weights.bin",
]
ALIKE = [f"{ENGINE}/draft-round-{name}.onnx" for name in ("8-native", "16-native", "4-stock", "8-stock", "16-stock")]
"""Files that would break as one of the others does."""


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def answer(bundle: Path, *more: str) -> Outcome:
    return eagle_run(bundle, "--prompt", "hello", "--profile", "4", "--max-new-tokens", "8", "--json", *more)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path, position: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    path.write_bytes(data)


def replace_with_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def edit_manifest(bundle: Path, *place: str | int, value: Any) -> None:
    path = bundle / "manifest.json"
    data = json.loads(path.read_text())
    part = data
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    path.write_text(json.dumps(data))


def test_the_files_that_are_broken_here_are_all_there_are(tiny_bundle: Path) -> None:
    found = {path.relative_to(tiny_bundle).as_posix() for path in tiny_bundle.rglob("*") if path.is_file()}
    assert found == {"manifest.json", *FILES, *ALIKE}


# Files


@pytest.mark.parametrize("damage", [truncate, empty, flip, Path.unlink, replace_with_directory])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(bundle: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(bundle / name)
    assert_refused(answer(bundle), str(bundle / name), "copy the bundle again, or export it again")


@pytest.mark.parametrize("more", [[], ["--verify"]], ids=["open", "verify"])
def test_a_file_that_changes_after_a_good_open_is_found(bundle: Path, more: list[str]) -> None:
    assert answer(bundle).status == 0
    flip(bundle / FILES[-1])
    assert_refused(answer(bundle, *more), str(bundle / FILES[-1]), "has changed since it was exported")


def test_verify_finds_what_kept_its_time(bundle: Path) -> None:
    weights = bundle / FILES[-1]
    assert answer(bundle).status == 0
    before = weights.stat()
    flip(weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert_refused(answer(bundle, "--verify"), str(weights))


def test_a_copy_elsewhere_says_the_same(tiny_bundle: Path, bundle: Path) -> None:
    original = answer(tiny_bundle)
    copy = answer(Path(shutil.copytree(bundle, bundle.parent / "else where" / "ein Bündel")), "--verify")
    assert original.status == copy.status == 0
    assert json.loads(copy.out)["token_ids"] == json.loads(original.out)["token_ids"]


@pytest.mark.parametrize("name", [FILES[0], FILES[-1]])
def test_a_link_out_of_the_bundle_is_refused_though_its_bytes_are_right(bundle: Path, name: str) -> None:
    outside = bundle.parent / "outside"
    shutil.move(bundle / name, outside)
    (bundle / name).symlink_to(outside)
    assert_refused(answer(bundle), str(bundle / name), "is a link that leaves the bundle")


def test_a_linked_folder_out_of_the_bundle_is_refused(bundle: Path) -> None:
    shutil.move(bundle / ENGINE, bundle.parent / "outside")
    (bundle / ENGINE).symlink_to(bundle.parent / "outside")
    assert_refused(answer(bundle), ENGINE, "is a link that leaves the bundle")


def test_a_link_that_leads_nowhere_or_in_circles_is_refused(bundle: Path) -> None:
    path = bundle / FILES[0]
    for target in ("absent", path.name):
        path.unlink()
        path.symlink_to(target)
        assert_refused(answer(bundle), str(path), "is missing")


def test_a_link_to_the_bundle_is_the_bundle(bundle: Path) -> None:
    link = bundle.parent / "link"
    link.symlink_to(bundle)
    assert answer(link).status == 0


# Directories


def test_what_is_no_bundle_is_refused(tmp_path: Path, tiny_bundle: Path) -> None:
    assert_refused(answer(tmp_path / "absent"), f"there is no bundle at {tmp_path / 'absent'}", "eagle-export")
    assert_refused(answer(tiny_bundle / "manifest.json"), "there is no bundle at", "manifest.json")
    assert_refused(answer(tmp_path), f"{tmp_path} has no manifest.json")
    assert_refused(answer(Path("x" * 5000)), "File name too long")
    (tmp_path / "manifest.json").mkdir()
    assert_refused(answer(tmp_path), f"{tmp_path / 'manifest.json'} cannot be read")


def test_the_installed_command_prints_no_traceback(bundle: Path) -> None:
    flip(bundle / FILES[3])
    command = [sys.executable, "-m", "eagle_runtime", str(bundle), "--prompt", "x"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert_refused(Outcome(status=done.returncode, out=done.stdout, err=done.stderr), FILES[3])


# The manifest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe", "manifest.json cannot be read"),
        (b"[]", "has no schema number"),
        (b'{"schema": 99}', f"has schema 99, this version reads schema {SCHEMA}"),
    ],
    ids=["empty", "cut", "deep", "not text", "a list", "later"],
)
def test_a_file_that_is_no_manifest_is_refused(bundle: Path, content: bytes, words: str) -> None:
    (bundle / "manifest.json").write_bytes(content)
    assert_refused(answer(bundle), "manifest.json", words)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (["surprise"], 1, "unknown field 'surprise'"),
        (["head", "kind"], "medusa", "manifest.head.kind is 'medusa'"),
        (["files"], {}, "names 'tokenizer.json' but does not list it"),
        (["files", "../x"], {"size": 1, "sha256": ""}, "'../x', which is not inside the bundle"),
        (["files", "/etc/passwd"], {"size": 1, "sha256": ""}, "'/etc/passwd', which is not inside the bundle"),
        (["files", "more.bin"], {"size": 1, "sha256": ""}, "more.bin is missing"),
        (["files", "a\0b"], {"size": 1, "sha256": ""}, "is missing"),
        (["files", FILES[0], "sha256"], "0" * 64, FILES[0]),
        (["default_profile"], "5", "default profile is '5'; it has plain, 4, 8, 16"),
        (["engines"], [], "lists no engines"),
        (["engines", 0, "backend"], "coreml", "manifest.engines[0].backend is 'coreml'; expected"),
        (["engines", 0, "slots"], 0, "manifest.engines[0].slots is 0; expected 1 or more"),
        (["limits", "buffer_rows"], -1, "manifest.limits.buffer_rows is -1; expected 1 or more"),
        (["limits", "buffer_rows"], 10**14, "not enough memory"),
        (["profiles", 0, "top_k"], 99, "profile 4 drafts 99 children of a node, its head gives 8"),
        (["target", "kv", "dtype"], "float15", "manifest.target.kv.dtype is 'float15'"),
    ],
    ids=lambda value: ".".join(map(str, value)).replace("\0", "NUL") if isinstance(value, list) and value else None,
)
def test_a_manifest_that_says_what_cannot_be_is_refused(
    bundle: Path, place: list[str | int], value: Any, words: str
) -> None:
    edit_manifest(bundle, *place, value=value)
    assert_refused(answer(bundle), words)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (
            ["target", "vocab_size"],
            319,
            "target-native.onnx: logits is float32 ['R', 320], its manifest says float32 ['R', 319]",
        ),
        (["target", "kv", "layers"], 5, "target-native.onnx has the ports"),
        (["target", "kv", "kv_heads"], 4, "target-native.onnx: past_key_0 is float32 ['B', 2, 'C/16', 16, 16]"),
        (["target", "kv", "head_dim"], 8, "target-native.onnx: past_key_0 is float32 ['B', 2, 'C/16', 16, 16]"),
        (["head", "hidden_size"], 32, "target-native.onnx: features is float32 ['B', 'Q', 64]"),
        (["head", "top_k"], 9, "draft-native.onnx: topk_ids is int64 ['R', 8]"),
        (["head", "kv", "layers"], 2, "draft-native.onnx has the ports"),
        (["head", "kv", "kv_heads"], 1, "draft-native.onnx: past_key_0 is float32"),
        (["engines", 0, "target"], FILES[4], "draft-native.onnx has the ports"),
        (["engines", 0, "target"], FILES[0], "cannot load tokenizer.json"),
        (["tokenizer", "tokenizer"], FILES[1], "chat_template.jinja is not a tokenizer"),
        (["tokenizer", "chat_template"], FILES[-1], "weights.bin cannot be read"),
        (
            ["engines", 0, "cache_dtype"],
            "bool",
            "past_key_0 is float32 ['B', 2, 'C/16', 16, 16], its manifest says bool",
        ),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, list) else None,
)
def test_a_manifest_that_its_own_files_contradict_is_refused(
    bundle: Path, place: list[str | int], value: Any, words: str
) -> None:
    edit_manifest(bundle, *place, value=value)
    assert_refused(answer(bundle), words)


def test_no_flip_in_the_manifest_gives_a_traceback(bundle: Path) -> None:
    manifest = bundle / "manifest.json"
    whole = manifest.read_bytes()
    for position in range(5, len(whole), 23):
        flip(manifest, position)
        outcome = answer(bundle)
        if outcome.status != 0:  # such as another digit in a version
            assert_refused(outcome)
        manifest.write_bytes(whole)


# Nothing of the machine that made it


def _texts_in(bundle: Path, *texts: str) -> list[str]:
    contents = {path.relative_to(bundle).as_posix(): path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    return [f"{name}: {text}" for name, content in contents.items() for text in texts if text.encode() in content]


def test_no_file_names_the_models_or_the_place_of_the_export(
    tiny_bundle: Path, tiny_target: Path, tiny_head: Path
) -> None:
    places = (str(tiny_bundle.parent), str(tiny_target), str(tiny_head), str(Path.home()), ".partial-")
    assert _texts_in(tiny_bundle, *places) == []


def test_no_file_names_the_code_of_the_machine_that_exported(tiny_bundle: Path) -> None:
    assert _texts_in(tiny_bundle, str(ROOT), sys.prefix, "site-packages") == []
