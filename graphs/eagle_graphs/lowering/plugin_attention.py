"""Attention for an engine of TensorRT with the fused kernels: TreeAttention becomes `plugin.tensorrt_plugin`'s plugins.

TensorRT's parser finds a plugin by a node's name and its attribute `plugin_namespace`. The ports stay as they are: the
tree's mask is packed in the graph, once in front of all layers.

A graph holds nothing of the GPU that it is for. `onnx_for_gpu` adds that where an engine is built.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from eagle_graphs import tree_attention
from eagle_graphs.errors import EagleError
from eagle_graphs.lowering.rewrite import Rewriter
from eagle_graphs.lowering.rows import float_attribute, head_count
from eagle_graphs.lowering.standard import ATTENTION, fix_cache
from eagle_graphs.plugin.launch import Attention, split_rows_for
from eagle_graphs.plugin.masks import WORD_BITS

NAMESPACE = "eagle"
ATTEND, COMBINE = "attend", "combine"
_QUARTER = WORD_BITS // 4
_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def lower_for_plugins(model: ir.Model, *, capacity: int, dtype: ir.DataType) -> None:
    """Lowers the neutral graph in place, for one slot; `lower_for_standard_onnx` with the plugins' attention.

    Args:
        model: the neutral graph.
        capacity: rows of the cache (C).
        dtype: element type of attention and of its caches, FLOAT16 or BFLOAT16.

    Raises:
        EagleError: the kernels cannot express an attention, or have not this type.
    """
    if dtype not in _HALVES:
        raise EagleError(f"--attention plugin got {dtype.name}, expected FLOAT16 or BFLOAT16: use --attention native")
    CommonSubexpressionEliminationPass()(model)
    fix_cache(model.graph, capacity)
    rewriter = Rewriter(model.graph)
    nodes = [n for n in model.graph if (n.domain, n.op_type) == (tree_attention.DOMAIN, tree_attention.NAME)]
    placement = _placement(rewriter, model.graph)
    for number, node in enumerate(nodes):
        _rewrite(rewriter, node, placement, dtype, f"{ATTENTION}.{number}")
    model.opset_imports[NAMESPACE] = 1
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)


def onnx_for_gpu(path: Path, *, new_rows: int, capability: int, multiprocessors: int) -> bytes:
    """A graph with plugins as an engine for one GPU is built from it; its weights stay in their file beside `path`.

    Args:
        path: a graph that `lower_for_plugins` made.
        new_rows: rows of the largest pass.
        capability: ten times the compute capability of the GPU, 89 for 8.9.
        multiprocessors: of the GPU.
    """
    model = ir.load(path)
    for node in model.graph:
        if (node.domain, node.op_type) not in ((NAMESPACE, ATTEND), (NAMESPACE, COMBINE)):
            continue
        attend = node if node.op_type == ATTEND else node.inputs[0].producer()  # type: ignore[union-attr]
        assert attend is not None
        slots, kv_heads, capacity, _ = attend.inputs[3].shape.numpy()  # type: ignore[union-attr]
        split_rows = split_rows_for(kv_heads, slots=slots, capacity=capacity, multiprocessors=multiprocessors)
        told = {"split_rows": split_rows, "capability": capability}
        if node is attend:
            told["new_rows"] = new_rows
        for name, number in told.items():
            node.attributes[name] = ir.AttrInt64(name, number)
    return bytes(ir.to_proto(model).SerializeToString())


def _placement(rewriter: Rewriter, graph: ir.Graph) -> tuple[ir.Value, ir.Value]:
    """The mask in words [B, Q, W] and the first row to write [B]."""
    first = next(iter(graph))
    ints, int64 = rewriter.ints, ir.DataType.INT64.value
    inputs = {value.name: value for value in graph.inputs}
    tree_mask, kv_length = inputs["tree_mask"], inputs["kv_length"]

    def one(op_type: str, *values: ir.Value, **attributes: int) -> ir.Value:
        return rewriter.one(first, op_type, values, attributes)

    new, after = one("Shape", tree_mask, start=1, end=2), one("Shape", tree_mask, start=2, end=3)
    missing = one("Mod", one("Neg", after), ints(WORD_BITS))  # columns up to a whole word
    padding = one("Concat", ints(0, 0, 0, 0, 0), missing, axis=0)
    bits = one("Pad", one("Cast", tree_mask, to=int64), padding)
    # By quarters of a word: a runtime may add integers in floating point, which is exact for so few bits.
    bits = one("Reshape", bits, ints(0, 0, -1, 4, _QUARTER))
    powers = rewriter.constant(np.left_shift(np.int64(1), np.arange(_QUARTER, dtype=np.int64)))
    sums = one("ReduceSum", one("Mul", bits, powers), ints(4), keepdims=0)
    *lower, words = rewriter.insert(first, "Split", [sums], {"axis": 3, "num_outputs": 4}, outputs=4)
    for quarter in reversed(lower):
        words = one("Add", one("Mul", words, ints(1 << _QUARTER)), quarter)
    words = one("Squeeze", words, ints(3))
    return words, one("Sub", one("Add", kv_length, after), new)


def _rewrite(
    rewriter: Rewriter, node: ir.Node, placement: tuple[ir.Value, ir.Value], dtype: ir.DataType, name: str
) -> None:
    query, key, value, past_key, past_value, _, kv_length = node.inputs[:7]
    assert query is not None
    assert query.shape is not None
    attention = Attention(
        query_heads=head_count(node.outputs[0], axis=2),
        kv_heads=head_count(past_key, axis=1),
        head_dim=head_count(past_key, axis=3),
        scale=node.attributes["scale"].as_float(),
        softcap=float_attribute(node, "softcap"),
        sliding_window=int(float_attribute(node, "sliding_window")),
    )

    def cast(given: ir.Value | None, to: ir.DataType) -> ir.Value:
        return rewriter.one(node, "Cast", [given], {"to": to.value})

    sinks = node.inputs[7] if len(node.inputs) > 7 else None
    if sinks is None:
        sinks = rewriter.constant(np.full(attention.query_heads, -np.inf, np.float32))
    shared = {"sliding_window": attention.sliding_window, "plugin_namespace": NAMESPACE, "plugin_version": "1"}
    rows = [cast(part, dtype) for part in (query, key, value)]
    partial, statistics, present_key, present_value = rewriter.insert(
        node,
        ATTEND,
        [*rows, past_key, past_value, placement[0], kv_length, placement[1]],
        {"scale": attention.scale, "softcap": attention.softcap, **shared},
        domain=NAMESPACE,
        outputs=4,
        name=name,
    )
    (out,) = rewriter.insert(
        node,
        COMBINE,
        [partial, statistics, kv_length, cast(sinks, dtype)],
        shared,
        domain=NAMESPACE,
        name=f"{name}.{COMBINE}",
    )
    rewriter.replace(node.outputs[0], cast(out, ir.DataType.FLOAT))
    for past, old, present in ((past_key, 1, present_key), (past_value, 2, present_value)):
        assert past is not None
        rewriter.replace(node.outputs[old], present)
        past.type = present.type = ir.TensorType(dtype)
        present.shape = past.shape
    rewriter.graph.remove(node, safe=True)
