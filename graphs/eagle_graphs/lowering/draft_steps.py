"""The steps of a round of drafting on a device: see `eagle_graphs.draft_steps`, whose names are the ports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_graphs.draft_steps import TREE, draft_step_ports
from eagle_graphs.lowering import growth
from eagle_graphs.ports import GraphPorts
from eagle_graphs.profiles import Profile
from eagle_graphs.static_tree import StaticLevel, static_tree
from eagle_graphs.tree import Ids, depths_and_ancestors

_IR_VERSION = 10
_OPSET = 18
"""No later than the ops need: a provider that lacks an op in its latest version runs it on the CPU."""
_TYPES = {"int64": ir.DataType.INT64, "float32": ir.DataType.FLOAT, "bool": ir.DataType.BOOL}


def draft_steps(profile: Profile, *, hidden_width: int, top_k: int) -> list[ir.Model]:
    """The graphs of `draft_step_ports`, in standard ONNX."""
    kind = _StaticStep if profile.paths else _Step
    ports = draft_step_ports(profile, hidden_width=hidden_width, top_k=top_k)
    models = []
    for step, own in enumerate(ports):
        made = kind(profile, step, own)
        values = made.last() if step == len(ports) - 1 else made.between()
        for port in own.outputs:
            made.builder.give(port.name, values[port.name], ir.TensorType(_TYPES[port.dtype]), ir.Shape(port.axes))
        models.append(ir.Model(made.builder.graph, ir_version=_IR_VERSION, producer_name="eagle-export"))
    return models


class _Step:
    def __init__(self, profile: Profile, step: int, ports: GraphPorts) -> None:
        inputs = [
            ir.Value(name=port.name, type=ir.TensorType(_TYPES[port.dtype]), shape=ir.Shape(port.axes))
            for port in ports.inputs
        ]
        graph = ir.Graph(inputs, [], nodes=[], opset_imports={"": _OPSET}, name=f"draft_step_{step}")
        self.builder = growth.Builder(graph, "step")
        self._profile, self._step = profile, step

    def between(self) -> dict[str, ir.Value]:
        """What the next pass of the head takes."""
        builder, profile, step = self.builder, self._profile, self._step
        tokens, hidden = self._children("topk_ids", step), builder.inputs[f"hidden_out.{step}"]
        if step == 0:
            hidden = builder.one("Gather", hidden, builder.constant(np.zeros((1, profile.top_k), np.int64)))
            return {"token_ids.1": builder.one("Identity", tokens), "hidden.1": hidden}
        tokens, values = self._candidates(step)
        ancestors: Any = builder.inputs.get(f"tree_mask.{step}")
        if ancestors is None:
            ancestors = builder.constant(np.eye(profile.top_k, dtype=np.bool_)[None])
        expanded = growth.expand_level(builder, profile, step + 1, tokens, values, hidden, ancestors)
        level = step + 1
        return {
            f"token_ids.{level}": expanded.tokens,
            f"hidden.{level}": expanded.hidden,
            f"tree_mask.{level}": expanded.mask,
            f"values.{level}": expanded.values,
            f"indices.{level}": expanded.indices,
            f"candidates.{step}": tokens,
            f"candidate_values.{step}": values,
        }

    def last(self) -> dict[str, ir.Value]:
        """The tree."""
        builder, profile, last, given = self.builder, self._profile, self._step, self.builder.inputs
        tokens, values = [self._children("topk_ids", 0)], [self._children("topk_logprobs", 0)]
        for level in range(1, last):
            tokens.append(given[f"candidates.{level}"])
            values.append(given[f"candidate_values.{level}"])
        indices = []
        if last > 0:
            for parts, part in zip((tokens, values), self._candidates(last), strict=True):
                parts.append(part)
            first = builder.constant(np.arange(profile.top_k)[None])
            indices = [first, *(given[f"indices.{level}"] for level in range(2, last + 1))]
        tree = growth.rerank(builder, profile, [*tokens, given["root"]], values, indices)
        assert tuple(tree) == TREE
        return tree | {"position_ids": builder.one("Add", tree["depths"], given["committed"])}

    def _candidates(self, level: int) -> tuple[ir.Value, ir.Value]:
        above = self._children("topk_logprobs", 0) if level == 1 else self.builder.inputs[f"values.{level}"]
        rows = (self._children(name, level) for name in ("topk_ids", "topk_logprobs"))
        return growth.candidates(self.builder, self._profile, above, *rows)

    def _children(self, name: str, step: int) -> ir.Value:
        """Of the children that the head gives as many as the profile takes."""
        value, width, ints = self.builder.inputs[f"{name}.{step}"], self._profile.top_k, self.builder.ints
        assert value.shape is not None
        if value.shape[1] == width:
            return value
        return self.builder.one("Slice", value, ints(0), ints(width), ints(1))


class _StaticStep(_Step):
    """Every choice is a constant: which child of which row."""

    def between(self) -> dict[str, ir.Value]:
        """See `_Step`."""
        step = self._step
        level, below = static_tree(self._profile.paths).levels[step : step + 2]
        expanded = np.searchsorted(level.children, below.expanded)
        parents = self.builder.constant(level.parents[expanded][None])
        return {
            f"token_ids.{step + 1}": self._picked("topk_ids", step, level, expanded),
            f"hidden.{step + 1}": self.builder.one("Gather", self.builder.inputs[f"hidden_out.{step}"], parents),
        }

    def last(self) -> dict[str, ir.Value]:
        """See `_Step`."""
        builder, shape = self.builder, static_tree(self._profile.paths)
        tokens = [builder.inputs["root"]]
        values = [builder.constant(np.zeros((1, 1), np.float32))]
        above = shape.levels[0].expanded
        for step, level in enumerate(shape.levels):
            tokens.append(self._picked("topk_ids", step, level))
            parents = np.searchsorted(above, level.expanded[level.parents])
            value = builder.one("Gather", values[-1], builder.constant(parents), axis=1)
            values.append(builder.one("Add", value, self._picked("topk_logprobs", step, level)))
            above = level.children
        by_level = np.concatenate([[0], *(level.children for level in shape.levels)])
        row_order = builder.constant(np.argsort(by_level))

        def in_rows(parts: Sequence[ir.Value]) -> ir.Value:
            return builder.one("Gather", builder.one("Concat", *parts, axis=1), row_order, axis=1)

        def fixed(array: npt.NDArray[Any]) -> ir.Value:
            return builder.one("Identity", builder.constant(array[None]))

        depths, mask = depths_and_ancestors(shape.parents)
        return {
            "tokens": in_rows(tokens),
            "parents": fixed(shape.parents),
            "values": in_rows(values),
            "depths": fixed(depths),
            "mask": fixed(mask),
            "position_ids": builder.one("Add", builder.constant(depths[None]), builder.inputs["committed"]),
        }

    def _picked(self, name: str, step: int, level: StaticLevel, which: Ids | slice = slice(None)) -> ir.Value:
        """[1, M] what the head says of some of a level's children, in their order."""
        value = self.builder.inputs[f"{name}.{step}"]
        assert value.shape is not None
        width = value.shape[1]
        assert isinstance(width, int)
        places = level.parents[which] * width + level.ranks[which]
        return self.builder.one("Gather", self.builder.flat(value), self.builder.constant(places), axis=1)
