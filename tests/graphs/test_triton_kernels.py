"""The Triton kernels in Triton's interpreter against the op's definition."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_graphs.plugin.calls import commit_path, tree_attention
from eagle_graphs.plugin.launch import Attention
from eagle_graphs.plugin.masks import pack_mask
from tests.graphs.native_attention import Call, random_call

SHAPES: dict[str, dict[str, Any]] = {
    "first token": {"lengths": (0,), "new": 1, "heads": 2, "kv_heads": 1},
    "plain decoding": {"lengths": (9,), "new": 1, "heads": 4, "kv_heads": 4},
    "SmolLM2 over two splits": {"lengths": (70,), "new": 8, "heads": 9, "kv_heads": 3, "head_dim": 64},
    "many splits": {"lengths": (300,), "new": 3, "heads": 2, "kv_heads": 1},
    "the last split holds the tree alone": {"lengths": (128,), "new": 4, "heads": 2, "kv_heads": 1},
    "prefill": {"lengths": (0,), "new": 100, "chain": True, "heads": 1, "kv_heads": 1},
    "a tree of a whole word": {"lengths": (20,), "new": 64, "heads": 2, "kv_heads": 1},
    "a tree of two words": {"lengths": (20,), "new": 70, "heads": 2, "kv_heads": 1},
    "draft level": {"lengths": (20,), "new": 8, "after": 24},
    "draft level behind a word": {"lengths": (5,), "new": 4, "after": 70},
    "nothing committed below a level": {"lengths": (0,), "new": 2, "after": 5},
    "slots of all lengths": {"lengths": (140, 0, 4, 63), "new": 5, "after": 9},
    "narrow heads": {"lengths": (18,), "new": 4, "head_dim": 5},
    "odd heads": {"lengths": (70,), "new": 4, "head_dim": 80, "heads": 2, "kv_heads": 1},
    "wide heads": {"lengths": (70,), "new": 17, "head_dim": 256, "heads": 2, "kv_heads": 1},
    "full cache": {"lengths": (60,), "new": 4, "capacity": 64},
    "sinks": {"lengths": (30,), "new": 6, "sinks": True},
    "sinks over splits": {"lengths": (90, 3), "new": 6, "sinks": True},
    "soft-cap": {"lengths": (90,), "new": 6, "softcap": 1.5, "sinks": True},
    "a window over splits": {"lengths": (200, 30), "new": 12, "sliding_window": 100, "sinks": True},
    "a window within the tree": {"lengths": (130,), "new": 30, "sliding_window": 2, "heads": 2, "kv_heads": 1},
    "a window of the row itself": {"lengths": (3,), "new": 9, "sliding_window": 1, "softcap": 4.0},
    "a window over a prompt": {
        "lengths": (50,),
        "new": 70,
        "chain": True,
        "sliding_window": 40,
        "heads": 2,
        "kv_heads": 1,
    },
    "a window longer than all": {"lengths": (70,), "new": 4, "sliding_window": 1000},
}


def run(
    call: Call, *, split_rows: int = 64, dtype: torch.dtype = torch.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The kernel's out [B, Q, Hq, D] and its caches, as the definition returns them."""
    _, heads, new, head_dim = call.query.shape
    attention = Attention(query_heads=heads, kv_heads=call.key.shape[1], head_dim=head_dim, **call.attributes)
    names = ("query", "key", "value", "past_key", "past_value")
    rows = {name: torch.tensor(np.ascontiguousarray(getattr(call, name))).to(dtype) for name in names}
    lengths = torch.tensor(call.kv_length)
    out = tree_attention(
        attention,
        **rows,
        words=torch.from_numpy(pack_mask(call.tree_mask)),
        kv_length=lengths,
        write_row=lengths + call.tree_mask.shape[2] - new,
        sinks=None if call.sinks is None else torch.tensor(call.sinks).to(dtype),
        split_rows=split_rows,
    )
    assert out.dtype == dtype
    return out.double().numpy(), rows["past_key"].double().numpy(), rows["past_value"].double().numpy()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_definition(shape: dict[str, Any]) -> None:
    call = random_call(**shape)
    for actual, expected in zip(run(call), call.defined(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    kv_heads, group, new = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(1, 20))
    return random_call(
        lengths=tuple(draw(st.lists(st.integers(0, 100), min_size=1, max_size=2))),
        new=new,
        after=new + draw(st.sampled_from([0, 0, 3, 60])),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 20])),
        sinks=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        sliding_window=draw(st.sampled_from([0, 0, 1, 3, 70])),
    )


