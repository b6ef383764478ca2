"""The GPU that plugins are compiled for: TensorRT builds an engine on the machine that runs it, so the one at hand."""

from __future__ import annotations

import re
from dataclasses import dataclass

from eagle_graphs.errors import EagleError

USUAL_MULTIPROCESSORS = 108
"""Assumed of a GPU that is only named. They say how finely a long cache is split: its time, and at most last bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What the attention's kernels must know of a GPU."""

    capability: int
    """Ten times its compute capability: 89 for 8.9."""
    multiprocessors: int

    @property
    def architecture(self) -> str:
        """As sm89."""
        return f"sm{self.capability}"


def choose_gpu(asked: str | None) -> Gpu:
    """The GPU at hand; where nothing can be learnt of it, the one that is asked for, as "sm89".

    Raises EagleError where neither is known, or both and they differ.
    """
    found = gpu_at_hand()
    if asked is not None and (named := re.fullmatch(r"sm(\d{2,3})", asked)) is None:
        raise EagleError(f"--gpu is {asked!r}; expected the one GPU that the engine is built on, as sm89")
    if found is None and asked is None:
        raise EagleError(
            "--attention plugin compiles its kernels for the GPU that the engine is built on, of which nothing can be "
            "learnt here: install cuda-bindings (pip install cuda-bindings) where the GPU is, or name it with --gpu, "
            "as --gpu sm89"
        )
    if found is None:
        assert named is not None
        return Gpu(capability=int(named[1]), multiprocessors=USUAL_MULTIPROCESSORS)
    if asked not in (None, found.architecture):
        raise EagleError(
            f"--gpu is {asked}; TensorRT builds for the GPU that it runs on, here {found.architecture}: leave it out"
        )
    return found


def gpu_at_hand() -> Gpu | None:
    """The first GPU, as cuda-bindings sees it; None where that is not installed or finds none."""
    try:
        from cuda.bindings import runtime

        attributes = runtime.cudaDeviceAttr
        major, minor, multiprocessors = (
            _attribute(runtime, attribute)
            for attribute in (
                attributes.cudaDevAttrComputeCapabilityMajor,
                attributes.cudaDevAttrComputeCapabilityMinor,
                attributes.cudaDevAttrMultiProcessorCount,
            )
        )
    except (ImportError, RuntimeError):  # the second: CUDA's library is looked for at the first call
        return None
    return Gpu(capability=10 * major + minor, multiprocessors=multiprocessors)


def _attribute(runtime: object, attribute: object) -> int:
    error, value = runtime.cudaDeviceGetAttribute(attribute, 0)  # type: ignore[attr-defined]
    if int(error):
        raise RuntimeError(f"CUDA answers {error}")
    return int(value)
