"""The TensorRT plugins against a mock of `tensorrt.plugin`: TensorRT itself has not seen them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from eagle_graphs.plugin.masks import pack_mask
from tests import tensorrt_mock
from tests.graphs.native_attention import Call, random_call
from tests.tensorrt_mock import MockDesc, MockPlugins


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> MockPlugins:
    mock = tensorrt_mock.install(monkeypatch).plugin
    importlib.import_module("eagle_graphs.plugin.tensorrt_plugin")
    return mock


def run(plugins: MockPlugins, call: Call, tactic: int) -> tuple[np.ndarray, ...]:
    """What the two plugins of an attention give; the caches are written in place."""
    rows = [torch.tensor(getattr(call, name)) for name in ("query", "key", "value", "past_key", "past_value")]
    lengths, new = torch.tensor(call.kv_length), call.query.shape[2]
    integers = [torch.from_numpy(pack_mask(call.tree_mask)), lengths, lengths + call.tree_mask.shape[2] - new]
    sinks = torch.full((call.query.shape[1],), -torch.inf) if call.sinks is None else torch.tensor(call.sinks)
    told = {"scale": 1.0, "softcap": 0.0, "sliding_window": 0} | call.attributes
    shared = {"sliding_window": told.pop("sliding_window"), "split_rows": 64, "capability": 89}
    attend = onnx.helper.make_node("attend", [], [], domain="eagle", **told, **shared, new_rows=60)
    combine = onnx.helper.make_node("combine", [], [], domain="eagle", **shared)
    partial, statistics, present_key, present_value = plugins.run(attend, [*rows, *integers], tactic)
    (out,) = plugins.run(combine, [partial, statistics, lengths, sinks], tactic)
    assert present_key is rows[3]
    assert present_value is rows[4]
    return tuple(output.double().numpy() for output in (out, present_key, present_value))


@pytest.mark.parametrize(
    ("shape", "tactic"),
    [
        ({"lengths": (70, 3), "new": 9, "after": 12, "heads": 6, "kv_heads": 2, "sinks": True}, 0),
        ({"lengths": (70,), "new": 9, "heads": 6, "kv_heads": 2, "softcap": 2.0, "sliding_window": 40}, -1),
    ],
    ids=["slots and sinks, lowest tiles", "cap and window, highest tiles"],
)
def test_a_mocked_network_computes_the_definition(plugins: MockPlugins, shape: dict[str, Any], tactic: int) -> None:
    call = random_call(**shape)
    for actual, expected in zip(run(plugins, call, tactic), call.defined(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6)


def test_types_and_tactics_that_are_offered_to_the_mock(plugins: MockPlugins) -> None:
    query, key = MockDesc((1, 32, -1, 128), "float16"), MockDesc((1, 8, -1, 128), "float16")
    (choice,) = plugins.choices["eagle::attend"](query, key, *[None] * 6, np.array([60]), ())
    assert choice.tactics == [16, 32, 64]
    rows = ["FP16|BF16"]
    assert choice.io_types.split(", ") == [*rows * 5, *["INT64"] * 3, *["FP32"] * 2, *rows * 2]
    assert choice.layouts == "LINEAR"


def test_an_attribute_is_an_array_since_one_of_numpy_2_4_is_no_scalar(plugins: MockPlugins) -> None:
    """TensorRT converts what is declared as `int` with int(array), whose array has one dimension."""
    node = onnx.helper.make_node("combine", [], [], domain="eagle", sliding_window=0, split_rows=64, capability=89)
    assert {name: (array.dtype.name, array.shape) for name, array in plugins.fields(node).items()} == dict.fromkeys(
        ("sliding_window", "split_rows", "capability"), ("int64", (1,))
    )
