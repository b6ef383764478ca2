"""The draft phase of a round as one graph: the head's lowered graph, unrolled over the levels of a dynamic tree.

The head stands in it once for the extension and once a level, over the same weights. Every copy writes the cache that
the runtime binds, each through outputs of its own; since a level's rows come from the level before it, they run in
order. Between the copies and behind them stand EAGLE-2's choices, in operators that every backend has. They are those
of `eagle_graphs.dynamic_tree.grow` and `eagle_graphs.tree.rerank`, ties included: ONNX's TopK gives a tie to the lower
index.

    K  children of a node; rows of a level    N  nodes of the tree, root included    h  hidden width of the head
    M  candidates, level by level, and the root behind them
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from eagle_graphs.lowering.rewrite import Rewriter
from eagle_graphs.native_ops import TOP_LOGPROBS
from eagle_graphs.ports import cache_names, round_cache_prefixes
from eagle_graphs.profiles import Profile

_INPUTS = ("token_ids", "hidden", "position_ids", "tree_mask", "kv_length", "logit_rows")


def unroll_draft(draft: ir.Model, profile: Profile) -> ir.Model:
    """The round's graph, with the ports of `eagle_graphs.draft_round_ports`, for a profile whose tree is dynamic.

    draft: the head's graph as it was lowered for the backend; it stays as it is.
    """
    assert not profile.paths, "a static tree has no choices to compile"
    builder = _Builder(draft.graph)
    head = _Head(draft.graph, builder, profile)
    tree = _rerank(builder, profile, *_grow(builder, head, profile))
    for (name, value), axes in zip(tree.items(), [(1, profile.nodes)] * 4 + [(1, *[profile.nodes] * 2)], strict=True):
        dtype = {"values": ir.DataType.FLOAT, "mask": ir.DataType.BOOL}.get(name, ir.DataType.INT64)
        builder.give(name, value, ir.TensorType(dtype), ir.Shape(axes))
    for name, value, like in head.caches:
        builder.give(name, value, like.type, like.shape)
    model = ir.Model(builder.graph, ir_version=draft.ir_version, producer_name=draft.producer_name)
    RemoveUnusedNodesPass()(model)
    return model


class _Builder:
    """A graph with the head's inputs and weights, to which nodes are appended."""

    def __init__(self, head: ir.Graph) -> None:
        inputs = [ir.Value(name=value.name, type=value.type, shape=value.shape) for value in head.inputs]
        self.graph = ir.Graph(inputs, [], nodes=[], opset_imports=dict(head.opset_imports), name="draft_round")
        self.inputs = {str(value.name): value for value in inputs}
        self.weights: dict[str, ir.Value] = {}
        for name, value in head.initializers.items():
            shared = ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
            self.graph.register_initializer(shared)
            self.weights[name] = shared
        self._constants, self._number = Rewriter(self.graph), itertools.count()

    def one(self, op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """A new node's only output."""
        return self._append(op_type, inputs, attributes, outputs=1)[0]

    def top(self, values: ir.Value, count: int, *, largest: int = 1) -> tuple[ir.Value, ir.Value]:
        """The best of [1, size], in order: themselves and their indices, each [1, count]."""
        attributes = {"axis": 1, "largest": largest, "sorted": 1}
        best, indices = self._append("TopK", [values, self.ints(count)], attributes, outputs=2)
        return best, indices

    def flat(self, value: ir.Value) -> ir.Value:
        """[1, size]"""
        return self.one("Reshape", value, self.ints(1, -1))

    def constant(self, array: npt.NDArray[Any]) -> ir.Value:
        """An initializer."""
        return self._constants.constant(array)

    def ints(self, *numbers: int) -> ir.Value:
        """A 1-D int64 initializer."""
        return self._constants.ints(*numbers)

    def give(self, name: str, value: ir.Value, kind: ir.TypeProtocol | None, shape: ir.Shape | None) -> None:
        """Makes `value` an output."""
        value.name, value.type, value.shape = name, kind, shape
        self.graph.outputs.append(value)

    def _append(
        self, op_type: str, inputs: Sequence[ir.Value], attributes: dict[str, Any], *, outputs: int
    ) -> Sequence[ir.Value]:
        node = ir.node(op_type, inputs, attributes, num_outputs=outputs, name=f"round.{next(self._number)}")
        for index, out in enumerate(node.outputs):
            out.name = f"{node.name}.{index}"
        self.graph.append(node)
        return node.outputs


class _Head:
    """The head's passes."""

    def __init__(self, graph: ir.Graph, builder: _Builder, profile: Profile) -> None:
        self._graph, self._builder, self._width = graph, builder, profile.top_k
        self._prefixes = iter(round_cache_prefixes(profile))
        self.caches: list[tuple[str, ir.Value, ir.Value]] = []
        """Outputs of the round: name, value, and the head's own output of that type and shape."""

    def children(self, feeds: Mapping[str, ir.Value]) -> tuple[ir.Value, ir.Value, ir.Value]:
        """A pass: tokens and log-probabilities of the K best children, each [rows, K], and `hidden_out` [rows, h]."""
        copy, prefix = self._graph.clone(), next(self._prefixes)
        for value in copy.inputs:
            name = str(value.name)
            value.replace_all_uses_with(feeds[name] if name in feeds else self._builder.inputs[name])
        for name, value in copy.initializers.items():
            value.replace_all_uses_with(self._builder.weights[name])
        results, nodes = {str(value.name): value for value in copy.outputs}, list(copy)
        copy.outputs.clear()
        copy.remove(nodes)
        for node in nodes:
            if node.name:
                node.name = f"{prefix}.{node.name}"
            for out in node.outputs:
                out.name = f"{prefix}.{out.name}"
                out.shape = None  # its symbols would stand for other sizes in each copy
        self._builder.graph.extend(nodes)
        caches = [value for value in self._graph.outputs if str(value.name).startswith("present_")]
        for like, name in zip(caches, cache_names(prefix, len(caches) // 2), strict=True):
            self.caches.append((name, results[str(like.name)], like))
        self._narrow(next(node for node in reversed(nodes) if node.op_type in ("TopK", TOP_LOGPROBS)))
        return results["topk_ids"], results["topk_logprobs"], results["hidden_out"]

    def _narrow(self, choice: ir.Node) -> None:
        """Has the children's choice, the last one in the head, give as many as the profile takes."""
        if choice.op_type == TOP_LOGPROBS:
            choice.attributes["k"] = ir.AttrInt64("k", self._width)
        else:
            choice.replace_input_with(1, self._builder.ints(self._width))


def _grow(builder: _Builder, head: _Head, profile: Profile) -> tuple[list[ir.Value], list[ir.Value], list[ir.Value]]:
    """The candidates, as `eagle_graphs.dynamic_tree.grow` finds them.

    Returns, by level: tokens, the root's behind them, and values, each [1, candidates]; and the candidates [1, K] that
    each level expands.
    """
    one, ints, width, given = builder.one, builder.ints, profile.top_k, builder.inputs
    tokens, values, hidden = head.children({name: given[name] for name in _INPUTS})
    root, position = (one("Gather", given[name], given["logit_rows"], axis=1) for name in ("token_ids", "position_ids"))
    committed = one("Add", given["kv_length"], one("Add", given["logit_rows"], ints(1)))

    all_tokens, all_values = [tokens], [values]
    own_rows = builder.constant(np.eye(width, dtype=np.bool_)[None])
    ancestors = own_rows  # [1, K, S]
    parent_rows = builder.constant(np.zeros((1, width), np.int64))  # of the last pass
    expanded = [builder.constant(np.arange(width)[None])]
    for level in range(1, profile.depth):
        if level > 1:
            values, best = builder.top(all_values[-1], width)
            tokens, parent_rows = one("Gather", one("Reshape", tokens, ints(-1)), best), one("Div", best, ints(width))
            ancestors = one("Gather", one("Squeeze", ancestors, ints(0)), parent_rows)
            ancestors = one("Concat", ancestors, own_rows, axis=2)
            expanded.append(one("Add", best, ints(width + (level - 2) * width**2)))
        feeds = {
            "token_ids": tokens,
            "hidden": one("Gather", hidden, parent_rows),
            "position_ids": one("Add", position, builder.constant(np.full((1, width), level))),
            "tree_mask": ancestors,
            "kv_length": committed,
            "logit_rows": builder.constant(np.arange(width)),
        }
        above = one("Reshape", values, ints(width, 1))
        tokens, logprobs, hidden = head.children(feeds)
        all_tokens.append(builder.flat(tokens))
        all_values.append(builder.flat(one("Add", above, logprobs)))
    return [*all_tokens, root], all_values, expanded


def _rerank(
    builder: _Builder,
    profile: Profile,
    tokens: list[ir.Value],
    values: list[ir.Value],
    expanded: list[ir.Value],
) -> dict[str, ir.Value]:
    """The best N candidates in depth-first order, as `eagle_graphs.tree.rerank` finds them.

    Whatever the values are, NaN included, what comes out is a tree: a node whose parent is not chosen hangs below the
    root, and depths are counted in the mask.

    Depth-first order, the better sibling first, is the order of the nodes' paths, compared rank by rank. A path becomes
    a number whose digits to base N are the ranks along it and 0 below: then a node's descendants are the nodes whose
    number lies less than `span` above its own, the span being what one more in its last digit counts.
    """
    one, constant, nodes = builder.one, builder.constant, profile.nodes
    width, depth = profile.top_k, profile.depth
    assert nodes**depth < 2**63, "the tree is too deep for paths as numbers"
    depths = np.append(np.repeat(np.arange(1, depth + 1), [width, *[width**2] * (depth - 1)]), 0)  # [M]
    root, spans = len(depths) - 1, constant(nodes ** (depth - depths))
    # Candidate -> its parent's place in `above`, the root's being the first. Here the root is its own parent.
    places = np.append(np.repeat(np.arange((depth - 1) * width + 1), width), 0)
    above = one("Concat", builder.ints(root), *(one("Reshape", v, builder.ints(-1)) for v in expanded), axis=0)

    value, chosen = builder.top(one("Concat", *values, axis=1), nodes - 1)
    value = one("Concat", constant(np.zeros((1, 1), np.float32)), value, axis=1)  # by rank; the root is the first
    chosen = one("Concat", constant(np.array([[root]])), chosen, axis=1)
    ranks, no_ranks = constant(np.arange(nodes)[None]), constant(np.zeros((1, root + 1), np.int64))
    rank = one("ScatterElements", no_ranks, chosen, ranks, axis=1)
    parent = one("GatherElements", rank, one("Gather", above, one("Gather", constant(places), chosen)), axis=1)
    digit = one("Mul", one("Gather", spans, chosen), ranks)
    number = digit
    for _ in range(depth - 1):
        number = one("Add", digit, one("GatherElements", number, parent, axis=1))
    number, order = builder.top(number, nodes, largest=0)

    row = one("ScatterElements", ranks, order, ranks, axis=1)
    chosen, parent, value = (one("GatherElements", v, order, axis=1) for v in (chosen, parent, value))
    root_has_none = constant(np.where(np.arange(nodes), 0, -1)[None])
    end = one("Add", number, one("Gather", spans, chosen))
    before_end = one("Less", one("Reshape", number, builder.ints(1, nodes, 1)), end)
    mask, last = one("And", before_end, constant(np.tri(nodes, dtype=np.bool_)[None])), builder.ints(-1)
    return {
        "tokens": one("GatherElements", one("Concat", *tokens, axis=1), chosen, axis=1),
        "parents": one("Add", one("GatherElements", row, parent, axis=1), root_has_none),
        "values": value,
        "depths": one(
            "Sub", one("ReduceSum", one("Cast", mask, to=ir.DataType.INT64), last, keepdims=0), builder.ints(1)
        ),
        "mask": mask,
    }
