"""Writing a bundle: beside its final name, renamed into place when it is complete.

All graphs name their weights in one file, where equal tensors stand once: the embedding serves the
target's embedding and LM head and the draft head alike.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from eagle_exporter.checkpoint import sha256
from eagle_graphs import EagleError
from eagle_graphs.manifest import FILE_NAME, FileEntry

WEIGHTS = "weights.bin"
_ALIGNMENT = 4096  # of a tensor in the file: a page, so that it can be mapped
_SMALLEST_EXTERNAL = 1024  # bytes; smaller tensors stay inside the graph


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `directory` when the block ends well and vanishes when it does not.

    Raises EagleError where `directory` exists and is no bundle, cannot be made, or has no room on its disk; a bundle
    there is replaced at the end.
    """
    directory = Path(os.path.abspath(directory))  # so that "." has a name and a parent
    try:
        check_replaceable(directory)
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
    except OSError as error:
        raise EagleError(f"--out {directory} cannot be written ({error.strerror}): name another directory") from None
    try:
        yield staging
        staging.chmod(0o755)
        if directory.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}.old-", dir=directory.parent))
            os.rename(directory, old / directory.name)
            os.rename(staging, directory)
            shutil.rmtree(old)
        else:
            os.rename(staging, directory)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise EagleError(f"no room for {directory} ({error.strerror}): free some, or name another --out") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_replaceable(directory: Path) -> None:
    """Raises EagleError where `directory` holds something other than a bundle."""
    if not os.path.lexists(directory):
        return
    if not directory.is_dir() or (any(directory.iterdir()) and not _is_bundle(directory)):
        raise EagleError(f"--out {directory} exists and is not a bundle: name another directory, or remove it")
    if os.path.ismount(directory):
        raise EagleError(f"--out {directory} is a mount point, which cannot be replaced: name a directory inside it")


def _is_bundle(directory: Path) -> bool:
    """Whether its manifest is one of ours: other programs keep a manifest.json too."""
    try:
        data = json.loads((directory / FILE_NAME).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and data.keys() >= {"schema", "files", "engines"}


def file_entries(directory: Path) -> dict[str, FileEntry]:
    """Size and hash of every file below `directory` but the manifest."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != FILE_NAME)
    return {
        path.relative_to(directory).as_posix(): FileEntry(size=path.stat().st_size, sha256=sha256(path))
        for path in files
    }


@dataclass(frozen=True, slots=True)
class _Place:
    offset: int
    length: int


class WeightFile:
    """The bundle's weights: tensors appended, equal ones once."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / WEIGHTS
        self._places: dict[tuple[str, str], _Place] = {}
        self._end = 0

    def move_out(self, model: ir.Model) -> None:
        """Writes the model's larger initializers to the file and leaves references in their place."""
        with self.path.open("ab") as file:
            for value in _large_initializers(model.graph.initializers.values()):
                tensor = value.const_value
                assert tensor is not None
                data = tensor.tobytes()
                key = (tensor.dtype.name, hashlib.sha256(data).hexdigest())
                place = self._places.get(key)
                if place is None:
                    start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
                    file.write(b"\0" * (start - self._end))
                    file.write(data)
                    self._end = start + len(data)
                    place = self._places[key] = _Place(start, len(data))
                value.const_value = ir.ExternalTensor(
                    WEIGHTS,
                    place.offset,
                    place.length,
                    tensor.dtype,
                    shape=ir.Shape(tensor.shape.numpy()),
                    name=value.name or "",
                    base_dir=self.path.parent,
                )


def _large_initializers(values: Iterable[ir.Value]) -> list[ir.Value]:
    return [v for v in values if v.const_value is not None and v.const_value.nbytes >= _SMALLEST_EXTERNAL]
