"""ONNX Runtime on the CPU.

Every shape that a round uses gets its buffers and its binding once; a round then fills the inputs in
place and runs. A cache is bound at one address as past and present, so that nothing is copied.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_graphs import EagleError, GraphPorts, Port
from eagle_graphs.native import import_onnxruntime, library_path
from eagle_graphs.session_config import SESSION_CONFIG
from eagle_runtime.engines.base import Array
from eagle_runtime.kv_pool import KVPool

_KEPT_CALLS = 64
_BFLOAT16 = 16  # of onnx.TensorProto, since numpy has no such type


class OnnxRuntimeGraph:
    """One graph of a bundle. Raises EagleError where ONNX Runtime refuses it."""

    def __init__(self, path: Path, ports: GraphPorts, pool: KVPool, *, threads: int | None, native: bool) -> None:
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        options.log_severity_level = 3
        # Target and head run in turn, each with threads of its own. Left spinning after a run, the one's would
        # take the other's cores: measured on 2 cores, a verification of 8 rows then takes 47 ms, not 26.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        for name, value in SESSION_CONFIG.items():
            options.add_session_config_entry(name, value)
        if native:
            options.register_custom_ops_library(str(library_path()))
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no other base
            raise EagleError(f"ONNX Runtime {onnxruntime.__version__} cannot load {path.name}: {error}") from None
        check_ports(self._session, path, ports)
        self._ports, self._pool = ports, pool
        self._calls: dict[tuple[Any, ...], OnnxRuntimeCall] = {}

    def call(
        self,
        slot: int,
        *,
        outputs: tuple[str, ...],
        kept: tuple[str, ...] = (),
        given: tuple[str, ...] = (),
        **sizes: int,
    ) -> OnnxRuntimeCall:
        """See `Graph.call`. Calls are kept, so that a repeated shape costs nothing."""
        outputs += kept
        key = (slot, outputs, *sizes.items())
        found = self._calls.pop(key, None)
        if found is None:
            if len(self._calls) >= _KEPT_CALLS:
                self._calls.pop(next(iter(self._calls)))
            found = OnnxRuntimeCall(self._session, self._ports, self._pool, slot, outputs, {"B": 1, **sizes})
        self._calls[key] = found  # behind all others: the one that was used longest ago goes first
        return found

    def close(self) -> None:
        """See `Graph.close`."""
        self._calls.clear()
        self._session = None


def check_ports(session: Any, path: Path, ports: GraphPorts) -> None:
    """Raises EagleError where a session's inputs and outputs are not those that the manifest says."""
    for found, expected in (
        (session.get_inputs(), ports.inputs),
        (session.get_outputs(), ports.outputs),
    ):
        names = [value.name for value in found]
        if names != [port.name for port in expected]:
            raise EagleError(f"{path.name} has the ports {names[:8]}..., which are not those of its manifest")
        for value, port in zip(found, expected, strict=True):
            kind = value.type.removeprefix("tensor(").removesuffix(")")
            kind = {"float": "float32"}.get(kind, kind)
            fits = len(value.shape) == len(port.axes) and all(
                size == axis for size, axis in zip(value.shape, port.axes, strict=True) if isinstance(axis, int)
            )
            if kind != port.dtype or not fits:
                raise EagleError(
                    f"{path.name}: {port.name} is {kind} {value.shape}, its manifest says {port.dtype} "
                    f"{list(port.axes)}: export the bundle again"
                )


class OnnxRuntimeCall:
    """See `Call`."""

    def __init__(
        self,
        session: Any,
        ports: GraphPorts,
        pool: KVPool,
        slot: int,
        outputs: tuple[str, ...],
        sizes: dict[str, int],
    ) -> None:
        self._run, self._binding = session.run_with_iobinding, session.io_binding()
        past = pool.views(slot, "past")
        present = {name: past[shared] for name, shared in ports.cache_outputs.items()}
        self.inputs = {port.name: _array(port, sizes) for port in ports.inputs if port.name not in past}
        self.outputs = {port.name: _array(port, sizes) for port in ports.outputs if port.name in outputs}
        types = {port.name: element_type(port.dtype) for port in (*ports.inputs, *ports.outputs)}
        for name, array in (self.inputs | past).items():
            self._binding.bind_input(name, "cpu", 0, types[name], array.shape, array.ctypes.data)
        for name, array in (self.outputs | present).items():
            self._binding.bind_output(name, "cpu", 0, types[name], array.shape, array.ctypes.data)

    def kept(self, name: str) -> Array:
        """See `Call.kept`."""
        array = self.outputs[name]
        return array[0] if array.ndim == 3 else array

    def run(self) -> None:
        """See `Call.run`."""
        self._run(self._binding)


def element_type(dtype: str) -> Any:
    """An element type of `eagle_graphs.ports` as ONNX Runtime's bindings take it."""
    return _BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype).type


def _array(port: Port, sizes: dict[str, int]) -> Array:
    shape = [axis if isinstance(axis, int) else sizes[axis] for axis in port.axes]
    zeros: npt.NDArray[Any] = np.zeros(shape, np.dtype(port.dtype))
    return zeros
