"""The graphs of whole rounds, over the caches of target and head. Each is opened when it is first asked for."""

from __future__ import annotations

import itertools

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
    """Rounds on a device, of drafting alone or with the verification behind it, over the same steps."""

    def __init__(
        self, bundle: Bundle, engine: Engine, memory: DeviceMemory, draft: OpenGraph, verifying: Verifying
    ) -> None:
        self._bundle, self._engine, self._memory = bundle, engine, memory
        self._draft, self._verifying = draft, verifying
        self._steps: dict[str, list[OnnxRuntimeDeviceGraph | TensorRTGraph]] = {}
        self._open: dict[tuple[str, bool], RoundGraph] = {}

    def drafting(self, profile: Profile) -> RoundGraph | None:
        """A profile's round of drafting; None where the engine has not its steps.

        Raises EagleError where the engine's library refuses a step.
        """
        return self._round(profile, None)

    def whole(self, profile: Profile) -> RoundGraph | None:
        """The same with the verification behind it."""
        return self._round(profile, self._verifying)

    def _round(self, profile: Profile, verifying: Verifying | None) -> RoundGraph | None:
        nodes, limits = str(profile.nodes), self._bundle.manifest.limits
        if nodes not in self._engine.draft_steps:
            return None
        key = (nodes, verifying is not None)
        if key not in self._open:
            if nodes not in self._steps:
                self._steps[nodes] = self._open_steps(profile)
            head = self._draft.graph
            assert isinstance(head, OnnxRuntimeDeviceGraph | TensorRTGraph)
            self._open[key] = RoundGraph(
                self._memory,
                profile,
                self._draft.ports,
                head,
                self._steps[nodes],
                chunk=limits.prefill_chunk,
                verifying=verifying,
            )
        return self._open[key]

    def _open_steps(self, profile: Profile) -> list[OnnxRuntimeDeviceGraph | TensorRTGraph]:
        head, names = self._bundle.manifest.head, self._engine.draft_steps[str(profile.nodes)]
        ports = draft_step_ports(profile, hidden_width=head.hidden_size, top_k=head.top_k)
        return [
            open_on_device(self._engine, self._bundle.path(name), own, None, self._memory, (STEP,))
            for name, own in zip(names, ports, strict=True)
        ]

    def close(self) -> None:
        """Frees all of them."""
        for graph in self._open.values():
            graph.close()
        for step in itertools.chain(*self._steps.values()):
            step.close()
        self._open.clear()
        self._steps.clear()


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
