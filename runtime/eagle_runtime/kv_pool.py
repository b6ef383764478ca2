"""The cache pool: slots for keys and values, allocated once.

One buffer holds all layers, so that committing an accepted path is one copy. A slot's rows are

    [0, length)                  committed: the rows that plain decoding would have
    [length, length + reserved)  a pass under way: written by the graph, seen by nobody else

`commit` keeps a path of the reserved rows, `rollback` none of them; neither clears anything, since a
row beyond `length` is never read before it is written again.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eagle_graphs import EagleError, KVGeometry
from eagle_graphs.ports import cache_names


class KVPool:
    """Caches of `slots` sequences for one graph. buffer: [layers, 2, slots, kv_heads, rows, head_dim]."""

    def __init__(self, geometry: KVGeometry, *, slots: int, rows: int) -> None:
        self.rows = rows
        shape = (geometry.layers, 2, slots, geometry.kv_heads, rows, geometry.head_dim)
        dtype = np.dtype(geometry.dtype)
        # A mapping of its own rather than numpy's memory, which asks for huge pages: so only rows that were
        # written are resident (47 kB a token for SmolLM2-135M), not the whole buffer from the first one on.
        memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
        self.buffer: npt.NDArray[np.float32] = np.frombuffer(memory, dtype).reshape(shape)
        self._free = list(range(slots))
        self._held: set[KVSlot] = set()

    def acquire(self) -> KVSlot:
        """An empty slot. Raises EagleError when all are taken."""
        if not self._free:
            raise EagleError(f"all {self.buffer.shape[2]} cache slots are in use: close a sequence first")
        slot = KVSlot(self, self._free.pop())
        self._held.add(slot)
        return slot

    def release(self, slot: KVSlot) -> None:
        """Takes a slot back; it must not be used afterwards."""
        assert slot in self._held, "slot released twice, or another pool's"
        self._held.remove(slot)
        self._free.append(slot.index)

    @property
    def free_slots(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def views(self, slot: int, prefix: str) -> dict[str, npt.NDArray[np.float32]]:
        """Each cache port of a slot, by name: contiguous views [1, kv_heads, rows, head_dim]."""
        layers = self.buffer.shape[0]
        parts = (self.buffer[layer, part, slot : slot + 1] for layer in range(layers) for part in (0, 1))
        return dict(zip(cache_names(prefix, layers), parts, strict=True))


class KVSlot:
    """One sequence's rows."""

    def __init__(self, pool: KVPool, index: int) -> None:
        self.pool = pool
        self.index = index
        self.length = 0
        self.reserved = 0

    def reserve(self, rows: int) -> int:
        """Makes room for `rows` new rows and returns the first. Raises EagleError where the buffer ends."""
        assert self.reserved == 0, "a pass is already under way"
        if self.length + rows > self.pool.rows:
            raise EagleError(
                f"the cache has {self.pool.rows} rows; {self.length} are filled and {rows} more were asked for"
            )
        self.reserved = rows
        return self.length

    def commit(self, path: Sequence[int]) -> None:
        """Keeps the reserved rows `path` (rising, counted from the first reserved one), in that order."""
        assert len(path) <= self.reserved, "more rows committed than reserved"
        moved = next((i for i, row in enumerate(path) if row != i), len(path))
        if moved < len(path):
            rows = self.pool.buffer[:, :, self.index]
            source = self.length + np.asarray(path[moved:])
            rows[:, :, :, self.length + moved : self.length + len(path)] = rows[:, :, :, source]
        self.length += len(path)
        self.reserved = 0

    def rollback(self) -> None:
        """Keeps none of the reserved rows."""
        self.reserved = 0

    def truncate(self, length: int) -> None:
        """Forgets the committed rows from `length` on."""
        assert 0 <= length <= self.length, "cannot truncate to more rows than there are"
        self.length = length
        self.reserved = 0
