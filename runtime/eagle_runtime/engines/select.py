"""Choosing a bundle's engine for this machine, and opening its graphs over cache pools of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from eagle_graphs import (
    EagleError,
    GraphPorts,
    KVGeometry,
    Manifest,
    draft_ports,
    target_ports,
)
from eagle_graphs.manifest import Engine, Exactness, PluginGraphs, PortableGraphs
from eagle_graphs.native import library_problem
from eagle_graphs.passes import Pass, draft_passes, target_passes
from eagle_graphs.tensorrt.library import import_tensorrt
from eagle_runtime.bundle import Bundle
from eagle_runtime.engines.base import Graph
from eagle_runtime.engines.device_pool import DeviceKVPool
from eagle_runtime.engines.memory import DeviceMemory
from eagle_runtime.engines.onnxruntime import OnnxRuntimeGraph
from eagle_runtime.engines.onnxruntime_device import OnnxRuntimeDeviceGraph
from eagle_runtime.engines.tensorrt import TensorRTGraph
from eagle_runtime.kv_pool import KVPool, SlotPool

Backend = Literal["onnxruntime", "tensorrt-rtx", "tensorrt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGraph:
    """A graph and the pool that its caches live in."""

    graph: Graph
    pool: SlotPool
    ports: GraphPorts


def select_engine(manifest: Manifest, kernels: str = "auto") -> tuple[Engine, str | None]:
    """The first engine for CPUs with these kernels that can be run, and why it is not the bundle's first, if it is not.

    Raises EagleError where there is none.
    """
    problem = fallback = None
    runnable = [engine for engine in manifest.engines if engine.device == "cpu"]
    if not runnable:
        held = ", ".join(dict.fromkeys(engine.backend for engine in manifest.engines))
        raise EagleError(f"the bundle has no graphs for CPUs, only engines of {held}: use --device cuda")
    engines = [engine for engine in runnable if kernels in ("auto", engine.kernels)]
    if not engines:
        held = ", ".join(dict.fromkeys(engine.kernels for engine in runnable))
        raise EagleError(f"kernels is {kernels!r}; the bundle has graphs for {held}")
    for engine in engines:
        if engine.kernels == "stock":
            return engine, fallback
        problem = library_problem()
        if problem is None:
            return engine, None
        fallback = f"on ONNX Runtime's own ops, since the library of native CPU ops cannot be used here: {problem}"
    raise EagleError(
        f"the bundle needs the library of native CPU ops, which cannot be used here: {problem}; "
        "or export the bundle for ONNX Runtime's own ops with --kernels stock"
    )


def select_cuda_engine(
    manifest: Manifest, *, architecture: str, installed: Collection[Backend]
) -> tuple[Engine, str | None]:
    """The engine to run on a GPU, and why it is not the bundle's first for GPUs, if it is not.

    An engine of TensorRT that was built for the GPU; else the portable graphs, in ONNX Runtime.

    Args:
        manifest: the bundle's.
        architecture: of the GPU, as sm89.
        installed: libraries that are here.

    Raises:
        EagleError: there is none.
    """
    reasons = []
    for engine in manifest.engines:
        if engine.device != "cuda":
            continue
        if engine.backend not in installed:
            reasons.append(f"{engine.backend} is not installed")
        elif engine.architectures and architecture not in engine.architectures:
            reasons.append(f"its {engine.backend} engine is for {', '.join(engine.architectures)}, not {architecture}")
        elif engine.weights_stripped and weights_of(manifest, engine) is None:
            reasons.append(
                f"its {engine.backend} engine has no weights, nor has the bundle the graphs that it takes them from"
            )
        else:
            return engine, reasons[0] if reasons else None
    if manifest.portable and "onnxruntime" in installed:
        return engine_from_portable(manifest.portable[0]), reasons[0] if reasons else None
    if manifest.portable:
        reasons.append("ONNX Runtime, for its portable graphs, is not installed")
    found = "; ".join(dict.fromkeys(reasons)) or "its graphs are for CPUs"
    raise EagleError(
        f"--device cuda: the bundle has nothing that runs here: {found}. "
        "Export it with --portable, make engines of that with eagle-build on this machine, or use --device cpu"
    )


def weights_of(manifest: Manifest, engine: Engine) -> PortableGraphs | PluginGraphs | None:
    """The portable graphs that an engine was built from; None where the bundle holds them no longer."""
    for graphs in manifest.portable:
        if graphs.precision == engine.precision:
            return graphs.plugin if engine.kernels == "plugin" else graphs
    return None


def engine_from_portable(graphs: PortableGraphs) -> Engine:
    """What ONNX Runtime's CUDA provider runs of portable graphs. How exact it is there, nobody has measured."""
    return Engine(
        backend="onnxruntime",
        device="cuda",
        architectures=(),
        kernels="stock",
        precision=graphs.precision,
        cache_dtype=graphs.cache_dtype,
        weights_stripped=False,
        slots=1,
        target=graphs.target,
        draft=graphs.draft,
        draft_rounds={},
        draft_steps=graphs.draft_steps,
        exactness=Exactness(kind="unmeasured", logit_gap=0.0, max_logit_difference=0.0, rows=0),
    )


