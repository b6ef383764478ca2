"""Attention for the library of CPU kernels: the neutral TreeAttention becomes `eagle.cpu::TreeAttention`.

The kernel reads rows, rotates queries and keys itself and keeps its keys in blocks of KEY_BLOCK rows, so the
nodes that a traced graph has for all that go, and the key caches change their shape.
"""

from __future__ import annotations

import onnx_ir as ir

from eagle_graphs import native_ops, tree_attention
from eagle_graphs.errors import EagleError
from eagle_graphs.lowering.rewrite import Rewriter, producer
from eagle_graphs.lowering.rows import float_attribute, head_count, replace_heads_by_rows, rows_from_heads

_SPLIT = "Split"


def use_native_attention(model: ir.Model) -> None:
    """Rewrites every attention of the neutral graph in place. Raises EagleError on one it cannot express."""
    rewriter = Rewriter(model.graph)
    for node in [n for n in model.graph if (n.domain, n.op_type) == (tree_attention.DOMAIN, tree_attention.NAME)]:
        _rewrite(rewriter, node)
    model.opset_imports[native_ops.DOMAIN] = native_ops.VERSION


def use_bf16_caches(model: ir.Model) -> None:
    """Gives a lowered graph caches of bfloat16 in place of float32: half the bytes that attention reads.

    The keys and values of a row are rounded as they are written, so that every row, itself among them, sees the same.
    """
    for value in (*model.graph.inputs, *model.graph.outputs):
        if str(value.name).startswith(("past_", "present_")):
            value.dtype = ir.DataType.BFLOAT16


def _rewrite(rewriter: Rewriter, node: ir.Node) -> None:
    query, key, value, past_key, past_value, tree_mask, kv_length = node.inputs[:7]
    sinks = node.inputs[7] if len(node.inputs) > 7 else None
    query, key, angles, interleaved = _without_rotary(query, key)
    rows = [rows_from_heads(rewriter, node, part) for part in (query, key, value)]
    packed = _packed(rows)
    out, present_key, present_value = rewriter.insert(
        node,
        native_ops.TREE_ATTENTION,
        [
            *((packed, None, None) if packed is not None else rows),
            *(past_key, past_value, tree_mask, kv_length),
            *(angles if angles or sinks is None else (None, None)),
            *([sinks] if sinks is not None else []),
        ],
        {
            "num_heads": head_count(node.outputs[0], axis=2),
            "kv_num_heads": head_count(past_key, axis=1),
            "scale": node.attributes["scale"].as_float(),
            "softcap": float_attribute(node, "softcap"),
            "sliding_window": int(float_attribute(node, "sliding_window")),
            "interleaved": interleaved,
        },
        domain=native_ops.DOMAIN,
        outputs=3,
    )
    replace_heads_by_rows(rewriter, node, out)
    rewriter.replace(node.outputs[1], present_key)
    rewriter.replace(node.outputs[2], present_value)
    for cache in (past_key, present_key):
        _block_keys(cache)
    rewriter.graph.remove(node, safe=True)


def _without_rotary(
    query: ir.Value | None, key: ir.Value | None
) -> tuple[ir.Value | None, ir.Value | None, tuple[ir.Value | None, ...], int]:
    """Queries and keys before a rotation that both undergo alike, its (cos, sin), and whether it turns pairs."""
    nodes = [producer(query), producer(key)]
    if all(n is not None and (n.domain, n.op_type) == ("", "RotaryEmbedding") and len(n.inputs) == 3 for n in nodes):
        first, second = nodes
        assert first is not None
        assert second is not None
        attributes = [
            {name: a.value for name, a in n.attributes.items() if name != "num_heads"} for n in (first, second)
        ]
        if first.inputs[1:] == second.inputs[1:] and attributes[0] == attributes[1]:
            return first.inputs[0], second.inputs[0], tuple(first.inputs[1:]), int(attributes[0].get("interleaved", 0))
    return query, key, (), 0


def _packed(rows: list[ir.Value]) -> ir.Value | None:
    """The one value whose parts are `rows`, in their order and nothing else."""
    split = producer(rows[0])
    if split is None or split.op_type != _SPLIT or list(split.outputs) != rows:
        return None
    return split.inputs[0]


def _block_keys(value: ir.Value | None) -> None:
    shape = None if value is None else value.shape
    if value is None or shape is None or len(shape) != 4 or not isinstance(shape[3], int):
        raise EagleError("TreeAttention needs a key cache of a fixed head size; the traced graph leaves it open")
    block = native_ops.KEY_BLOCK
    rows = shape[2]
    blocks = rows // block if isinstance(rows, int) else f"{rows}/{block}"
    value.shape = ir.Shape([shape[0], shape[1], blocks, shape[3], block])
