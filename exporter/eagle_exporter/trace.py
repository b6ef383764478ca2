"""From a module to a neutral ONNX graph: torch.export, then torch.onnx, with TreeAttention left as one op."""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch import nn

from eagle_graphs import GraphPorts, Port

OPSET = 23  # has RMSNormalization and RotaryEmbedding
_EXAMPLE_SIZES = {"B": 2, "Q": 5, "S": 7, "R": 3, "C": 16}
"""Sizes to trace with: distinct, and above 1, since torch.export takes an axis of size 1 for a fixed one."""


def trace(module: nn.Module, ports: GraphPorts) -> ir.Model:
    """The graph of `module`, whose forward takes and returns the tensors of `ports`."""
    arguments = tuple(_example(port) for port in ports.inputs)
    axes = tuple(
        {i: torch.export.Dim.DYNAMIC for i, axis in enumerate(port.axes) if isinstance(axis, str)}
        for port in ports.inputs
    )
    fixed, caches = _split_variadic(module, axes)
    with torch.no_grad(), _quiet():
        program = torch.export.export(module, arguments, dynamic_shapes=(*fixed, caches), strict=False)
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            optimize=True,
            input_names=[port.name for port in ports.inputs],
            output_names=[port.name for port in ports.outputs],
        )
    assert onnx_program is not None
    model = onnx_program.model
    _name_linears(model)
    ClearMetadataAndDocStringPass()(model)  # torch's stack traces: paths of this machine
    _name_axes(model.graph.inputs, ports.inputs)
    _name_axes(model.graph.outputs, ports.outputs)
    return model


def _split_variadic(module: nn.Module, axes: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """torch.export wants the axes of `*past` as one tuple behind the named arguments."""
    code = module.forward.__code__
    named = code.co_argcount - 1
    return axes[:named], axes[named:]


def _example(port: Port) -> torch.Tensor:
    shape = [axis if isinstance(axis, int) else _EXAMPLE_SIZES[axis] for axis in port.axes]
    return torch.from_numpy(np.zeros(shape, np.dtype(port.dtype)))


def _name_axes(values: Any, ports: tuple[Port, ...]) -> None:
    """Gives the graph's inputs and outputs the axis names of the contract, in place of traced symbols."""
    assert [value.name for value in values] == [port.name for port in ports]
    for value, port in zip(values, ports, strict=True):
        value.shape = ir.Shape(port.axes)


def _name_linears(model: ir.Model) -> None:
    """Names the products of linear layers as their modules, by which a report and a plan speak of them.

    A module with several products is no linear layer; they keep the names that the trace gave them.
    """
    products: dict[str, list[ir.Node]] = defaultdict(list)
    for node in model.graph:
        scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes")
        if node.op_type in ("MatMul", "Gemm") and scopes is not None:
            path = ast.literal_eval(scopes)
            products[path[-2] if len(path) > 1 else ""].append(node)
    for name, nodes in products.items():
        if name and len(nodes) == 1:
            nodes[0].name = name


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch.onnx's progress prints and notes on optional packages off the user's terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
