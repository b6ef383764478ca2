"""Small tools for rewriting a graph: new nodes, new constants, and a value put in another's place."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir


class Rewriter:
    """Inserts nodes into `graph` in front of a chosen node."""

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def constant(self, array: npt.NDArray[Any]) -> ir.Value:
        """An initializer that holds `array`; equal arrays share one."""
        key = (str(array.dtype), array.shape, hashlib.sha256(np.ascontiguousarray(array).view(np.uint8).data).digest())
        if key not in self._constants:
            tensor = ir.tensor(array, name=self._unused_name())
            value = ir.Value(
                name=tensor.name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
            )
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def _unused_name(self) -> str:
        taken = self.graph.initializers
        return next(name for n in itertools.count(len(taken)) if (name := f"lowering_constant_{n}") not in taken)

    def ints(self, *numbers: int) -> ir.Value:
        """A 1-D int64 constant."""
        return self.constant(np.array(numbers, np.int64))

    def insert(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: dict[str, Any] | None = None,
        *,
        domain: str = "",
        outputs: int = 1,
        name: str | None = None,
    ) -> Sequence[ir.Value]:
        """A new node in front of `before`; returns its outputs."""
        node = ir.node(op_type, inputs, attributes=attributes or {}, domain=domain, num_outputs=outputs, name=name)
        self.graph.insert_before(before, node)
        return node.outputs

    def one(
        self, before: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], attributes: dict[str, Any] | None = None
    ) -> ir.Value:
        """A new node with one output, which is returned."""
        return self.insert(before, op_type, inputs, attributes)[0]

    def replace(self, old: ir.Value, new: ir.Value) -> None:
        """Puts `new` where `old` is read, the graph's outputs included; it takes over name and type."""
        name, old.name = old.name, None
        new.name, new.shape, new.type = name, old.shape, old.type
        old.replace_all_uses_with(new, replace_graph_outputs=True)


def producer(value: ir.Value | None) -> ir.Node | None:
    """The node that makes `value`; None for inputs and initializers."""
    return None if value is None else value.producer()
