"""A head that is no network: what it says of a row hangs on everything that the row was given.

It is so coarse that values tie everywhere, children with their parents included.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import parser

from eagle_graphs import KVGeometry, Profile, profile_from_nodes
from eagle_graphs.dynamic_tree import Outputs

ROWS, WIDTH = 97, 8  # of the table that the fake head reads
KV = KVGeometry(layers=1, kv_heads=1, head_dim=1)
HEAD = """
<ir_version: 10, opset_import: ["" : 23]>
head (int64[B,Q] token_ids, float[B,Q,2] hidden, int64[B,Q] position_ids, bool[B,Q,S] tree_mask, int64[B] kv_length,
      int64[R] logit_rows, float[B,1,C,1] past_key_0, float[B,1,C,1] past_value_0)
  => (float[R,2] hidden_out, int64[R,8] topk_ids, float[R,8] topk_logprobs,
      float[B,1,C,1] present_key_0, float[B,1,C,1] present_value_0)
<int64 zero = {0}, int64 one = {1}, int64[1] last = {-1}, int64[1] flat = {-1}, int64[2] pairs = {-1, 2},
 int64[1] width = {8}, int64 c3 = {3}, int64 c5 = {5}, int64 c7 = {7}, int64 c11 = {11}, int64 modulus = {97}>
{
  seen = Cast<to = 7>(tree_mask)
  all = Shape(tree_mask)
  rows = Gather(all, last)
  end = Squeeze(rows)
  after = Add(end, one)
  numbers = Range(one, after, one)
  numbered = Mul(seen, numbers)
  path = ReduceSum<keepdims = 0>(numbered, last)
  sums = ReduceSum<keepdims = 0>(hidden, last)
  feature = Cast<to = 7>(sums)
  a = Mul(token_ids, c3)
  b = Mul(position_ids, c5)
  c = Mul(path, c7)
  d = Mul(kv_length, c11)
  ab = Add(a, b)
  cd = Add(c, d)
  abcd = Add(ab, cd)
  mixed = Add(abcd, feature)
  places = Mod(mixed, modulus)
  all_places = Reshape(places, flat)
  place = Gather(all_places, logit_rows)
  row_logprobs = Gather(logprobs, place)
  topk_logprobs, ranks = TopK(row_logprobs, width)
  row_ids = Gather(ids, place)
  topk_ids = GatherElements<axis = 1>(row_ids, ranks)
  features = Reshape(hidden, pairs)
  feature_rows = Gather(features, logit_rows)
  table_rows = Gather(states, place)
  hidden_out = Add(feature_rows, table_rows)
  present_key_0 = Identity(past_key_0)
  present_value_0 = Identity(past_value_0)
}
"""
PROFILES = [
    *(profile_from_nodes(nodes) for nodes in (2, 3, 4, 5, 8, 10, 16, 30, 60, 128)),
    profile_from_nodes(128, 8),
    Profile(nodes=2, top_k=1, depth=1),
    Profile(nodes=7, top_k=1, depth=6),
    Profile(nodes=6, top_k=2, depth=5),
    Profile(nodes=73, top_k=8, depth=2),
    Profile(nodes=9, top_k=8, depth=1),
]


def fake_head(random: np.random.Generator, choices: tuple[float, ...]) -> ir.Model:
    """The head over random tables."""
    model = ir.from_proto(add_tables(parser.parse_model(HEAD), random, choices))
    assert isinstance(model, ir.Model)
    return model


def add_tables(model: onnx.ModelProto, random: np.random.Generator, choices: tuple[float, ...]) -> onnx.ModelProto:
    logprobs = random.choice(choices, (ROWS, WIDTH)).astype(np.float32)
    ids = np.stack([random.permutation(1000)[:WIDTH] for _ in range(ROWS)])
    states = random.integers(-3, 4, (ROWS, 2)).astype(np.float32)
    for name, table in (("logprobs", logprobs), ("ids", ids), ("states", states)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(table, name))
    return model


def session(model: ir.Model, path: Path) -> Callable[[dict[str, np.ndarray]], Outputs]:
    ir.save(model, path)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    opened = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in opened.get_outputs()]
    return lambda feeds: dict(zip(names, opened.run(None, feeds), strict=True))


def extension(random: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    start = int(random.integers(0, 50))
    return {
        "token_ids": random.integers(0, 1000, (1, rows)),
        "hidden": random.integers(-5, 5, (1, rows, 2)).astype(np.float32),
        "position_ids": np.arange(start, start + rows)[None] + 3,
        "tree_mask": np.tri(rows, dtype=np.bool_)[None],
        "kv_length": np.array([start]),
        "logit_rows": np.array([rows - 1]),
        "past_key_0": np.zeros((1, 1, 4, 1), np.float32),
        "past_value_0": np.zeros((1, 1, 4, 1), np.float32),
    }


CHOICES = {
    "ties": (0.0, -0.25, -0.5),
    "all alike": (0.0,),
    "few": (0.0, -0.5, -7.0),
    "none": tuple(np.log(np.linspace(1e-4, 1, 1000)).tolist()),
}
"""Log-probabilities that the head gives."""


def level_feeds(
    feeds: dict[str, np.ndarray], tokens: np.ndarray, hidden: np.ndarray, mask: np.ndarray, level: int
) -> dict[str, np.ndarray]:
    """What the head takes for a level below the extension of `feeds`."""
    rows = len(tokens)
    return feeds | {
        "token_ids": tokens[None],
        "hidden": hidden[None],
        "position_ids": np.full((1, rows), feeds["position_ids"][0, -1] + level),
        "tree_mask": mask[None],
        "kv_length": feeds["kv_length"] + feeds["token_ids"].shape[1],
        "logit_rows": np.arange(rows),
    }
