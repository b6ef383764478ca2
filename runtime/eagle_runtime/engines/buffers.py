"""The buffers of one pass on a device: pinned arrays on the host, their places on the device, copies between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from eagle_graphs import GraphPorts
from eagle_runtime.engines.base import Array
from eagle_runtime.engines.features import DeviceRows
from eagle_runtime.engines.memory import DeviceMemory, size_in_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Where the ports of a pass come from and go to; inputs that it does not name come from the host."""

    outputs: Collection[str] = ()
    """Come back to the host."""
    given: Collection[str] = ()
    """Inputs that others fill on the device."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Inputs that are read where another pass has put them, and their addresses."""


class PassBuffers:
    """Every port of a graph but its caches, at fixed sizes."""

    def __init__(self, memory: DeviceMemory, ports: GraphPorts, sizes: Mapping[str, int], wiring: Wiring) -> None:
        sources, given, outputs = wiring.sources, wiring.given, wiring.outputs
        inputs = [port for port in ports.inputs if not port.name.startswith("past_")]
        results = [port for port in ports.outputs if not port.name.startswith("present_")]
        self.shapes = {port.name: port.shape(sizes) for port in (*inputs, *results)}
        self.dtypes = {port.name: port.dtype for port in (*inputs, *results)}
        self._own = {
            name: memory.allocate(size_in_bytes(shape, self.dtypes[name]))
            for name, shape in self.shapes.items()
            if name not in sources
        }
        self.addresses = self._own | {port.name: sources[port.name] for port in inputs if port.name in sources}
        self.inputs: dict[str, Array] = {
            p.name: memory.host_array(self.shapes[p.name], p.dtype)
            for p in inputs
            if p.name not in sources and p.name not in given
        }
        self.outputs: dict[str, Array] = {
            p.name: memory.host_array(self.shapes[p.name], p.dtype) for p in results if p.name in outputs
        }
        self._of_slots = {port.name for port in results if port.axes[0] == "B"}
        self._memory = memory

    def rows(self, name: str) -> DeviceRows:
        """The rows of an output where they are."""
        shape = self.shapes[name][1:] if name in self._of_slots else self.shapes[name]
        return DeviceRows(self._memory, self.addresses[name], shape, self.dtypes[name])

    def place(self, name: str) -> tuple[int, int]:
        """Address of a port and its bytes."""
        return self.addresses[name], size_in_bytes(self.shapes[name], self.dtypes[name])

    def upload(self) -> None:
        """Copies all inputs to the device, in the stream's order."""
        for name, array in self.inputs.items():
            self._memory.upload(self.addresses[name], array)

    def download(self) -> None:
        """Copies the outputs asked for to the host, in the stream's order."""
        for name, array in self.outputs.items():
            self._memory.download(array, self.addresses[name])

    def close(self) -> None:
        """Frees all of it, host arrays included."""
        for address in self._own.values():
            self._memory.free(address)
        for array in (*self.inputs.values(), *self.outputs.values()):
            self._memory.free_host(array)


class DevicePass(Protocol):
    """A graph at fixed sizes on a device."""

    recordable: bool
    """Whether `DeviceMemory.record` may hold it."""

    @property
    def buffers(self) -> PassBuffers:
        """Its ports."""
        ...

    def enqueue(self) -> None:
        """Puts the pass on the stream, copies of inputs and outputs included; waits for nothing."""
        ...


@runtime_checkable
class DeviceGraph(Protocol):
    """What a round on a device needs of a graph."""

    def device_pass(self, slot: int, sizes: Mapping[str, int], wiring: Wiring) -> DevicePass:
        """A pass at exactly these sizes, with buffers of its own, which the caller closes."""
        ...
