"""The progress of a build in the terminal: a bar for each phase that is under way, below its parent's."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class BuildProgress:
    """See `build.Progress`; shown while the context is entered."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._depths: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """See `build.Progress`."""
        depth = self._depths.get(parent, 0) + 1 if parent else 0
        self._depths[phase] = depth
        self._tasks[phase] = self._bars.add_task("  " * depth + phase, total=steps)

    def step(self, phase: str, done: int) -> None:
        """See `build.Progress`."""
        if phase in self._tasks:
            self._bars.update(self._tasks[phase], completed=done)

    def finish(self, phase: str) -> None:
        """See `build.Progress`."""
        if phase in self._tasks:
            self._bars.remove_task(self._tasks.pop(phase))
