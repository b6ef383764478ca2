"""--attention plugin from the export to the engine, with a mock in the place of TensorRT, which is not to be had here.

The graphs with plugins are the bundle's own files: what they compute is compared with the standard ones.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from eagle_graphs import draft_ports, target_ports
from eagle_graphs.lowering.plugin_attention import onnx_for_gpu
from eagle_graphs.manifest import PortableGraphs
from eagle_graphs.tensorrt import gpu, library
from eagle_graphs.tensorrt.bundle import read_manifest
from tests import tensorrt_mock
from tests.commands import Outcome, assert_refused, eagle_build, eagle_export
from tests.heads import HEADS
from tests.models import LAYERS, write_tiny_target

TENSORRT = ("--backend", "tensorrt", "--attention", "plugin")
CAPACITY = 500
"""Enough for several splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    bundle: Path
    outcome: Outcome
    mock: tensorrt_mock.MockTensorRT


def attributes(node: Any) -> dict[str, Any]:
    return {each.name: each.i or each.f for each in node.attribute}


@pytest.fixture(scope="module", autouse=True)
def no_gpu() -> Iterator[None]:
    """Whatever GPU there is: none is seen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "gpu_at_hand", lambda: None)
        yield


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A small Llama with an EAGLE-3 head, exported for TensorRT, its engines "built" by the mock."""
    directory = tmp_path_factory.mktemp("plugin")
    write_tiny_target(directory / "target", initializer_range=0.1)  # rounding does not throw it off
    with pytest.MonkeyPatch.context() as patch:
        mock = tensorrt_mock.install(patch)
        outcome = eagle_export(
            *("--model", directory / "target", "--draft", HEADS["safeailab"].write(directory / "head")),
            *("--out", directory / "bundle", "--profiles", "10,30", "--capacity", CAPACITY, "--prefill-chunk", 40),
            *("--accept-probe", "--portable", "--gpu", "sm89", *TENSORRT),
        )
    assert outcome.status == 0, outcome.err
    return Exported(bundle=directory / "bundle", outcome=outcome, mock=mock)


@pytest.fixture
def bundle(exported: Exported, tmp_path: Path) -> Path:
    shutil.copytree(exported.bundle, tmp_path / "bundle")
    return tmp_path / "bundle"


def portable_graphs(bundle: Path) -> PortableGraphs:
    (portable,) = read_manifest(bundle).portable
    return portable


def test_an_export_with_the_mocked_tensorrt_names_plugin_graphs_and_engines(exported: Exported) -> None:
    manifest, portable = read_manifest(exported.bundle), portable_graphs(exported.bundle)
    assert portable.plugin is not None
    assert {portable.plugin.target, portable.plugin.draft} < manifest.files.keys()
    (engine,) = manifest.engines
    assert (engine.backend, engine.kernels, engine.architectures) == ("tensorrt", "plugin", ("sm89",))
    reports = json.loads((exported.bundle / engine.target).with_name("report.json").read_text())
    assert [report["attention"] for report in reports] == ["plugin", "plugin"]
    assert [each["attentions"] for each in reports[0]["passes"]] == [LAYERS] * 4
    assert not any(each["decomposed"] for report in reports for each in report["passes"])
    assert "plugin attention" in exported.outcome.err


def test_the_mocked_tensorrt_is_told_the_gpu_and_what_plugins_need(exported: Exported) -> None:
    trt = exported.mock
    with_plugins, steps = trt.built[:2], trt.built[2:]
    assert [len(network.plugins()) for network, _ in steps] == [0] * (4 + 5)  # a step a level
    for network, config in with_plugins:
        wanted = (
            trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED,
            trt.NetworkDefinitionCreationFlag.PREFER_AOT_PYTHON_PLUGINS,
        )
        assert network.flags == sum(1 << int(flag) for flag in wanted)
        assert config.features == {trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03}
        assert {profile["past_key_0"][2] for profile in config.profiles} == {544}
        for node in network.plugins().values():
            told = attributes(node)
            assert (told["capability"], told["split_rows"]) == (89, 256)
            assert told.get("new_rows") == (40 if node.op_type == "attend" else None)
    assert [len(network.plugins()) for network, _ in with_plugins] == [2 * LAYERS, 2]


