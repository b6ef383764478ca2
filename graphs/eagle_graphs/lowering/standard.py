"""Lowering to standard ONNX (opset 24), for TensorRT and for any other runtime.

TreeAttention becomes TensorScatter, which writes the new rows into the cache, and Attention over the cache's whole
capacity, under a mask. TensorRT makes a KVCacheUpdate and a fused attention of the two, if the capacity is a fixed
size and the attention is in half precision; ONNX Runtime runs the same graph on the CPU.

Queries that share a head of keys are laid side by side as rows of one head, [B, Hkv, G * Q, D]: the same products,
but TensorRT would otherwise copy the cache G times over in every pass.

What Attention cannot express everywhere (soft-capped scores, sinks) is written out as products and a softmax.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from eagle_graphs import tree_attention
from eagle_graphs.lowering.rewrite import Rewriter
from eagle_graphs.lowering.rows import float_attribute, head_count

OPSET = 24
ATTENTION = "attention"
"""Attention nodes are named `attention.0`, `attention.1`, ..., by which an engine's report finds them."""


def lower_for_standard_onnx(model: ir.Model, *, capacity: int, dtype: ir.DataType = ir.DataType.FLOAT) -> None:
    """Lowers the neutral graph in place, for one slot.

    Args:
        model: the neutral graph.
        capacity: rows of the cache (C).
        dtype: element type of attention and of its cache.
    """
    CommonSubexpressionEliminationPass()(model)
    graph = model.graph
    fix_cache(graph, capacity)
    rewriter = Rewriter(graph)
    masks = _Masks(rewriter, graph, capacity)
    nodes = [node for node in graph if (node.domain, node.op_type) == (tree_attention.DOMAIN, tree_attention.NAME)]
    for number, node in enumerate(nodes):
        _Attention(rewriter, node, masks, dtype, f"{ATTENTION}.{number}").lower()
    model.opset_imports[""] = OPSET
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)


def fix_cache(graph: ir.Graph, capacity: int) -> None:
    """Gives the graph's ports one slot (B) and a cache of `capacity` rows (C)."""
    for value in (*graph.inputs, *graph.outputs):
        assert value.shape is not None
        value.shape = ir.Shape([{"B": 1, "C": capacity}.get(str(axis), axis) for axis in value.shape])


