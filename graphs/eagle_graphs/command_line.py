"""What every command does with a user's mistake, and when it is told to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from eagle_graphs.errors import EagleError


def run_command(app: Callable[[], object]) -> None:
    """Runs a command; an EagleError gives one line on standard error and status 2."""
    try:
        app()
    except EagleError as error:
        refuse(str(error))


def refuse(reason: str) -> NoReturn:
    """Ends the command with one line that says why, and status 2."""
    print(f"error: {' '.join(reason.split())}", file=sys.stderr)
    sys.exit(2)


def clean_up_when_terminated() -> None:
    """Has SIGTERM end the process as Ctrl-C does, through every `finally`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
