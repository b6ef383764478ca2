"""The native CPU ops (domain `eagle.cpu`), a library that ONNX Runtime loads.

It is built where there is a C++ compiler when the package is installed, and is absent where there is none.
"""

from __future__ import annotations

from pathlib import Path

DOMAIN = "eagle.cpu"


def library_path() -> Path | None:
    """The built library, for `SessionOptions.register_custom_ops_library`; None where it was not built."""
    return next(iter(sorted(Path(__file__).parent.glob("_eagle_ops*.so"))), None)
