"""ONNX Runtime with a device's own buffers: its CUDA provider, and on a CPU the same path for tests.

It runs the portable graphs, standard ONNX: TensorScatter into the cache, which CUDA's kernel does in place where past
and present are one buffer, and Attention under a mask. (Its GroupQueryAttention takes a tree's bias in late versions
only, and not in its fast kernels.) Inputs lie pinned, caches never leave the device, and copies, kernels and the
cache's moves share one stream, so that a pass waits once: for its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_graphs import EagleError, GraphPorts
from eagle_graphs.native import import_onnxruntime
from eagle_graphs.session_config import SESSION_CONFIG
from eagle_runtime.engines.buffers import PassBuffers, Wiring
from eagle_runtime.engines.device_pool import DeviceKVPool
from eagle_runtime.engines.features import DeviceRows
from eagle_runtime.engines.memory import DeviceMemory
from eagle_runtime.engines.onnxruntime import check_ports, element_type

KEPT_CALLS = 64
CUDA_PROVIDER = "CUDAExecutionProvider"


def providers(device: str, stream: int) -> list[tuple[str, dict[str, str]]]:
    """The provider for a device, and its options.

    No TF32: it rounds the products of float32 to 10 bits. The arena takes what is asked for, since all shapes are
    known. The stream is the caller's, so that its copies need no synchronization.
    """
    if device == "cpu":
        return [("CPUExecutionProvider", {})]
    return [
        (
            CUDA_PROVIDER,
            {
                "device_id": "0",
                "has_user_compute_stream": "1",
                "user_compute_stream": str(stream),
                "do_copy_in_default_stream": "1",
                "arena_extend_strategy": "kSameAsRequested",
                "use_tf32": "0",
            },
        )
    ]


def check_cuda_provider(available: list[str], version: str) -> None:
    """Raises EagleError where the ONNX Runtime that is installed was built without CUDA."""
    if CUDA_PROVIDER not in available:
        raise EagleError(
            f"--device cuda needs ONNX Runtime's CUDA provider; onnxruntime {version} is installed without it: "
            "pip uninstall onnxruntime, then pip install 'eagle-aot[cuda]' (both are one module)"
        )


class OnnxRuntimeDeviceGraph:
    """See `Graph` and `DeviceGraph`. Raises EagleError where ONNX Runtime refuses the graph or misses the device.

    pool: None for a graph without caches.
    """

    def __init__(self, path: Path, ports: GraphPorts, pool: DeviceKVPool | None, memory: DeviceMemory) -> None:
        onnxruntime = import_onnxruntime()
        if memory.device == "cuda":
            check_cuda_provider(onnxruntime.get_available_providers(), onnxruntime.__version__)
        wanted = providers(memory.device, memory.stream)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        for name, value in SESSION_CONFIG.items():
            options.add_session_config_entry(name, value)
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=wanted)
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            raise EagleError(f"ONNX Runtime {onnxruntime.__version__} cannot load {path.name}: {error}") from None
        if (found := self._session.get_providers()[0]) != wanted[0][0]:
            raise EagleError(
                f"ONNX Runtime {onnxruntime.__version__} fell back to {found}, since it cannot load the libraries of "
                f"{wanted[0][0]}: install the CUDA and cuDNN that it was built for (pip install "
                "'onnxruntime-gpu[cuda,cudnn]')"
            )
        check_ports(self._session, path, ports)
        self._run_options = onnxruntime.RunOptions()
        # Or each run would wait for the device before its outputs are on their way.
        self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._ports, self._pool, self._memory = ports, pool, memory
        self._calls: dict[tuple[Any, ...], OnnxRuntimeDeviceCall] = {}

    def call(
        self,
        slot: int,
        *,
        outputs: tuple[str, ...],
        kept: tuple[str, ...] = (),
        given: tuple[str, ...] = (),
        **sizes: int,
    ) -> OnnxRuntimeDeviceCall:
        """See `Graph.call`. Calls are kept, so that a repeated shape costs nothing."""
        key = (slot, outputs, given, *sorted(sizes.items()))
        found = self._calls.pop(key, None)
        if found is None:
            if len(self._calls) >= KEPT_CALLS:
                self._calls.pop(next(iter(self._calls))).close()
            found = self.device_pass(slot, {"B": 1, **sizes}, Wiring(outputs=outputs, given=given))
        self._calls[key] = found  # behind all others: the one that was used longest ago goes first
        return found

    def device_pass(self, slot: int, sizes: Mapping[str, int], wiring: Wiring) -> OnnxRuntimeDeviceCall:
        """See `DeviceGraph.device_pass`."""
        buffers = PassBuffers(self._memory, self._ports, sizes, wiring)
        return OnnxRuntimeDeviceCall(self._session, self._run_options, buffers, self._pool, slot, self._memory)

    def close(self) -> None:
        """See `Graph.close`."""
        for call in self._calls.values():
            call.close()
        self._calls.clear()
        self._session = None


class OnnxRuntimeDeviceCall:
    """See `Call` and `DevicePass`."""

    recordable = False

    def __init__(
        self,
        session: Any,
        run_options: Any,
        buffers: PassBuffers,
        pool: DeviceKVPool | None,
        slot: int,
        memory: DeviceMemory,
    ) -> None:
        self._run, self._binding, self._options = session.run_with_iobinding, session.io_binding(), run_options
        self.buffers, self._memory = buffers, memory
        self.inputs, self.outputs = buffers.inputs, buffers.outputs
        inputs = {value.name for value in session.get_inputs()}
        for name, address in buffers.addresses.items():
            bind = self._binding.bind_input if name in inputs else self._binding.bind_output
            bind(name, memory.device, 0, element_type(buffers.dtypes[name]), buffers.shapes[name], address)
        if pool is not None:
            cache = element_type(pool.geometry.dtype)
            for prefix, bind in (("past", self._binding.bind_input), ("present", self._binding.bind_output)):
                for name, address in pool.addresses(slot, prefix).items():
                    bind(name, memory.device, 0, cache, pool.shape, address)

    def kept(self, name: str) -> DeviceRows:
        """See `Call.kept`."""
        return self.buffers.rows(name)

    def place(self, name: str) -> tuple[int, int]:
        """See `PassBuffers.place`."""
        return self.buffers.place(name)

    def enqueue(self) -> None:
        """See `DevicePass.enqueue`."""
        self.buffers.upload()
        self._run(self._binding, self._options)
        self.buffers.download()

    def run(self) -> None:
        """See `Call.run`."""
        self.enqueue()
        self._memory.synchronize()

    def close(self) -> None:
        """Frees its buffers."""
        self._binding = None
        self.buffers.close()