def test_weights_are_shared(exported: Exported) -> None:
    portable = portable_graphs(exported.bundle)
    assert portable.plugin is not None
    weights = (exported.bundle / portable.target).with_name("weights.bin")
    held = {}
    for kind in (portable, portable.plugin):
        for path in (exported.bundle / kind.target, exported.bundle / kind.draft):
            tensors = [value.const_value for value in ir.load(path).graph.initializers.values()]
            held[path.name] = {
                (each.location, each.offset): each.nbytes for each in tensors if isinstance(each, ir.ExternalTensor)
            }
    for name in ("target", "draft"):
        standard, plugin = held[f"{name}.onnx"], held[f"{name}-plugin.onnx"]
        # Beside the weights there are the standard graph's own constants.
        assert plugin.keys() <= standard.keys()
        assert sum(plugin.values()) > 0.9 * sum(standard.values())
    graphs = sum((exported.bundle / name).stat().st_size for name in (portable.plugin.target, portable.plugin.draft))
    assert graphs < 0.15 * weights.stat().st_size, "a bundle grows by this, and by nothing else"


def feeds(name: str, bundle: Path, rows: int, committed: int) -> dict[str, np.ndarray]:
    """A tree of `rows` rows behind `committed` ones."""
    manifest, random = read_manifest(bundle), np.random.default_rng(rows)
    width = manifest.head.hidden_size
    if name == "target":
        ports = target_ports(manifest.target.kv, vocab_size=manifest.target.vocab_size, feature_width=width)
        vocabulary = manifest.target.vocab_size
    else:
        ports = draft_ports(manifest.head.kv, hidden_width=width, top_k=manifest.head.top_k)
        vocabulary = manifest.head.draft_vocab_size
    parents = np.maximum(np.arange(rows) // 2 - 1, 0)
    mask = np.eye(rows, dtype=np.bool_)
    for row in range(1, rows):
        mask[row] |= mask[min(parents[row], row - 1)]
    sizes = {"B": 1, "Q": rows, "S": rows, "R": rows, "C": manifest.limits.buffer_rows}
    given = {
        "tree_mask": mask[None],
        "kv_length": np.array([committed]),
        "logit_rows": np.arange(rows),
        "position_ids": committed + mask.sum(1)[None] - 1,
    }
    for port in ports.inputs:
        shape = port.shape(sizes)
        if port.name.startswith("past_"):
            cache = (random.standard_normal(shape) / 2).astype(np.float16)
            cache[:, :, committed:] = 0  # beyond the committed rows only what a pass writes counts
            given[port.name] = cache
        elif port.name.endswith("_ids") and port.name not in given:
            given[port.name] = random.integers(0, vocabulary, shape)
        elif port.name == "hidden":
            given[port.name] = random.standard_normal(shape).astype(np.float32)
    return given


@pytest.mark.parametrize("name", ["target", "draft"])
@pytest.mark.parametrize(("rows", "committed"), [(1, 0), (10, 37), (30, 455)])
def test_the_bundle_s_plugin_graphs_give_what_its_standard_ones_give_with_plugins_run_by_the_mock(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, name: str, rows: int, committed: int
) -> None:
    portable, plugins = portable_graphs(exported.bundle), tensorrt_mock.install(monkeypatch).plugin
    import eagle_graphs.plugin.tensorrt_plugin  # noqa: F401

    path = exported.bundle / getattr(portable.plugin, name)
    (path.parent / "built.onnx").write_bytes(onnx_for_gpu(path, new_rows=40, capability=89, multiprocessors=108))
    given = feeds(name, exported.bundle, rows, committed)
    found = tensorrt_mock.Evaluator(plugins, path.parent / "built.onnx", tactic=-1).run(given)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        exported.bundle / getattr(portable, name), options, providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    expected = dict(zip(names, session.run(None, given), strict=True))
    assert found.keys() == expected.keys()
    for output, array in expected.items():
        if output.endswith("_ids"):
            assert (found[output] == array).mean() > 0.9, output
        else:
            scale = max(1.0, float(np.abs(array.astype(np.float32)).max()))
            np.testing.assert_allclose(found[output], array, rtol=0, atol=0.01 * scale, err_msg=output)
    assert {constants["BLOCK_M"] for kernel, _, constants, _ in plugins.asked if "BLOCK_M" in constants}


def test_eagle_build_adds_an_engine_of_each_attention_with_the_mocked_tensorrt(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mock = tensorrt_mock.install(monkeypatch)
    monkeypatch.setattr(gpu, "gpu_at_hand", lambda: gpu.Gpu(capability=120, multiprocessors=1))
    built = eagle_build(bundle, *TENSORRT)
    assert built.status == 0, built.err
    told = [attributes(node) for network, _ in mock.built for node in network.plugins().values()]
    assert {(each["capability"], each["split_rows"]) for each in told} == {(120, 576)}
    assert eagle_build(bundle, "--backend", "tensorrt").status == 0
    found = [(engine.kernels, engine.architectures) for engine in read_manifest(bundle).engines]
    assert found == [("stock", ()), ("plugin", ("sm120",))]


def test_a_bundle_without_plugin_graphs_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorrt_mock.install(monkeypatch)
    data = json.loads((bundle / "manifest.json").read_text())
    data["portable"][0]["plugin"] = None
    (bundle / "manifest.json").write_text(json.dumps(data))
    words = ("portable graphs in fp16 are without plugins", "--portable --attention plugin", "--attention native")
    assert_refused(eagle_build(bundle, *TENSORRT, "--gpu", "sm89"), *words)


def test_a_tensorrt_without_plugins_ahead_of_time_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mock = tensorrt_mock.install(monkeypatch)
    mock.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
    refused = eagle_build(bundle, *TENSORRT, "--gpu", "sm89")
    assert refused.status == 2
    words = "error: TensorRT 10.0-mock takes no plugins that are compiled ahead of time: install a later version"
    assert refused.err.strip().startswith(words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("--backend", "tensorrt-rtx"), "takes no plugins of this kind: use --attention native"),
        (("--backend", "onnxruntime"), "for engines of TensorRT, not for --backend onnxruntime: leave it out, choose"),
    ],
)
def test_libraries_without_such_plugins_are_refused(
    command: tuple[str, ...], words: str, tmp_path: Path, bundle: Path
) -> None:
    options = (*command, "--attention", "plugin")
    assert_refused(eagle_export("--model", "m", "--draft", "d", "--out", tmp_path / "out", *options), words)
    if "onnxruntime" not in command:
        assert_refused(eagle_build(bundle, *options), words)


