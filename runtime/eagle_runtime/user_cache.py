"""Small things that the runtime remembers of bundles, for this user and outside them, since their files are hashed."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_KEPT = 512


def read_cache(name: str) -> dict[str, Any]:
    """The entries of a cache; none where it was never written, or was damaged."""
    try:
        data = json.loads(_path(name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def write_cache(name: str, entries: Mapping[str, Any]) -> None:
    """Replaces a cache's entries, of which the last ones are kept. Best effort: a read-only system forgets."""
    path = _path(name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({key: entries[key] for key in list(entries)[-_KEPT:]}, file)
        os.replace(file.name, path)


def _path(name: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "eagle-aot" / name
