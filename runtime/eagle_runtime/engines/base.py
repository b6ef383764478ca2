"""What the loop needs of a compiled graph, whatever runs it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy.typing as npt

Array = npt.NDArray[Any]


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

    def run(self) -> None:
        """One pass; returns when the outputs are filled."""
        ...


class Graph(Protocol):
    """A compiled graph over the caches of one pool."""

    def call(self, slot: int, *, outputs: tuple[str, ...], **sizes: int) -> Call:
        """The graph for one cache slot at these axis sizes (Q=, S=, R=), giving the outputs named."""
        ...

    def close(self) -> None:
        """Frees the graph; calls made from it must not run afterwards."""
        ...
