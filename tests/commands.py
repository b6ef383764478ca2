"""The commands, run inside the test's process: what they print and how they end."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

from transformers.utils.logging import disable_progress_bar

import eagle_exporter.cli
import eagle_graphs.tensorrt.cli
import eagle_runtime.cli
import tools.train.__main__


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A command that has ended."""

    status: int
    out: str
    err: str


def eagle_export(*arguments: object) -> Outcome:
    """Runs eagle-export."""
    disable_progress_bar()  # the command's own switch comes too late for a transformers that is imported already
    return _run(eagle_exporter.cli.main, "eagle-export", arguments, b"")


def eagle_build(*arguments: object) -> Outcome:
    """Runs eagle-build."""
    return _run(eagle_graphs.tensorrt.cli.main, "eagle-build", arguments, b"")


def eagle_run(*arguments: object, stdin: str | bytes = b"") -> Outcome:
    """Runs eagle-run."""
    return _run(eagle_runtime.cli.main, "eagle-run", arguments, stdin.encode() if isinstance(stdin, str) else stdin)


def train_tool(*arguments: object) -> Outcome:
    """Runs python -m tools.train."""
    disable_progress_bar()
    return _run(tools.train.__main__.main, "train", arguments, b"")


def assert_refused(outcome: Outcome, *words: str) -> None:
    """The user's mistake gave status 2 and one line on standard error that holds every one of `words`."""
    assert outcome.status == 2, outcome
    lines = [line for line in outcome.err.splitlines() if not re.match(r"done  \w", line)]  # steps that went well
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]
    assert outcome.out == ""


def assert_usage(outcome: Outcome, *words: str) -> None:
    """The option was refused by the parser, in its own words."""
    assert outcome.status == 2, outcome
    assert "Traceback" not in outcome.err
    for word in ("Usage:", *words):
        assert word in outcome.err


def _run(main: Callable[[], None], name: str, arguments: tuple[object, ...], stdin: bytes) -> Outcome:
    """Anything but an exit of its own, such as a traceback, is the test's failure."""
    out, err, given = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(stdin), "utf-8")
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", [name, *map(str, arguments)]),
        mock.patch.object(sys, "stdin", given),
    ):
        on_sigterm = signal.getsignal(signal.SIGTERM)  # a command puts its own, which is not for the test's process
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)
    return Outcome(status=status, out=out.getvalue(), err=err.getvalue())
