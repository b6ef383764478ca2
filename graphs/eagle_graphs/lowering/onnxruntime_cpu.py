"""Lowering for ONNX Runtime on the CPU: TreeAttention becomes com.microsoft.GroupQueryAttention.

GroupQueryAttention appends the new keys and values to a cache that is bound as past and present
alike, and takes the tree as a bias on the scores. It reads queries, keys and values as
[B, Q, heads * D], which is how the projections leave them, so that the transposes of the traced
graph go. Its kernel serves one slot a call when Q > 1, and so do the graphs made here.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)

from eagle_graphs import tree_attention
from eagle_graphs.errors import EagleError
from eagle_graphs.lowering.rewrite import Rewriter, producer

MICROSOFT = "com.microsoft"


def lower_for_onnxruntime_cpu(model: ir.Model) -> ir.Model:
    """Lowers the neutral graph in place and returns it. Raises EagleError on an attention it cannot express."""
    CommonSubexpressionEliminationPass()(model)
    graph = model.graph
    attentions = [node for node in graph if (node.domain, node.op_type) == (tree_attention.DOMAIN, tree_attention.NAME)]
    rewriter = Rewriter(graph)
    placement = _placement_from_inputs(rewriter, graph)
    for attention in attentions:
        _lower_attention(rewriter, attention, placement)
    model.opset_imports[MICROSOFT] = 1
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    return model


def _placement_from_inputs(rewriter: Rewriter, graph: ir.Graph) -> tuple[ir.Value, ir.Value, ir.Value]:
    """(seqlens_k [1] int32, total rows [] int32, attention_bias [1, 1, Q, total]), shared by all layers."""
    inputs = {value.name: value for value in graph.inputs}
    tree_mask, kv_length = inputs["tree_mask"], inputs["kv_length"]
    first = next(iter(graph))
    one = rewriter.ints(1)
    zero = rewriter.constant(np.zeros((), np.float32))

    rows_after = rewriter.one(first, "Shape", [tree_mask], {"start": 2, "end": 3})
    total = rewriter.one(first, "Add", [kv_length, rows_after])
    to_int32 = {"to": ir.DataType.INT32.value}
    seqlens_k = rewriter.one(first, "Cast", [rewriter.one(first, "Sub", [total, one])], to_int32)
    total_scalar = rewriter.one(first, "Cast", [rewriter.one(first, "Squeeze", [total])], to_int32)

    hidden = rewriter.constant(np.array(-np.inf, np.float32))
    tree_bias = rewriter.one(first, "Where", [tree_mask, zero, hidden])
    slots_and_rows = rewriter.one(first, "Shape", [tree_mask], {"start": 0, "end": 2})
    prefix_shape = rewriter.one(first, "Concat", [slots_and_rows, kv_length], {"axis": 0})
    prefix_bias = rewriter.one(first, "Expand", [zero, prefix_shape])
    bias = rewriter.one(first, "Concat", [prefix_bias, tree_bias], {"axis": 2})
    return seqlens_k, total_scalar, rewriter.one(first, "Unsqueeze", [bias, one])


def _lower_attention(rewriter: Rewriter, node: ir.Node, placement: tuple[ir.Value, ir.Value, ir.Value]) -> None:
    query, key, value, past_key, past_value = node.inputs[:5]
    seqlens_k, total, bias = placement
    query_heads, kv_heads = _heads(query), _heads(key)
    out, present_key, present_value = rewriter.insert(
        node,
        "GroupQueryAttention",
        [
            _rows_from_heads(rewriter, node, query),
            _rows_from_heads(rewriter, node, key),
            _rows_from_heads(rewriter, node, value),
            *(past_key, past_value, seqlens_k, total, None, None, None, bias),
        ],
        {"num_heads": query_heads, "kv_num_heads": kv_heads, "scale": node.attributes["scale"].as_float()},
        domain=MICROSOFT,
        outputs=3,
    )
    _replace_heads_by_rows(rewriter, node, out)
    rewriter.replace(node.outputs[1], present_key)
    rewriter.replace(node.outputs[2], present_value)
    rewriter.graph.remove(node, safe=True)


def _replace_heads_by_rows(rewriter: Rewriter, node: ir.Node, rows: ir.Value) -> None:
    """Puts `rows` [B, Q, heads * D] where the attention's result [B, Q, heads, D] is read."""
    heads = node.outputs[0]
    for user in list(heads.consumers()):
        if user.op_type == "Reshape" and _is_rows(user.outputs[0], heads):
            rewriter.replace(user.outputs[0], rows)
            rewriter.graph.remove(user, safe=True)
    if heads.uses():
        split = rewriter.ints(0, 0, *(int(size) for size in list(heads.shape or ())[2:]))  # type: ignore[arg-type]
        rewriter.replace(heads, rewriter.one(node, "Reshape", [rows, split]))


def _heads(value: ir.Value | None) -> int:
    if value is None or value.shape is None or not isinstance(value.shape[1], int):
        raise EagleError("TreeAttention needs a fixed number of heads; the traced graph leaves it open")
    return value.shape[1]


def _rows_from_heads(rewriter: Rewriter, before: ir.Node, value: ir.Value | None) -> ir.Value:
    """[B, Q, heads * D] for a value [B, heads, Q, D], without a transpose where the graph allows it."""
    heads = _heads(value)
    node = producer(value)
    if node is not None and (node.domain, node.op_type) == ("", "RotaryEmbedding"):
        rows = _rows_from_heads(rewriter, before, node.inputs[0])
        attributes = {**{name: attribute.value for name, attribute in node.attributes.items()}, "num_heads": heads}
        return rewriter.one(before, "RotaryEmbedding", [rows, *node.inputs[1:]], attributes)
    if (
        node is not None
        and (node.domain, node.op_type) == ("", "Transpose")
        and list(node.attributes["perm"].as_ints()) == [0, 2, 1, 3]
    ):
        split = node.inputs[0]
        reshape = producer(split)
        if reshape is not None and reshape.op_type == "Reshape" and _is_rows(reshape.inputs[0], split):
            assert reshape.inputs[0] is not None
            return reshape.inputs[0]
    else:
        split = rewriter.one(before, "Transpose", [value], {"perm": [0, 2, 1, 3]})
    return rewriter.one(before, "Reshape", [split, rewriter.ints(0, 0, -1)])


def _is_rows(rows: ir.Value | None, split: ir.Value | None) -> bool:
    """Whether `rows` [B, Q, heads * D] holds the heads of `split` [B, Q, heads, D] side by side."""
    if rows is None or split is None or rows.shape is None or split.shape is None:
        return False
    if len(rows.shape) != 3 or len(split.shape) != 4:
        return False
    heads, head_dim = split.shape[2], split.shape[3]
    return isinstance(heads, int) and isinstance(head_dim, int) and rows.shape[2] == heads * head_dim
