"""Attention's queries, keys, values and result as rows [B, Q, heads * D], which is how projections write and read them.

A traced graph splits the projections' rows into heads and transposes them; the kernels take rows, so that these
nodes go.
"""

from __future__ import annotations

import onnx_ir as ir

from eagle_graphs.errors import EagleError
from eagle_graphs.lowering.rewrite import Rewriter, producer


def float_attribute(node: ir.Node, name: str) -> float:
    """An attribute that may be missing, which means 0."""
    return float(node.attributes[name].value) if name in node.attributes else 0.0


def replace_heads_by_rows(rewriter: Rewriter, node: ir.Node, rows: ir.Value) -> None:
    """Puts `rows` [B, Q, heads * D] where the attention's result [B, Q, heads, D] is read."""
    heads = node.outputs[0]
    for user in list(heads.consumers()):
        if user.op_type == "Reshape" and _is_rows(user.outputs[0], heads):
            rewriter.replace(user.outputs[0], rows)
            rewriter.graph.remove(user, safe=True)
    if heads.uses() or heads.is_graph_output():
        split = rewriter.ints(0, 0, *(int(size) for size in list(heads.shape or ())[2:]))  # type: ignore[arg-type]
        rewriter.replace(heads, rewriter.one(node, "Reshape", [rows, split]))


def head_count(value: ir.Value | None, *, axis: int) -> int:
    """Size of the axis of heads. Raises EagleError where the graph leaves it open."""
    heads = value.shape[axis] if value is not None and value.shape is not None else None
    if not isinstance(heads, int):
        raise EagleError("TreeAttention needs a fixed number of heads; the traced graph leaves it open")
    return heads


def rows_from_heads(rewriter: Rewriter, before: ir.Node, value: ir.Value | None) -> ir.Value:
    """[B, Q, heads * D] for a value [B, heads, Q, D], without a transpose where the graph allows it."""
    node = producer(value)
    if node is not None and (node.domain, node.op_type) == ("", "RotaryEmbedding"):
        rows = rows_from_heads(rewriter, before, node.inputs[0])
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        attributes["num_heads"] = head_count(value, axis=1)
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
