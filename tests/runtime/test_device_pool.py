"""The pool of a device and its copies, against the host's pool, with the host playing the device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto
from onnx.helper import make_graph, make_model, make_node, make_opsetid, make_tensor_value_info

from eagle_graphs import EagleError, GraphPorts, KVGeometry, Port, target_ports
from eagle_runtime.engines import onnxruntime, onnxruntime_device
from eagle_runtime.engines.base import Array
from eagle_runtime.engines.buffers import PassBuffers, Wiring
from eagle_runtime.engines.device_pool import DeviceKVPool
from eagle_runtime.engines.features import DeviceFeatures, DeviceRows, runs
from eagle_runtime.engines.memory import HostMemory, Replayed
from eagle_runtime.engines.onnxruntime import OnnxRuntimeGraph
from eagle_runtime.engines.onnxruntime_device import OnnxRuntimeDeviceGraph
from eagle_runtime.kv_pool import KVPool

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=4)
ROWS = 24


def view(address: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """The numbers at an address of the host."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)).view(dtype).reshape(shape)


def caches(pool: DeviceKVPool, slot: int) -> dict[str, np.ndarray]:
    return {name: view(address, pool.shape) for name, address in pool.addresses(slot, "past").items()}


@given(st.integers(0, 10), st.lists(st.integers(0, 12), unique=True, max_size=8), st.integers(0, 1))
def test_a_commit_moves_what_the_hosts_pool_moves(length: int, path: list[int], slot: int) -> None:
    memory = HostMemory()
    pool = DeviceKVPool(memory, GEOMETRY, slots=2, rows=ROWS)
    host = KVPool(GEOMETRY, slots=2, rows=ROWS)
    slots = [each.acquire() for each in (pool, host)]
    if slot == 0:  # the other of the two
        slots = [each.acquire() for each in (pool, host)]
    index = slots[0].index
    assert index == slots[1].index
    random = np.random.default_rng(0)
    for name, array in host.views(index, "past").items():
        array[...] = random.standard_normal(array.shape)
        caches(pool, index)[name][...] = array
    for each in slots:
        each.length = length
        each.reserve(13)
        each.commit(sorted(path))
        assert each.length == length + len(path)
    for name, array in host.views(index, "past").items():
        np.testing.assert_array_equal(
            caches(pool, index)[name][:, :, : length + len(path)], array[:, :, : length + len(path)]
        )
    other = caches(pool, 1 - index)
    assert all(not array.any() for array in other.values()), "another slot was touched"


def test_ports_of_a_slot_lie_side_by_side_and_past_is_present() -> None:
    pool = DeviceKVPool(HostMemory(), GEOMETRY, slots=2, rows=ROWS)
    assert pool.addresses(1, "past").values().__str__() == pool.addresses(1, "present").values().__str__()
    found = [*pool.addresses(0, "past").values(), *pool.addresses(1, "past").values()]
    assert [*pool.addresses(0, "past")][:3] == ["past_key_0", "past_value_0", "past_key_1"]
    assert np.diff(found).tolist() == [2 * ROWS * 4 * 4] * 11
    half = DeviceKVPool(
        HostMemory(), KVGeometry(layers=3, kv_heads=2, head_dim=4, dtype="bfloat16"), slots=1, rows=ROWS
    )
    assert half.slot_size * 2 == pool.slot_size


def test_slots_are_lent_as_the_hosts_are() -> None:
    pool = DeviceKVPool(HostMemory(), GEOMETRY, slots=1, rows=ROWS)
    slot = pool.acquire()
    with pytest.raises(EagleError, match="all 1 cache slots are in use"):
        pool.acquire()
    with pytest.raises(EagleError, match="the cache has 24 rows"):
        slot.reserve(ROWS + 1)
    pool.release(slot)
    assert pool.free_slots == 1


