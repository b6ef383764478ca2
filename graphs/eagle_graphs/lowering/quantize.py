"""W8A8: linear layers become `eagle.cpu::QuantLinear`, and what stands around them goes inside.

Each pass rewrites a graph in place, and each can be left out:

    quantize_linears      MatMul or Gemm, and its bias      -> QuantLinear
    quantize_embeddings   Gather from a float table         -> QuantEmbedding
    merge_shared_inputs   layers that read the same rows    -> one layer and a Split
    absorb_norms          RMSNormalization before a layer   -> inside it
    absorb_gates          silu(gate) * up before a layer    -> inside it
    absorb_residuals      Add behind a layer                -> inside it
    pack_weights          int8 [N, K]                       -> the kernel's order

Until `pack_weights` the matrices are int8 [N, K], so that the passes before it can join them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_graphs import native_ops
from eagle_graphs.lowering.linear import Linear, constant, is_constant, linears, lookups, replace_linear
from eagle_graphs.lowering.rewrite import Rewriter, producer
from eagle_graphs.native.packing import pack, quantize_rows

Order = npt.NDArray[np.int32]

_BIAS, _RESIDUAL, _NORM, _ORDER = 3, 4, 5, 6
"""Inputs of QuantLinear that may be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedLayer:
    """How one linear layer is quantized."""

    wide: int = 0
    """Inputs, the first of `order`, that have 16 bits; the others have 8. A multiple of 64."""
    order: Order | None = None
    """[K] the inputs in the order of the quantized weights; None for their own."""


Tables = dict[str, Order]
"""Orders of quantized matrices, by `digest` of what they were; an embedding tied to one takes its order."""


def digest(matrix: npt.NDArray[np.float32]) -> str:
    """Of a matrix [N, K]."""
    return hashlib.sha256(np.ascontiguousarray(matrix).data).hexdigest()


def quantize_linears(model: ir.Model, layers: Mapping[str, QuantizedLayer]) -> Tables:
    """Quantizes the linear layers named; returns the orders that their inputs were brought into."""
    rewriter, tables = Rewriter(model.graph), Tables()
    for linear in linears(model.graph):
        if (how := layers.get(linear.name)) is not None:
            matrix = linear.matrix()
            if how.order is not None:
                tables[digest(matrix)] = how.order
            _quantize(rewriter, linear, matrix, how)
    model.opset_imports[native_ops.DOMAIN] = native_ops.VERSION
    return tables


def _quantize(rewriter: Rewriter, linear: Linear, matrix: npt.NDArray[np.float32], how: QuantizedLayer) -> None:
    integers, scale = quantize_rows(matrix)
    order = None
    if how.order is not None:
        integers, order = integers[:, how.order], rewriter.constant(how.order)
    outputs, inputs = integers.shape
    replace_linear(
        rewriter,
        linear,
        native_ops.QUANT_LINEAR,
        [linear.x, rewriter.constant(integers), rewriter.constant(scale), linear.bias, None, None, order],
        {"N": outputs, "K": inputs, "prologue": "none", "wide": how.wide},
        domain=native_ops.DOMAIN,
    )


def quantize_embeddings(model: ir.Model, tables: Mapping[str, Order]) -> None:
    """Quantizes every float table whose rows are gathered by the graph's token ids.

    tables: orders of matrices that were quantized, in this graph or in one beside it, with which a table may be shared.
    """
    rewriter = Rewriter(model.graph)
    for node in lookups(model.graph):
        table, ids = node.inputs
        assert table is not None
        matrix = constant(table)
        integers, scale = quantize_rows(matrix)
        order = tables.get(digest(matrix))
        if order is not None:
            integers = integers[:, order]
        rows, width = integers.shape
        (out,) = rewriter.insert(
            node,
            native_ops.QUANT_EMBEDDING,
            [
                *(ids, rewriter.constant(integers), rewriter.constant(scale)),
                *([rewriter.constant(order)] if order is not None else []),
            ],
            {"N": rows, "K": width},
            domain=native_ops.DOMAIN,
        )
        rewriter.replace(node.outputs[0], out)
        rewriter.graph.remove(node, safe=True)
    model.opset_imports[native_ops.DOMAIN] = native_ops.VERSION


