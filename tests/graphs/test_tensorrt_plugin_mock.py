"""The TensorRT plugins against a mock of `tensorrt.plugin`: TensorRT itself has not seen them.

The mock keeps to that module's documentation: what decorated functions are called with, and a kernel's arguments, which
are its inputs, then integers, then its outputs. It launches the kernels so in Triton's interpreter.
"""

import importlib
import inspect
import sys
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eagle_graphs.plugin import compile as plugin_compile
from eagle_graphs.plugin.launch import Attention
from eagle_graphs.plugin.masks import pack_mask
from tests.graphs.native_attention import Call, random_call

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "int64": torch.int64}


@dataclass(frozen=True)
class MockDesc:
    """A tensor's description; its symbolic shape is its shape."""

    shape: tuple[int, ...]
    dtype: str
    of: "MockDesc | None" = None

    @property
    def shape_expr(self) -> tuple[int, ...]:
        return self.shape

    def aliased(self) -> "MockDesc":
        return replace(self, of=self)


@dataclass(frozen=True)
class MockCombination:
    io_types: str
    layouts: str
    tactics: list[int] | None = None


class MockPlugins(ModuleType):
    """`tensorrt.plugin`."""

    TensorDesc, AutoTuneCombination, KernelLaunchParams = (
        MockDesc,
        MockCombination,
        type("Params", (SimpleNamespace,), {}),
    )
    SymInt32 = int
    SymIntExprs = type("SymIntExprs", (list,), {"from_tuple": classmethod(lambda cls, items: cls(items))})

    def __init__(self) -> None:
        super().__init__("tensorrt.plugin")
        self.described: dict[str, Any] = {}
        self.choices: dict[str, Any] = {}
        self.implemented: dict[str, Any] = {}
        self.op = SimpleNamespace(eagle=SimpleNamespace())

    def _keep(self, table: dict[str, Any], name: str) -> Any:
        def decorate(function: Any) -> Any:
            table[name] = function
            setattr(self.op.eagle, name.split("::")[1], lambda *tensors, **attributes: (name, tensors, attributes))
            return function

        return decorate

    def register(self, name: str) -> Any:
        return self._keep(self.described, name)

    def autotune(self, name: str) -> Any:
        return self._keep(self.choices, name)

    def aot_impl(self, name: str) -> Any:
        return self._keep(self.implemented, name)

    @staticmethod
    def cdiv(number: int, by: int) -> int:
        return -(-number // by)

    @staticmethod
    def from_shape_expr(shape: tuple[int, ...], dtype: str) -> MockDesc:
        return MockDesc(shape, dtype)


@dataclass(frozen=True)
class Tensor:
    """A tensor of a network, with its numbers."""

    data: torch.Tensor

    @property
    def desc(self) -> MockDesc:
        return MockDesc(tuple(self.data.shape), str(self.data.dtype).removeprefix("torch."))


class MockNetwork:
    """A network that runs a plugin when it is added, with the `tactic`-th of its tactics."""

    def __init__(self, plugins: MockPlugins, tactic: int, kernels: list[Any]) -> None:
        self.plugins, self.tactic, self.kernels = plugins, tactic, kernels

    def add_plugin(self, plugin: tuple[str, tuple[Tensor, ...], dict[str, Any]], aot: bool) -> Any:
        assert aot
        name, tensors, attributes = plugin
        schema = inspect.signature(self.plugins.described[name]).parameters
        assert list(schema)[len(tensors) :] == list(attributes), "attributes in another order than registered"
        for key, given in attributes.items():
            assert type(given) is schema[key].annotation
        inputs = [tensor.desc for tensor in tensors]
        described = self.plugins.described[name](*inputs, **attributes)
        outputs = described if isinstance(described, tuple) else (described,)
        choose = self.plugins.choices[name]
        wanted = {key: value for key, value in attributes.items() if key in inspect.signature(choose).parameters}
        (choice,) = choose(*inputs, **wanted, outputs=outputs)
        assert len(choice.io_types.split(",")) == len(inputs) + len(outputs)
        tactic = choice.tactics[self.tactic] if choice.tactics else 0
        implement = self.plugins.implemented[name]
        assert list(inspect.signature(implement).parameters) == [*schema, "outputs", "tactic"]
        _, _, launch, scalars = implement(*inputs, *attributes.values(), outputs, tactic)
        data = [tensor.data for tensor in tensors]
        results = [
            torch.full(out.shape, float("nan"), dtype=DTYPES[out.dtype])
            if out.of is None
            else next(each for each, desc in zip(data, inputs, strict=True) if desc is out.of)
            for out in outputs
        ]
        self.launch(launch, [*data, *scalars, *results])
        return SimpleNamespace(get_output=lambda index: Tensor(results[index]))

    def launch(self, launch: Any, arguments: list[Any]) -> None:
        kernel, types, constants = self.kernels.pop()
        left = iter(arguments)
        given = [
            constants[name] if name in constants else next(left) if types[name] else None for name in kernel.arg_names
        ]
        assert next(left, None) is None, "more arguments than the kernel has parameters"
        kernel[(launch.grid_x, launch.grid_y, launch.grid_z)](*given)


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> MockPlugins:
    mock = MockPlugins()
    tensorrt = ModuleType("tensorrt")
    vars(tensorrt).update({name: name for name in DTYPES}, plugin=mock)
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", mock)
    monkeypatch.delitem(sys.modules, "eagle_graphs.plugin.tensorrt_plugin", raising=False)
    return mock


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked of the compiler, instead of its being compiled: kernel, types and constants."""
    asked: list[Any] = []

    def ask(kernel: Any, types: Any, constants: Any, options: Any, capability: int) -> Any:
        asked.append((kernel, types, constants))
        return plugin_compile.CompiledKernel(
            name="kernel", ptx="ptx", cubin=b"", threads=128, shared=1, registers=1, spilled=0
        )

    monkeypatch.setattr(plugin_compile, "_compile", ask)
    return asked


def run(module: Any, network: MockNetwork, call: Call, new_rows: int) -> tuple[np.ndarray, ...]:
    _, heads, new, head_dim = call.query.shape
    attention = Attention(query_heads=heads, kv_heads=call.key.shape[1], head_dim=head_dim, **call.attributes)
    rows = [torch.tensor(getattr(call, name)) for name in ("query", "key", "value", "past_key", "past_value")]
    lengths = torch.tensor(call.kv_length)
    integers = [torch.from_numpy(pack_mask(call.tree_mask)), lengths, lengths + call.tree_mask.shape[2] - new]
    sinks = torch.full((heads,), -torch.inf) if call.sinks is None else torch.tensor(call.sinks)
    build = module.Build(new_rows=new_rows, split_rows=64, capability=89)
    outputs = module.add_tree_attention(
        network, attention, build, tuple(Tensor(data) for data in (*rows, *integers)), Tensor(sinks)
    )
    assert outputs[1].data is rows[3]
    assert outputs[2].data is rows[4]
    return tuple(output.data.double().numpy() for output in outputs)


@pytest.mark.parametrize(
    ("shape", "tactic"),
    [
        ({"lengths": (70, 3), "new": 9, "after": 12, "heads": 6, "kv_heads": 2, "sinks": True}, 0),
        ({"lengths": (70,), "new": 9, "heads": 6, "kv_heads": 2, "softcap": 2.0, "sliding_window": 40}, -1),
    ],
    ids=["slots and sinks, lowest tiles", "cap and window, highest tiles"],
)
def test_a_mocked_network_computes_the_definition(
    plugins: MockPlugins, kernels: list[Any], shape: dict[str, Any], tactic: int
) -> None:
    module = importlib.import_module("eagle_graphs.plugin.tensorrt_plugin")
    call = random_call(**shape)
    network = MockNetwork(plugins, tactic, kernels)
    for actual, expected in zip(run(module, network, call, new_rows=60), call.defined(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6)


def test_types_and_tactics_that_are_offered_to_the_mock(plugins: MockPlugins) -> None:
    importlib.import_module("eagle_graphs.plugin.tensorrt_plugin")
    query, key = MockDesc((1, 32, -1, 128), "float16"), MockDesc((1, 8, -1, 128), "float16")
    (choice,) = plugins.choices["eagle::attend"](query, key, *[None] * 6, 60, ())
    assert choice.tactics == [16, 32, 64]
    rows = ["FP16|BF16"]
    assert choice.io_types.split(", ") == [*rows * 5, *["INT64"] * 3, *["FP32"] * 2, *rows * 2]
    assert choice.layouts == "LINEAR"