def test_buffers_go_to_the_device_and_back_by_name() -> None:
    memory = HostMemory()
    ports = target_ports(GEOMETRY, vocab_size=11, feature_width=6)
    sizes = {"B": 1, "Q": 3, "S": 5, "R": 2}
    buffers = PassBuffers(memory, ports, sizes, Wiring(outputs=("argmax_ids", "features")))
    assert buffers.inputs.keys() == {"input_ids", "position_ids", "tree_mask", "kv_length", "logit_rows"}
    assert {name: array.shape for name, array in buffers.outputs.items()} == {"argmax_ids": (2,), "features": (1, 3, 6)}
    assert buffers.shapes["logits"] == (2, 11), "what stays on the device has a place there"
    buffers.inputs["tree_mask"][...] = True
    buffers.inputs["input_ids"][0] = [4, 5, 6]
    buffers.upload()
    assert view(buffers.addresses["input_ids"], (3,), "int64").tolist() == [4, 5, 6]
    assert view(buffers.addresses["tree_mask"], (15,), "bool").all()
    view(buffers.addresses["argmax_ids"], (2,), "int64")[...] = [7, 8]
    buffers.download()
    assert buffers.outputs["argmax_ids"].tolist() == [7, 8]
    buffers.close()
    memory.close()


def test_buffers_of_another_pass_are_read_where_they_are() -> None:
    memory = HostMemory()
    ports = target_ports(GEOMETRY, vocab_size=11, feature_width=6)
    sizes = {"B": 1, "Q": 3, "S": 3, "R": 3}
    place = memory.allocate(24)
    view(place, (3,), "int64")[...] = [4, 5, 6]
    buffers = PassBuffers(memory, ports, sizes, Wiring(sources={"input_ids": place}, given=("position_ids",)))
    assert buffers.inputs.keys() == {"tree_mask", "kv_length", "logit_rows"}
    assert buffers.addresses["input_ids"] == place
    buffers.close()
    assert view(place, (3,), "int64").tolist() == [4, 5, 6], "it was never this pass's own"


def test_features_wait_in_a_ring_on_the_device() -> None:
    memory, width = HostMemory(), 2
    waiting = DeviceFeatures(memory, width=width, rows=6)
    source = memory.allocate(5 * width * 4)
    rows = DeviceRows(memory, source, (5, width), "float32")
    call = SimpleNamespace(place=lambda name: (place, 6 * width * 4))
    place, expected = memory.allocate(6 * width * 4), []
    for turn, (path, count) in enumerate([([0, 1, 4], 2), ([0, 2, 3], 3), ([0, 1, 2, 3, 4], 4), ([1, 3], 3)]):
        numbers = 10 * turn + np.arange(5, dtype=np.float32)[:, None] + np.zeros((5, width), np.float32)
        view(source, (5, width), "float32")[...] = numbers
        waiting.push(rows, path)
        expected += [10 * turn + row for row in path]
        waiting.feed(call, count)
        fed = view(place, (6, width), "float32")
        assert fed[:count, 0].tolist() == expected[:count]
        assert not fed[count:].any(), "what an earlier turn has left would become keys and values"
        expected = expected[count:]
        assert len(waiting) == len(expected)
    waiting.truncate(0)
    assert len(waiting) == 0
    with pytest.raises(AssertionError, match="more features than were to wait"):
        waiting.push(rows, [0, 1, 2, 3, 4, 0, 1])


def test_rows_are_fetched_when_they_are_read() -> None:
    memory = HostMemory()
    place = memory.allocate(24)
    rows = DeviceRows(memory, place, (3, 2), "float32")
    view(place, (3, 2), "float32")[...] = [[1, 2], [3, 4], [5, 6]]
    assert len(rows) == 3
    assert rows[1].tolist() == [3, 4]


@pytest.mark.parametrize(
    ("path", "expected"),
    [([], []), ([3], [(3, 1)]), ([0, 1, 2], [(0, 3)]), ([0, 2, 3, 7], [(0, 1), (2, 2), (7, 1)])],
)
def test_rows_that_follow_one_another_are_one_copy(path: list[int], expected: list[tuple[int, int]]) -> None:
    assert list(runs(path)) == expected