def merge_shared_inputs(model: ir.Model) -> None:
    """Joins the QuantLinears that read the same rows alike."""
    rewriter = Rewriter(model.graph)
    alike: dict[tuple[object, ...], list[ir.Node]] = defaultdict(list)
    for node in _quant_linears(model):
        settings = (node.attributes[name].value for name in ("K", "prologue", "wide"))
        alike[node.inputs[0], node.inputs[_BIAS] is not None, node.inputs[_ORDER], *settings].append(node)
    for nodes in alike.values():
        if len(nodes) > 1:
            _merge(rewriter, nodes)


def _merge(rewriter: Rewriter, nodes: list[ir.Node]) -> None:
    first = nodes[0]
    widths = [node.attributes["N"].as_int() for node in nodes]
    inputs = list(first.inputs)
    for index in (1, 2, _BIAS):  # weights, their scales, biases
        if inputs[index] is not None:
            inputs[index] = rewriter.constant(np.concatenate([_constant(node, index) for node in nodes]))
    attributes = {name: attribute.value for name, attribute in first.attributes.items()} | {"N": sum(widths)}
    (out,) = rewriter.insert(
        first,
        native_ops.QUANT_LINEAR,
        inputs,
        attributes,
        domain=native_ops.DOMAIN,
        name=first.name,
    )
    parts = rewriter.insert(
        first, "Split", [out, rewriter.ints(*widths)], {"axis": -1}, outputs=len(nodes), name=f"{first.name}.split"
    )
    for node, part in zip(nodes, parts, strict=True):
        rewriter.replace(node.outputs[0], part)
        rewriter.graph.remove(node, safe=True)


def absorb_norms(model: ir.Model) -> None:
    """Puts an RMSNormalization that one QuantLinear alone reads inside it."""
    for node in _quant_linears(model):
        norm = producer(node.inputs[0])
        if (
            node.attributes["prologue"].as_string() == "none"
            and norm is not None
            and _is_norm_of_rows(norm, width=node.attributes["K"].as_int())
            and _alone(norm.outputs[0])
        ):
            node.replace_input_with(0, norm.inputs[0])
            node.replace_input_with(_NORM, norm.inputs[1])
            node.attributes["prologue"] = ir.AttrString("prologue", "rms_norm")
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", _number(norm, "epsilon", 1e-5))
            model.graph.remove(norm, safe=True)


def _is_norm_of_rows(norm: ir.Node, *, width: int) -> bool:
    """Whether it is an RMSNormalization over the last axis, with a constant scale for each of its `width` numbers."""
    scale = norm.inputs[1] if _is(norm, "RMSNormalization") else None
    if scale is None or not is_constant(scale, rank=1) or scale.const_value.shape[0] != width:  # type: ignore[union-attr]
        return False
    x = norm.inputs[0]
    last = {-1.0, len(x.shape) - 1.0} if x is not None and x.shape is not None else {-1.0}
    return _number(norm, "axis", -1) in last and _number(norm, "stash_type", 1) == 1


def _number(node: ir.Node, name: str, missing: float) -> float:
    """A numeric attribute, or what its absence means."""
    return float(node.attributes[name].value) if name in node.attributes else missing


def absorb_gates(model: ir.Model) -> None:
    """Puts silu(gate) * up, where gate and up are the halves of one value, inside the QuantLinear behind it."""
    for node in _quant_linears(model):
        product = producer(node.inputs[0])
        if not _is(product, "Mul") or not _alone(product.outputs[0]):  # type: ignore[union-attr]
            continue
        assert product is not None
        for activated, up in (tuple(product.inputs), tuple(reversed(product.inputs))):
            gate, name, inner = _activation(producer(activated))
            both = producer(up)
            if (
                gate is not None
                and both is not None
                and _is(both, "Split")
                and list(both.outputs) == [gate, up]
                and _splits_rows_in_halves(both)
            ):
                node.replace_input_with(0, both.inputs[0])
                node.attributes["prologue"] = ir.AttrString("prologue", name)
                for unused in (product, *inner, both):
                    if not any(out.uses() or out.is_graph_output() for out in unused.outputs):
                        model.graph.remove(unused, safe=True)
                break


