"""CUDA's memory through cuda-python: thin, since nothing here runs without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from eagle_graphs import EagleError
from eagle_runtime.engines.base import Array
from eagle_runtime.engines.memory import size_in_bytes

INSTALL = "pip install 'eagle-aot[cuda]'"


def import_cuda_runtime() -> Any:
    """cuda-python's runtime module. Raises EagleError where it, its library or a GPU is missing."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        raise EagleError(f"--device cuda needs cuda-python, which is not installed: {INSTALL}") from None
    try:
        error, count = runtime.cudaGetDeviceCount()
    except RuntimeError as problem:  # its library is looked for at the first call
        raise EagleError(f"--device cuda needs CUDA's runtime library, which cannot be loaded: {problem}") from None
    if int(error) or not count:
        raise EagleError(
            f"--device cuda needs an NVIDIA GPU; CUDA finds none ({_name(runtime, error)}): use --device cpu, or check "
            "the driver with nvidia-smi"
        )
    return runtime


def _name(runtime: Any, error: Any) -> str:
    return str(runtime.cudaGetErrorName(error)[1].decode())


class CudaMemory:
    """See `DeviceMemory`: the first GPU's, over a stream of its own."""

    device = "cuda"

    def __init__(self) -> None:
        self._runtime = import_cuda_runtime()
        self._kinds = self._runtime.cudaMemcpyKind
        self.stream = int(self._do("StreamCreate"))
        attributes = self._runtime.cudaDeviceAttr
        major, minor = (
            self._do("DeviceGetAttribute", attribute, 0)
            for attribute in (
                attributes.cudaDevAttrComputeCapabilityMajor,
                attributes.cudaDevAttrComputeCapabilityMinor,
            )
        )
        self.architecture = f"sm{major}{minor}"
        self._blocks: set[int] = set()
        self._pinned: set[int] = set()
        self._recorded: list[Any] = []

    def _do(self, function: str, *arguments: Any) -> Any:
        """Calls a function of the runtime; its result. Raises EagleError where it fails."""
        error, *results = getattr(self._runtime, f"cuda{function}")(*arguments)
        if int(error):
            raise EagleError(f"CUDA's {function} failed: {_name(self._runtime, error)}")
        return results[0] if results else None

    def allocate(self, size: int) -> int:
        """See `DeviceMemory`."""
        address = int(self._do("Malloc", max(size, 1)))
        self._blocks.add(address)
        self.clear(address, size)
        return address

    def free(self, address: int) -> None:
        """See `DeviceMemory`."""
        self._blocks.remove(address)
        self._do("Free", address)

    def host_array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """See `DeviceMemory`."""
        size = size_in_bytes(shape, dtype)
        address = int(self._do("HostAlloc", max(size, 1), 0))
        self._pinned.add(address)
        block = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        block[...] = 0
        array: Array = block.view(np.dtype(dtype)).reshape(shape)
        return array

    def free_host(self, array: Array) -> None:
        """See `DeviceMemory`."""
        self._unpin(array.ctypes.data)

    def _unpin(self, address: int) -> None:
        self._pinned.remove(address)
        self._do("FreeHost", address)

    def upload(self, address: int, array: Array) -> None:
        """See `DeviceMemory`."""
        kind = self._kinds.cudaMemcpyHostToDevice
        self._do("MemcpyAsync", address, array.ctypes.data, array.nbytes, kind, self.stream)

    def download(self, array: Array, address: int) -> None:
        """See `DeviceMemory`."""
        kind = self._kinds.cudaMemcpyDeviceToHost
        self._do("MemcpyAsync", array.ctypes.data, address, array.nbytes, kind, self.stream)

    def copy_rows(self, target: int, source: int, *, pitch: int, width: int, height: int) -> None:
        """See `DeviceMemory`."""
        kind = self._kinds.cudaMemcpyDeviceToDevice
        self._do("Memcpy2DAsync", target, pitch, source, pitch, width, height, kind, self.stream)

    def clear(self, address: int, size: int) -> None:
        """See `DeviceMemory`."""
        self._do("MemsetAsync", address, 0, size, self.stream)

    def record(self, enqueue: Callable[[], None]) -> Callable[[], None] | None:
        """See `DeviceMemory`: a CUDA graph."""
        self._do(
            "StreamBeginCapture", self.stream, self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        )
        captured = False
        try:
            enqueue()
            captured = True
        except EagleError:  # without a recording it works, or says what is wrong
            pass
        finally:
            error, graph = self._runtime.cudaStreamEndCapture(self.stream)
        if int(error) or not captured:
            if not int(error):
                self._do("GraphDestroy", graph)
            return None
        recorded = self._do("GraphInstantiate", graph, 0)
        self._do("GraphDestroy", graph)
        self._recorded.append(recorded)
        return lambda: self._do("GraphLaunch", recorded, self.stream)

    def synchronize(self) -> None:
        """See `DeviceMemory`."""
        self._do("StreamSynchronize", self.stream)

    def close(self) -> None:
        """See `DeviceMemory`."""
        self.synchronize()
        for recorded in self._recorded:
            self._do("GraphExecDestroy", recorded)
        for address in list(self._blocks):
            self.free(address)
        for address in list(self._pinned):
            self._unpin(address)
        self._do("StreamDestroy", self.stream)
