"""The buffers of one pass on a device: pinned arrays on the host, their places on the device, copies between them."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_graphs import GraphPorts
from eagle_runtime.engines.base import Array
from eagle_runtime.engines.memory import DeviceMemory, size_in_bytes


class PassBuffers:
    """Every port of a graph but its caches, at fixed sizes; `outputs` names those that come back to the host."""

    def __init__(
        self, memory: DeviceMemory, ports: GraphPorts, sizes: Mapping[str, int], outputs: tuple[str, ...]
    ) -> None:
        inputs = [port for port in ports.inputs if not port.name.startswith("past_")]
        results = [port for port in ports.outputs if not port.name.startswith("present_")]
        self.shapes = {port.name: port.shape(sizes) for port in (*inputs, *results)}
        self.dtypes = {port.name: port.dtype for port in (*inputs, *results)}
        self.addresses = {
            name: memory.allocate(size_in_bytes(shape, self.dtypes[name])) for name, shape in self.shapes.items()
        }
        self.inputs: dict[str, Array] = {p.name: memory.host_array(self.shapes[p.name], p.dtype) for p in inputs}
        self.outputs: dict[str, Array] = {
            p.name: memory.host_array(self.shapes[p.name], p.dtype) for p in results if p.name in outputs
        }
        self._memory = memory

    def upload(self) -> None:
        """Copies all inputs to the device, in the stream's order."""
        for name, array in self.inputs.items():
            self._memory.upload(self.addresses[name], array)

    def download(self) -> None:
        """Copies the outputs asked for to the host, in the stream's order."""
        for name, array in self.outputs.items():
            self._memory.download(array, self.addresses[name])

    def close(self) -> None:
        """Frees the device's part."""
        for address in self.addresses.values():
            self._memory.free(address)
