"""An export of a pair."""

from __future__ import annotations

from pathlib import Path

from tests.commands import Outcome, eagle_export


def export(target: object, head: object, out: Path, *more: object) -> Outcome:
    return eagle_export("--model", target, "--draft", head, "--out", out, *more)
