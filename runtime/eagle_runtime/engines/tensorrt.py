"""TensorRT and TensorRT-RTX: an engine with a profile of frozen shapes for every pass of a bundle.

A pass is enqueued as a whole, inputs' copies, kernels and outputs' copies, on the stream of the device's memory, and
waits once, for its outputs. The second time it is recorded as a CUDA graph, and from then on it is one launch. Caches
are bound at one address as past and present, and never leave the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_graphs import EagleError, GraphPorts
from eagle_graphs.passes import Pass
from eagle_runtime.engines.buffers import PassBuffers, Wiring
from eagle_runtime.engines.device_pool import DeviceKVPool
from eagle_runtime.engines.features import DeviceRows
from eagle_runtime.engines.frozen import choose_pass, pad_mask, views
from eagle_runtime.engines.memory import DeviceMemory, Replayed
from eagle_runtime.engines.refit import refit


class TensorRTGraph:
    """See `Graph` and `DeviceGraph`. Raises EagleError where the library refuses the engine, or it is another one.

    trt: the library's module, of either flavour. pool: None for an engine without caches.
    weights: the ONNX file that an engine without weights takes them from; None for an engine that has its own.
    """

    def __init__(
        self,
        trt: Any,
        path: Path,
        ports: GraphPorts,
        pool: DeviceKVPool | None,
        memory: DeviceMemory,
        passes: Sequence[Pass],
        weights: Path | None = None,
    ) -> None:
        self._errors: list[str] = []
        logger = _logger(trt, self._errors)
        runtime = trt.Runtime(logger)
        engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            reason = " ".join(self._errors[-1].split())[:300] if self._errors else "it gives no reason"
            raise EagleError(f"{trt.__name__} {trt.__version__} cannot load {path.name}: {reason}")
        found = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
        expected = {port.name for port in (*ports.inputs, *ports.outputs)}
        if found != expected or engine.num_optimization_profiles != len(passes):
            raise EagleError(
                f"{path.name} has {engine.num_optimization_profiles} profiles and {len(found)} tensors, its manifest "
                f"says {len(passes)} and {len(expected)} ({', '.join(sorted(found ^ expected)[:4])}): build it again"
            )
        if weights is not None:
            refit(trt, engine, weights, logger, self._errors)
        self._engine, self._runtime = engine, runtime
        self._ports, self._pool, self._memory, self._passes = ports, pool, memory, passes
        # Profiles run in turn, so that their activations can share one place.
        strategy = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        sizes = [engine.get_device_memory_size_for_profile_v2(index) for index in range(len(passes))]
        self._scratch = memory.allocate(max(sizes))
        self._contexts = [self._context(index, strategy, size) for index, size in enumerate(sizes)]
        self._frozen: dict[tuple[Any, ...], FrozenPass] = {}

    def _context(self, index: int, strategy: Any, size: int) -> Any:
        context = self._engine.create_execution_context(strategy)
        if context is None or not context.set_optimization_profile_async(index, self._memory.stream):
            raise EagleError(f"no context for the pass {self._passes[index].name}: {' '.join(self._errors[-1:])}")
        sizes = {"B": 1, **self._passes[index].sizes}
        if self._pool is not None:
            sizes["C"] = self._pool.rows
        for port in self._ports.inputs:
            context.set_input_shape(port.name, port.shape(sizes))
        context.set_device_memory(self._scratch, size)
        return context

    def call(
        self,
        slot: int,
        *,
        outputs: tuple[str, ...],
        kept: tuple[str, ...] = (),
        given: tuple[str, ...] = (),
        **sizes: int,
    ) -> TensorRTCall:
        """See `Graph.call`. Raises EagleError where no pass holds these sizes."""
        index = choose_pass(self._passes, sizes)
        key = (slot, outputs, given, index)
        if key not in self._frozen:
            frozen = {"B": 1, **self._passes[index].sizes}
            self._frozen[key] = self.device_pass(slot, frozen, Wiring(outputs=outputs, given=given))
        return TensorRTCall(self._frozen[key], self._ports, sizes)

    def device_pass(self, slot: int, sizes: Mapping[str, int], wiring: Wiring) -> FrozenPass:
        """See `DeviceGraph.device_pass`."""
        frozen = {name: size for name, size in sizes.items() if name != "B"}
        index = next(number for number, each in enumerate(self._passes) if not frozen or each.sizes == frozen)
        buffers = PassBuffers(self._memory, self._ports, sizes, wiring)
        pool = self._pool
        caches = {} if pool is None else pool.addresses(slot, "past") | pool.addresses(slot, "present")
        return FrozenPass(self._contexts[index], buffers, caches, self._memory)

    def close(self) -> None:
        """See `Graph.close`."""
        for frozen in self._frozen.values():
            frozen.close()
        self._frozen.clear()
        self._contexts.clear()
        self._memory.free(self._scratch)
        self._engine = self._runtime = None


class FrozenPass:
    """See `DevicePass`: a pass at its full size."""

    recordable = True

    def __init__(self, context: Any, buffers: PassBuffers, caches: dict[str, int], memory: DeviceMemory) -> None:
        self._context, self.buffers, self._memory = context, buffers, memory
        self._addresses = buffers.addresses | caches
        self._replayed = Replayed(memory, self.enqueue, recorded=True)

    def run(self) -> None:
        """One pass; returns when the outputs are on the host."""
        self._replayed.run()

    def enqueue(self) -> None:
        """See `DevicePass.enqueue`."""
        for name, address in self._addresses.items():
            self._context.set_tensor_address(name, address)
        self.buffers.upload()
        if not self._context.execute_async_v3(self._memory.stream):
            raise EagleError("TensorRT could not enqueue a pass: its log says why")
        self.buffers.download()

    def close(self) -> None:
        """Frees its buffers."""
        self.buffers.close()


class TensorRTCall:
    """See `Call`: the part of a pass that a call of these sizes fills and reads."""

    def __init__(self, frozen: FrozenPass, ports: GraphPorts, sizes: dict[str, int]) -> None:
        self._frozen, self._sizes, exact = frozen, sizes, {"B": 1, **sizes}
        self.inputs = views(frozen.buffers.inputs, ports, exact)
        self.outputs = views(frozen.buffers.outputs, ports, exact)

    def kept(self, name: str) -> DeviceRows:
        """See `Call.kept`."""
        return self._frozen.buffers.rows(name)

    def place(self, name: str) -> tuple[int, int]:
        """See `PassBuffers.place`."""
        return self._frozen.buffers.place(name)

    def run(self) -> None:
        """See `Call.run`."""
        pad_mask(self._frozen.buffers.inputs["tree_mask"], self._sizes)
        self._frozen.run()


def _logger(trt: Any, errors: list[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                errors.append(message)

    return Logger()
