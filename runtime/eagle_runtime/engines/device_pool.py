"""The cache pool of a device: one block of its memory, of which the host knows the addresses alone.

block: [slots, layers, 2, kv_heads, rows, head_dim], so that a row of a slot, in all layers, keys and values and all
heads, is one copy of equal pieces at equal distances; committing an accepted path is a few of these.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eagle_graphs import KVGeometry
from eagle_graphs.ports import cache_names
from eagle_runtime.engines.memory import ITEM_SIZES, DeviceMemory
from eagle_runtime.kv_pool import SlotPool


class DeviceKVPool(SlotPool):
    """Caches of `slots` sequences for one graph, in elements of `geometry.dtype`."""

    def __init__(self, memory: DeviceMemory, geometry: KVGeometry, *, slots: int, rows: int) -> None:
        super().__init__(slots=slots, rows=rows)
        self.geometry, self._memory = geometry, memory
        self.row_size = geometry.head_dim * ITEM_SIZES[geometry.dtype]
        """Bytes of one head's row."""
        self._pieces = geometry.layers * 2 * geometry.kv_heads
        self.slot_size = self._pieces * rows * self.row_size
        """Bytes of a slot."""
        self.address = memory.allocate(slots * self.slot_size)

    @property
    def shape(self) -> tuple[int, ...]:
        """[1, kv_heads, rows, head_dim] of each cache port of a slot."""
        return (1, self.geometry.kv_heads, self.rows, self.geometry.head_dim)

    def addresses(self, slot: int, prefix: str) -> dict[str, int]:
        """Where each cache port of a slot begins, by name."""
        size = self.geometry.kv_heads * self.rows * self.row_size
        start = self.address + slot * self.slot_size
        names = cache_names(prefix, self.geometry.layers)
        return {name: start + index * size for index, name in enumerate(names)}

    def clear(self, slot: int) -> None:
        """See `SlotPool.clear`."""
        self._memory.clear(self.address + slot * self.slot_size, self.slot_size)

    def move(self, slot: int, source: npt.NDArray[np.intp], start: int) -> None:
        """See `SlotPool.move`. Rows are copied in turn; a rising path never overwrites what it reads later."""
        first = self.address + slot * self.slot_size
        for target, row in enumerate(source.tolist(), start):
            self._memory.copy_rows(
                first + target * self.row_size,
                first + row * self.row_size,
                pitch=self.rows * self.row_size,
                width=self.row_size,
                height=self._pieces,
            )
