"""Finding a model or a head: a local directory, a GGUF file, or a Hugging Face Hub id.

Only tensors are ever read from them: safetensors, GGUF, and a head's .bin files through torch's reader of weights,
which builds nothing but tensors. No remote code runs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_graphs import EagleError
from eagle_graphs.manifest import Source

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.bin")
"""Files that hold tensors: those of the first pattern that finds any."""
HEAD_PATTERNS = ["*.json", "*.safetensors", "*.bin"]
CONFIG_PATTERNS = ["config.json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's or a head's files."""

    name: str
    directory: Path
    gguf_file: str | None
    """File inside `directory` when the checkpoint is a GGUF file."""
    revision: str | None

    def source(self) -> Source:
        """Its identity: what the tensors and the config were read from, by content."""
        if self.gguf_file is not None:
            files = [self.directory / self.gguf_file]
        else:
            found = (sorted(self.directory.glob(pattern)) for pattern in WEIGHTS)
            files = [*next(filter(None, found), []), self.directory / "config.json"]
        return Source(name=self.name, revision=self.revision, files={f.name: sha256(f) for f in files})

    def config(self) -> dict[str, Any]:
        """config.json. Raises EagleError where it is missing or not a JSON object."""
        path = self.directory / "config.json"
        try:
            data = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise EagleError(f"{self.directory} has no config.json: name the directory of a checkpoint") from None
        except OSError as error:
            raise EagleError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise EagleError(f"{path} is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise EagleError(f"{path} holds {type(data).__name__}; expected an object")
        return data


def find_checkpoint(where: str, *, what: str, config_only: bool = False) -> Checkpoint:
    """The checkpoint at a path or Hub id. `what` ("target", "head") is for messages. Raises EagleError.

    config_only: of a Hub repository, fetch nothing but config.json.
    """
    if not where:
        raise EagleError(f"{what}: its name is empty; expected a checkpoint directory, a .gguf file or a Hub id")
    try:
        return _from_path(where, what=what) or _from_hub(where, what=what, config_only=config_only)
    except (OSError, RuntimeError) as error:  # RuntimeError: of expanduser, "~nobody"
        raise EagleError(f"{what}: {where[:200]} cannot be read: {getattr(error, 'strerror', error)}") from None


def _from_path(where: str, *, what: str) -> Checkpoint | None:
    """The checkpoint at a path; None where nothing is there."""
    path = Path(where).expanduser()
    if path.is_dir():
        return Checkpoint(name=path.resolve().name, directory=path, gguf_file=None, revision=None)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise EagleError(f"{what}: there is no file {where}")
        with path.open("rb") as file:
            magic = file.read(4)
        if magic != b"GGUF":
            raise EagleError(f"{what}: {where} is not a GGUF file (it begins with {magic!r})")
        return Checkpoint(name=path.stem, directory=path.parent, gguf_file=path.name, revision=None)
    if path.exists():
        raise EagleError(f"{what}: {where} is a file; expected a checkpoint directory, a .gguf file or a Hub id")
    return None


def _from_hub(repo: str, *, what: str, config_only: bool) -> Checkpoint:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError

    if repo.startswith((".", "/", "~")) or repo.count("/") > 1:
        raise EagleError(f"{what}: there is no directory or .gguf file {repo}")
    patterns = CONFIG_PATTERNS if config_only else HEAD_PATTERNS if what == "head" else PATTERNS
    try:
        directory = Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns))
    except HFValidationError:
        raise EagleError(f"{what}: {repo} is neither a directory, a .gguf file nor a Hub id") from None
    except Exception as error:  # its HTTP library, which changes between versions, has errors of its own
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise EagleError(
            f"{what}: {repo} is no local path and could not be fetched from the Hugging Face Hub ({reason}): "
            "check the name and the connection, or download it and name its directory"
        ) from None
    return Checkpoint(name=repo, directory=directory, gguf_file=None, revision=directory.name)


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
