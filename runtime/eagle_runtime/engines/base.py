"""What the loop needs of a compiled graph, whatever runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


class Rows(Protocol):
    """An output that stays where its graph runs, row by row: an array on the host, or rows of a device's memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any:
        """A row, on the host."""
        ...


class Call(Protocol):
    """A graph at fixed shapes, its buffers bound: fill `inputs` in place, run, read `outputs`.

    The arrays are reused by the next run at the same shapes; copy what must outlive it.
    """

    @property
    def inputs(self) -> dict[str, Array]:
        """Buffers to fill, by port."""
        ...

    @property
    def outputs(self) -> dict[str, Array]:
        """Buffers that a run fills, by port."""
        ...

    def kept(self, name: str) -> Rows:
        """The rows of one of the outputs that were to be kept; of a port [B, Q, ...] those of the only slot."""
        ...

    def run(self) -> None:
        """One pass; returns when the outputs are filled."""
        ...


class Graph(Protocol):
    """A compiled graph over the caches of one pool."""

    def call(
        self,
        slot: int,
        *,
        outputs: tuple[str, ...],
        kept: tuple[str, ...] = (),
        given: tuple[str, ...] = (),
        **sizes: int,
    ) -> Call:
        """The graph for one cache slot at these axis sizes (Q=, S=, R=).

        Args:
            slot: whose caches.
            outputs: what comes to the host.
            kept: outputs that stay where the graph runs.
            given: inputs that are filled where it runs.
            sizes: of the open axes.
        """
        ...

    def close(self) -> None:
        """Frees the graph; calls made from it must not run afterwards."""
        ...


class Features(Protocol):
    """The target's features of committed rows that the head has not read yet, in order, where the graphs run."""

    @property
    def most(self) -> float:
        """How many may wait."""
        ...

    @property
    def given(self) -> tuple[str, ...]:
        """Inputs of a call that `feed` fills on a device, past the call's own arrays."""
        ...

    def __len__(self) -> int: ...

    def push(self, rows: Rows, path: Sequence[int]) -> None:
        """Takes the rows `path`, rising, of what a pass kept."""
        ...

    def truncate(self, count: int) -> None:
        """Forgets all but the first `count`."""
        ...

    def feed(self, call: Call, count: int) -> None:
        """Moves the first `count` into the first rows of a call's input `hidden`."""
        ...
