"""The head's choice as one native op: the graph says what it said before."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

from eagle_graphs.lowering.native_choice import use_native_choice
from tests.graphs.native import session_options

HEADER = """
<ir_version: 10, opset_import: ["" : 23]>
head (float[R,20] logits) => (int64[R,4] topk_ids, float[R,4] topk_logprobs)
<int64[1] k = {4}, int64[1] last = {-1},
 int64[20] table = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10}>
"""
OWN_VOCABULARY = """{
  values, indices = TopK<axis = -1>(logits, k)
  all = LogSoftmax<axis = -1>(logits)
  topk_logprobs = GatherElements<axis = -1>(all, indices)
  places = Unsqueeze(indices, last)
  topk_ids = GatherND(table, places)
}"""
TARGETS = """{
  values, topk_ids = TopK<axis = -1>(logits, k)
  all = LogSoftmax<axis = -1>(logits)
  topk_logprobs = GatherElements<axis = -1>(all, topk_ids)
}"""
OTHER = """{
  values, topk_ids = TopK<axis = -1>(logits, k)
  sum = ReduceLogSumExp(logits, last)
  topk_logprobs = Sub(values, sum)
}"""


def run(model: ir.Model, logits: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), session_options())
    return session.run(["topk_ids", "topk_logprobs"], {"logits": logits})


@pytest.mark.parametrize("body", [OWN_VOCABULARY, TARGETS, OTHER], ids=["own vocabulary", "target's", "other"])
def test_the_outputs_are_the_same(body: str) -> None:
    model = ir.from_proto(parser.parse_model(HEADER + body))
    logits = np.random.default_rng(0).choice(np.float32([-1.0, 0.0, 0.5, 3.0]), (6, 20))
    ids, logprobs = run(model, logits)
    use_native_choice(model)
    ours = run(model, logits)
    np.testing.assert_array_equal(ours[0], ids)
    np.testing.assert_allclose(ours[1], logprobs, atol=1e-6)
    ops = [node.op_type for node in model.graph]
    assert ("TopLogprobs" in ops) == (body is not OTHER)
