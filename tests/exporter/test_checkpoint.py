"""Finding checkpoints: what a name stands for, what is refused, and an identity that is of the content alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from eagle_exporter.checkpoint import PATTERNS, Checkpoint, find_checkpoint, sha256
from eagle_graphs import EagleError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of two files, and one that says nothing of the model."""
    path = tmp_path / "some-model"
    path.mkdir()
    (path / "config.json").write_text('{"hidden_size": 64}')
    (path / "model.safetensors").write_bytes(b"tensors")
    (path / "README.md").write_text("of no account")
    return path


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def refusal(where: str, what: str = "target") -> str:
    with pytest.raises(EagleError) as caught:
        find_checkpoint(where, what=what)
    return str(caught.value)


# What is found


@pytest.mark.parametrize("where", ["some-model", "./some-model/", "some-model/.", "some-model/../some-model"])
def test_a_directory(directory: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.chdir(directory.parent)
    found = find_checkpoint(where, what="target")
    assert (found.name, found.gguf_file, found.revision) == ("some-model", None, None)
    assert found.config() == {"hidden_size": 64}


def test_the_current_directory_has_a_name_too(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    assert find_checkpoint(".", what="target").name == "some-model"


def test_a_directory_below_home(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(directory.parent))
    assert find_checkpoint("~/some-model", what="head").directory == directory


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.Q8_0.gguf"
    path.write_bytes(b"GGUF and more")
    found = find_checkpoint(str(path), what="target")
    assert (found.name, found.directory, found.gguf_file) == ("model.Q8_0", tmp_path, "model.Q8_0.gguf")
    assert found.source().files == {"model.Q8_0.gguf": digest(b"GGUF and more")}


def test_a_directory_comes_before_a_hub_id(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent.parent)
    with mock.patch.object(huggingface_hub, "snapshot_download", side_effect=AssertionError):
        found = find_checkpoint(f"{directory.parent.name}/some-model", what="target")
    assert found.revision is None


def test_a_hub_id(tmp_path: Path) -> None:
    snapshot = tmp_path / "0123abc"
    snapshot.mkdir()
    with mock.patch.object(huggingface_hub, "snapshot_download", return_value=str(snapshot)) as download:
        found = find_checkpoint("some/model", what="target")
    download.assert_called_once_with("some/model", allow_patterns=PATTERNS)
    assert found == Checkpoint(name="some/model", directory=snapshot, gguf_file=None, revision="0123abc")


def test_nothing_that_could_be_unpickled_is_downloaded() -> None:
    assert not [pattern for pattern in PATTERNS if pattern.endswith((".bin", ".pt", ".pth", ".pkl", ".py", "*"))]


# Identity


def test_the_identity_is_of_what_was_read(directory: Path) -> None:
    source = find_checkpoint(str(directory), what="target").source()
    assert (source.name, source.revision) == ("some-model", None)
    assert source.files == {"config.json": digest(b'{"hidden_size": 64}'), "model.safetensors": digest(b"tensors")}


def test_the_identity_names_no_path(directory: Path) -> None:
    source = find_checkpoint(str(directory), what="target").source()
    assert str(directory.parent) not in repr(source)


def test_every_shard_belongs_to_the_identity(directory: Path) -> None:
    (directory / "model-00002.safetensors").write_bytes(b"more")
    files = find_checkpoint(str(directory), what="target").source().files
    assert files.keys() == {"config.json", "model.safetensors", "model-00002.safetensors"}


def test_sha256_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc" * 100_000)
    assert sha256(tmp_path / "file") == digest(b"abc" * 100_000)


# What is refused


def test_names_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.bin").touch()
    (tmp_path / "zip.gguf").write_bytes(b"PK\3\4")
    assert refusal("") == "target: its name is empty; expected a checkpoint directory, a .gguf file or a Hub id"
    assert refusal("./absent") == "target: there is no directory or .gguf file ./absent"
    assert refusal("a/b/c", "head") == "head: there is no directory or .gguf file a/b/c"
    assert refusal("absent.gguf") == "target: there is no file absent.gguf"
    assert refusal("zip.gguf") == "target: zip.gguf is not a GGUF file (it begins with b'PK\\x03\\x04')"
    assert refusal("weights.bin").startswith("target: weights.bin is a file; expected")
    assert refusal("two words") == "target: two words is neither a directory, a .gguf file nor a Hub id"
    assert "cannot be read: File name too long" in refusal("x" * 5000)
    assert "~nobody-here/model cannot be read: " in refusal("~nobody-here/model")


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("not cached\nand offline"),
        ConnectionError("no route to host"),
        TimeoutError(),
        RuntimeError("an HTTP library's own"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_hub_that_does_not_answer(error: Exception) -> None:
    with mock.patch.object(huggingface_hub, "snapshot_download", side_effect=error):
        message = refusal("some/model")
    first = str(error).split("\n")[0] or "TimeoutError"
    assert f"some/model is no local path and could not be fetched from the Hugging Face Hub ({first})" in message
    assert message.endswith("check the name and the connection, or download it and name its directory")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "has no config.json: name the directory of a checkpoint"),
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "holds list; expected an object"),
        ("directory", "cannot be read: Is a directory"),
    ],
    ids=["missing", "empty", "not text", "deep", "a list", "a directory"],
)
def test_a_config_that_is_none(directory: Path, content: Any, words: str) -> None:
    path = directory / "config.json"
    path.unlink()
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(EagleError, match=words):
        find_checkpoint(str(directory), what="target").config()


def test_a_config_is_read_as_it_stands(directory: Path) -> None:
    config = {"größe": [1, None, {"a": 1.5}]}
    (directory / "config.json").write_text(json.dumps(config, ensure_ascii=False), "utf-8")
    assert find_checkpoint(str(directory), what="target").config() == config
