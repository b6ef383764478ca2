"""The head's choice for the library of CPU kernels: TopK, log-softmax and vocabulary map become one `TopLogprobs`.

indices          TopK(logits)
topk_logprobs    GatherElements(LogSoftmax(logits), indices)
topk_ids         indices, or of a head with a vocabulary of its own GatherND(table, Unsqueeze(indices))
"""

from __future__ import annotations

import onnx_ir as ir

from eagle_graphs import native_ops
from eagle_graphs.lowering.rewrite import Rewriter, producer


def use_native_choice(model: ir.Model) -> None:
    """Rewrites a head's choice in place; a graph that makes none, or makes it otherwise, stays as it is."""
    outputs = {value.name: value for value in model.graph.outputs}
    logprobs, ids = outputs.get("topk_logprobs"), outputs.get("topk_ids")
    gathered = _made_by(logprobs, "GatherElements")
    if gathered is None or logprobs is None or ids is None:
        return
    softmax, choice = _made_by(gathered.inputs[0], "LogSoftmax"), _made_by(gathered.inputs[1], "TopK")
    if softmax is None or choice is None or softmax.inputs[0] is not choice.inputs[0]:
        return
    table, replaced = None, [gathered, softmax, choice]
    if ids is not choice.outputs[1]:
        mapped = _made_by(ids, "GatherND")
        rows = _made_by(mapped.inputs[1], "Unsqueeze") if mapped is not None else None
        if mapped is None or rows is None or rows.inputs[0] is not choice.outputs[1]:
            return
        table, replaced = mapped.inputs[0], [mapped, rows, *replaced]
    wanted = choice.inputs[1]
    assert wanted is not None
    assert wanted.const_value is not None
    rewriter, attributes = Rewriter(model.graph), {"k": int(wanted.const_value.numpy().item())}
    best = rewriter.insert(
        choice, native_ops.TOP_LOGPROBS, [choice.inputs[0], table], attributes, domain=native_ops.DOMAIN, outputs=2
    )
    rewriter.replace(logprobs, best[1])
    rewriter.replace(ids, best[0])
    for node in replaced:
        model.graph.remove(node, safe=True)
    model.opset_imports[native_ops.DOMAIN] = native_ops.VERSION


def _made_by(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The standard node of this type that makes `value`, if one does."""
    node = producer(value)
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None
