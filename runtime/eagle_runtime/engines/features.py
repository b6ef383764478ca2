"""Queues of the target's features, from its passes to the head's: see `Features`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.engines.base import Array, Call, Rows
from eagle_runtime.engines.memory import DeviceMemory, size_in_bytes

HIDDEN = "hidden"
"""The head's input."""


class HostFeatures:
    """See `Features`."""

    most, given = math.inf, ()

    def __init__(self) -> None:
        self._waiting: list[npt.NDArray[np.float32]] = []

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def push(self, rows: Any, path: Sequence[int]) -> None:
        """See `Features`."""
        self._waiting.append(rows.take(path, axis=0))

    def truncate(self, count: int) -> None:
        """See `Features`."""
        self._waiting = [np.concatenate(self._waiting)[:count]] if count else []

    def feed(self, call: Call, count: int) -> None:
        """See `Features`."""
        waiting = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
        call.inputs[HIDDEN][0, :count] = waiting[:count]
        self._waiting = [waiting[count:]] if len(waiting) > count else []


class DeviceRows:
    """See `Rows`: of a buffer on a device, until the next pass that writes there."""

    def __init__(self, memory: DeviceMemory, address: int, shape: tuple[int, ...], dtype: str) -> None:
        """shape: [rows, ...]"""
        self.address, self.row_size = address, size_in_bytes(shape[1:], dtype)
        self._memory, self._shape, self._dtype = memory, shape, dtype
        self._fetched: dict[int, Array] = {}

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, row: int) -> Array:
        """Waits for the row, the first time that it is asked for."""
        if row not in self._fetched:
            array = np.empty(self._shape[1:], np.dtype(self._dtype))
            self._memory.download(array, self.address + row * self.row_size)
            self._memory.synchronize()
            self._fetched[row] = array
        return self._fetched[row]


class DeviceFeatures:
    """See `Features`: a ring on the device, filled and emptied by copies in the stream's order."""

    def __init__(self, memory: DeviceMemory, *, width: int, rows: int) -> None:
        """width: numbers of a row, in float32. rows: how many the ring holds."""
        self.most, self.given = rows, (HIDDEN,)
        self._memory, self._row_size = memory, size_in_bytes((width,), "float32")
        self._ring = memory.allocate(rows * self._row_size)
        self._first = self._count = 0

    def __len__(self) -> int:
        return self._count

    def push(self, rows: Rows, path: Sequence[int]) -> None:
        """See `Features`."""
        assert isinstance(rows, DeviceRows)
        assert self._count + len(path) <= self.most, "more features than were to wait"
        for start, length in runs(path):
            self._copy(rows.address + start * self._row_size, self._first + self._count, length, into_ring=True)
            self._count += length

    def truncate(self, count: int) -> None:
        """See `Features`."""
        self._count = count

    def feed(self, call: Any, count: int) -> None:
        """See `Features`."""
        assert count <= self._count, "fewer features wait than were asked for"
        address, size = call.place(HIDDEN)
        self._memory.clear(address, size)  # what lies behind them becomes keys and values too, and must be numbers
        self._copy(address, self._first, count, into_ring=False)
        self._first, self._count = (self._first + count) % self.most, self._count - count

    def _copy(self, address: int, place: int, count: int, *, into_ring: bool) -> None:
        """Copies rows between `address` and the ring's places from `place` on, in two parts where they wrap around."""
        place %= self.most
        until_end = min(count, self.most - place)
        for start, at, rows in (
            (place, address, until_end),
            (0, address + until_end * self._row_size, count - until_end),
        ):
            if rows:
                source, target = at, self._ring + start * self._row_size
                if not into_ring:
                    source, target = target, source
                self._memory.copy_rows(target, source, pitch=self._row_size, width=self._row_size, height=rows)


def runs(path: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First row and length of each stretch of rows that follow one another."""
    start = 0
    for end in range(1, len(path) + 1):
        if end == len(path) or path[end] != path[end - 1] + 1:
            yield path[start], end - start
            start = end
