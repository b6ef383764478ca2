"""The draft phase of a round as one graph: the head's lowered graph, unrolled over the levels of a dynamic tree.

The head stands in it once for the extension and once a level, over the same weights. Every copy writes the cache that
the runtime binds, each through outputs of its own; since a level's rows come from the level before it, they run in
order. Between the copies and behind them stand the choices of `eagle_graphs.lowering.growth`, whose letters are used.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from eagle_graphs.lowering import growth
from eagle_graphs.native_ops import TOP_LOGPROBS
from eagle_graphs.ports import cache_names, round_cache_prefixes
from eagle_graphs.profiles import Profile

_INPUTS = ("token_ids", "hidden", "position_ids", "tree_mask", "kv_length", "logit_rows")


def unroll_draft(draft: ir.Model, profile: Profile) -> ir.Model:
    """The round's graph, with the ports of `eagle_graphs.draft_round_ports`, for a profile whose tree is dynamic.

    draft: the head's graph as it was lowered for the backend; it stays as it is.
    """
    assert not profile.paths, "a static tree has no choices to compile"
    builder = _RoundBuilder(draft.graph)
    head = _Head(draft.graph, builder, profile)
    tree = growth.rerank(builder, profile, *_grow(builder, head, profile))
    for (name, value), axes in zip(tree.items(), [(1, profile.nodes)] * 4 + [(1, *[profile.nodes] * 2)], strict=True):
        dtype = {"values": ir.DataType.FLOAT, "mask": ir.DataType.BOOL}.get(name, ir.DataType.INT64)
        builder.give(name, value, ir.TensorType(dtype), ir.Shape(axes))
    for name, value, like in head.caches:
        builder.give(name, value, like.type, like.shape)
    model = ir.Model(builder.graph, ir_version=draft.ir_version, producer_name=draft.producer_name)
    RemoveUnusedNodesPass()(model)
    return model


class _RoundBuilder(growth.Builder):
    """A graph with the head's inputs and weights, to which nodes are appended."""

    def __init__(self, head: ir.Graph) -> None:
        inputs = [ir.Value(name=value.name, type=value.type, shape=value.shape) for value in head.inputs]
        graph = ir.Graph(inputs, [], nodes=[], opset_imports=dict(head.opset_imports), name="draft_round")
        self.weights: dict[str, ir.Value] = {}
        for name, value in head.initializers.items():
            shared = ir.Value(name=name, shape=value.shape, type=value.type, const_value=value.const_value)
            graph.register_initializer(shared)
            self.weights[name] = shared
        super().__init__(graph, "round")


class _Head:
    """The head's passes."""

    def __init__(self, graph: ir.Graph, builder: _RoundBuilder, profile: Profile) -> None:
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


def _grow(
    builder: _RoundBuilder, head: _Head, profile: Profile
) -> tuple[list[ir.Value], list[ir.Value], list[ir.Value]]:
    """The candidates, as `growth.rerank` takes them."""
    one, ints, given = builder.one, builder.ints, builder.inputs
    tokens, values, hidden = head.children({name: given[name] for name in _INPUTS})
    root, position = (one("Gather", given[name], given["logit_rows"], axis=1) for name in ("token_ids", "position_ids"))
    committed = one("Add", given["kv_length"], one("Add", given["logit_rows"], ints(1)))

    all_tokens, all_values, indices = [tokens], [values], []
    for level in range(1, profile.depth):
        if level == 1:
            expanded = growth.expand_root(builder, profile, tokens, values, hidden)
        else:
            expanded = growth.expand_level(builder, profile, level, tokens, all_values[-1], hidden, expanded.mask)
        indices.append(expanded.indices)
        feeds = {
            "token_ids": expanded.tokens,
            "hidden": expanded.hidden,
            "position_ids": one("Add", position, builder.constant(np.full((1, profile.top_k), level))),
            "tree_mask": expanded.mask,
            "kv_length": committed,
            "logit_rows": builder.constant(np.arange(profile.top_k)),
        }
        tokens, logprobs, hidden = head.children(feeds)
        tokens, values = growth.candidates(builder, profile, expanded.values, tokens, logprobs)
        all_tokens.append(tokens)
        all_values.append(values)
    return [*all_tokens, root], all_values, indices
