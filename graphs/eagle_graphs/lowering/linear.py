"""The linear layers of a graph, products of rows with a constant matrix however the exporter wrote them; its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_graphs.lowering.rewrite import Rewriter

_TOKEN_IDS = ("input_ids", "token_ids")
"""Inputs of the graphs that hold token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """y = x @ weight.T + bias, as a MatMul or Gemm and perhaps an Add."""

    nodes: tuple[ir.Node, ...]
    """In the order of the graph; the last one makes `y`."""
    y: ir.Value
    weight: ir.Value
    """Initializer [K, N], or [N, K] where `rows_are_outputs`."""
    rows_are_outputs: bool
    bias: ir.Value | None
    """Initializer [N]."""

    @property
    def x(self) -> ir.Value:
        """Its rows [..., K]; asked anew, since a layer in front of this one may have been replaced meanwhile."""
        x = self.nodes[0].inputs[0]
        assert x is not None
        return x

    @property
    def name(self) -> str:
        """The layer's name in the model, where the trace kept it."""
        return self.nodes[0].name or self.y.name or ""

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(N, K)"""
        assert self.weight.const_value is not None
        rows, columns = self.weight.const_value.shape.numpy()
        return (rows, columns) if self.rows_are_outputs else (columns, rows)

    def matrix(self) -> npt.NDArray[np.float32]:
        """The weights [N, K]."""
        matrix = constant(self.weight)
        return matrix if self.rows_are_outputs else np.ascontiguousarray(matrix.T)


def linears(graph: ir.Graph) -> list[Linear]:
    """All linear layers with float32 weights, in the order of the graph."""
    found = (_linear(node) for node in graph if node.domain == "" and node.op_type in ("MatMul", "Gemm"))
    return [linear for linear in found if linear is not None]


def replace_linear(
    rewriter: Rewriter,
    linear: Linear,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, Any],
    *,
    domain: str,
) -> None:
    """Puts one node in the place of a layer's; it takes over the layer's name."""
    (out,) = rewriter.insert(linear.nodes[-1], op_type, inputs, attributes, domain=domain, name=linear.nodes[0].name)
    rewriter.replace(linear.y, out)
    remove_linear(rewriter, linear)


def remove_linear(rewriter: Rewriter, linear: Linear) -> None:
    """Removes a layer's nodes, whose result nothing reads any more."""
    for node in reversed(linear.nodes):
        rewriter.graph.remove(node, safe=True)


def lookups(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that take rows of a float32 table by the graph's token ids."""
    return [node for node in graph if (node.domain, node.op_type) == ("", "Gather") and _is_lookup(node)]


def _is_lookup(node: ir.Node) -> bool:
    table, ids = node.inputs
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    return axis == 0 and is_constant(table, rank=2) and ids is not None and ids.name in _TOKEN_IDS


def constant(value: ir.Value) -> npt.NDArray[np.float32]:
    """What an initializer holds."""
    assert value.const_value is not None
    array: npt.NDArray[np.float32] = value.const_value.numpy()
    return array


def is_constant(value: ir.Value | None, *, rank: int) -> bool:
    """Whether `value` is a float32 initializer of so many axes."""
    tensor = None if value is None else value.const_value
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT and len(tensor.shape) == rank


def _linear(node: ir.Node) -> Linear | None:
    x, weight = node.inputs[:2]
    if x is None or weight is None or not is_constant(weight, rank=2):
        return None
    if node.op_type == "Gemm":
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0}
        if any(name in node.attributes and node.attributes[name].value != value for name, value in plain.items()):
            return None
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        transposed = "transB" in node.attributes and bool(node.attributes["transB"].value)
        outputs = weight.const_value.shape[0 if transposed else 1]  # type: ignore[union-attr]
        if bias is not None and not (is_constant(bias, rank=1) and bias.const_value.shape[0] == outputs):  # type: ignore[union-attr]
            return None
        return Linear(nodes=(node,), y=node.outputs[0], weight=weight, rows_are_outputs=transposed, bias=bias)
    nodes: tuple[ir.Node, ...] = (node,)
    y, bias = node.outputs[0], None
    addition, other = _only_addition(y)
    if addition is not None and other is not None and is_constant(other, rank=1):
        assert weight.const_value is not None
        assert other.const_value is not None
        if other.const_value.shape[0] == weight.const_value.shape[1]:
            nodes, y, bias = (node, addition), addition.outputs[0], other
    return Linear(nodes=nodes, y=y, weight=weight, rows_are_outputs=False, bias=bias)


def _only_addition(value: ir.Value) -> tuple[ir.Node | None, ir.Value | None]:
    """The Add that alone reads `value`, and what it adds."""
    if value.is_graph_output() or len(value.uses()) != 1:
        return None, None
    (user,) = value.consumers()
    if (user.domain, user.op_type) != ("", "Add"):
        return None, None
    return user, next((other for other in user.inputs if other is not value), None)
