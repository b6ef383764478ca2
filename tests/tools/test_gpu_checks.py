"""The script for a machine with a GPU, with the host playing it: what it runs, what it skips, what it compares."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eagle_graphs import EagleError
from eagle_graphs.manifest import FILE_NAME, manifest_from_json
from eagle_runtime.bundle import Bundle, open_bundle
from eagle_runtime.engines.memory import DeviceMemory, HostMemory
from eagle_runtime.engines.select import engine_from_portable
from eagle_runtime.measure import ProfileRun, measure
from tests.portable import with_portable_graphs
from tools import gpu_checks
from tools.gpu_pairs import pairs

ROOT = Path(__file__).parents[2]
PROMPTS = [[{"role": "user", "content": "the quick brown fox"}]]


@pytest.fixture(scope="module")
def portable(tiny_bundle: Path, tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_portable_graphs(tiny_bundle, tiny_target, tiny_head, tmp_path_factory.mktemp("checks") / "bundle")


def _check(bundle: Bundle, memory: Callable[[], DeviceMemory] = HostMemory) -> list[gpu_checks.Checked]:
    check = partial(gpu_checks.check, memory=memory, prompts=PROMPTS, new_tokens=6)
    return [check(name, alone) for name, alone in gpu_checks.alternatives(bundle)]


SIZES = ("4", "8", "16")
WAYS = [
    *("plain", *SIZES, "auto", "plain sampled"),
    *(f"{size} {how}" for how in ("sampled", "sampled tree", "stepwise") for size in SIZES),
]


def test_every_engine_is_tried_alone_and_what_cannot_run_says_why(portable: Path) -> None:
    bundle = open_bundle(portable)
    engine = replace(engine_from_portable(bundle.manifest.portable[0]), backend="tensorrt", architectures=("sm89",))
    manifest = replace(bundle.manifest, engines=(*bundle.manifest.engines, engine))
    found = _check(replace(bundle, manifest=manifest))
    assert [checked.name for checked in found] == ["tensorrt fp32 sm89", "onnxruntime fp32 (float32 cache)"]
    assert found[0].skipped is not None
    assert "tensorrt is not installed" in found[0].skipped
    assert not found[0].ways
    assert found[0].right
    assert found[1].skipped is None
    assert found[1].failed is None
    assert {way.name: way.differing for way in found[1].ways} == dict.fromkeys(WAYS, 0)
    texts = {way.name: way.run.token_ids for way in found[1].ways}
    assert texts["8 sampled"] != texts["8"], "nothing was sampled"


def test_what_runs_in_an_engine_s_place_is_not_taken_for_it(portable: Path) -> None:
    bundle = open_bundle(portable)
    graphs = bundle.manifest.portable[0]
    stripped = replace(engine_from_portable(graphs), backend="tensorrt", weights_stripped=True)
    (found, _) = _check(replace(bundle, manifest=replace(bundle.manifest, engines=(stripped,))))
    assert found.skipped is not None
    assert "tensorrt is not installed" in found.skipped


@pytest.mark.parametrize("way", ["8", "auto", "4 sampled", "16 sampled tree", "8 stepwise"])
def test_a_text_that_differs_is_counted_and_is_a_failure(
    portable: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    profile, _, how = way.partition(" ")
    calls = iter(("", "sampled", "sampled tree first", "sampled tree", "stepwise"))

    def changed(*arguments: Any, **more: Any) -> dict[str, ProfileRun]:
        runs = measure(*arguments, **more)
        if next(calls) == how:
            runs[profile].token_ids[0][-1] += 1
        return runs

    monkeypatch.setattr(gpu_checks, "measure", changed)
    with pytest.raises(SystemExit) as end:
        gpu_checks.main(portable, device="cpu", count=1, new_tokens=4)
    assert end.value.code == 1
    calls = iter(("", "sampled", "sampled tree first", "sampled tree", "stepwise"))
    (found,) = _check(open_bundle(portable))
    assert {each.name: each.differing for each in found.ways} == dict.fromkeys(WAYS, 0) | {way: 1}
    assert not found.right


class BrokenMemory(HostMemory):
    """Fails when it is waited for."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def synchronize(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "told"), [(EagleError("the GPU fell off"), "the GPU fell off"), (OSError("bus"), "OSError: bus")]
)
@pytest.mark.parametrize(("session", "ways"), [(1, []), (2, WAYS[:-3])])
def test_an_engine_that_fails_is_not_skipped_and_keeps_what_it_gave(
    portable: Path, error: Exception, told: str, session: int, ways: list[str]
) -> None:
    memories = [HostMemory(), HostMemory(), HostMemory()]  # for the choice, and two sessions
    memories[session] = BrokenMemory(error)
    (found,) = _check(open_bundle(portable), partial(next, iter(memories)))
    assert (found.failed, found.skipped, found.right) == (told, None, False)
    assert [way.name for way in found.ways] == ways


def test_an_engine_that_cannot_be_opened_is_not_skipped(portable: Path, tmp_path: Path) -> None:
    shutil.copytree(portable, tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    (tmp_path / "bundle" / "portable" / "draft.onnx").write_bytes(b"no graph")
    (found,) = _check(bundle)
    assert found.failed is not None
    assert "cannot load draft.onnx" in found.failed
    assert found.skipped is None


def test_an_engine_is_compared_with_the_portable_graph_of_its_precision(portable: Path) -> None:
    manifest = manifest_from_json((portable / FILE_NAME).read_text())
    alone = pairs(manifest)
    assert alone == [
        ("onnxruntime", "target", "portable/target.onnx", "-", "16"),
        ("onnxruntime", "draft", "portable/draft.onnx", "-", "8"),
    ]
    engine = replace(engine_from_portable(manifest.portable[0]), backend="tensorrt-rtx")
    other = replace(engine, precision="int8")
    left_out = replace(engine, weights_stripped=True), replace(engine, kernels="plugin")
    found = pairs(replace(manifest, engines=(*manifest.engines, engine, other, *left_out)))
    assert len(found) == 4
    assert found[0] == ("tensorrt-rtx", "target", "portable/target.onnx", engine.target, "16")
    assert found[2][2] == "", "no portable graph of that precision"


def test_the_whole_script_runs_on_a_played_gpu(portable: Path, tiny_target: Path, tiny_head: Path) -> None:
    packages = [str(ROOT / name) for name in ("graphs", "calibration", "exporter", "runtime")]
    environment = os.environ | {
        "PYTHON": sys.executable,
        "DEVICE": "cpu",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(packages),
    }
    command = ["bash", str(ROOT / "tools" / "gpu_checks.sh"), str(portable), str(tiny_target), str(tiny_head)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert "nothing failed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0
    assert done.stdout.count("no output and no layer differs") in (0, 2)  # none where polygraphy is not installed
