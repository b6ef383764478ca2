"""From the neutral graph to the graph of one backend."""

from eagle_graphs.lowering.draft_round import unroll_draft
from eagle_graphs.lowering.draft_steps import draft_steps
from eagle_graphs.lowering.native_cpu import lower_for_native_cpu
from eagle_graphs.lowering.onnxruntime_cpu import lower_for_onnxruntime_cpu
from eagle_graphs.lowering.quantize import QuantizedLayer, Tables

__all__ = [
    "QuantizedLayer",
    "Tables",
    "draft_steps",
    "lower_for_native_cpu",
    "lower_for_onnxruntime_cpu",
    "unroll_draft",
]
