"""Which engine of a bundle a GPU runs, and what is said where none does. No GPU, and no library of one, is needed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from eagle_graphs import EagleError, Manifest
from eagle_graphs.manifest import Engine, PluginGraphs, PortableGraphs
from eagle_runtime import Session
from eagle_runtime.engines.onnxruntime_device import CUDA_PROVIDER, check_cuda_provider, providers
from eagle_runtime.engines.select import Backend, installed_backends, select_cuda_engine, select_engine, weights_of
from tests.commands import assert_refused, eagle_run
from tests.graphs.test_manifest import engine, manifest

CPU = engine("stock")
GRAPHS = {"target": CPU.target, "draft": CPU.draft}
PORTABLE = PortableGraphs(precision="fp16", cache_dtype="float16", draft_steps={}, **GRAPHS)
ALL: tuple[Backend, ...] = ("onnxruntime", "tensorrt-rtx", "tensorrt")


def rtx(*architectures: str, **changes: Any) -> Engine:
    made = replace(CPU, backend="tensorrt-rtx", device="cuda", architectures=architectures, precision="fp16")
    return replace(made, **changes)


def choose(
    made: Manifest, installed: tuple[Backend, ...] = ALL, architecture: str = "sm89"
) -> tuple[Engine, str | None]:
    return select_cuda_engine(made, architecture=architecture, installed=installed)


def test_the_first_engine_for_the_gpu_runs() -> None:
    first, second = rtx("sm80", "sm89"), rtx("sm89", precision="int8")
    assert choose(manifest(engines=(CPU, first, second), portable=(PORTABLE,))) == (first, None)


def test_an_engine_for_another_gpu_is_passed_over_and_that_is_said() -> None:
    first, second = rtx("sm120"), rtx("sm89")
    assert choose(manifest(engines=(first, second))) == (second, "its tensorrt-rtx engine is for sm120, not sm89")


def test_an_engine_without_weights_runs_where_the_bundle_has_them() -> None:
    stripped = rtx("sm89", weights_stripped=True)
    assert choose(manifest(engines=(stripped,), portable=(PORTABLE,))) == (stripped, None)
    without = "engine has no weights, nor has the bundle the graphs that it takes them from"
    for other in (replace(stripped, precision="int8"), replace(stripped, kernels="plugin")):
        chosen, reason = choose(manifest(engines=(other,), portable=(PORTABLE,)))
        assert (chosen.backend, reason) == ("onnxruntime", f"its tensorrt-rtx {without}")
    with pytest.raises(EagleError, match=without):
        choose(manifest(engines=(stripped,)))


def test_an_engine_takes_the_weights_of_the_graph_that_it_was_built_from() -> None:
    graphs = PluginGraphs(target=CPU.target, draft=CPU.draft)
    made = manifest(portable=(PORTABLE, replace(PORTABLE, precision="int8", plugin=graphs)))
    assert weights_of(made, rtx("sm89")) == PORTABLE
    assert weights_of(made, rtx("sm89", precision="int8", kernels="plugin")) == graphs
    assert weights_of(made, rtx("sm89", precision="fp8")) is None


def test_portable_graphs_run_in_onnx_runtime() -> None:
    chosen, reason = choose(manifest(engines=(CPU, rtx("sm89")), portable=(PORTABLE,)), ("onnxruntime",))
    assert (chosen.backend, chosen.device, chosen.kernels, chosen.cache_dtype) == (
        "onnxruntime",
        "cuda",
        "stock",
        "float16",
    )
    assert chosen.exactness.kind == "unmeasured"
    assert reason == "tensorrt-rtx is not installed"


@pytest.mark.parametrize(
    ("made", "installed", "words"),
    [
        (manifest(engines=(CPU,)), ALL, "its graphs are for CPUs.*--portable.*eagle-build.*--device cpu"),
        (manifest(engines=(rtx("sm120"), rtx("sm120"))), ALL, "here: its tensorrt-rtx engine is for sm120, not sm89. "),
        (manifest(engines=(CPU,), portable=(PORTABLE,)), ("tensorrt",), "for its portable graphs, is not installed"),
    ],
    ids=["cpu only", "other gpu", "no library"],
)
def test_a_bundle_with_nothing_for_the_gpu_is_refused(
    made: Manifest, installed: tuple[Backend, ...], words: str
) -> None:
    with pytest.raises(EagleError, match=words):
        choose(made, installed)


def test_a_cpu_takes_none_of_the_engines_for_gpus() -> None:
    assert select_engine(manifest(engines=(rtx("sm89"), CPU)))[0] == CPU
    with pytest.raises(EagleError, match="no graphs for CPUs, only engines of tensorrt-rtx: use --device cuda"):
        select_engine(manifest(engines=(rtx("sm89"),)))


def test_the_cuda_provider_runs_on_the_stream_of_the_copies_and_without_tf32() -> None:
    ((name, options),) = providers("cuda", 0x7F00DEADBEEF)
    assert name == CUDA_PROVIDER
    assert (options["has_user_compute_stream"], options["user_compute_stream"]) == ("1", str(0x7F00DEADBEEF))
    assert options["use_tf32"] == "0"
    assert all(isinstance(value, str) for value in options.values())
    assert providers("cpu", 0) == [("CPUExecutionProvider", {})]


def test_an_onnx_runtime_without_cuda_is_told_apart() -> None:
    check_cuda_provider([CUDA_PROVIDER, "CPUExecutionProvider"], "1.31")
    with pytest.raises(EagleError, match=r"onnxruntime 1.31 is installed without it: pip uninstall onnxruntime"):
        check_cuda_provider(["CPUExecutionProvider"], "1.31")


def test_onnx_runtime_is_found_here() -> None:
    assert "onnxruntime" in installed_backends()


def test_cuda_without_its_library_says_what_to_install(tiny_bundle: Path) -> None:
    with mock.patch.dict(sys.modules, {"cuda.bindings": None}):
        outcome = eagle_run(tiny_bundle, "--prompt", "the", "--device", "cuda")
    assert_refused(outcome, "needs cuda-python", "pip install 'eagle-aot[cuda]'")


def test_a_device_of_another_name_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(EagleError, match="device is 'gpu'; expected 'cpu' or 'cuda'"):
        Session.open(tiny_bundle, device="gpu")
