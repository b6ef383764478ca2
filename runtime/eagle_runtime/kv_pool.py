"""The cache pool: slots for keys and values, allocated once.

One buffer holds all layers, so that committing an accepted path is one copy. A slot's rows are

    [0, length)                  committed: the rows that plain decoding would have
    [length, length + reserved)  a pass under way: written by the graph, seen by nobody else

`commit` keeps a path of the reserved rows, `rollback` none of them; neither clears anything, since a
row beyond `length` counts for nothing before it is written again. (Graphs that attend to the whole buffer under a
mask do read it: NaN there would spread, which is why a slot is cleared after a pass that failed.)

Where the graphs keep keys in blocks of b rows, the key of row r is column r % b of block r // b.
"""

from __future__ import annotations

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eagle_graphs import EagleError, KVGeometry
from eagle_graphs.ports import cache_names


class SlotPool(ABC):
    """Who holds which slot; where their rows lie is the subclass's affair."""

    def __init__(self, *, slots: int, rows: int) -> None:
        self.slots, self.rows = slots, rows
        self._free = list(range(slots))
        self._held: set[KVSlot] = set()

    def acquire(self) -> KVSlot:
        """An empty slot. Raises EagleError when all are taken."""
        if not self._free:
            raise EagleError(f"all {self.slots} cache slots are in use: close a sequence first")
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

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Sees to it that nothing of the past reaches a slot's next pass, not even NaN in rows that are masked."""

    @abstractmethod
    def move(self, slot: int, source: npt.NDArray[np.intp], start: int) -> None:
        """Copies the rows `source` of a slot, rising, to the rows from `start` on, each at or below its source."""


class KVPool(SlotPool):
    """Caches of `slots` sequences for one graph. rows: a multiple of `key_block`.

    buffer: [layers, 2, slots, kv_heads, rows, head_dim]
    keys: [layers, slots, kv_heads, rows / key_block, head_dim, key_block], a view of it
    values: [layers, slots, kv_heads, rows, head_dim], the other

    Of bfloat16, which numpy lacks, they are the bits. huge_pages: see `_mapping`.
    """

    def __init__(
        self, geometry: KVGeometry, *, slots: int, rows: int, key_block: int = 1, huge_pages: bool = False
    ) -> None:
        assert rows % key_block == 0, f"{rows} rows are no multiple of a block of {key_block}"
        super().__init__(slots=slots, rows=rows)
        self.key_block = key_block
        shape = (geometry.layers, 2, slots, geometry.kv_heads, rows, geometry.head_dim)
        dtype = np.dtype("uint16" if geometry.dtype == "bfloat16" else geometry.dtype)
        memory = _mapping(math.prod(shape) * dtype.itemsize, huge_pages=huge_pages)
        self.buffer: npt.NDArray[np.float32] = np.frombuffer(memory, dtype).reshape(shape)
        blocks = (*shape[2:4], rows // key_block, geometry.head_dim, key_block)
        self.keys = self.buffer[:, 0].reshape(geometry.layers, *blocks)
        self.values = self.buffer[:, 1]

    def views(self, slot: int, prefix: str) -> dict[str, npt.NDArray[np.float32]]:
        """Each cache port of a slot, by name: contiguous views [1, kv_heads, rows, head_dim] or, of keys, in blocks."""
        layers = self.buffer.shape[0]
        keys = self.keys if self.key_block > 1 else self.buffer[:, 0]
        parts = (cache[layer, slot : slot + 1] for layer in range(layers) for cache in (keys, self.values))
        return dict(zip(cache_names(prefix, layers), parts, strict=True))

    def clear(self, slot: int) -> None:
        """See `SlotPool.clear`. The graphs of a host read no row beyond the committed ones and their own."""

    def move(self, slot: int, source: npt.NDArray[np.intp], start: int) -> None:
        """See `SlotPool.move`. Row by row, since the rows are few and slices cost less than lists of indices."""
        values, keys, block = self.values[:, slot], self.keys[:, slot], self.key_block
        for row, old in enumerate(source.tolist(), start):
            values[:, :, row] = values[:, :, old]
            keys[:, :, row // block, :, row % block] = keys[:, :, old // block, :, old % block]


def _mapping(size: int, *, huge_pages: bool) -> mmap.mmap:
    """Zeros, `size` bytes of them.

    A mapping of its own rather than numpy's memory, which asks for huge pages: so only rows that were written are
    resident (47 kB a token for SmolLM2-135M), not the whole buffer from the first one on. Huge pages are for a pool
    that will be full: its rows are found sooner.
    """
    if not (huge_pages and hasattr(mmap, "MADV_HUGEPAGE")):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)  # shared memory has none
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class KVSlot:
    """One sequence's rows."""

    def __init__(self, pool: SlotPool, index: int) -> None:
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
            self.pool.move(self.index, self.length + np.asarray(path[moved:]), self.length + moved)
        self.length += len(path)
        self.reserved = 0

    def rollback(self) -> None:
        """Keeps none of the reserved rows."""
        self.reserved = 0

    def clear(self) -> None:
        """Forgets all rows, and whatever was written."""
        self.truncate(0)
        self.pool.clear(self.index)

    def truncate(self, length: int) -> None:
        """Forgets the committed rows from `length` on."""
        assert 0 <= length <= self.length, "cannot truncate to more rows than there are"
        self.length = length
        self.reserved = 0
