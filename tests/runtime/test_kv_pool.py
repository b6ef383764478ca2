"""The cache pool: slots against a list of rows each, and committed rows against those of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eagle_graphs import EagleError, KVGeometry
from eagle_runtime import Session
from eagle_runtime.kv_pool import KVPool, KVSlot
from tests.drafters import Scripted, Shape, bush, chain, random_prompt, run, run_plain, state_with

GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=3)
BLOCKS = pytest.mark.parametrize("block", [1, 2, 4])
"""Rows of a block of keys."""
SLOTS, ROWS = 3, 8


def committed(slot: KVSlot) -> np.ndarray:
    """[2, layers, kv_heads, length, head_dim] keys and values of the committed rows, row by row."""
    values = slot.pool.values[:, slot.index]
    keys = slot.pool.keys[:, slot.index].swapaxes(-1, -2).reshape(values.shape)
    return np.stack((keys, values))[:, :, :, : slot.length]


class PoolMachine(RuleBasedStateMachine):
    """Slots come, go and run passes in any order; `model` has the committed rows of each, oldest slot first."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = KVPool(GEOMETRY, slots=SLOTS, rows=ROWS)
        self.model: list[tuple[KVSlot, list[np.ndarray]]] = []
        self.pending: dict[int, list[np.ndarray]] = {}
        self.written = 0

    def held(self, data: st.DataObject) -> tuple[KVSlot, list[np.ndarray]]:
        return self.model[data.draw(st.integers(0, len(self.model) - 1))]

    def under_way(self, data: st.DataObject) -> tuple[KVSlot, list[np.ndarray]]:
        waiting = [held for held in self.model if held[0].index in self.pending]
        return waiting[data.draw(st.integers(0, len(waiting) - 1))]

    @rule()
    def acquire(self) -> None:
        if len(self.model) == SLOTS:
            with pytest.raises(EagleError, match=f"all {SLOTS} cache slots are in use"):
                self.pool.acquire()
        else:
            self.model.append((self.pool.acquire(), []))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot, _ = held = self.held(data)
        self.pool.release(slot)
        self.pending.pop(slot.index, None)
        self.model = [other for other in self.model if other is not held]

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(1, 6))
    def run_a_pass(self, data: st.DataObject, count: int) -> None:
        """Reserves rows and writes them as a graph would, through the views."""
        slot, committed = self.held(data)
        if slot.index in self.pending:
            with pytest.raises(AssertionError, match="already under way"):
                slot.reserve(count)
        elif len(committed) + count > ROWS:
            with pytest.raises(EagleError, match=f"{len(committed)} are filled and {count} more were asked for"):
                slot.reserve(count)
        else:
            assert slot.reserve(count) == len(committed)
            self.pending[slot.index] = [self.write(slot, len(committed) + row) for row in range(count)]

    def write(self, slot: KVSlot, row: int) -> np.ndarray:
        shape = (2 * GEOMETRY.layers, GEOMETRY.kv_heads, GEOMETRY.head_dim)
        self.written += 1
        values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * self.written
        for view, value in zip(self.pool.views(slot.index, "past").values(), values, strict=True):
            view[0, :, row] = value
        return values

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        slot, committed = self.under_way(data)
        rows = self.pending.pop(slot.index)
        path = [row for row in range(len(rows)) if data.draw(st.booleans())]
        slot.commit(path)
        committed.extend(rows[row] for row in path)

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        slot, _ = self.under_way(data)
        slot.rollback()
        del self.pending[slot.index]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        slot, committed = self.held(data)
        length = data.draw(st.integers(0, len(committed)))
        slot.truncate(length)
        del committed[length:]
        self.pending.pop(slot.index, None)

    @invariant()
    def committed_rows_are_the_models(self) -> None:
        for slot, committed in self.model:
            assert slot.length == len(committed)
            for part, view in enumerate(self.pool.views(slot.index, "past").values()):
                for row, values in enumerate(committed):
                    np.testing.assert_array_equal(view[0, :, row], values[part])

    @invariant()
    def no_slot_is_lost_or_given_twice(self) -> None:
        indices = {slot.index for slot, _ in self.model}
        assert len(indices) == len(self.model)
        assert self.pool.free_slots + len(self.model) == SLOTS


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@BLOCKS
def test_every_path_through_a_pass_is_kept_in_order_below_what_was_committed(block: int) -> None:
    for kept in product((False, True), repeat=6):
        path = [row for row in range(6) if kept[row]]
        slot = KVPool(GEOMETRY, slots=1, rows=ROWS, key_block=block).acquire()
        slot.reserve(2)
        slot.commit(range(2))
        pool, rows = slot.pool, np.arange(ROWS)
        pool.values += rows[:, None]
        pool.keys += 10 * np.arange(3)[:, None] + rows.reshape(-1, 1, block)
        slot.reserve(6)
        slot.commit(path)
        expected = np.array([0, 1, *(2 + row for row in path)], np.float32)
        values = pool.values[..., : slot.length, :]
        np.testing.assert_array_equal(values, np.broadcast_to(expected[:, None], values.shape))
        keys = pool.keys.swapaxes(-1, -2).reshape(*values.shape[:3], ROWS, 3)[..., : slot.length, :]
        np.testing.assert_array_equal(keys, np.broadcast_to(expected[:, None] + 10 * np.arange(3), keys.shape))


