"""The two libraries, which share one API, and what each builds for which GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal

from eagle_graphs.errors import EagleError

Backend = Literal["tensorrt-rtx", "tensorrt"]
Attention = Literal["native", "plugin"]

_MODULES: dict[Backend, tuple[str, str]] = {
    "tensorrt-rtx": ("tensorrt_rtx", "pip install 'eagle-aot[tensorrt-rtx]'"),
    "tensorrt": ("tensorrt", "install TensorRT from NVIDIA with its Python package"),
}
LEAST_ARCHITECTURE = {"fp16": 75, "bf16": 80, "fp8": 89, "int8": 80, "int4": 80}
"""The oldest compute capability that TensorRT-RTX has kernels for, by precision."""


def import_tensorrt(backend: Backend) -> Any:
    """The library's module. Raises EagleError where it is not installed."""
    module, install = _MODULES[backend]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise EagleError(
            f"--backend {backend} needs its library, which is not installed ({error}): {install}"
        ) from None


def choose_architectures(backend: Backend, asked: Sequence[str], precision: str) -> tuple[str, ...]:
    """The GPUs to build for, as ("sm80", "sm89"): those asked for, or all that it has and `precision` runs on.

    None for TensorRT, which builds for the GPU at hand. Raises EagleError where a GPU cannot be built for.
    """
    if backend == "tensorrt":
        if asked:
            raise EagleError(
                f"--gpu {','.join(asked)} is for --backend tensorrt-rtx and --attention plugin; TensorRT builds for "
                "the GPU that it runs on: leave it out, and run eagle-build where the engine is to run"
            )
        return ()
    capabilities = import_tensorrt(backend).ComputeCapability.__members__
    offered = sorted((name.lower() for name in capabilities if name.startswith("SM")), key=_number)
    least = LEAST_ARCHITECTURE[precision]
    for name in asked:
        if name not in offered:
            raise EagleError(f"--gpu names {name!r}; TensorRT-RTX builds for {', '.join(offered)}")
        if _number(name) < least:
            raise EagleError(
                f"--precision {precision} does not run on {name}; it needs sm{least} or later: leave {name} out, or "
                "choose fp16"
            )
    return tuple(asked) or tuple(name for name in offered if _number(name) >= max(least, 80))


def _number(architecture: str) -> int:
    return int(architecture.removeprefix("sm"))


def check_attention(backend: Backend, attention: Attention) -> None:
    """Raises EagleError where the plugin's attention is asked for and cannot be built in."""
    if attention == "native":
        return
    if backend == "tensorrt-rtx":
        raise EagleError(
            "--attention plugin is not for --backend tensorrt-rtx, whose library takes no plugins of this kind: use "
            "--attention native"
        )
    if missing := [name for name in ("triton", "onnx_ir") if find_spec(name) is None]:
        raise EagleError(
            f"--attention plugin compiles its kernels where an engine is built, and needs {' and '.join(missing)}, "
            "which is not installed: pip install 'eagle-aot[plugin]', or use --attention native"
        )
