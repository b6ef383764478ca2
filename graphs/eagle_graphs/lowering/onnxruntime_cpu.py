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
from eagle_graphs.lowering.rewrite import Rewriter
from eagle_graphs.lowering.rows import float_attribute, head_count, replace_heads_by_rows, rows_from_heads

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
        "num_heads": head_count(node.outputs[0], axis=2),
        "kv_num_heads": head_count(past_key, axis=1),
        "scale": node.attributes["scale"].as_float(),
    }
    if softcap := float_attribute(node, "softcap"):
        attributes["softcap"] = softcap
    window = int(float_attribute(node, "sliding_window"))
    out, present_key, present_value = rewriter.insert(
        node,
        "GroupQueryAttention",
        [
            rows_from_heads(rewriter, node, query),
            rows_from_heads(rewriter, node, key),
            rows_from_heads(rewriter, node, value),
            *(past_key, past_value, placement.seqlens_k, placement.total, None, None, None, placement.bias(window)),
            *([sinks] if sinks is not None else []),
        ],
        attributes,
        domain=MICROSOFT,
        outputs=3,
    )
    replace_heads_by_rows(rewriter, node, out)
    rewriter.replace(node.outputs[1], present_key)
    rewriter.replace(node.outputs[2], present_value)
    rewriter.graph.remove(node, safe=True)
