"""Progress bars that count tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} tokens/s" if task.speed else "")


@contextmanager
def token_progress(console: Console, what: str, total: int, before: int = 0) -> Iterator[Callable[[int], None]]:
    """A bar over `total` tokens, `before` of which are there. Yields a function that takes the tokens so far."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, speed_estimate_period=120) as progress:
        task = progress.add_task(what, total=total, completed=before)
        yield lambda tokens: progress.update(task, completed=tokens)
