"""The native TreeAttention against its definition, and the bits of a row against those of its path alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from onnx import TensorProto

from tests.graphs.native import offered_instruction_sets, session_of_one_op
from tests.graphs.native_attention import ELEMENTS, INPUTS, OUTPUTS, Call, random_call, rows_from_blocks

ISAS = offered_instruction_sets()

SHAPES: dict[str, dict[str, Any]] = {
    "first token": {"lengths": (0,), "new": 1, "heads": 2, "kv_heads": 1},
    "plain decoding": {"lengths": (9,), "new": 1, "heads": 4, "kv_heads": 4},
    "SmolLM2": {"lengths": (70,), "new": 8, "heads": 9, "kv_heads": 3, "head_dim": 64, "rotary": 64},
    "prefill": {"lengths": (0,), "new": 100, "chain": True, "heads": 9, "kv_heads": 3, "head_dim": 64},
    "second chunk": {"lengths": (37,), "new": 40, "chain": True, "packed": True, "rotary": 16},
    "a wide tree": {"lengths": (20,), "new": 64, "heads": 8},
    "draft level": {"lengths": (20,), "new": 8, "after": 24},
    "nothing committed below a level": {"lengths": (0,), "new": 2, "after": 5},
    "one query head for each key head": {"lengths": (33,), "new": 5, "heads": 3, "kv_heads": 3, "head_dim": 80},
    "multi-query": {"lengths": (6,), "new": 4, "heads": 8, "kv_heads": 1, "head_dim": 96, "rotary": 32},
    "more query heads than a task has": {"lengths": (6,), "new": 3, "heads": 71, "kv_heads": 1, "head_dim": 20},
    "wide heads": {"lengths": (18,), "new": 4, "head_dim": 128, "rotary": 128, "interleaved": 1},
    "wider heads": {"lengths": (18,), "new": 4, "head_dim": 256, "packed": True, "sinks": True},
    "narrow heads": {"lengths": (18,), "new": 4, "head_dim": 5, "rotary": 4},
    "odd heads": {"lengths": (18,), "new": 4, "head_dim": 20, "rotary": 10, "interleaved": 1},
    "full cache": {"lengths": (28,), "new": 4, "capacity": 32},
    "slots": {"lengths": (40, 0, 4, 17), "new": 5, "after": 9, "rotary": 8, "packed": True},
    "sinks": {"lengths": (30,), "new": 6, "sinks": True},
    "soft-cap": {"lengths": (30,), "new": 6, "softcap": 1.5, "sinks": True},
    "a long window": {"lengths": (50,), "new": 12, "sliding_window": 40},
    "a window within the tree": {"lengths": (50,), "new": 30, "sliding_window": 2, "sinks": True},
    "a window of the row itself": {"lengths": (3,), "new": 9, "sliding_window": 1, "softcap": 4.0},
    "a window over a prompt": {"lengths": (50, 2), "new": 60, "chain": True, "sliding_window": 17},
    "a window longer than all": {"lengths": (5,), "new": 4, "sliding_window": 1000},
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_definition(shape: dict[str, Any], isa: str) -> None:
    call = random_call(**shape)
    for actual, expected in zip(call.run(2, isa), call.defined(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6)


def test_large_scores_and_small_weights() -> None:
    """Scores far apart: the softmax neither overflows nor loses what is not small."""
    call = random_call(lengths=(40,), new=6, scale=30.0)
    for actual, expected in zip(call.run(), call.defined(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_buffer_is_written_in_place(threads: int) -> None:
    call = random_call(lengths=(21, 3), new=70, after=75, rotary=8)
    expected = call.run()
    session = call.session(threads)
    binding = session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in call.inputs().items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("out")
    binding.bind_ortvalue_output("present_key", values["past_key"])
    binding.bind_ortvalue_output("present_value", values["past_value"])
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy().reshape(expected[0].shape), expected[0])
    np.testing.assert_array_equal(rows_from_blocks(values["past_key"].numpy()), expected[1])
    np.testing.assert_array_equal(values["past_value"].numpy(), expected[2])


def test_two_buffers_leave_the_past_alone() -> None:
    call = random_call(lengths=(21,), new=3)
    inputs = call.inputs()
    before = {name: array.copy() for name, array in inputs.items()}
    call.session().run(None, inputs)
    for name, array in inputs.items():
        np.testing.assert_array_equal(array, before[name])


@st.composite
def calls(draw: st.DrawFn) -> Call:
    kv_heads, group = draw(st.sampled_from([(1, 1), (3, 3), (2, 2), (1, 8)]))
    new = draw(st.integers(1, 20))
    return random_call(
        lengths=tuple(draw(st.lists(st.integers(0, 70), min_size=1, max_size=2))),
        new=new,
        after=new + draw(st.sampled_from([0, 0, 3])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([20, 64])),
        rotary=draw(st.sampled_from([0, 20])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        sliding_window=draw(st.sampled_from([0, 0, 1, 3, 18])),
    )


def committed(call: Call, slot: int, row: int) -> tuple[Call, list[int]]:
    """`call` with those rows of an earlier pass committed that `row` sees, one after another; and its own path."""
    length, after = int(call.kv_length[slot]), call.tree_mask.shape[2]
    earlier = after - call.query.shape[2]
    seen = np.flatnonzero(call.tree_mask[slot, row])
    of_cache = [*range(length), *(length + seen[seen < earlier])]
    caches = {}
    for name in ("past_key", "past_value"):
        cache = np.full_like(getattr(call, name), np.nan)
        cache[slot, :, : len(of_cache)] = getattr(call, name)[slot, :, of_cache].swapaxes(0, 1)
        caches[name] = cache
    lengths = call.kv_length.copy()
    lengths[slot] = len(of_cache)
    return replace(call, kv_length=lengths, **caches), [int(j) - earlier for j in seen if j >= earlier]


def stepped(call: Call, slot: int, path: list[int], isa: str) -> np.ndarray:
    """[Hq, D] the last row of `path` by plain decoding: one row a call."""
    length = int(call.kv_length[slot])
    for step, row in enumerate(path):
        one = call.rows(slot, [row], np.ones((1, 1), bool), length + step)
        out, past_key, past_value = one.run(1, isa)
        key, value = call.past_key.copy(), call.past_value.copy()
        key[slot], value[slot] = past_key[0], past_value[0]
        call = replace(call, past_key=key, past_value=value)
    return out[0, 0]


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, deadline=None)
@given(call=calls(), data=st.data())
def test_a_row_has_the_bits_of_its_path_alone(isa: str, call: Call, data: st.DataObject) -> None:
    """A row of a tree, of several slots, on two threads, against a chain of its path and against steps of one row."""
    out, *_ = call.run(2, isa)
    slot = data.draw(st.integers(0, len(call.kv_length) - 1))
    row = data.draw(st.integers(0, call.query.shape[2] - 1))
    alone, path = committed(call, slot, row)
    length = int(alone.kv_length[slot])
    chain, *_ = alone.rows(slot, path, np.tri(len(path), dtype=bool), length).run(1, isa)
    np.testing.assert_array_equal(out[slot, row], chain[0, -1])
    np.testing.assert_array_equal(out[slot, row], stepped(alone, slot, path, isa))


@pytest.mark.parametrize("isa", ISAS)
def test_a_prompt_has_the_bits_of_its_steps(isa: str) -> None:
    """A long chain in chunks of any size, windows and soft-cap included."""
    for attributes in ({}, {"sliding_window": 33, "softcap": 3.0}):
        call = random_call(lengths=(90,), new=150, chain=True, heads=9, kv_heads=3, head_dim=64, **attributes)
        whole, past_key, past_value = call.run(2, isa)
        filled = replace(call, past_key=past_key, past_value=past_value)
        for first, count in ((0, 1), (1, 7), (70, 24), (149, 1)):
            rows = list(range(first, first + count))
            part, *_ = filled.rows(0, rows, np.tri(count, dtype=bool), 90 + first).run(1, isa)
            np.testing.assert_array_equal(part[0], whole[0, rows])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_sibling_that_overflows_changes_nothing(poison: float, isa: str) -> None:
    call = random_call(lengths=(20,), new=30, heads=9, kv_heads=3, head_dim=64)
    clean, *_ = call.run(1, isa)
    key, value = call.key.copy(), call.value.copy()
    key[:, :, 3] = value[:, :, 3] = poison
    out, *_ = replace(call, key=key, value=value).run(1, isa)
    sees = call.tree_mask[0, :, 3]
    assert 1 < sees.sum() < 30
    np.testing.assert_array_equal(out[0, ~sees], clean[0, ~sees])
    assert np.isnan(out[0, sees]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_half_precision_caches_give_the_bits_of_rounded_ones(shape: dict[str, Any], isa: str) -> None:
    call = random_call(**shape)
    *_, present_key, present_value = call.run(1, isa)
    _, *halves = run_over_halves(call, isa)
    np.testing.assert_array_equal(halves[0], rounded(present_key))
    np.testing.assert_array_equal(halves[1], rounded(present_value))
    names = ("key", "value", "past_key", "past_value")
    call = replace(call, angles=None, **{name: rounded(getattr(call, name)) for name in names})
    for actual, expected in zip(run_over_halves(call, isa), call.run(1, isa), strict=True):
        np.testing.assert_array_equal(actual, expected)


def rounded(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(bfloat16).astype(np.float32)


def run_over_halves(call: Call, isa: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `Call.run`, over caches of bfloat16 that are written in place."""
    inputs = call.inputs()
    caches = {f"past_{part}": inputs[f"past_{part}"].astype(bfloat16) for part in ("key", "value")}
    halves = {f"{when}_{part}": TensorProto.BFLOAT16 for when in ("past", "present") for part in ("key", "value")}
    heads = {"num_heads": call.query.shape[1], "kv_num_heads": call.key.shape[1]}
    names = [name if name in inputs else "" for name in INPUTS]
    session = session_of_one_op(
        "TreeAttention", names, OUTPUTS, ELEMENTS | halves, heads | call.attributes, threads=2, isa=isa
    )
    binding = session.io_binding()
    binding.bind_output("out")
    for name, array in (inputs | caches).items():
        element = halves.get(name, array.dtype.type)
        binding.bind_input(name, "cpu", 0, element, array.shape, array.ctypes.data)
        if name in caches:
            binding.bind_output(name.replace("past", "present"), "cpu", 0, element, array.shape, array.ctypes.data)
    session.run_with_iobinding(binding)
    slots, count, new, width = call.query.shape
    out = binding.get_outputs()[0].numpy().reshape(slots, new, count, width)
    return (
        out,
        rows_from_blocks(caches["past_key"].astype(np.float32)),
        caches["past_value"].astype(np.float32),
    )


