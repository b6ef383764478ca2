"""A mock of classic TensorRT, which cannot be installed here: `tensorrt.plugin`, and of `tensorrt` what a build calls.

It keeps to the documentation: what decorated functions are called with, and a kernel's arguments, which are its inputs,
then integers, then its outputs. Kernels run in Triton's interpreter, and a graph with plugins in onnx's reference
evaluator. That TensorRT's parser hands attributes over as arrays of 32 bits was seen of TensorRT-RTX's.
"""

from __future__ import annotations

import inspect
import sys
import typing
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from eagle_graphs.plugin import compile as plugin_compile

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "int64": torch.int64}
NOT_FIELDS = ("plugin_namespace", "plugin_version")


@dataclass(frozen=True)
class MockDesc:
    """A tensor's description; its symbolic shape is its shape."""

    shape: tuple[int, ...]
    dtype: str
    of: MockDesc | None = None

    @property
    def shape_expr(self) -> tuple[int, ...]:
        return self.shape

    def aliased(self) -> MockDesc:
        return replace(self, of=self)


@dataclass(frozen=True)
class MockCombination:
    io_types: str
    layouts: str
    tactics: list[int] | None = None


class MockPlugins(ModuleType):
    """`tensorrt.plugin`: what was registered, and how a layer of it is made and run."""

    TensorDesc, AutoTuneCombination = MockDesc, MockCombination
    KernelLaunchParams = type("Params", (SimpleNamespace,), {})
    SymInt32 = int
    SymIntExprs = type("SymIntExprs", (list,), {"from_tuple": classmethod(lambda cls, items: cls(items))})

    def __init__(self) -> None:
        super().__init__("tensorrt.plugin")
        self.described: dict[str, Any] = {}
        self.choices: dict[str, Any] = {}
        self.implemented: dict[str, Any] = {}
        self.asked: list[Any] = []
        """What was asked of the compiler, instead of its being compiled: kernel, types, constants and capability."""

    def register(self, name: str) -> Any:
        return lambda function: self.described.setdefault(name, function)

    def autotune(self, name: str) -> Any:
        return lambda function: self.choices.setdefault(name, function)

    def aot_impl(self, name: str) -> Any:
        return lambda function: self.implemented.setdefault(name, function)

    @staticmethod
    def cdiv(number: int, by: int) -> int:
        return -(-number // by)

    @staticmethod
    def from_shape_expr(shape: tuple[int, ...], dtype: str) -> MockDesc:
        return MockDesc(shape, dtype)

    def fields(self, node: onnx.NodeProto) -> dict[str, np.ndarray]:
        """A node's attributes as the plugin's creator gets them: arrays of one number, of the declared type."""
        described = self.described[f"{node.domain}::{node.op_type}"]
        declared = {
            name: typing.get_args(typing.get_args(parameter.annotation)[1])[0]
            for name, parameter in inspect.signature(described).parameters.items()
            if parameter.annotation is not MockDesc
        }
        given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        given = {name: value for name, value in given.items() if name not in NOT_FIELDS}
        assert set(given) == set(declared), f"{node.name} has {sorted(given)}, its plugin takes {sorted(declared)}"
        arrays = {name: np.array([v], np.float32 if isinstance(v, float) else np.int32) for name, v in given.items()}
        return {name: arrays[name].astype(kind) for name, kind in declared.items()}

    def run(self, node: onnx.NodeProto, data: list[torch.Tensor], tactic: int) -> list[torch.Tensor]:
        """A layer's outputs, with the `tactic`-th of its tactics. An output that is an input is written in place."""
        name, attributes = f"{node.domain}::{node.op_type}", self.fields(node)
        inputs = [MockDesc(tuple(each.shape), str(each.dtype).removeprefix("torch.")) for each in data]
        described = self.described[name](*inputs, **attributes)
        outputs = described if isinstance(described, tuple) else (described,)
        choose, implement = self.choices[name], self.implemented[name]
        wanted = {key: value for key, value in attributes.items() if key in inspect.signature(choose).parameters}
        (choice,) = choose(*inputs, **wanted, outputs=outputs)
        assert len(choice.io_types.split(",")) == len(inputs) + len(outputs)
        chosen = choice.tactics[tactic] if choice.tactics else 0
        schema = inspect.signature(self.described[name]).parameters
        assert list(inspect.signature(implement).parameters) == [*schema, "outputs", "tactic"]
        _, _, launch, scalars = implement(*inputs, *attributes.values(), outputs, chosen)
        results = [
            torch.full(out.shape, float("nan"), dtype=DTYPES[out.dtype])
            if out.of is None
            else next(each for each, desc in zip(data, inputs, strict=True) if desc is out.of)
            for out in outputs
        ]
        self._launch(launch, [*data, *scalars, *results])
        return results

    def _launch(self, launch: Any, arguments: list[Any]) -> None:
        kernel, types, constants, _ = self.asked[-1]
        left = iter(arguments)
        given = [
            constants[name] if name in constants else next(left) if types[name] else None for name in kernel.arg_names
        ]
        assert next(left, None) is None, "more arguments than the kernel has parameters"
        kernel[(launch.grid_x, launch.grid_y, launch.grid_z)](*given)


class GatherElements(OpRun):
    """onnx's own refuses indices of fewer rows than the data has, which its definition allows."""

    op_domain = ""

    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        sizes = [slice(None) if i == axis % data.ndim else slice(size) for i, size in enumerate(indices.shape)]
        return (np.take_along_axis(data[tuple(sizes)], indices, axis),)


class Evaluator:
    """A graph with plugins: its other nodes in onnx's reference evaluator. Caches are read, not written."""

    def __init__(self, plugins: MockPlugins, graph: bytes | Path, tactic: int = 0) -> None:
        def run(self: OpRun, *arrays: np.ndarray, **attributes: object) -> tuple[np.ndarray, ...]:
            data = [torch.tensor(np.ascontiguousarray(array)) for array in arrays]
            return tuple(result.numpy() for result in plugins.run(self.onnx_node, data, tactic))

        ops = [type(name, (OpRun,), {"op_domain": "eagle", "_run": run}) for name in ("attend", "combine")]
        ops.append(GatherElements)
        model = onnx.load(graph) if isinstance(graph, Path) else onnx.load_from_string(graph)
        self._names = [output.name for output in model.graph.output]
        self._model = ReferenceEvaluator(model, new_ops=ops)

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self._names, self._model.run(None, feeds), strict=True))


