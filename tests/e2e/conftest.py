"""A tiny pair to spoil, and a place that nothing may be left in."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Where to export to; afterwards the directory above must be as empty as before."""
    place = tmp_path / "out"
    place.mkdir()
    yield place / "bundle"
    assert list(place.iterdir()) == []


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny_target, tmp_path / "target"))


@pytest.fixture
def head(tiny_head: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(tiny_head, tmp_path / "head"))
