"""The graphs of whole rounds, over the caches of target and head. Each is opened when it is first asked for."""

from __future__ import annotations

from eagle_graphs import Profile, draft_round_ports
from eagle_graphs.draft_steps import draft_step_ports
from eagle_graphs.manifest import Engine
from eagle_graphs.passes import STEP
from eagle_runtime.bundle import Bundle
from eagle_runtime.engines.memory import DeviceMemory
from eagle_runtime.engines.onnxruntime import OnnxRuntimeGraph
from eagle_runtime.engines.onnxruntime_device import OnnxRuntimeDeviceGraph
from eagle_runtime.engines.round_graph import RoundGraph, Verifying
from eagle_runtime.engines.select import OpenGraph, open_on_device
from eagle_runtime.engines.tensorrt import TensorRTGraph
from eagle_runtime.kv_pool import KVPool


class DeviceRounds:
    """Rounds on a device, of drafting alone or with the verification behind it."""

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        memory: DeviceMemory,
        draft: OpenGraph,
        verifying: Verifying | None = None,
    ) -> None:
        """verifying: the target, to be asked in the same pass."""
        self._bundle, self._engine, self._memory = bundle, engine, memory
        self._draft, self._verifying = draft, verifying
        self._open: dict[str, tuple[RoundGraph, list[OnnxRuntimeDeviceGraph | TensorRTGraph]]] = {}

    def __call__(self, profile: Profile) -> RoundGraph | None:
        """The round of a profile; None where the engine has not its steps. Raises EagleError as `open_draft`."""
        nodes, manifest = str(profile.nodes), self._bundle.manifest
        if nodes not in self._engine.draft_steps:
            return None
        if nodes not in self._open:
            ports = draft_step_ports(profile, hidden_width=manifest.head.hidden_size, top_k=manifest.head.top_k)
            steps = [
                open_on_device(self._engine, self._bundle.path(name), own, None, self._memory, (STEP,))
                for name, own in zip(self._engine.draft_steps[nodes], ports, strict=True)
            ]
            head = self._draft.graph
            assert isinstance(head, OnnxRuntimeDeviceGraph | TensorRTGraph)
            chunk = manifest.limits.prefill_chunk
            graph = RoundGraph(
                self._memory, profile, self._draft.ports, head, steps, chunk=chunk, verifying=self._verifying
            )
            self._open[nodes] = graph, steps
        return self._open[nodes][0]

    def close(self) -> None:
        """Frees all of them."""
        for graph, steps in self._open.values():
            graph.close()
            for step in steps:
                step.close()
        self._open.clear()


class DraftRounds:
    """Rounds of drafting on the host, one graph a profile."""

    def __init__(self, bundle: Bundle, engine: Engine, pool: KVPool, *, threads: int | None) -> None:
        self._bundle, self._engine, self._pool, self._threads = bundle, engine, pool, threads
        self._open: dict[str, OnnxRuntimeGraph] = {}

    def __call__(self, profile: Profile) -> OnnxRuntimeGraph | None:
        """The round of a profile; None where the bundle has none. Raises EagleError where ONNX Runtime refuses it."""
        name = str(profile.nodes)
        graph = self._open.get(name)
        if graph is None and name in self._engine.draft_rounds:
            head, engine = self._bundle.manifest.head, self._engine
            ports = draft_round_ports(head.kv, profile, hidden_width=head.hidden_size, key_block=engine.key_block)
            path, native = self._bundle.path(engine.draft_rounds[name]), engine.kernels == "native"
            graph = OnnxRuntimeGraph(path, ports, self._pool, threads=self._threads, native=native)
            self._open[name] = graph
        return graph

    def close(self) -> None:
        """Frees all of them."""
        for graph in self._open.values():
            graph.close()
        self._open.clear()
