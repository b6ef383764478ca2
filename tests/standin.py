"""A stand-in for TensorRT where there is no GPU: its Python interface, over ONNX Runtime and the portable graphs.

It holds the runtime to TensorRT's rules (one profile a context, the shapes that the profile froze, every tensor given
an address before a pass; an engine without weights runs nothing before all of its own are put in, by name), and
computes with the very ONNX that an engine is built from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir
import onnxruntime

_TYPES = {
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
}


STREAMS: dict[int, Callable[[Callable[[], object]], object]] = {0: lambda work: work()}
"""How each stream, by its handle, does what is put on it."""


class Severity(IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO = range(4)


class Logger:
    Severity = Severity

    def log(self, severity: Severity, message: str) -> None: ...


class Context:
    def __init__(self, session: Any, profiles: list[dict[str, tuple[int, ...]]]) -> None:
        self._session, self._profiles = session, profiles
        self._frozen: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self._frozen = self._profiles[index]
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert tuple(shape) == self._frozen[name], f"{name}: {shape} is not the profile's {self._frozen[name]}"
        self._shapes[name] = tuple(shape)
        return True

    def set_device_memory(self, address: int, size: int) -> None:
        assert address

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        STREAMS[stream](partial(self._execute, dict(self._addresses)))
        return True

    def _execute(self, addresses: dict[str, int]) -> None:
        sizes = {"B": 1}
        if "logit_rows" in self._shapes:  # else all its axes are fixed
            sizes |= {"Q": self._shapes["position_ids"][1], "R": self._shapes["logit_rows"][0]}
        feeds = {
            value.name: self._array(addresses[value.name], value.type, self._shapes[value.name])
            for value in self._session.get_inputs()
        }
        outputs = self._session.run(None, feeds)
        for value, array in zip(self._session.get_outputs(), outputs, strict=True):
            shape = [sizes.get(axis, axis) for axis in value.shape]
            assert list(array.shape) == shape
            self._array(addresses[value.name], value.type, tuple(shape))[...] = array

    def _array(self, address: int, kind: str, shape: tuple[int, ...]) -> np.ndarray:
        dtype = np.dtype(_TYPES[kind])
        size = int(np.prod(shape)) * dtype.itemsize
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)).view(dtype).reshape(shape)


def weight_names(path: Path) -> frozenset[str]:
    """The weights that an engine of a graph has."""
    return frozenset(onnx_ir.load(path).graph.initializers)


class Engine:
    def __init__(self, path: Path, profiles: list[dict[str, tuple[int, ...]]], *, stripped: bool = False) -> None:
        self._put_in(path)
        self._profiles = profiles
        self.refittable, self.has_context = stripped, False
        self.missing = weight_names(path) if stripped else frozenset()
        self._names = [value.name for value in (*self._session.get_inputs(), *self._session.get_outputs())]
        self.num_io_tensors, self.num_optimization_profiles = len(self._names), len(profiles)

    def _put_in(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # TensorScatter warns of the copy that TensorRT's rules spare
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def refit(self, path: Path) -> None:
        """Its graph, with the weights of `path`."""
        assert not self.has_context, "weights are put in before contexts are made"
        self._put_in(path)
        self.missing = frozenset()

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return 64 * (index + 1)

    def create_execution_context(self, strategy: str) -> Context:
        assert strategy == "user managed"
        assert not self.missing, "an engine without weights runs nothing"
        self.has_context = True
        return Context(self._session, self._profiles)


class Refitter:
    def __init__(self, engine: Engine, logger: Logger) -> None:
        assert engine.refittable, "the binding gives no refitter for such an engine"
        self.engine, self.given = engine, None

    def get_missing_weights(self) -> list[str]:
        return sorted(self.engine.missing if self.given is None else self.engine.missing - weight_names(self.given))

    def refit_cuda_engine(self) -> bool:
        if self.get_missing_weights() or self.given is None:
            return False
        self.engine.refit(self.given)
        return True


class OnnxParserRefitter:
    def __init__(self, refitter: Refitter, logger: Logger) -> None:
        self._refitter, self._errors = refitter, []

    def refit_from_file(self, path: str) -> bool:
        try:
            self._refitter.given = Path(path)
            missing = len(self._refitter.get_missing_weights())
        except Exception as error:
            self._refitter.given = None
            self._errors.append(f"Failed to parse the ONNX model: {error}")
            return False
        if missing:
            self._errors.append(f"Only successfully refitted some weights,\n{missing} are left")
        return not missing

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> Any:
        return SimpleNamespace(desc=lambda: self._errors[index])


def tensorrt_standin(
    engines: dict[bytes, tuple[Path, list[dict[str, tuple[int, ...]]]]], *, stripped: Collection[bytes] = ()
) -> Any:
    """The module.

    engines: for the contents of an engine file, the ONNX behind it and its profiles' input shapes.
    stripped: those that were built without weights.
    """

    class Runtime:
        def __init__(self, logger: Logger) -> None:
            self._logger = logger

        def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
            if data not in engines:
                self._logger.log(Severity.ERROR, "the magic tag is\n another one")
                return None
            return Engine(*engines[data], stripped=data in stripped)

    return SimpleNamespace(
        __name__="standin",
        __version__="0",
        ILogger=Logger,
        Runtime=Runtime,
        Refitter=Refitter,
        OnnxParserRefitter=OnnxParserRefitter,
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
    )
