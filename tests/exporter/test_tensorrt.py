"""Engines of TensorRT-RTX, built without a GPU: a small Llama with its EAGLE-3 and EAGLE-1 heads, in every precision.

The files that engines are built from are compared with torch, by ONNX Runtime; the engines are inspected.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from rich.console import Console

from eagle_exporter import gpu, pipeline
from eagle_exporter.bundle import file_entries
from eagle_exporter.gpu_options import TOLERANCE, GpuOptions
from eagle_exporter.report import Report, Steps
from eagle_graphs import EagleError, profiles_from_text, static_profile
from eagle_graphs.draft_steps import draft_step_ports
from eagle_graphs.lowering import draft_steps
from eagle_graphs.passes import STEP
from eagle_graphs.tensorrt import bundle as bundle_module
from eagle_graphs.tensorrt.build import BuildLog, BuildOptions, build_engine
from eagle_graphs.tensorrt.bundle import add_engines, frozen_graphs, read_manifest, write_manifest
from eagle_graphs.tensorrt.report import EngineReport, report_from_engine
from tests.heads import HEADS
from tests.models import LAYERS, write_tiny_target

RTX = BuildOptions(backend="tensorrt-rtx", architectures=("sm89",))
KERNELS = {"fp16": "Half", "fp8": "FP8", "int8": "Int8", "int4": "Int4"}
"""Element types that the products of each precision read."""
PASSES = {
    "target": ["plain", "tree 10", "tree 30", "tree 60", "chunk"],
    "draft": [
        *("extension 5", "extension 6", "extension 7"),
        *("level 5/5", "level 5/10", "level 5/15", "level 2/2", "level 1/3", "level 1/4"),
        *("level 8/8", "level 8/16", "level 8/24", "level 8/32"),
        *("level 3/3", "level 6/9", "level 4/13", "level 3/16", "level 8/40"),
        *("level 4/4", "level 8/12", "level 10/22", "level 5/27", "level 6/33", "chunk"),
    ],
}


class Silent:
    """Hears of a build's progress."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        self.phases.append(phase)

    def step(self, phase: str, done: int) -> None:
        assert phase in self.phases

    def finish(self, phase: str) -> None:
        assert phase in self.phases


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A bundle with portable graphs, its report, and what the export made the graphs from."""

    bundle: Path
    report: Report
    made_from: dict[str, Any]

    def make_portable(self, precision: Any) -> None:
        """Adds portable graphs in another precision to the bundle, compared with torch."""
        options = GpuOptions(precision=precision, head_precision=precision, build=None, keep_portable=True)
        made, parity = gpu.make_portable(self.bundle, options, **self.made_from)
        assert {entry.graph for entry in parity} == {"target", "draft"}
        manifest = read_manifest(self.bundle)
        portable = (*manifest.portable, made)
        write_manifest(self.bundle, replace(manifest, files=file_entries(self.bundle), portable=portable))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama that rounding does not throw off, as it does one whose weights are large."""
    directory = tmp_path_factory.mktemp("tiny") / "target"
    write_tiny_target(directory, initializer_range=0.1)
    return directory


def export(target: Path, head: str, directory: Path, build: BuildOptions | None) -> Exported:
    """In fp16, as eagle-export does."""
    seen: dict[str, Any] = {}

    def make_portable(where: Path, options: GpuOptions, *arguments: Any, **more: Any) -> Any:
        neutral, original, answers, prompts = arguments
        copies = {name: graph.clone() for name, graph in neutral.items()}
        seen.update(neutral=copies, original=original, answers=answers, prompts=prompts, **more)
        return gpu.make_portable(where, options, *arguments, **more)

    options = pipeline.ExportOptions(
        model=str(target),
        draft=str(HEADS[head].write(directory / "head")),
        profiles=profiles_from_text("10,30,60"),
        out=directory / "bundle",
        capacity=120,
        prefill_chunk=64,
        accept_probe=True,
        cpu=False,
        gpu=GpuOptions(precision="fp16", head_precision="fp16", build=build, keep_portable=True),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "make_portable", make_portable)
        report = pipeline.export(options, Steps(Console(quiet=True)))
    return Exported(bundle=directory / "bundle", report=report, made_from=seen)


