"""Opening a bundle: every file is there, whole and inside it, before anything of it is used.

Sizes are checked each time. Hashes are checked when a machine first sees the files and again when they
change, since weights can be tens of gigabytes; what was checked is remembered outside the bundle.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from eagle_graphs import EagleError, Manifest
from eagle_graphs.manifest import FILE_NAME, FileEntry, manifest_from_json
from eagle_runtime.user_cache import read_cache, write_cache

_VERIFIED = "verified.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An opened bundle."""

    directory: Path
    manifest: Manifest

    def path(self, name: str) -> Path:
        """Path of one of the manifest's files."""
        assert name in self.manifest.files
        return self.directory / name

    def text(self, name: str) -> str:
        """A text file of the bundle. Raises EagleError where it is not UTF-8."""
        try:
            return self.path(name).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise EagleError(f"{self.path(name)} cannot be read: {error}") from None


def open_bundle(directory: Path | str, *, verify: bool = False) -> Bundle:
    """The bundle in `directory`. verify: hash every file even if this machine has done so before.

    Raises EagleError, naming the file, where one is missing, changed or outside the directory.
    """
    directory = Path(directory)
    try:
        if not directory.is_dir():
            raise EagleError(f"there is no bundle at {directory}: make one with eagle-export --out {directory}")
        text = (directory / FILE_NAME).read_text("utf-8")
    except FileNotFoundError:
        raise EagleError(f"{directory} has no {FILE_NAME}: it is not a bundle, or its export did not finish") from None
    except (OSError, UnicodeDecodeError) as error:
        raise EagleError(f"{directory / FILE_NAME} cannot be read ({error}): export the bundle again") from None
    manifest = manifest_from_json(text)
    if not manifest.engines:
        raise EagleError(f"{directory / FILE_NAME} lists no engines, so nothing can run: export the bundle again")
    for name, entry in manifest.files.items():
        _check_file(directory, name, entry)
    _check_hashes(directory, manifest, verify=verify)
    return Bundle(directory=directory, manifest=manifest)


def _check_file(directory: Path, name: str, entry: FileEntry) -> None:
    path = directory / name
    try:
        inside = path.resolve().is_relative_to(directory.resolve())
        size = path.stat().st_size
    except (OSError, RuntimeError, ValueError):  # a loop of links; a name that no file can have
        raise EagleError(f"the bundle's file {path} is missing: copy the bundle again, or export it again") from None
    if not inside:
        raise EagleError(f"the bundle's file {path} is a link that leaves the bundle: copy the bundle with cp -rL")
    if not path.is_file() or size != entry.size:
        raise EagleError(
            f"the bundle's file {path} has {size} bytes, its manifest says {entry.size}: "
            "copy the bundle again, or export it again"
        )


def _check_hashes(directory: Path, manifest: Manifest, *, verify: bool) -> None:
    known = read_cache(_VERIFIED)
    fresh = {}
    for name, entry in manifest.files.items():
        path = directory / name
        status = path.stat()
        key = f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
        if verify or known.get(key) != entry.sha256:
            found = _sha256(path)
            if found != entry.sha256:
                raise EagleError(
                    f"the bundle's file {path} has changed since it was exported (SHA-256 {found[:12]}..., "
                    f"expected {entry.sha256[:12]}...): copy the bundle again, or export it again"
                )
            fresh[key] = found
    if fresh:
        write_cache(_VERIFIED, known | fresh)


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise EagleError(f"the bundle's file {path} cannot be read: {error.strerror}") from None
