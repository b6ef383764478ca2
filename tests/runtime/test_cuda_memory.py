"""What a GPU's memory is asked for and given back, with a mock of cuda-bindings: there is no GPU here."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from eagle_graphs import EagleError, KVGeometry, target_ports
from eagle_runtime.engines import cuda
from eagle_runtime.engines.buffers import PassBuffers, Wiring
from eagle_runtime.engines.cuda import CudaMemory


class MockRuntime:
    """Hands out the host's memory and remembers what is out."""

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrComputeCapabilityMajor=8, cudaDevAttrComputeCapabilityMinor=9)

    def __init__(self) -> None:
        self.device: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.pinned: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.full = False

    def cudaStreamCreate(self) -> tuple[int, int]:
        return 0, 7

    def cudaDeviceGetAttribute(self, attribute: int, _device: int) -> tuple[int, int]:
        return 0, attribute

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        return self._take(self.device, size)

    def cudaHostAlloc(self, size: int, _flags: int) -> tuple[int, int]:
        return self._take(self.pinned, size)

    def _take(self, held: dict[int, ctypes.Array[ctypes.c_char]], size: int) -> tuple[int, int]:
        assert size > 0
        if self.full:
            return 2, 0
        block = ctypes.create_string_buffer(b"\xff" * size, size)
        held[ctypes.addressof(block)] = block
        return 0, ctypes.addressof(block)

    def cudaFree(self, address: int) -> tuple[int]:
        del self.device[address]
        return (0,)

    def cudaFreeHost(self, address: int) -> tuple[int]:
        del self.pinned[address]
        return (0,)

    def cudaMemsetAsync(self, address: int, value: int, size: int, stream: int) -> tuple[int]:
        assert stream == 7
        ctypes.memset(address, value, size)
        return (0,)

    def cudaMemcpyAsync(self, target: int, source: int, size: int, _kind: int, stream: int) -> tuple[int]:
        assert stream == 7
        ctypes.memmove(target, source, size)
        return (0,)

    def cudaStreamSynchronize(self, _stream: int) -> tuple[int]:
        return (0,)

    def cudaStreamDestroy(self, _stream: int) -> tuple[int]:
        return (0,)

    def cudaGetErrorName(self, error: int) -> tuple[int, bytes]:
        return 0, {2: b"cudaErrorMemoryAllocation"}[error]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> MockRuntime:
    mock = MockRuntime()
    monkeypatch.setattr(cuda, "import_cuda_runtime", lambda: mock)
    return mock


def test_buffers_give_all_their_memory_back_with_a_mock_of_cuda(runtime: MockRuntime) -> None:
    memory = CudaMemory()
    assert (memory.architecture, memory.stream) == ("sm89", 7)
    ports = target_ports(KVGeometry(layers=1, kv_heads=2, head_dim=4), vocab_size=11, feature_width=6)
    buffers = [
        PassBuffers(memory, ports, {"B": 1, "Q": rows, "S": rows, "R": asked}, Wiring(outputs=("argmax_ids",)))
        for rows, asked in ((3, 2), (5, 0))  # one of them with arrays of no size
    ]
    assert len(runtime.pinned) == 12
    ids = buffers[0].inputs["input_ids"]
    assert not ids.any()
    ids[0] = [4, 5, 6]
    buffers[0].upload()
    where = buffers[0].addresses["input_ids"]
    assert np.frombuffer(runtime.device[where], np.int64).tolist() == [4, 5, 6]
    for each in buffers:
        each.close()
    assert not runtime.device
    assert not runtime.pinned
    memory.close()


def test_closing_frees_what_is_left_with_a_mock_of_cuda(runtime: MockRuntime) -> None:
    memory = CudaMemory()
    memory.allocate(8)
    memory.host_array((3,), "int64")
    memory.free_host(memory.host_array((4,), "float32"))
    memory.close()
    assert not runtime.device
    assert not runtime.pinned


def test_a_gpu_without_room_says_so_with_a_mock_of_cuda(runtime: MockRuntime) -> None:
    memory = CudaMemory()
    runtime.full = True
    with pytest.raises(EagleError, match="CUDA's Malloc failed: cudaErrorMemoryAllocation"):
        memory.allocate(8)
