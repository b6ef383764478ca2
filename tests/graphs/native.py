"""The native ops under test."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnxruntime as ort

from eagle_graphs.native import library_path


def library() -> Path:
    path = library_path()
    assert path is not None, "the native ops are not built: install the package again, with a C++ compiler (g++)"
    return path


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Sessions made inside run the kernels of `name`."""
    before = os.environ.get("EAGLE_CPU_ISA")
    os.environ["EAGLE_CPU_ISA"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["EAGLE_CPU_ISA"]
        else:
            os.environ["EAGLE_CPU_ISA"] = before


def session_options(threads: int = 1) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(library()))
    return options


def offered_instruction_sets() -> list[str]:
    """Those of this CPU, as the library names them."""
    with instruction_set("?"):
        try:
            session_options()
        except Exception as error:
            found = re.search(r"this CPU offers ([\w, ]+):", str(error))
            assert found, error
            return found[1].split(", ")
    raise AssertionError("the instruction set '?' was taken")