def test_triton_that_is_missing_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorrt_mock.install(monkeypatch)
    monkeypatch.setattr(library, "find_spec", lambda name: None if name == "triton" else object())
    words = ("needs triton, which is not installed", "pip install 'eagle-aot[plugin]'", "use --attention native")
    assert_refused(eagle_build(bundle, *TENSORRT, "--gpu", "sm89"), *words)


@pytest.mark.parametrize(
    ("here", "asked", "words"),
    [
        (None, (), ("nothing can be learnt here", "as --gpu sm89")),
        (None, ("--gpu", "sm89,sm90"), ("--gpu is 'sm89,sm90'; expected the one GPU",)),
        (gpu.Gpu(capability=89, multiprocessors=58), ("--gpu", "sm90"), ("here sm89: leave it out",)),
    ],
)
def test_the_gpu_must_be_known(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, here: gpu.Gpu | None, asked: tuple[str, ...], words: tuple[str, ...]
) -> None:
    tensorrt_mock.install(monkeypatch)
    monkeypatch.setattr(gpu, "gpu_at_hand", lambda: here)
    assert_refused(eagle_build(bundle, *TENSORRT, *asked), *words)


def test_a_cpu_s_bundle_takes_plugin_graphs_along_without_triton(
    tiny_target: Path, tiny_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For eagle-build on the machine with TensorRT."""
    monkeypatch.setitem(sys.modules, "triton", None)
    out = tmp_path / "bundle"
    sizes = ("--capacity", 160, "--prefill-chunk", 16, "--profiles", "4", "--kernels", "stock", "--accept-probe")
    outcome = eagle_export(
        *("--model", tiny_target, "--draft", tiny_head, "--out", out, *sizes, "--portable", "--attention", "plugin")
    )
    assert outcome.status == 0, outcome.err
    assert portable_graphs(out).plugin is not None
    assert {engine.device for engine in read_manifest(out).engines} == {"cpu"}
