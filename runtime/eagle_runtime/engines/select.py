"""Choosing a bundle's engine for this machine, and opening its graphs over cache pools of their own."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_graphs import EagleError, Manifest, draft_ports, target_ports
from eagle_graphs.manifest import Engine
from eagle_graphs.native import library_problem
from eagle_runtime.bundle import Bundle
from eagle_runtime.engines.onnxruntime import OnnxRuntimeGraph
from eagle_runtime.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGraph:
    """A graph and the pool that its caches live in."""

    graph: OnnxRuntimeGraph
    pool: KVPool


def select_engine(manifest: Manifest, kernels: str = "auto") -> tuple[Engine, str | None]:
    """The first engine for these kernels that this machine can run, and why it is not the bundle's first, if it is not.

    Raises EagleError where there is none.
    """
    problem = fallback = None
    runnable = [engine for engine in manifest.engines if engine.backend == "onnxruntime"]
    if not runnable:
        held = ", ".join(dict.fromkeys(engine.backend for engine in manifest.engines))
        raise EagleError(f"the bundle has engines of {held} alone, which this version cannot run: export it for one more")
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


def open_target(bundle: Bundle, engine: Engine, *, threads: int | None) -> OpenGraph:
    """The target's graph. Raises EagleError where ONNX Runtime refuses it."""
    manifest = bundle.manifest
    ports = target_ports(
        manifest.target.kv,
        vocab_size=manifest.target.vocab_size,
        feature_width=manifest.head.hidden_size,
        key_block=engine.key_block,
    )
    pool = KVPool(manifest.target.kv, slots=engine.slots, rows=manifest.limits.buffer_rows, key_block=engine.key_block)
    native = engine.kernels == "native"
    graph = OnnxRuntimeGraph(bundle.path(engine.target), ports, pool, threads=threads, native=native)
    return OpenGraph(graph=graph, pool=pool)


def open_draft(bundle: Bundle, engine: Engine, *, threads: int | None) -> OpenGraph:
    """The head's graph. Raises EagleError where ONNX Runtime refuses it."""
    head = bundle.manifest.head
    ports = draft_ports(head.kv, hidden_width=head.hidden_size, top_k=head.top_k, key_block=engine.key_block)
    pool = KVPool(head.kv, slots=engine.slots, rows=bundle.manifest.limits.buffer_rows, key_block=engine.key_block)
    native = engine.kernels == "native"
    graph = OnnxRuntimeGraph(bundle.path(engine.draft), ports, pool, threads=threads, native=native)
    return OpenGraph(graph=graph, pool=pool)
