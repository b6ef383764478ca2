"""What a builder says of the engine it made: its layers, pass by pass.

An engine inspector can be asked only where a GPU can load the engine. But a builder that logs everything ends with the
inspector's text, and says before it how much memory each optimization profile needs; that is read here.

    Layers:
    Name: a+b_myl3_7, LayerType: gemm, Inputs: [ { ... Datatype: FP8, ... } ], Constants: [...], Outputs: [...],
        TacticName: ..., StreamId: 0, Metadata: [ONNX Layer: a][ONNX Layer: b]
    I/O Tensors:
     Name: x, IOMode: Input, DataType: Half, ..., ProfileInfo: [ { MinShape: [1,10], OptShape: ..., ... }, ... ]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle_graphs.errors import EagleError

_LAYER = re.compile(r"Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: (?P<reads>.*?), Outputs: ")
_TENSOR = re.compile(
    r" Name: (?P<name>.*?), IOMode: (?P<mode>\w+), DataType: (?P<dtype>\w+), .*ProfileInfo: (?P<info>.*)"
)
_SHAPES = re.compile(r"MinShape: \[([\d,]*)\], OptShape: \[([\d,]*)\], MaxShape: \[([\d,]*)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One kernel, or a few that run as one."""

    name: str
    kind: str
    """gemm, kgen (generated), runtime_fusion, ..."""
    profile: int
    reads: tuple[str, ...]
    """Element types of inputs and constants."""
    nodes: tuple[str, ...]
    """Names of the ONNX nodes that it computes, or parts of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """An input or output of the engine."""

    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    """Of an input in each profile; none of an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """An engine."""

    layers: tuple[Layer, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    memory: tuple[int, ...]
    """Bytes of activations of each profile."""
    weights: int
    """Bytes."""


def description_from_log(messages: Sequence[str]) -> Description:
    """The engine that a build's messages describe.

    Raises EagleError where they describe none, or shapes that are not frozen.
    """
    text = next((message for message in messages if message.startswith("Layers:")), None)
    if text is None:
        raise EagleError(
            "the builder did not describe the engine it made: this version of the library is not supported"
        )
    tensors = [_tensor(found) for line in text.splitlines() if (found := _TENSOR.match(line))]
    return Description(
        layers=_layers(line for line in text.splitlines() if line.startswith("Name:")),
        inputs=tuple(tensor for mode, tensor in tensors if mode == "Input"),
        outputs=tuple(tensor for mode, tensor in tensors if mode == "Output"),
        memory=tuple(_bytes(messages, "Total Activation Memory")),
        weights=sum(_bytes(messages, "Total Weights Memory")),
    )


def _layers(lines: Iterable[str]) -> tuple[Layer, ...]:
    """Kernels of one compiled graph share its number (`_myl3`), and some of them name the profile that they are for."""
    lines = list(lines)
    profiles: dict[str, int] = {}
    for line in lines:
        marks = [int(number) for number in re.findall(r"\[profile (\d+)\]", line)]
        profiles[_graph(line)] = max([profiles.get(_graph(line), 0), *marks])
    return tuple(_layer(line, profiles[_graph(line)]) for line in lines)


def _graph(line: str) -> str:
    name = line.partition(", LayerType: ")[0]
    number = re.search(r"_myl(\d+)_\d+$", name)
    return number[1] if number else name


def _layer(line: str, profile: int) -> Layer:
    found = _LAYER.match(line)
    if found is None:
        raise EagleError(f"the builder describes a layer in an unknown way: {line[:80]}")
    return Layer(
        name=found["name"],
        kind=found["kind"],
        profile=profile,
        reads=tuple(re.findall(r"Datatype: (\w+)", found["reads"])),
        nodes=tuple(re.findall(r"\[ONNX Layer: (.*?)\]", line)),
    )


def _tensor(found: re.Match[str]) -> tuple[str, Tensor]:
    shapes = []
    for smallest, best, largest in _SHAPES.findall(found["info"]):
        if not smallest == best == largest:
            raise EagleError(
                f"{found['name']} has shapes from {smallest} to {largest} in one profile; expected one shape"
            )
        shapes.append(tuple(int(size) for size in best.split(",") if size))
    return found["mode"], Tensor(name=found["name"], dtype=found["dtype"], shapes=tuple(shapes))


def _bytes(messages: Sequence[str], what: str) -> list[int]:
    matches = (re.match(rf"{what}: (\d+) bytes", message) for message in messages)
    return [int(found[1]) for found in matches if found]
