"""From the neutral graph to the graph of one backend."""

from eagle_graphs.lowering.onnxruntime_cpu import lower_for_onnxruntime_cpu

__all__ = ["lower_for_onnxruntime_cpu"]