def installed_backends() -> frozenset[Backend]:
    """The libraries that can be imported here."""
    modules: dict[Backend, str] = {
        "tensorrt-rtx": "tensorrt_rtx",
        "tensorrt": "tensorrt",
        "onnxruntime": "onnxruntime",
    }
    return frozenset(backend for backend, module in modules.items() if find_spec(module) is not None)


def open_target(
    bundle: Bundle, engine: Engine, *, threads: int | None = None, memory: DeviceMemory | None = None
) -> OpenGraph:
    """The target's graph. memory: of the device that it runs on; None for the host.

    Raises EagleError where the engine's library refuses it.
    """
    manifest = bundle.manifest
    kv = replace(manifest.target.kv, dtype=engine.cache_dtype)
    ports = target_ports(
        kv,
        vocab_size=manifest.target.vocab_size,
        feature_width=manifest.head.hidden_size,
        key_block=engine.key_block,
    )
    passes = target_passes(manifest.profiles, manifest.limits)
    return _open(bundle, engine, bundle.path(engine.target), ports, kv, passes, threads, memory)


def open_draft(
    bundle: Bundle, engine: Engine, *, threads: int | None = None, memory: DeviceMemory | None = None
) -> OpenGraph:
    """The head's graph, as `open_target`."""
    head = bundle.manifest.head
    kv = replace(head.kv, dtype=engine.cache_dtype)
    ports = draft_ports(kv, hidden_width=head.hidden_size, top_k=head.top_k, key_block=engine.key_block)
    passes = draft_passes(bundle.manifest.profiles, bundle.manifest.limits)
    return _open(bundle, engine, bundle.path(engine.draft), ports, kv, passes, threads, memory)


def _open(
    bundle: Bundle,
    engine: Engine,
    path: Path,
    ports: GraphPorts,
    kv: KVGeometry,
    passes: Sequence[Pass],
    threads: int | None,
    memory: DeviceMemory | None,
) -> OpenGraph:
    rows = bundle.manifest.limits.buffer_rows
    if memory is None:
        pool = KVPool(kv, slots=engine.slots, rows=rows, key_block=engine.key_block)
        native = engine.kernels == "native"
        graph = OnnxRuntimeGraph(path, ports, pool, threads=threads, native=native)
        return OpenGraph(graph=graph, pool=pool, ports=ports)
    device_pool = DeviceKVPool(memory, kv, slots=engine.slots, rows=rows)
    weights = _onnx_of(bundle, engine, path) if engine.weights_stripped else None
    graph_on_device = open_on_device(engine, path, ports, device_pool, memory, passes, weights)
    return OpenGraph(graph=graph_on_device, pool=device_pool, ports=ports)


def open_on_device(
    engine: Engine,
    path: Path,
    ports: GraphPorts,
    pool: DeviceKVPool | None,
    memory: DeviceMemory,
    passes: Sequence[Pass],
    weights: Path | None = None,
) -> OnnxRuntimeDeviceGraph | TensorRTGraph:
    """A graph of the engine on its device. weights: the ONNX file that a graph without them takes them from.

    Raises EagleError where the engine's library refuses it.
    """
    if engine.backend == "onnxruntime":
        return OnnxRuntimeDeviceGraph(path, ports, pool, memory)
    return TensorRTGraph(import_tensorrt(engine.backend), path, ports, pool, memory, passes, weights)


def _onnx_of(bundle: Bundle, engine: Engine, path: Path) -> Path:
    """The ONNX file that an engine's file at `path` was built from."""
    built_from = weights_of(bundle.manifest, engine)
    assert built_from is not None, "select_cuda_engine passes such an engine over"
    return bundle.path(built_from.target if path == bundle.path(engine.target) else built_from.draft)
