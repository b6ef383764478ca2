"""Reading a head's tensors: safetensors, sharded or not, or a .bin file that holds nothing but tensors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eagle_exporter.checkpoint import WEIGHTS
from eagle_exporter.heads.spec import Tensors
from eagle_graphs import EagleError


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the tensors: safetensors if there are any, else .bin files.

    Raises EagleError where there are none, or where an index names one that is missing.
    """
    for pattern in WEIGHTS:
        if indexes := sorted(directory.glob(f"{pattern}.index.json")):
            return _indexed_files(indexes[0])
        if files := sorted(directory.glob(pattern)):
            return files
    raise EagleError(f"head: {directory} has no .safetensors file, nor a .bin file")


def read_tensors(directory: Path) -> Tensors:
    """All tensors of a checkpoint. Raises EagleError where a file is damaged or holds anything but tensors."""
    tensors: Tensors = {}
    for path in weight_files(directory):
        found = _from_bin(path) if path.suffix == ".bin" else _from_safetensors(path)
        if twice := sorted(found.keys() & tensors.keys()):
            raise EagleError(f"head: {twice[0]} is in {path.name} and in another file of {directory}: remove one")
        tensors |= found
    return tensors


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise EagleError(f"head: {index} is not an index of weights: download it again") from None
    for path in files:
        if path.parent != index.parent or not path.is_file():
            raise EagleError(f"head: {index.name} names {path.name}, which is missing: download it again")
    return files


def _from_safetensors(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise EagleError(f"head: {path} cannot be read ({error}): download it again") from None


def _from_bin(path: Path) -> Tensors:
    """Through torch's unpickler for weights, which builds tensors and plain containers and runs nothing."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError):
        raise EagleError(
            f"head: {path} is damaged, or holds more than tensors, which is not loaded: convert it to safetensors"
        ) from None
    if not isinstance(data, dict) or not all(isinstance(value, torch.Tensor) for value in data.values()):
        raise EagleError(f"head: {path} holds something other than named tensors: convert it to safetensors")
    return {str(name): tensor for name, tensor in data.items()}
