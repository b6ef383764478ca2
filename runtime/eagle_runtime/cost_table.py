"""Measured costs, kept per machine and bundle in the user's cache."""

from __future__ import annotations

import hashlib
import math
import os
import platform
from dataclasses import dataclass
from typing import Any

from eagle_graphs.manifest import Engine
from eagle_runtime.bundle import Bundle
from eagle_runtime.user_cache import read_cache, write_cache

_CACHE = "costs.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Seconds of a step in a context of some rows."""

    base: float
    slope: float
    """Seconds for each row of the context."""

    def at(self, rows: int) -> float:
        """Seconds at `rows`."""
        return self.base + self.slope * rows

    def times(self, factor: float) -> Line:
        """The line of a step that takes `factor` times as long."""
        return Line(base=self.base * factor, slope=self.slope * factor)


Table = dict[str, Line]
"""Steps by name: "verify 8" is a round of 8 nodes but for its drafting, "draft 8" the drafting of that profile."""


def table_key(bundle: Bundle, engine: Engine, threads: int | None, drafting: str) -> str:
    """What the costs depend on: the engine and its files, the trees, how they are drafted, the threads, the machine."""
    place = engine.target.partition("/")[0]
    files = {name: entry.sha256 for name, entry in bundle.manifest.files.items() if name.partition("/")[0] == place}
    parts = (
        engine,
        sorted(files.items()),
        bundle.manifest.profiles,
        threads,
        drafting,
        platform.node(),
        os.cpu_count(),
    )
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest()


def load_table(key: str) -> Table:
    """What was measured under `key`; empty where nothing was, or it cannot be read."""
    entry = read_cache(_CACHE).get(key)
    if not isinstance(entry, dict) or not all(map(_is_line, entry.values())):
        return {}
    return {step: Line(base=base, slope=slope) for step, (base, slope) in entry.items()}


def save_table(key: str, table: Table) -> None:
    """Keeps `table`, best effort."""
    entries = {other: entry for other, entry in read_cache(_CACHE).items() if other != key}
    write_cache(_CACHE, entries | {key: {step: [line.base, line.slope] for step, line in table.items()}})


def _is_line(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(type(number) is float for number in value):
        return False
    return math.isfinite(sum(value)) and value[0] > 0 and value[1] >= 0