def test_no_new_rows() -> None:
    call = random_call(lengths=(5,), new=1)
    nothing = call.rows(0, [], np.ones((0, 0), bool), 5)
    out, past_key, past_value = nothing.run()
    assert out.shape == (1, 0, 4, 16)
    np.testing.assert_array_equal(past_key, call.past_key)
    np.testing.assert_array_equal(past_value, call.past_value)


def changed(name: str, change: Callable[[np.ndarray], Any]) -> Callable[[dict[str, np.ndarray]], None]:
    def apply(inputs: dict[str, np.ndarray]) -> None:
        inputs[name] = np.ascontiguousarray(change(inputs[name]))

    return apply


WRONG_INPUTS: dict[str, tuple[Callable[[dict[str, np.ndarray]], None], str]] = {
    "query's width": (changed("query", lambda x: x[..., 1:]), "query has the shape [2, 3, 63], expected [2, 3, 64]"),
    "query's rank": (changed("query", lambda x: x[0]), "query has the shape [3, 64], expected [2, 3, 64]"),
    "query's slots": (changed("query", lambda x: x[:1]), "query has the shape [1, 3, 64], expected [2, 3, 64]"),
    "key's rows": (changed("key", lambda x: x[:, 1:]), "key has the shape [2, 2, 32], expected [2, 3, 32]"),
    "value's width": (changed("value", lambda x: x[..., 1:]), "value has the shape [2, 3, 31], expected [2, 3, 32]"),
    "rows of keys": (
        changed("past_key", rows_from_blocks),
        "past_key has the shape [2, 2, 32, 16], expected [2, 2, 2, 16, 16]",
    ),
    "key heads": (
        changed("past_value", lambda x: x[:, :1]),
        "past_value has the shape [2, 1, 32, 16], expected [2, 2, 32, 16]",
    ),
    "past_value's rank": (changed("past_value", lambda x: x[0]), "past_value has the shape [2, 32, 16], expected 4"),
    "capacity": (changed("past_value", lambda x: x[:, :, 1:]), "the cache has 31 rows, expected a multiple of 16"),
    "mask's rank": (changed("tree_mask", lambda x: x[0]), "tree_mask has the shape [3, 3], expected 3 dimensions"),
    "seven dimensions": (changed("tree_mask", lambda x: x.reshape(2, 3, 3, 1, 1, 1, 1)), "tree_mask has 7 dimensions"),
    "mask's width": (changed("tree_mask", lambda x: x[..., 1:]), "tree_mask has 2 columns, expected at least its 3"),
    "an empty path": (changed("tree_mask", np.zeros_like), "row 0 of slot 1 sees no row: set its own place"),
    "too short a cache": (
        changed("kv_length", lambda x: x + 14),
        "slot 0 has 30 committed rows and 3 more, but the cache holds 32: use a longer cache",
    ),
    "a negative length": (changed("kv_length", lambda x: x - 1), "slot 1 has -1 committed rows"),
    "a huge length": (changed("kv_length", lambda x: x + 2**62), "slot 0 has 46"),
    "lengths": (changed("kv_length", lambda x: x[:1]), "kv_length has the shape [1], expected [2]"),
    "cos's rank": (changed("cos", lambda x: x[0]), "cos has the shape [3, 4], expected 3 dimensions"),
    "cos's width": (changed("cos", lambda x: np.tile(x, 3)), "cos has 12 columns, expected at most half of the head's"),
    "sin's width": (changed("sin", lambda x: x[..., 1:]), "sin has the shape [2, 3, 3], expected [2, 3, 4]"),
    "sinks": (changed("sinks", lambda x: x[1:]), "sinks has the shape [3], expected [4]"),
}


