"""The native CPU ops (domain `eagle.cpu`), a library that ONNX Runtime loads.

It is built where there is a C++ compiler when the package is installed, and is absent where there is none.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

DOMAIN = "eagle.cpu"


def library_path() -> Path | None:
    """The built library, for `SessionOptions.register_custom_ops_library`; None where it was not built."""
    built = (Path(__file__).with_name(f"_eagle_ops{suffix}") for suffix in EXTENSION_SUFFIXES)  # of this Python
    return next((path for path in built if path.is_file()), None)