class MockTensorRT(ModuleType):
    """`tensorrt`. `built` holds what was built: networks and their configurations."""

    __version__ = "10.0-mock"
    float32, bfloat16 = "float32", "bfloat16"

    NetworkDefinitionCreationFlag = IntEnum("Flag", {"STRONGLY_TYPED": 1, "PREFER_AOT_PYTHON_PLUGINS": 2})
    LayerType = IntEnum("Type", "OTHER ATTENTION_INPUT MATRIX_MULTIPLY PLUGIN_V3 SHUFFLE UNSQUEEZE DEQUANTIZE")
    ProfilingVerbosity = IntEnum("Verbosity", "DETAILED")
    PreviewFeature = IntEnum("Feature", "ALIASED_PLUGIN_IO_10_03")
    BuilderFlag = IntEnum("BuilderFlag", "STRIP_PLAN REFIT_IDENTICAL")

    class ILogger:
        Severity = IntEnum("Severity", {"ERROR": 1, "INFO": 3})

    class IProgressMonitor:
        pass

    def __init__(self, plugins: MockPlugins) -> None:
        super().__init__("tensorrt")
        self.plugin = plugins
        self.built: list[tuple[MockNetwork, MockConfig]] = []

    def Builder(self, logger: Any) -> Any:
        return MockBuilder(self, logger)

    def OnnxParser(self, network: MockNetwork, logger: Any) -> Any:
        return MockParser(self, network)


class MockNetwork:
    def __init__(self, flags: int) -> None:
        self.flags, self.model, self.layers = flags, onnx.ModelProto(), list[Any]()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_layer(self, index: int) -> Any:
        return self.layers[index]

    def plugins(self) -> dict[str, onnx.NodeProto]:
        return {node.name: node for node in self.model.graph.node if node.domain == "eagle"}


