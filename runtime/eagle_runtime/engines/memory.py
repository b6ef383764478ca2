"""Memory of a device: addresses, copies in the order of one stream, and host arrays that they can start from.

Graphs on a device and their cache pool know this interface alone. `HostMemory` is the same over the host's own memory:
with it all that surrounds a graph runs, and is tested, where there is no GPU.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eagle_runtime.engines.base import Array

ITEM_SIZES = {"bool": 1, "int64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by the names that ports use."""


class DeviceMemory(Protocol):
    """Whatever is copied is copied later, in order; `synchronize` waits for it."""

    device: str
    """"cpu" or "cuda", as ONNX Runtime calls it."""
    architecture: str
    """Of a GPU, as sm89; empty for the host."""
    stream: int
    """Handle of the stream; 0 where there is none."""

    def allocate(self, size: int) -> int:
        """Address of `size` bytes of zeros. Raises EagleError where there is no room."""
        ...

    def free(self, address: int) -> None:
        """Gives back what `allocate` gave."""
        ...

    def host_array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """An array of zeros on the host that copies reach without a detour (pinned)."""
        ...

    def free_host(self, array: Array) -> None:
        """Gives back what `host_array` gave."""
        ...

    def upload(self, address: int, array: Array) -> None:
        """Copies a host array to the device; it must not change before `synchronize`."""
        ...

    def download(self, array: Array, address: int) -> None:
        """Copies to a host array; it holds the data after `synchronize`."""
        ...

    def copy_rows(self, target: int, source: int, *, pitch: int, width: int, height: int) -> None:
        """Copies `height` pieces of `width` bytes, `pitch` bytes apart, within the device."""
        ...

    def clear(self, address: int, size: int) -> None:
        """Fills with zeros."""
        ...

    def record(self, enqueue: Callable[[], None]) -> Callable[[], None] | None:
        """What does again all that `enqueue` puts on the stream, from the same addresses; nothing is done yet.

        None where the device cannot record it.
        """
        ...

    def synchronize(self) -> None:
        """Waits until all that was asked for is done."""
        ...

    def close(self) -> None:
        """Frees everything, host arrays included; whoever uses them afterwards is at fault."""
        ...


class Replayed:
    """Work on the stream that is done again and again from the same addresses."""

    def __init__(self, memory: DeviceMemory, enqueue: Callable[[], None], *, recorded: bool) -> None:
        """recorded: whether to record it, the second time: kernels are loaded, and some made, by the first run."""
        self._memory, self._enqueue = memory, enqueue
        self._replay: Callable[[], None] = enqueue
        self._runs_until_recorded = 2 if recorded else 0

    def run(self) -> None:
        """Once; returns when it is done."""
        self._runs_until_recorded -= 1
        if self._runs_until_recorded == 0:
            self._replay = self._memory.record(self._enqueue) or self._enqueue
        self._replay()
        self._memory.synchronize()


class HostMemory:
    """See `DeviceMemory`; the host plays the device, and every copy is done at once."""

    device, architecture, stream = "cpu", "", 0

    def __init__(self) -> None:
        self._held: dict[int, npt.NDArray[np.uint8]] = {}

    def allocate(self, size: int) -> int:
        """See `DeviceMemory`."""
        block = np.zeros(size, np.uint8)
        self._held[block.ctypes.data] = block
        return block.ctypes.data

    def free(self, address: int) -> None:
        """See `DeviceMemory`."""
        del self._held[address]

    def host_array(self, shape: tuple[int, ...], dtype: str) -> Array:
        """See `DeviceMemory`."""
        zeros: Array = np.zeros(shape, np.dtype(dtype))
        return zeros

    def free_host(self, array: Array) -> None:
        """See `DeviceMemory`."""

    def upload(self, address: int, array: Array) -> None:
        """See `DeviceMemory`."""
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, array: Array, address: int) -> None:
        """See `DeviceMemory`."""
        ctypes.memmove(array.ctypes.data, address, array.nbytes)

    def copy_rows(self, target: int, source: int, *, pitch: int, width: int, height: int) -> None:
        """See `DeviceMemory`."""
        for offset in range(0, pitch * height, pitch):
            ctypes.memmove(target + offset, source + offset, width)

    def clear(self, address: int, size: int) -> None:
        """See `DeviceMemory`."""
        ctypes.memset(address, 0, size)

    def record(self, enqueue: Callable[[], None]) -> Callable[[], None]:
        """See `DeviceMemory`."""
        return enqueue

    def synchronize(self) -> None:
        """See `DeviceMemory`."""

    def close(self) -> None:
        """See `DeviceMemory`."""
        self._held.clear()


def size_in_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Of an array."""
    return math.prod(shape) * ITEM_SIZES[dtype]
