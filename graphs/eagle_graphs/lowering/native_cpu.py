"""Lowering for ONNX Runtime on the CPU with the library of kernels under `native/`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)

from eagle_graphs.lowering import quantize
from eagle_graphs.lowering.native_attention import use_native_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class W8A8:
    """Which linear layers are quantized how, by name; those in neither set have weights and activations of 8 bits."""

    keep: Collection[str] = ()
    """Left in float32."""
    fine: Collection[str] = ()
    """With activations of 16 bits."""


def lower_for_native_cpu(model: ir.Model, quantization: W8A8 | None = None) -> ir.Model:
    """Lowers the neutral graph in place and returns it. Raises EagleError on an attention it cannot express."""
    CommonSubexpressionEliminationPass()(model)
    if quantization is not None:
        quantize.quantize_linears(model, keep=quantization.keep, fine=quantization.fine)
        quantize.quantize_embeddings(model)
        quantize.merge_shared_inputs(model)
    use_native_attention(model)
    if quantization is not None:
        quantize.absorb_norms(model)
        quantize.absorb_gates(model)
        quantize.absorb_residuals(model)
        quantize.pack_weights(model)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    return model
