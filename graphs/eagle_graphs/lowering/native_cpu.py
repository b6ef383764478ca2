"""Lowering for ONNX Runtime on the CPU with the library of kernels under `native/`."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from onnx_ir.passes.common import (
    CommonSubexpressionEliminationPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
)

from eagle_graphs.lowering.native_attention import use_native_attention
from eagle_graphs.lowering.native_choice import use_native_choice
from eagle_graphs.lowering.quantize import (
    Order,
    QuantizedLayer,
    Tables,
    absorb_gates,
    absorb_norms,
    absorb_residuals,
    merge_shared_inputs,
    pack_weights,
    quantize_embeddings,
    quantize_linears,
)


def lower_for_native_cpu(
    model: ir.Model,
    quantized: Mapping[str, QuantizedLayer] | None = None,
    tables: Mapping[str, Order] | None = None,
) -> Tables:
    """Lowers the neutral graph in place.

    Args:
        model: the neutral graph.
        quantized: linear layers to quantize, by name; then embeddings are quantized too. None for a graph in float32.
        tables: what the lowering of a graph returned whose matrices this one's embeddings may be.

    Returns:
        The orders that quantized matrices were brought into, for `tables`.

    Raises:
        EagleError: the graph has an attention that the kernels cannot express.
    """
    CommonSubexpressionEliminationPass()(model)
    orders: Tables = {}
    if quantized is not None:
        orders = quantize_linears(model, quantized)
        quantize_embeddings(model, {**(tables or {}), **orders})
        merge_shared_inputs(model)
    use_native_attention(model)
    use_native_choice(model)
    if quantized is not None:
        absorb_norms(model)
        absorb_gates(model)
        absorb_residuals(model)
        pack_weights(model)
    RemoveUnusedNodesPass()(model)
    RemoveUnusedOpsetsPass()(model)
    return orders
