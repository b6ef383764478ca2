"""The GPU that plugins are compiled for, with a mock in the place of cuda-bindings."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from eagle_graphs import EagleError
from eagle_graphs.tensorrt.gpu import USUAL_MULTIPROCESSORS, Gpu, choose_gpu, gpu_at_hand

NUMBERS = {
    "cudaDevAttrComputeCapabilityMajor": 12,
    "cudaDevAttrComputeCapabilityMinor": 1,
    "cudaDevAttrMultiProcessorCount": 48,
}
SPARK = Gpu(capability=121, multiprocessors=48)


def put_cuda(monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
    """cuda-bindings with one GPU, or with an error in its place."""
    names = SimpleNamespace(**{name: name for name in NUMBERS})
    runtime = SimpleNamespace(
        cudaDeviceAttr=names, cudaDeviceGetAttribute=lambda name, device: (error, NUMBERS[name] if not error else None)
    )
    bindings = ModuleType("cuda.bindings")
    vars(bindings)["runtime"] = runtime
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def test_the_gpu_at_hand_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    put_cuda(monkeypatch)
    assert gpu_at_hand() == choose_gpu(None) == choose_gpu("sm121") == SPARK
    assert SPARK.architecture == "sm121"
    with pytest.raises(EagleError, match=r"--gpu is sm89; TensorRT builds for the GPU .* here sm121: leave it out"):
        choose_gpu("sm89")


@pytest.mark.parametrize("why", ["no bindings", "no driver"])
def test_where_it_is_unknown_it_must_be_named(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    put_cuda(monkeypatch, error=35)
    if why == "no bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert gpu_at_hand() is None
    assert choose_gpu("sm87") == Gpu(capability=87, multiprocessors=USUAL_MULTIPROCESSORS)
    with pytest.raises(
        EagleError, match=r"nothing can be learnt here: install cuda-bindings .*, or name it with --gpu"
    ):
        choose_gpu(None)
    for asked in ("sm87,sm89", "90", "ampere", ""):
        with pytest.raises(EagleError, match=r"--gpu is '.*'; expected the one GPU that the engine is built on"):
            choose_gpu(asked)
