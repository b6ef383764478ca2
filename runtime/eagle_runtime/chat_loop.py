"""The interactive chat of eagle-run: history kept, the cache reused from turn to turn."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from rich.console import Console

from eagle_graphs import EagleError
from eagle_runtime.answer import StreamOptions
from eagle_runtime.generate import Round
from eagle_runtime.session import Session
from eagle_runtime.show_tree import draw_round

BANNER = "Type a message; /new starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer."


@contextlib.contextmanager
def ctrl_c_cancels(session: Session) -> Iterator[None]:
    """Within it Ctrl-C ends the answer under way, between two rounds, and not the program."""

    def cancel(_signal: int, _frame: FrameType | None) -> None:
        session.cancel()

    previous = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def chat(session: Session, console: Console, options: StreamOptions, *, trees: bool) -> None:
    """Reads messages and streams answers until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its history and editing
    console.print(BANNER, style="dim")
    messages: list[dict[str, str]] = []
    while (line := _read_line()) is not None:
        if line == "/exit":
            return
        if line == "/new":
            messages = []
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        rounds = RoundPrinter(session, console) if trees else None
        try:
            with ctrl_c_cancels(session):
                asked: StreamOptions = {**options, "messages": messages, "on_round": rounds}
                for piece in session.stream(**asked):
                    print(piece, end="", flush=True)
        except EagleError as error:
            messages.pop()
            print(f"error: {error} (/new starts over)", file=sys.stderr)
            continue
        print()
        assert session.last is not None
        messages.append({"role": "assistant", "content": session.last.text})
        stats = session.stats
        console.print(
            f"{session.last.finish_reason}; {stats.tokens} tokens, {stats.tokens_per_s:.1f} tok/s, "
            f"accepted length {stats.accepted_length:.2f}, {stats.reused_tokens} of {stats.prompt_tokens} "
            f"prompt tokens reused; {stats.line()}",
            style="dim",
            highlight=False,
        )


class RoundPrinter:
    """Draws each round's tree as it is verified."""

    def __init__(self, session: Session, console: Console) -> None:
        self._session, self._console, self._rounds = session, console, 0

    def __call__(self, done: Round) -> None:
        """Draws one round."""
        self._rounds += 1
        self._console.print(draw_round(self._rounds, done, self._session.piece))


def _read_line() -> str | None:
    """The next message, stripped; None at the end of input."""
    if sys.stdin is None:
        return None
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    except UnicodeDecodeError:
        raise EagleError("standard input is not UTF-8 text") from None
