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
    placement = _Placement(rewriter, graph)
    for attention in attentions:
        _lower_attention(rewriter, attention, placement)
    model.opset_imports[MICROSOFT] = 1
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    return model


class _Placement:
    """What GroupQueryAttention is told of where the rows stand; computed once, in front of all layers.

    `seqlens_k` is [1] int32, `total` [] int32. The bias [1, 1, Q, total] is 0 where a row sees a key and -inf
    where not; there is one for each distinct window. GroupQueryAttention's own window goes by index in the
    buffer, which is wrong below a tree.
    """

    def __init__(self, rewriter: Rewriter, graph: ir.Graph) -> None:
        self._rewriter, self._first = rewriter, next(iter(graph))
        inputs = {value.name: value for value in graph.inputs}
        self._tree_mask, self._kv_length = inputs["tree_mask"], inputs["kv_length"]
        self._visible = rewriter.constant(np.zeros((), np.float32))
        self._hidden = rewriter.constant(np.array(-np.inf, np.float32))
        self._biases: dict[int, ir.Value] = {}

        rows_after = self._one("Shape", self._tree_mask, start=2, end=3)
        total = self._one("Add", self._kv_length, rows_after)
        int32 = ir.DataType.INT32.value
        self.seqlens_k = self._one("Cast", self._one("Sub", total, rewriter.ints(1)), to=int32)
        self.total = self._one("Cast", self._one("Squeeze", total), to=int32)

    def bias(self, window: int) -> ir.Value:
        """The bias of the layers whose window is so many positions, 0 for none."""
        if window not in self._biases:
            prefix, tree = self._inside(window) if window else self._everything()
            bias = self._one("Concat", prefix, tree, axis=2)
            self._biases[window] = self._one("Unsqueeze", bias, self._rewriter.ints(1))
        return self._biases[window]

    def _everything(self) -> tuple[ir.Value, ir.Value]:
        """Biases [1, Q, kv_length] and [1, Q, S] without a window: all committed rows, and what the mask names."""
        slots_and_rows = self._one("Shape", self._tree_mask, start=0, end=2)
        prefix_shape = self._one("Concat", slots_and_rows, self._kv_length, axis=0)
        prefix = self._one("Expand", self._visible, prefix_shape)
        return prefix, self._one("Where", self._tree_mask, self._visible, self._hidden)

    def _inside(self, window: int) -> tuple[ir.Value, ir.Value]:
        """The same with a window: of the rows that a row sees, those with fewer than `window` from them to it."""
        ints, int64 = self._rewriter.ints, ir.DataType.INT64.value
        seen = self._one("Cast", self._tree_mask, to=int64)
        from_key = self._one("CumSum", seen, ints(2), reverse=1)  # [1, Q, S] rows seen from this one on
        near = self._one("LessOrEqual", from_key, ints(window))
        tree = self._one("Where", self._one("And", self._tree_mask, near), self._visible, self._hidden)

        depth = self._one("ReduceSum", seen, ints(2), keepdims=1)  # [1, Q, 1] rows of the tree that a row sees
        first = self._one("Sub", self._one("Add", self._kv_length, depth), ints(window))
        scalar = [self._rewriter.constant(np.array(number, np.int64)) for number in (0, 1)]
        committed = self._one("Range", scalar[0], self._one("Squeeze", self._kv_length), scalar[1])
        near = self._one("GreaterOrEqual", committed, first)
        return self._one("Where", near, self._visible, self._hidden), tree

    def _one(self, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        return self._rewriter.one(self._first, op_type, inputs, attributes)


def _lower_attention(rewriter: Rewriter, node: ir.Node, placement: _Placement) -> None:
    query, key, value, past_key, past_value = node.inputs[:5]
    sinks = node.inputs[7] if len(node.inputs) > 7 else None
    attributes: dict[str, float | int] = {
        "num_heads": _heads(node.outputs[0], axis=2),
        "kv_num_heads": _heads(past_key, axis=1),
        "scale": node.attributes["scale"].as_float(),
    }
    if softcap := _float(node, "softcap"):
        attributes["softcap"] = softcap
    window = int(_float(node, "sliding_window"))
    out, present_key, present_value = rewriter.insert(
        node,
        "GroupQueryAttention",
        [
            _rows_from_heads(rewriter, node, query),
            _rows_from_heads(rewriter, node, key),
            _rows_from_heads(rewriter, node, value),
            *(past_key, past_value, placement.seqlens_k, placement.total, None, None, None, placement.bias(window)),
            *([sinks] if sinks is not None else []),
        ],
        attributes,
        domain=MICROSOFT,
        outputs=3,
    )
    _replace_heads_by_rows(rewriter, node, out)
    rewriter.replace(node.outputs[1], present_key)
    rewriter.replace(node.outputs[2], present_value)
    rewriter.graph.remove(node, safe=True)


def _float(node: ir.Node, name: str) -> float:
    """An attribute that may be missing, which means 0."""
    return float(node.attributes[name].value) if name in node.attributes else 0.0


def _replace_heads_by_rows(rewriter: Rewriter, node: ir.Node, rows: ir.Value) -> None:
    """Puts `rows` [B, Q, heads * D] where the attention's result [B, Q, heads, D] is read."""
    heads = node.outputs[0]
    for user in list(heads.consumers()):
        if user.op_type == "Reshape" and _is_rows(user.outputs[0], heads):
            rewriter.replace(user.outputs[0], rows)
            rewriter.graph.remove(user, safe=True)
    if heads.uses() or heads.is_graph_output():
        split = rewriter.ints(0, 0, *(int(size) for size in list(heads.shape or ())[2:]))  # type: ignore[arg-type]
        rewriter.replace(heads, rewriter.one(node, "Reshape", [rows, split]))


def _heads(value: ir.Value | None, *, axis: int) -> int:
    heads = value.shape[axis] if value is not None and value.shape is not None else None
    if not isinstance(heads, int):
        raise EagleError("TreeAttention needs a fixed number of heads; the traced graph leaves it open")
    return heads


def _rows_from_heads(rewriter: Rewriter, before: ir.Node, value: ir.Value | None) -> ir.Value:
    """[B, Q, heads * D] for a value [B, heads, Q, D], without a transpose where the graph allows it."""
    node = producer(value)
    if node is not None and (node.domain, node.op_type) == ("", "RotaryEmbedding"):
        rows = _rows_from_heads(rewriter, before, node.inputs[0])
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        attributes["num_heads"] = _heads(value, axis=1)
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