@settings(max_examples=12, deadline=None)
@given(call=calls(), split_rows=st.sampled_from([32, 64, 1024]))
def test_equals_the_definition_over_random_calls(call: Call, split_rows: int) -> None:
    for actual, expected in zip(run(call, split_rows=split_rows), call.defined(), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=3e-6)


def test_half_precision_in_and_out() -> None:
    """Sums are float32: beside the definition in float64 only the weights and the result are rounded.

    bfloat16 is only compiled (test_triton_compile): the interpreter multiplies its bits as integers.
    """
    call = random_call(lengths=(90, 7), new=6, head_dim=64, sinks=True)
    names = ("query", "key", "value", "past_key", "past_value", "sinks")
    call = replace(call, **{name: getattr(call, name).astype(np.float16).astype(np.float32) for name in names})
    out, past_key, past_value = run(call, dtype=torch.float16)
    expected, present_key, present_value = call.defined()
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-3)
    np.testing.assert_array_equal(past_key, present_key)
    np.testing.assert_array_equal(past_value, present_value)


def test_large_scores_and_small_weights() -> None:
    call = random_call(lengths=(90,), new=6, scale=30.0)
    np.testing.assert_allclose(run(call)[0], call.defined()[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 7.0])
def test_a_row_has_the_same_bits_whatever_it_does_not_see(poison: float) -> None:
    """Another row's numbers, an overflow among them, reach those rows alone that see it."""
    call = random_call(lengths=(40,), new=30, heads=2, kv_heads=1)
    clean, *_ = run(call)
    query, key, value = call.query.copy(), call.key.copy(), call.value.copy()
    query[:, :, 3] = key[:, :, 3] = value[:, :, 3] = poison
    out, *_ = run(replace(call, query=query, key=key, value=value))
    sees = call.tree_mask[0, :, 3]
    assert 1 < sees.sum() < 30
    np.testing.assert_array_equal(out[0, ~sees], clean[0, ~sees])
    assert np.isnan(out[0, sees]).all() == (poison != 7.0)


def test_rows_behind_change_no_bit() -> None:
    """A smaller profile's tree, which is the first rows of a larger one's, gives the bits of those rows."""
    call = random_call(lengths=(90,), new=12, heads=2, kv_heads=2, sliding_window=80)
    part = call.rows(0, list(range(5)), call.tree_mask[0, :5, :5], 90)
    np.testing.assert_array_equal(run(part)[0][0], run(call)[0][0, :5])


def test_a_slot_has_the_bits_that_it_has_alone() -> None:
    call = random_call(lengths=(90, 0, 17), new=5)
    out, *_ = run(call)
    for slot, length in enumerate(call.kv_length):
        alone = call.rows(slot, list(range(5)), call.tree_mask[slot], int(length))
        np.testing.assert_array_equal(run(alone)[0][0], out[slot])


@pytest.mark.parametrize("path", [[0, 1, 2, 3], [0, 2, 3, 7], [1, 2, 3, 4], [3, 4, 5, 6]])
def test_a_path_is_committed_in_all_layers(path: list[int]) -> None:
    """Slots keep all of the path, its first two rows and none; rows that move overlap those they move onto."""
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((3, 2, 3, 2, 40, 20)).astype(np.float16)
    lengths, counts, expected = [5, 20, 0], [4, 2, 0], cache.copy()
    for slot, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        kept = [length + row for row in path[:count]]
        expected[:, :, slot, :, length : length + count] = cache[:, :, slot, :, kept].transpose(1, 2, 3, 0, 4)
    moved = torch.from_numpy(cache.copy())
    commit_path(torch.tensor([path] * 3), torch.tensor(counts), torch.tensor(lengths), moved)
    np.testing.assert_array_equal(moved.numpy(), expected)
