"""Slots in the product's own INT8 graph: ONNX Runtime with the library of CPU kernels.

The target is traced once and lowered as for a bundle; each pass gives B slots one row, Q = S = 1, over one cache in
bfloat16 that is written in place. What the kernels bring: 8-bit products at the speed of the CPU's own instruction,
attention that reads each slot's own length and not a row more, and the choice of the best tokens beside the logits,
which never leave the graph. Every linear layer has plain 8-bit weights and rows: nothing is calibrated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import nn

from eagle_exporter.bundle import WeightFile
from eagle_exporter.target import Target, TargetGraph, settle
from eagle_exporter.trace import trace
from eagle_graphs import GraphPorts, KVGeometry, Port, target_ports
from eagle_graphs.lowering import QuantizedLayer, lower_for_native_cpu
from eagle_graphs.lowering.linear import linears
from eagle_graphs.lowering.native_attention import use_bf16_caches
from eagle_graphs.native_ops import KEY_BLOCK
from eagle_graphs.ports import cache_names
from eagle_runtime.engines.onnxruntime import OnnxRuntimeGraph
from eagle_runtime.kv_pool import KVPool
from tools.train.slots import TOP_K, Best


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingGraph:
    """The target as a lowered graph on disk, for any number of processes."""

    path: Path
    kv: KVGeometry
    """Of its caches."""
    choices: int
    """Best tokens that it gives for each row."""
    capacity: int
    """The longest sequence in tokens."""

    def ports(self, key_block: int = KEY_BLOCK) -> GraphPorts:
        """The target's inputs; the best tokens and the caches out."""
        target = target_ports(self.kv, vocab_size=1, feature_width=1, key_block=key_block)
        choice = (
            Port(name="topk_ids", dtype="int64", axes=("R", self.choices)),
            Port(name="topk_logprobs", dtype="float32", axes=("R", self.choices)),
        )
        caches = tuple(port for port in target.outputs if port.name in target.cache_outputs)
        return GraphPorts(inputs=target.inputs, outputs=(*choice, *caches))


def write_graph(target: Target, directory: Path, *, capacity: int) -> WritingGraph:
    """Traces, quantizes and lowers a target. Raises EagleError where the kernels cannot express it.

    directory: where the graph and its weights go; an empty one.
    """
    settle(target.model, capacity=capacity)
    choices = min(TOP_K, int(target.config.vocab_size))
    kv = replace(target.kv, dtype="bfloat16")
    graph = WritingGraph(path=directory / "target.onnx", kv=kv, choices=choices, capacity=capacity)
    traced_ports = graph.ports(key_block=1).with_caches("float32")
    model = trace(_Choosing(target, choices).eval(), traced_ports)
    lower_for_native_cpu(model, {linear.name: QuantizedLayer() for linear in linears(model.graph)})
    use_bf16_caches(model)
    WeightFile(directory).move_out(model)
    ir.save(model, graph.path)
    return graph


class _Choosing(nn.Module):
    """The target's graph with the best tokens as its outputs, in the form that the lowering makes one op of."""

    def __init__(self, target: Target, choices: int) -> None:
        super().__init__()
        self.target = TargetGraph(target.model, (0,), nn.Identity())
        self.choices = choices

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        tree_mask: torch.Tensor,
        kv_length: torch.Tensor,
        logit_rows: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """The target's pass over Q rows."""
        _, logits, _, _, *present = self.target(input_ids, position_ids, tree_mask, kv_length, logit_rows, *past)
        ids = logits.topk(self.choices, dim=-1).indices
        return ids, logits.log_softmax(dim=-1).gather(-1, ids), *present


class NativeSlots:
    """`Slots` over a lowered graph."""

    def __init__(self, graph: WritingGraph, *, slots: int, threads: int) -> None:
        rows = -(-graph.capacity // KEY_BLOCK) * KEY_BLOCK
        pool = _AllSlots(graph.kv, slots=slots, rows=rows, key_block=KEY_BLOCK, huge_pages=True)
        self._graph = OnnxRuntimeGraph(graph.path, graph.ports(), pool, threads=threads, native=True)
        self._call = self._graph.call(0, outputs=("topk_ids", "topk_logprobs"), B=slots, Q=1, S=1, R=slots)
        self._call.inputs["tree_mask"][:] = True
        self._call.inputs["logit_rows"][:] = np.arange(slots)
        self._prefix = 0
        self.lengths: npt.NDArray[np.int64] = np.zeros(slots, np.int64)

    def step(self, tokens: Sequence[int]) -> Best:
        """See `Slots.step`."""
        inputs = self._call.inputs
        inputs["input_ids"][:, 0] = tokens
        inputs["position_ids"][:, 0] = inputs["kv_length"][:] = self.lengths
        self._call.run()
        self.lengths += 1
        return Best(ids=self._call.outputs["topk_ids"], scores=self._call.outputs["topk_logprobs"])

    def keep_prefix(self) -> None:
        """See `Slots.keep_prefix`. Nothing is copied: what is written later comes behind it."""
        self._prefix = int(self.lengths[0])

    def restart(self, slot: int) -> None:
        """See `Slots.restart`."""
        self.lengths[slot] = self._prefix


class _AllSlots(KVPool):
    """A pool whose slots are the graph's axis B."""

    def views(self, slot: int, prefix: str) -> dict[str, npt.NDArray[np.float32]]:
        """Each cache port of all slots, by name."""
        del slot
        caches = (part for layer in zip(self.keys, self.values, strict=True) for part in layer)
        return dict(zip(cache_names(prefix, len(self.keys)), caches, strict=True))