class _Masks:
    """Which rows of the cache each new row sees, [B, 1, G * Q, C], computed once in front of all layers.

    A committed row is seen by all, within the window; a row behind them by those whose tree mask names it.
    """

    def __init__(self, rewriter: Rewriter, graph: ir.Graph, capacity: int) -> None:
        self._rewriter, self._first = rewriter, next(iter(graph))
        inputs = {value.name: value for value in graph.inputs}
        self._tree_mask, self._kv_length = inputs["tree_mask"], inputs["kv_length"]
        self._masks: dict[tuple[int, int], ir.Value] = {}
        ints = rewriter.ints

        new = self._one("Shape", self._tree_mask, start=1, end=2)
        after = self._one("Shape", self._tree_mask, start=2, end=3)
        self.write_at = self._one("Sub", self._one("Add", self._kv_length, after), new)
        """[B] first row to write"""
        self._columns = rewriter.constant(np.arange(capacity, dtype=np.int64)[None, None])
        offset = self._one("Sub", self._columns, self._one("Unsqueeze", self._kv_length, ints(1, 2)))  # [B, 1, C]
        self._committed = self._one("Less", offset, ints(0))
        behind = self._one("Less", offset, after)
        self._in_tree = self._one("And", behind, self._one("Not", self._committed))
        index = self._one("Min", self._one("Max", offset, ints(0)), self._one("Sub", after, ints(1)))
        shape = self._one("Concat", ints(1), new, ints(capacity), axis=0)
        self._index = self._one("Expand", index, shape)  # [B, Q, C]

    def mask(self, *, window: int, group: int) -> ir.Value:
        """The mask of layers whose window is so many positions, 0 for none, with `group` queries for a head of keys."""
        if (window, group) not in self._masks:
            if group > 1:
                single = self.mask(window=window, group=1)
                self._masks[window, group] = self._one("Concat", *[single] * group, axis=2)
            else:
                committed, tree_mask = self._inside(window) if window else (self._committed, self._tree_mask)
                named = self._one("GatherElements", tree_mask, self._index, axis=2)
                seen = self._one("Or", committed, self._one("And", named, self._in_tree))
                self._masks[window, group] = self._one("Unsqueeze", seen, self._rewriter.ints(1))
        return self._masks[window, group]

    def _inside(self, window: int) -> tuple[ir.Value, ir.Value]:
        """Committed rows and tree mask, of both only what a row sees with fewer than `window` rows from there to it."""
        ints, int32, int64 = self._rewriter.ints, ir.DataType.INT32.value, ir.DataType.INT64.value
        seen = self._one("Cast", self._tree_mask, to=int32)
        from_key = self._one("Cast", self._one("CumSum", seen, ints(2), reverse=1), to=int64)  # [B, Q, S]
        near = self._one("And", self._tree_mask, self._one("LessOrEqual", from_key, ints(window)))
        depth = self._one("Cast", self._one("ReduceSum", seen, ints(2), keepdims=1), to=int64)  # [B, Q, 1]
        length = self._one("Unsqueeze", self._kv_length, ints(1, 2))
        first = self._one("Sub", self._one("Add", length, depth), ints(window))
        committed = self._one("And", self._committed, self._one("GreaterOrEqual", self._columns, first))
        return committed, near

    def _one(self, op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        return self._rewriter.one(self._first, op_type, inputs, attributes)


class _Attention:
    """One TreeAttention on its way."""

    def __init__(self, rewriter: Rewriter, node: ir.Node, masks: _Masks, dtype: ir.DataType, name: str) -> None:
        self._rewriter, self._node, self._masks, self._dtype, self._name = rewriter, node, masks, dtype, name
        self._heads, self._kv_heads = head_count(node.outputs[0], axis=2), head_count(node.inputs[3], axis=1)
        self._group = self._heads // self._kv_heads

    def lower(self) -> None:
        """Puts the standard nodes in its place."""
        rewriter, node, ints = self._rewriter, self._node, self._rewriter.ints
        window = int(float_attribute(node, "sliding_window"))
        mask = self._masks.mask(window=window, group=self._group)
        key, value = (self._appended(part) for part in (1, 2))
        sinks = node.inputs[7] if len(node.inputs) > 7 else None
        head_dim = int(node.outputs[0].shape[3])  # type: ignore[index, arg-type]
        query = self._one("Reshape", node.inputs[0], ints(0, self._kv_heads, -1, head_dim))
        if sinks is None and not float_attribute(node, "softcap"):
            attributes = {"scale": node.attributes["scale"].as_float()}
            query = self._cast(query, self._dtype)
            (out,) = rewriter.insert(node, "Attention", [query, key, value, mask], attributes, name=self._name)
        else:
            out = self._written_out(query, key, value, mask, sinks)
        out = self._cast(out, ir.DataType.FLOAT)
        out = self._one("Reshape", out, ints(0, self._heads, -1, head_dim))
        rewriter.replace(node.outputs[0], self._one("Transpose", out, perm=[0, 2, 1, 3]))
        rewriter.graph.remove(node, safe=True)

    def _appended(self, part: int) -> ir.Value:
        """The cache of keys (1) or values (2) with the new rows in it."""
        past, present = self._node.inputs[part + 2], self._node.outputs[part]
        assert past is not None
        new = self._cast(self._node.inputs[part], self._dtype)
        cache = self._one("TensorScatter", past, new, self._masks.write_at, axis=2)
        shape = past.shape
        self._rewriter.replace(present, cache)
        past.type = cache.type = ir.TensorType(self._dtype)
        cache.shape = shape
        return cache

    def _written_out(
        self, query: ir.Value, key: ir.Value, value: ir.Value, mask: ir.Value, sinks: ir.Value | None
    ) -> ir.Value:
        """Products in `dtype`, scores and softmax in float32."""
        rewriter, node, float32 = self._rewriter, self._node, ir.DataType.FLOAT
        query = self._cast(self._one("Mul", query, self._scalar(node.attributes["scale"].as_float())), self._dtype)
        keys = self._one("Transpose", key, perm=[0, 1, 3, 2])
        scores = self._cast(self._one("MatMul", query, keys), float32)  # [B, Hkv, G * Q, C]
        if softcap := float_attribute(node, "softcap"):
            cap = self._scalar(softcap)
            scores = self._one("Mul", self._one("Tanh", self._one("Div", scores, cap)), cap)
        scores = self._one("Where", mask, scores, self._scalar(-np.inf))
        if sinks is not None:
            scores = self._one("Concat", scores, self._sink_column(sinks), axis=3)
        weights = self._one("Softmax", scores, axis=-1)
        if sinks is not None:
            ints = rewriter.ints
            weights = self._one("Slice", weights, ints(0), ints(-1), ints(3))
        (out,) = rewriter.insert(node, "MatMul", [self._cast(weights, self._dtype), value], name=self._name)
        return out

    def _sink_column(self, sinks: ir.Value) -> ir.Value:
        """[1, Hkv, G * Q, 1] from [Hq]."""
        ints = self._rewriter.ints
        rows = self._one("Shape", self._node.inputs[0], start=2, end=3)
        of_heads = self._one("Reshape", sinks, ints(1, self._heads, 1, 1))
        wide = self._one("Expand", of_heads, self._one("Concat", ints(1, self._heads), rows, ints(1), axis=0))
        return self._one("Reshape", wide, ints(0, self._kv_heads, -1, 1))

    def _scalar(self, number: float) -> ir.Value:
        return self._rewriter.constant(np.array(number, np.float32))

    def _cast(self, value: ir.Value | None, dtype: ir.DataType) -> ir.Value:
        assert value is not None
        return value if self._dtype == ir.DataType.FLOAT else self._one("Cast", value, to=dtype.value)

    def _one(self, op_type: str, *inputs: ir.Value | None, **attributes: object) -> ir.Value:
        return self._rewriter.one(self._node, op_type, inputs, attributes)