def test_views_are_named_and_ordered_as_the_ports() -> None:
    pool = KVPool(GEOMETRY, slots=SLOTS, rows=ROWS)
    pool.buffer[:] = np.arange(4).reshape(2, 2, 1, 1, 1, 1) + 10 * np.arange(SLOTS).reshape(SLOTS, 1, 1, 1)
    views = pool.views(2, "past")
    assert {name: float(view.min()) for name, view in views.items()} == {
        "past_key_0": 20.0,
        "past_value_0": 21.0,
        "past_key_1": 22.0,
        "past_value_1": 23.0,
    }
    assert all(view.flags.c_contiguous and view.shape == (1, 2, ROWS, 3) for view in views.values())
    assert all(np.shares_memory(view, pool.buffer) for view in views.values())


def test_keys_in_blocks_are_the_same_bytes_with_each_block_transposed() -> None:
    pool = KVPool(GEOMETRY, slots=SLOTS, rows=ROWS, key_block=4)
    views = pool.views(1, "present")
    assert {view.shape for name, view in views.items() if "key" in name} == {(1, 2, 2, 3, 4)}
    assert {view.shape for name, view in views.items() if "value" in name} == {(1, 2, ROWS, 3)}
    assert all(view.flags.c_contiguous and np.shares_memory(view, pool.buffer) for view in views.values())
    with pytest.raises(AssertionError, match="9 rows are no multiple of a block of 4"):
        KVPool(GEOMETRY, slots=1, rows=9, key_block=4)


def test_rows_are_refused_beyond_the_buffer_and_the_slot_stays_as_it_was() -> None:
    slot = KVPool(GEOMETRY, slots=1, rows=ROWS).acquire()
    slot.reserve(ROWS - 1)
    slot.commit(range(ROWS - 1))
    with pytest.raises(EagleError, match=f"has {ROWS} rows; {ROWS - 1} are filled and 2 more"):
        slot.reserve(2)
    assert (slot.length, slot.reserved) == (ROWS - 1, 0)
    assert slot.reserve(1) == ROWS - 1


def test_a_path_longer_than_the_pass_is_a_fault() -> None:
    slot = KVPool(GEOMETRY, slots=1, rows=ROWS).acquire()
    slot.reserve(2)
    with pytest.raises(AssertionError, match="more rows committed than reserved"):
        slot.commit(range(3))


def test_a_slot_is_released_once() -> None:
    pool = KVPool(GEOMETRY, slots=2, rows=ROWS)
    slot = pool.acquire()
    pool.release(slot)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(slot)


def test_a_slot_is_released_once_though_another_sequence_has_its_rows_now() -> None:
    pool = KVPool(GEOMETRY, slots=1, rows=ROWS)
    stale = pool.acquire()
    pool.release(stale)
    pool.acquire()
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(stale)


@pytest.fixture(scope="module")
def session(tiny_bundle: Path) -> Iterator[Session]:
    with Session.open(tiny_bundle, profile="8", threads=1) as opened:
        yield opened


@pytest.mark.parametrize("shape", [chain(4, 4), chain(2, 4), chain(0, 4), bush], ids=["4", "2", "0", "siblings"])
@pytest.mark.parametrize("count", [19, 21])  # of new tokens: the last round is cut or whole
def test_committed_rows_are_those_of_plain_decoding(session: Session, shape: Shape, count: int) -> None:
    prompt = random_prompt(20)
    slot = session._state.verifier._slot
    tokens = run_plain(session, prompt, count)
    plain = committed(slot)
    slot.pool.buffer[:] = 0
    answer = run(session, state_with(session, Scripted([*prompt, *tokens], shape)), prompt, max_new_tokens=count)
    assert answer.tokens == tokens
    assert slot.length == plain.shape[3] == len(prompt) + count - 1
    np.testing.assert_allclose(committed(slot), plain, atol=1e-4)