def test_work_is_recorded_the_second_time_and_done_unrecorded_where_it_cannot_be() -> None:
    class Recorder(HostMemory):
        def __init__(self, *, able: bool) -> None:
            super().__init__()
            self.able, self.done = able, list[str]()

        def record(self, enqueue: Callable[[], None]) -> Callable[[], None] | None:
            self.done.append("record")
            return (lambda: self.done.append("replay")) if self.able else None

    for able, recorded, expected in (
        (True, True, ["work", "record", "replay", "replay"]),
        (False, True, ["work", "record", "work", "work"]),
        (True, False, ["work", "work", "work"]),
    ):
        memory = Recorder(able=able)
        work = Replayed(memory, partial(memory.done.append, "work"), recorded=recorded)
        for _ in range(3):
            work.run()
        assert memory.done == expected


class CountedMemory(HostMemory):
    """Knows what was not given back."""

    def __init__(self) -> None:
        super().__init__()
        self.host_arrays: set[int] = set()

    @property
    def blocks(self) -> set[int]:
        return set(self._held)

    def host_array(self, shape: tuple[int, ...], dtype: str) -> Array:
        array = super().host_array(shape, dtype)
        self.host_arrays.add(id(array))
        return array

    def free_host(self, array: Array) -> None:
        self.host_arrays.remove(id(array))


def doubling(directory: Path) -> tuple[Path, GraphPorts]:
    """A graph without caches."""
    path = directory / "double.onnx"
    x, y = (make_tensor_value_info(name, TensorProto.FLOAT, ["Q"]) for name in "xy")
    graph = make_graph([make_node("Add", ["x", "x"], ["y"])], "double", [x], [y])
    onnx.save(make_model(graph, opset_imports=[make_opsetid("", 18)], ir_version=8), path)
    ports = [Port(name=name, dtype="float32", axes=("Q",)) for name in "xy"]
    return path, GraphPorts(inputs=(ports[0],), outputs=(ports[1],))


def test_the_host_keeps_the_passes_that_were_used_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "_KEPT_CALLS", 2)
    pool = KVPool(GEOMETRY, slots=1, rows=ROWS)
    monkeypatch.setattr(pool, "views", lambda _slot, _prefix: {})
    double = OnnxRuntimeGraph(*doubling(tmp_path), pool, threads=1, native=False)
    passes = {size: double.call(0, outputs=("y",), Q=size) for size in (1, 2)}
    assert double.call(0, outputs=("y",), Q=1) is passes[1]
    double.call(0, outputs=("y",), Q=3)
    assert double.call(0, outputs=("y",), Q=1) is passes[1]
    assert double.call(0, outputs=("y",), Q=2) is not passes[2]


def test_the_pass_that_was_used_longest_ago_gives_all_its_memory_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime_device, "KEPT_CALLS", 2)
    memory = CountedMemory()
    double = OnnxRuntimeDeviceGraph(*doubling(tmp_path), None, memory)
    passes = {size: double.call(0, outputs=("y",), Q=size) for size in (1, 2)}
    assert double.call(0, outputs=("y",), Q=1) is passes[1]
    before = memory.blocks, set(memory.host_arrays)
    double.call(0, outputs=("y",), Q=3)
    kept = set(passes[1].buffers.addresses.values())
    assert kept <= memory.blocks
    assert not set(passes[2].buffers.addresses.values()) & memory.blocks
    assert (len(memory.blocks), len(memory.host_arrays)) == (len(before[0]), len(before[1]))
    assert double.call(0, outputs=("y",), Q=1) is passes[1]
    passes[1].inputs["x"][...] = 21
    passes[1].run()
    assert passes[1].outputs["y"].tolist() == [42]
    double.close()
    assert not memory.blocks
    assert not memory.host_arrays