@pytest.fixture(scope="module")
def eagle3(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(tiny, "safeailab", tmp_path_factory.mktemp("eagle3"), RTX)


@pytest.fixture(scope="module")
def eagle1(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(tiny, "eagle1", tmp_path_factory.mktemp("eagle1"), None)


def check_report(report: EngineReport, precision: str) -> None:
    """Frozen shapes, one cache in place, every attention one kernel, every product of the precision's kind."""
    assert [each.name for each in report.passes] == PASSES[report.graph]
    assert report.problems() == []
    layers = LAYERS if report.graph == "target" else 1
    assert report.cache == ("Half", (1, 2, 192, 16), 2 * layers)
    for each in report.passes:
        assert each.attentions == layers
        assert sum(each.layers.values()) >= each.attentions
        assert each.products.get(KERNELS[precision], 0) >= 0.8 * sum(each.products.values())
        assert each.memory is not None


def test_an_export_builds_engines_and_says_what_they_are_made_of(eagle3: Exported) -> None:
    manifest = read_manifest(eagle3.bundle)
    (engine,) = manifest.engines
    assert (engine.backend, engine.architectures, engine.cache_dtype) == ("tensorrt-rtx", ("sm89",), "float16")
    assert {engine.target, engine.draft, "gpu-calibration.json"} - manifest.files.keys() == {"gpu-calibration.json"}
    assert manifest.versions["tensorrt-rtx"]
    assert {nodes: len(steps) for nodes, steps in engine.draft_steps.items()} == {"10": 4, "30": 5, "60": 6}
    assert {entry.output for entry in eagle3.report.parity["portable"]} >= {
        "logits",
        "features",
        "present",
        "hidden_out",
    }
    for report in eagle3.report.engines:
        check_report(report, "fp16")
    kept = json.loads((eagle3.bundle / "tensorrt-rtx-fp16" / "report.json").read_text())
    assert kept == json.loads(json.dumps([report.to_dict() for report in eagle3.report.engines]))


def test_frozen_shapes_are_those_of_the_passes(eagle3: Exported) -> None:
    target, draft = eagle3.report.engines
    assert target.passes[2].inputs == {
        "input_ids": (1, 30),
        "position_ids": (1, 30),
        "tree_mask": (1, 30, 30),
        "kv_length": (1,),
        "logit_rows": (30,),
    }
    assert draft.passes[5].inputs["tree_mask"] == (1, 5, 15)
    assert target.outputs == {"argmax_ids": "Int64", "logits": "Float", "finite": "Bool", "features": "Float"}


@pytest.mark.parametrize("precision", ["fp8", "int8", "int4"])
def test_engines_of_other_precisions_join_the_bundle(eagle3: Exported, precision: str) -> None:
    eagle3.make_portable(precision)
    (portable,) = (made for made in read_manifest(eagle3.bundle).portable if made.precision == precision)
    heard = Silent()
    for report in add_engines(eagle3.bundle, portable, RTX, progress=heard, log=eagle3.bundle / "log"):
        check_report(report, precision)
    assert heard.phases
    manifest = read_manifest(eagle3.bundle)
    assert {engine.precision for engine in manifest.engines} >= {"fp16", precision}
    assert manifest.files == file_entries(eagle3.bundle)


@pytest.mark.parametrize("precision", ["fp16", "fp8", "int8", "int4"])
def test_an_eagle1_head_s_engine(eagle1: Exported, precision: str, tmp_path: Path) -> None:
    if precision != "fp16":
        eagle1.make_portable(precision)
    manifest = read_manifest(eagle1.bundle)
    (portable,) = (made for made in manifest.portable if made.precision == precision)
    frozen = frozen_graphs(manifest, portable.cache_dtype)["draft"]
    built = build_engine(
        eagle1.bundle / portable.draft,
        tmp_path / "draft.engine",
        frozen.ports,
        frozen.passes,
        RTX,
        capacity=manifest.limits.buffer_rows,
        progress=Silent(),
        log=BuildLog(),
    )
    check_report(report_from_engine("draft", frozen.passes, built), precision)


def test_bfloat16_is_compared_with_torch_too(eagle3: Exported, tmp_path: Path) -> None:
    options = GpuOptions(precision="bf16", head_precision="bf16", build=None, keep_portable=True)
    made, parity = gpu.make_portable(tmp_path, options, **eagle3.made_from)
    assert made.cache_dtype == "bfloat16"
    assert max(entry.rms for entry in parity if not entry.output.endswith("_ids")) < TOLERANCE["bf16"]


def test_engines_without_weights_want_a_gpu(eagle3: Exported, tmp_path: Path) -> None:
    portable = read_manifest(eagle3.bundle).portable[0]
    stripped = replace(RTX, strip_weights=True, level=0)
    with pytest.raises(EagleError, match=r"engines without weights are built where there is a GPU: leave out --strip"):
        add_engines(eagle3.bundle, portable, stripped, progress=Silent(), log=tmp_path / "log")


def test_steps_of_drafting_keep_their_few_constants(
    eagle3: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stripped = dict[str, bool]()

    def build(graph: Path, *arguments: Any, **more: Any) -> None:
        stripped[graph.name] = arguments[3].strip_weights

    monkeypatch.setattr(bundle_module, "build_engine", build)
    monkeypatch.setattr(bundle_module, "report_from_engine", lambda *_: EngineReport)
    monkeypatch.setattr(EngineReport, "to_dict", dict)
    monkeypatch.setattr(bundle_module, "_put_in_place", lambda *_: None)
    options, portable = replace(RTX, strip_weights=True), read_manifest(eagle3.bundle).portable[0]
    add_engines(eagle3.bundle, portable, options, progress=Silent(), log=tmp_path / "log")
    assert len(stripped) == 2 + (4 + 5 + 6)  # a step a level
    assert {name for name, without in stripped.items() if without} == {"target.onnx", "draft.onnx"}


def test_the_steps_of_a_static_tree_are_engines_too(tmp_path: Path) -> None:
    profile = static_profile()
    graphs = draft_steps(profile, hidden_width=8, top_k=4)
    every_port = draft_step_ports(profile, hidden_width=8, top_k=4)
    for step, (graph, ports) in enumerate(zip(graphs, every_port, strict=True)):
        path, engine = tmp_path / f"{step}.onnx", tmp_path / f"{step}.engine"
        ir.save(graph, path)
        build_engine(path, engine, ports, (STEP,), RTX, capacity=192, progress=Silent(), log=BuildLog())
        assert engine.stat().st_size > 0


def test_a_build_that_fails_names_the_node_keeps_the_log_and_leaves_the_bundle(
    eagle3: Exported, tmp_path: Path
) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(eagle3.bundle, bundle)
    manifest = read_manifest(bundle)
    damaged = bundle / manifest.portable[0].draft
    graph = damaged.read_bytes()
    assert b"LogSoftmax" in graph
    damaged.write_bytes(graph.replace(b"LogSoftmax", b"LogSoftmix"))
    write_manifest(bundle, replace(manifest, files=file_entries(bundle)))
    before = {path: path.stat().st_mtime_ns for path in bundle.rglob("*")}
    with pytest.raises(EagleError, match=r"draft.onnx.*node_.*LogSoftmix") as refused:
        add_engines(bundle, manifest.portable[0], RTX, progress=Silent(), log=tmp_path / "log")
    assert str(tmp_path / "log") in str(refused.value)
    assert "LogSoftmix" in (tmp_path / "log").read_text()
    assert {path: path.stat().st_mtime_ns for path in bundle.rglob("*")} == before


def test_a_cache_that_no_tensor_holds_is_refused(eagle3: Exported, tmp_path: Path) -> None:
    manifest = read_manifest(eagle3.bundle)
    frozen = frozen_graphs(manifest, "float16")["target"]
    with pytest.raises(EagleError, match=r"a cache of 100000000 rows has 3200000000 numbers.*at most 67108863 rows"):
        build_engine(
            eagle3.bundle / manifest.portable[0].target,
            tmp_path / "target.engine",
            frozen.ports,
            frozen.passes,
            RTX,
            capacity=100_000_000,
            progress=Silent(),
            log=BuildLog(),
        )


def test_ctrl_c_ends_a_build(eagle3: Exported, tmp_path: Path) -> None:
    class Impatient(Silent):
        def step(self, phase: str, done: int) -> None:
            raise KeyboardInterrupt

    manifest = read_manifest(eagle3.bundle)
    with pytest.raises(KeyboardInterrupt):
        add_engines(eagle3.bundle, manifest.portable[0], RTX, progress=Impatient(), log=tmp_path / "log")
    assert read_manifest(eagle3.bundle) == manifest
    assert not list(eagle3.bundle.glob(".building-*"))