def _splits_rows_in_halves(split: ir.Node) -> bool:
    sizes = split.inputs[1].const_value if len(split.inputs) > 1 and split.inputs[1] is not None else None
    halves = sizes is not None and len(set(sizes.numpy().tolist())) == 1
    return halves and _number(split, "axis", 0) == -1


def _activation(node: ir.Node | None) -> tuple[ir.Value | None, str, tuple[ir.Node, ...]]:
    """What an activation reads, the prologue that computes it, and its nodes; None where it is none of the kernel's."""
    if node is not None and _is(node, "Mul"):
        for gate, curve in (tuple(node.inputs), tuple(reversed(node.inputs))):
            sigmoid = producer(curve)
            if sigmoid is not None and _is(sigmoid, "Sigmoid") and sigmoid.inputs[0] is gate:
                return gate, "silu_mul", (node, sigmoid)
    if node is not None and _is(node, "Gelu") and _text(node, "approximate") == "tanh":
        return node.inputs[0], "gelu_tanh_mul", (node,)
    return None, "none", ()


def _text(node: ir.Node, name: str) -> str:
    return node.attributes[name].as_string() if name in node.attributes else ""


def absorb_residuals(model: ir.Model) -> None:
    """Puts the Add of a value of the same rows behind a QuantLinear inside it."""
    rewriter = Rewriter(model.graph)
    order = {node: index for index, node in enumerate(model.graph)}
    for node in _quant_linears(model):
        out = node.outputs[0]
        users = list(out.consumers())
        if not _alone(out) or not _is(users[0], "Add"):
            continue
        addition = users[0]
        residual = next((value for value in addition.inputs if value is not out), None)
        if residual is None or residual.const_value is not None or not _same_rows(residual, out):
            continue
        made = producer(residual)
        if made is not None and order[made] > order[node]:
            model.graph.remove(node)
            model.graph.insert_before(addition, node)
            order[node] = order[addition]
        node.replace_input_with(_RESIDUAL, residual)
        rewriter.replace(addition.outputs[0], out)
        model.graph.remove(addition, safe=True)


def _same_rows(one: ir.Value, other: ir.Value) -> bool:
    """Whether both have the same known shape; a broadcast is none of the kernel's."""
    return one.shape is not None and other.shape is not None and list(one.shape) == list(other.shape)


def pack_weights(model: ir.Model) -> None:
    """Brings the int8 matrices into the order in which the kernel reads them."""
    rewriter = Rewriter(model.graph)
    packed: dict[ir.Value, ir.Value] = {}
    for node in model.graph:
        if node.domain == native_ops.DOMAIN and node.op_type in (native_ops.QUANT_LINEAR, native_ops.QUANT_EMBEDDING):
            weight = node.inputs[1]
            assert weight is not None
            if weight not in packed:
                packed[weight] = rewriter.constant(pack(_constant(node, 1)))
            node.replace_input_with(1, packed[weight])


def _quant_linears(model: ir.Model) -> list[ir.Node]:
    wanted = (native_ops.DOMAIN, native_ops.QUANT_LINEAR)
    return [node for node in model.graph if (node.domain, node.op_type) == wanted]


def _constant(node: ir.Node, index: int) -> npt.NDArray[Any]:
    value = node.inputs[index]
    assert value is not None
    assert value.const_value is not None
    array: npt.NDArray[Any] = value.const_value.numpy()
    return array


def _is(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and (node.domain, node.op_type) == ("", op_type)


def _alone(value: ir.Value) -> bool:
    """Whether exactly one input of one node reads `value`."""
    return not value.is_graph_output() and len(value.uses()) == 1