class MockParser:
    def __init__(self, trt: MockTensorRT, network: MockNetwork) -> None:
        self._trt, self._network, self.num_errors = trt, network, 0

    def parse(self, data: bytes, path: str) -> bool:
        network = self._network
        network.model = onnx.load_from_string(data)
        for tensor in network.model.graph.initializer:
            for entry in tensor.external_data:
                assert entry.key != "location" or Path(path).with_name(entry.value).is_file()
        kinds = self._trt.LayerType
        for node in network.model.graph.node:
            if node.domain == "eagle":
                self._trt.plugin.fields(node)
            kind = (
                kinds.PLUGIN_V3 if node.domain else kinds.MATRIX_MULTIPLY if node.op_type == "MatMul" else kinds.OTHER
            )
            inputs, outputs = ([SimpleNamespace(name=name) for name in names] for names in (node.input, node.output))
            network.layers.append(
                SimpleNamespace(
                    name=node.name,
                    type=kind,
                    num_outputs=len(outputs),
                    get_input=inputs.__getitem__,
                    get_output=outputs.__getitem__,
                )
            )
        return True


class MockConfig(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(flags=set(), features=set(), profiles=[])

    def set_flag(self, flag: int) -> None:
        self.flags.add(flag)

    def set_preview_feature(self, feature: int, enable: bool) -> None:
        assert enable
        self.features.add(feature)

    def add_optimization_profile(self, profile: Any) -> None:
        self.profiles.append(profile.shapes)


class MockBuilder:
    def __init__(self, trt: MockTensorRT, logger: Any) -> None:
        self._trt, self._logger = trt, logger

    def create_network(self, flags: int) -> MockNetwork:
        return MockNetwork(flags)

    def create_builder_config(self) -> MockConfig:
        return MockConfig()

    def create_optimization_profile(self) -> Any:
        shapes: dict[str, tuple[int, ...]] = {}
        return SimpleNamespace(shapes=shapes, set_shape=lambda name, *three: shapes.__setitem__(name, three[1]))

    def build_serialized_network(self, network: MockNetwork, config: MockConfig) -> bytes | None:
        trt, severity = self._trt, self._trt.ILogger.Severity
        if network.plugins() and trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03 not in config.features:
            self._logger.log(severity.ERROR, "Aliased I/O used by plugin, but ALIASED_PLUGIN_IO_10_03 is not enabled")
            return None
        trt.built.append((network, config))
        self._logger.log(severity.INFO, described(network, config))
        return network.model.SerializeToString()


def described(network: MockNetwork, config: MockConfig) -> str:
    """What the builder says of an engine, in the form that TensorRT-RTX's was seen to have."""
    lines = ["Layers:"]
    for index, _ in enumerate(config.profiles):
        for node in network.model.graph.node:
            lines.append(
                f"Name: {node.name} [profile {index}], LayerType: mock, Inputs: [ {{ Datatype: Half }}], "
                f"Outputs: [], Metadata: [ONNX Layer: {node.name}]"
            )
    lines.append("I/O Tensors:")
    for value in network.model.graph.input:
        shapes = (",".join(map(str, profile[value.name])) for profile in config.profiles)
        ranges = ", ".join(f"{{ MinShape: [{s}], OptShape: [{s}], MaxShape: [{s}] }}" for s in shapes)
        lines.append(f" Name: {value.name}, IOMode: Input, DataType: Half, x ProfileInfo: [ {ranges}]")
    for value in network.model.graph.output:
        lines.append(f" Name: {value.name}, IOMode: Output, DataType: Float, x ProfileInfo: [ ]")
    return "\n".join(lines)


def install(monkeypatch: pytest.MonkeyPatch) -> MockTensorRT:
    """Puts the mock in TensorRT's place, and a list of what is asked of it in the place of Triton's compiler."""
    plugins = MockPlugins()
    tensorrt = MockTensorRT(plugins)

    def ask(kernel: Any, types: Any, constants: Any, options: Any, capability: int) -> Any:
        plugins.asked.append((kernel, types, constants, capability))
        return plugin_compile.CompiledKernel(
            name="kernel", ptx="ptx", cubin=b"", threads=128, shared=1, registers=1, spilled=0
        )

    monkeypatch.setattr(plugin_compile, "_compile", ask)
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", plugins)
    monkeypatch.delitem(sys.modules, "eagle_graphs.plugin.tensorrt_plugin", raising=False)
    return tensorrt
