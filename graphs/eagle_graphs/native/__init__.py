"""The native CPU ops (domain `eagle.cpu`), a library that ONNX Runtime loads.

It is built where there is a C++ compiler when the package is installed, and is absent where there is none.
"""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from eagle_graphs.errors import EagleError

DOMAIN = "eagle.cpu"


def library_path() -> Path | None:
    """The built library, for `SessionOptions.register_custom_ops_library`; None where it was not built."""
    built = (Path(__file__).with_name(f"_eagle_ops{suffix}") for suffix in EXTENSION_SUFFIXES)  # of this Python
    return next((path for path in built if path.is_file()), None)


def library_problem() -> str | None:
    """Why the library cannot be used here; None where it can.

    Raises EagleError where EAGLE_CPU_ISA asks for what this CPU does not offer, or there is no ONNX Runtime.
    """
    path = library_path()
    if path is None:
        return "it was not built: install eagle-aot where there is a C++ compiler, or from a wheel"
    onnxruntime = import_onnxruntime()
    try:
        onnxruntime.SessionOptions().register_custom_ops_library(str(path))
    except Exception as error:  # ONNX Runtime's exceptions share no other base
        _, variable, wrong = str(error).partition("EAGLE_CPU_ISA")
        if variable:
            raise EagleError(variable + wrong) from None
        return str(error)
    return None


def import_onnxruntime() -> Any:
    """The onnxruntime module. Raises EagleError where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        raise EagleError("ONNX Runtime is not installed: pip install 'eagle-aot[cpu]'") from None
    return onnxruntime