@pytest.mark.parametrize(("change", "message"), WRONG_INPUTS.values(), ids=WRONG_INPUTS)
def test_wrong_inputs_are_refused(change: Callable[[dict[str, np.ndarray]], None], message: str) -> None:
    call = random_call(lengths=(16, 0), new=3, rotary=8, sinks=True, capacity=32)
    inputs = call.inputs()
    change(inputs)
    with pytest.raises(Exception, match=re.escape(f"TreeAttention: {message}")):
        call.session().run(None, inputs)


@pytest.mark.parametrize(
    ("left_out", "message"),
    [("value", "key and value are given together"), ("sin", "cos and sin are given together")],
)
def test_half_of_a_pair_is_refused(left_out: str, message: str) -> None:
    inputs = random_call(lengths=(4,), new=2, rotary=8).inputs()
    del inputs[left_out]
    names = [name if name in inputs else "" for name in INPUTS]
    attributes = {"num_heads": 4, "kv_num_heads": 2, "scale": 1.0}
    session = session_of_one_op("TreeAttention", names, OUTPUTS, ELEMENTS, attributes)
    with pytest.raises(Exception, match=message):
        session.run(None, inputs)


ATTRIBUTES = {"num_heads": 4, "kv_num_heads": 2, "scale": 1.0}


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"num_heads": 3}, "num_heads 3 is no multiple of kv_num_heads 2"),
        ({"kv_num_heads": 0}, "num_heads 4 is no multiple of kv_num_heads 0"),
        ({"sliding_window": -1}, "sliding_window is -1, expected 0 for none or a number of rows"),
        ({"softcap": -1.0}, "softcap is -1, expected 0 for none or more"),
        ({"scale": 1}, "attribute scale: .*type"),
        ({"softcap": "30"}, "attribute softcap: .*type"),
        ({"num_heads": None}, "attribute num_heads: "),
        ({"scale": None}, "attribute scale: "),
    ],
)
def test_wrong_attributes_are_refused_at_load(attributes: dict[str, Any], message: str) -> None:
    given = {name: value for name, value in (ATTRIBUTES | attributes).items() if value is not None}
    with pytest.raises(Exception, match=f"TreeAttention: .*{message}"):
        session_of_one_op("TreeAttention", INPUTS, OUTPUTS, ELEMENTS, given)


@pytest.mark.parametrize("name", ["query", "past_key", "tree_mask", "kv_length"])
def test_a_required_input_that_is_left_out_is_refused_at_load(name: str) -> None:
    names = ["" if other == name else other for other in INPUTS]
    with pytest.raises(Exception, match="TreeAttention"):
        session_of_one_op("TreeAttention", names, OUTPUTS, ELEMENTS, ATTRIBUTES)


@pytest.mark.parametrize(
    ("name", "element"),
    [
        ("query", TensorProto.FLOAT16),
        ("tree_mask", TensorProto.FLOAT),
        ("kv_length", TensorProto.INT32),
    ],
)
def test_a_wrong_type_is_refused_at_load(name: str, element: int) -> None:
    with pytest.raises(Exception, match=name):
        session_of_one_op("TreeAttention", INPUTS, OUTPUTS, ELEMENTS | {name: element}, ATTRIBUTES)


def test_caches_of_two_types_are_refused_at_load() -> None:
    with pytest.raises(Exception, match="TreeAttention"):
        session_of_one_op("TreeAttention", INPUTS, OUTPUTS, ELEMENTS | {"past_key": TensorProto.BFLOAT16}, ATTRIBUTES)
