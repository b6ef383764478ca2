"""EAGLE-2's choices in operators that every backend has: which nodes a level expands, and which make the tree.

They are those of `eagle_graphs.dynamic_tree.grow` and `eagle_graphs.tree.rerank`, ties included: ONNX's TopK gives a
tie to the lower index.

    K  children of a node; rows of a level    N  nodes of the tree, root included    h  hidden width of the head
    M  candidates, level by level, and the root behind them    S  rows of the tree so far
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_graphs.lowering.rewrite import Rewriter
from eagle_graphs.profiles import Profile


class Builder:
    """Appends nodes to a graph."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        """prefix: of the nodes' names."""
        self.graph = graph
        self.inputs = {str(value.name): value for value in graph.inputs}
        self._constants, self._prefix, self._number = Rewriter(graph), prefix, itertools.count()

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
        self, op_type: str, inputs: Sequence[ir.Value], attributes: Mapping[str, Any], *, outputs: int
    ) -> Sequence[ir.Value]:
        node = ir.node(
            op_type, inputs, dict(attributes), num_outputs=outputs, name=f"{self._prefix}.{next(self._number)}"
        )
        for index, out in enumerate(node.outputs):
            out.name = f"{node.name}.{index}"
        self.graph.append(node)
        return node.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Expanded:
    """The K nodes that a level expands: the head's next inputs."""

    tokens: ir.Value
    """[1, K]"""
    hidden: ir.Value
    """[1, K, h] of their parents' rows."""
    mask: ir.Value
    """[1, K, S]"""
    values: ir.Value
    """[1, K]"""
    indices: ir.Value
    """[1, K] among all candidates."""


def expand_root(builder: Builder, profile: Profile, tokens: ir.Value, values: ir.Value, hidden: ir.Value) -> Expanded:
    """All children of the root. tokens, values: [1, K]; hidden: [1, h]."""
    width = profile.top_k
    return Expanded(
        tokens=tokens,
        hidden=builder.one("Gather", hidden, builder.constant(np.zeros((1, width), np.int64))),
        mask=builder.constant(np.eye(width, dtype=np.bool_)[None]),
        values=values,
        indices=builder.constant(np.arange(width)[None]),
    )


def expand_level(
    builder: Builder,
    profile: Profile,
    level: int,
    tokens: ir.Value,
    values: ir.Value,
    hidden: ir.Value,
    ancestors: ir.Value,
) -> Expanded:
    """The best of level `level`, 2 or more, of whose candidates `tokens` and `values` are given, each [1, K * K].

    hidden: [K, h] of the rows above; ancestors: [1, K, S - K] of these rows.
    """
    one, ints, width = builder.one, builder.ints, profile.top_k
    best_values, best = builder.top(values, width)
    parent_rows = one("Div", best, ints(width))
    mask = one("Gather", one("Squeeze", ancestors, ints(0)), parent_rows)
    return Expanded(
        tokens=one("Gather", one("Reshape", tokens, ints(-1)), best),
        hidden=one("Gather", hidden, parent_rows),
        mask=one("Concat", mask, builder.constant(np.eye(width, dtype=np.bool_)[None]), axis=2),
        values=best_values,
        indices=one("Add", best, ints(width + (level - 2) * width**2)),
    )


def candidates(
    builder: Builder, profile: Profile, above: ir.Value, tokens: ir.Value, logprobs: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """Children of a level's rows: tokens and values, each [1, K * K].

    above: [1, K] the rows' values; tokens, logprobs: [K, K] of their children.
    """
    above = builder.one("Reshape", above, builder.ints(profile.top_k, 1))
    return builder.flat(tokens), builder.flat(builder.one("Add", above, logprobs))


def rerank(
    builder: Builder,
    profile: Profile,
    tokens: list[ir.Value],
    values: list[ir.Value],
    expanded: list[ir.Value],
) -> dict[str, ir.Value]:
    """The best N candidates in depth-first order, as `eagle_graphs.tree.rerank` finds them, named as a round's ports.

    tokens: the candidates' by level, and the root's behind them; values: theirs by level; expanded: the candidates
    [1, K] that each level below the root expands.

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
