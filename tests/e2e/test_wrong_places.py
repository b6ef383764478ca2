"""What users get wrong, in where to export to: status 2, one clear line, nothing left on the disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.commands import assert_refused, eagle_export, eagle_run
from tests.e2e.exports import export
from tests.models import write_tiny_target


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
    (head / "model.safetensors").unlink()
    sizes = ["--profiles", 2, "--capacity", 8, "--prefill-chunk", 4]  # answers end before what is compared with torch
    assert_refused(export(model, head, place, *sizes), "no .safetensors")
    assert (place / "manifest.json").read_bytes() == before

    outcome = export(model, tiny_head, place, *sizes, "--accept-probe", "--json")
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["taps"] == [2, 1, 0]
    assert json.loads((place / "manifest.json").read_text())["limits"]["capacity"] == 8
    assert eagle_run(place, "--prompt", "a", "--raw", "--profile", "2", "--verify").status == 0
    assert list(place.parent.iterdir()) == [place]
