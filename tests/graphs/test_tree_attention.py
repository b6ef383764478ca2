"""The op's numpy definition against torch's scaled_dot_product_attention and transformers' own rules."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_attention
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_attention

from eagle_graphs.tree import depths_and_ancestors
from eagle_graphs.tree_attention import tree_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One call. `lengths` has the committed rows of each slot."""

    lengths: tuple[int, ...]
    new: int
    after: int
    heads: int
    kv_heads: int
    head_dim: int = 8
    spare: int = 3
    """Rows of the buffer behind the last one used."""

    @property
    def capacity(self) -> int:
        return max(self.lengths) + self.after + self.spare


SHAPES = {
    "plain decoding": Shape(lengths=(9,), new=1, after=1, heads=4, kv_heads=4),
    "first token": Shape(lengths=(0,), new=1, after=1, heads=2, kv_heads=1),
    "prefill": Shape(lengths=(0,), new=12, after=12, heads=9, kv_heads=3, head_dim=64),
    "second chunk": Shape(lengths=(12,), new=7, after=7, heads=9, kv_heads=3),
    "verification": Shape(lengths=(20,), new=16, after=16, heads=9, kv_heads=3),
    "draft level": Shape(lengths=(20,), new=8, after=24, heads=9, kv_heads=3),
    "one row of a level": Shape(lengths=(5,), new=1, after=6, heads=8, kv_heads=2),
    "nothing committed below a level": Shape(lengths=(0,), new=2, after=5, heads=4, kv_heads=2),
    "multi-query": Shape(lengths=(6,), new=4, after=4, heads=8, kv_heads=1),
    "full buffer": Shape(lengths=(6,), new=4, after=4, heads=4, kv_heads=2, spare=0),
    "slots of one length": Shape(lengths=(7, 7), new=5, after=5, heads=6, kv_heads=3),
    "slots of all lengths": Shape(lengths=(13, 0, 4, 1), new=3, after=8, heads=6, kv_heads=2, head_dim=5),
}


def random_mask(rng: np.random.Generator, shape: Shape) -> np.ndarray:
    """[B, Q, S] the last Q rows of a random tree's mask over S rows, another tree for each slot."""
    masks = []
    for _ in shape.lengths:
        parents = np.array([rng.integers(-1, row) if row else -1 for row in range(shape.after)], np.int64)
        masks.append(depths_and_ancestors(parents)[1][-shape.new :])
    return np.stack(masks)


def random_call(shape: Shape, seed: int = 0, dtype: Any = np.float32) -> dict[str, Any]:
    """Arguments of the op. Buffer rows that are not committed hold large numbers, to be seen where they leak."""
    rng = np.random.default_rng(seed)
    slots, cached = len(shape.lengths), (shape.kv_heads, shape.capacity, shape.head_dim)

    def normal(*axes: int) -> np.ndarray:
        return rng.standard_normal(axes).astype(dtype)

    past_key, past_value = normal(slots, *cached), normal(slots, *cached)
    for slot, length in enumerate(shape.lengths):
        # Earlier levels' rows lie between the committed rows and the new ones.
        earlier = length + shape.after - shape.new
        past_key[slot, :, earlier:] = past_value[slot, :, earlier:] = 1e4
    return {
        "query": normal(slots, shape.heads, shape.new, shape.head_dim),
        "key": normal(slots, shape.kv_heads, shape.new, shape.head_dim),
        "value": normal(slots, shape.kv_heads, shape.new, shape.head_dim),
        "past_key": past_key,
        "past_value": past_value,
        "tree_mask": random_mask(rng, shape),
        "kv_length": np.array(shape.lengths, np.int64),
        "scale": 0.37,
    }


def torch_attention(call: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same by one batched call: rows scattered into the buffer, the mask spread over its capacity."""
    query, key, value = (torch.from_numpy(call[name]) for name in ("query", "key", "value"))
    tree_mask, lengths = torch.from_numpy(call["tree_mask"]), torch.from_numpy(call["kv_length"])[:, None]
    new, after = tree_mask.shape[1:]
    caches = []
    for name, rows in (("past_key", key), ("past_value", value)):
        places = (lengths + after - new + torch.arange(new))[:, None, :, None].expand_as(rows)
        caches.append(torch.from_numpy(call[name]).scatter(2, places, rows))
    row = torch.arange(caches[0].shape[2])[None]  # [1, C]
    place = (row - lengths).clamp(0, after - 1)[:, None].expand(-1, new, -1)  # [B, Q, C] column of the tree's mask
    in_tree = (row >= lengths) & (row < lengths + after)
    visible = (row < lengths)[:, None] | (in_tree[:, None] & tree_mask.gather(2, place))
    group = query.shape[1] // key.shape[1]
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        *(cache.repeat_interleave(group, dim=1) for cache in caches),
        attn_mask=visible[:, None],
        scale=call["scale"],
    )
    return out.transpose(1, 2), *caches


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_torch(shape: Shape, seed: int) -> None:
    call = random_call(shape, seed)
    out, present_key, present_value = tree_attention(**call)
    expected_out, expected_key, expected_value = torch_attention(call)
    assert out.dtype == np.float32
    assert out.shape == (len(shape.lengths), shape.new, shape.heads, shape.head_dim)
    np.testing.assert_allclose(out, expected_out.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(present_key, expected_key.numpy())
    np.testing.assert_array_equal(present_value, expected_value.numpy())


@pytest.mark.parametrize("seed", range(40))
def test_equals_torch_over_random_shapes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kv_heads, new = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    test_equals_torch(
        Shape(
            lengths=tuple(rng.integers(0, 20, rng.integers(1, 4)).tolist()),
            new=new,
            after=new + int(rng.integers(0, 9)),
            heads=kv_heads * int(rng.integers(1, 5)),
            kv_heads=kv_heads,
            head_dim=int(rng.integers(1, 17)),
            spare=int(rng.integers(0, 4)),
        ),
        seed,
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_touches_nothing_but_the_new_rows(shape: Shape) -> None:
    call = random_call(shape)
    before = {name: np.copy(value) for name, value in call.items()}
    _, present_key, present_value = tree_attention(**call)
    for name, value in before.items():
        np.testing.assert_array_equal(call[name], value)
    for slot, length in enumerate(shape.lengths):
        rows = slice(length + shape.after - shape.new, length + shape.after)
        for present, past, new in ((present_key, "past_key", "key"), (present_value, "past_value", "value")):
            np.testing.assert_array_equal(present[slot, :, rows], call[new][slot])
            np.testing.assert_array_equal(np.delete(present[slot], rows, 1), np.delete(call[past][slot], rows, 1))


def test_a_slot_does_not_depend_on_its_neighbours() -> None:
    call = random_call(SHAPES["slots of all lengths"])
    together = tree_attention(**call)
    for slot in range(len(call["kv_length"])):
        alone = {name: value if name == "scale" else value[slot : slot + 1] for name, value in call.items()}
        for whole, part in zip(together, tree_attention(**alone), strict=True):
            np.testing.assert_array_equal(whole[slot], part[0])


def test_a_level_equals_the_same_rows_of_one_pass() -> None:
    """Rows written level by level (S > Q) give what they give all at once (S = Q)."""
    call = random_call(Shape(lengths=(10, 3), new=9, after=9, heads=6, kv_heads=3), dtype=np.float64)
    whole = tree_attention(**call)
    past_key, past_value, outs = call["past_key"], call["past_value"], []
    for first, last in ((0, 1), (1, 5), (5, 9)):
        rows = {name: call[name][:, :, first:last] for name in ("query", "key", "value")}
        out, past_key, past_value = tree_attention(
            **rows,
            past_key=past_key,
            past_value=past_value,
            tree_mask=call["tree_mask"][:, first:last, :last],
            kv_length=call["kv_length"],
            scale=call["scale"],
        )
        outs.append(out)
    np.testing.assert_allclose(np.concatenate(outs, axis=1), whole[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(past_key, whole[1])
    np.testing.assert_array_equal(past_value, whole[2])


def test_a_row_that_sees_only_itself_and_nothing_committed_gives_its_value() -> None:
    call = random_call(Shape(lengths=(0,), new=5, after=5, heads=4, kv_heads=2))
    call["tree_mask"] = np.eye(5, dtype=np.bool_)[None]
    out, _, _ = tree_attention(**call)
    np.testing.assert_array_equal(out[0], call["value"][0].repeat(2, axis=0).transpose(1, 0, 2))


def test_large_scores_do_not_overflow() -> None:
    call = random_call(SHAPES["verification"])
    call["query"] = call["query"] * np.float32(1e4)
    out, _, _ = tree_attention(**call)
    assert np.isfinite(out).all()


def window_by_position(shape: Shape, window: int, parents: np.ndarray, length: int) -> np.ndarray:
    """[Q, kv_length + S] by transformers' own rule for a sliding window, over positions spelled out."""
    depths, mask = depths_and_ancestors(parents)
    positions = torch.from_numpy(np.concatenate((np.arange(length), length + depths)))
    seen = np.concatenate((np.ones((shape.after, length), np.bool_), mask), axis=1)
    inside = sliding_window_causal_mask_function(window)(0, 0, positions[length:, None], positions)
    return (seen & inside.numpy())[-shape.new :]


@pytest.mark.parametrize("window", [1, 2, 5, 12, 100])
@pytest.mark.parametrize("name", ["plain decoding", "prefill", "second chunk", "verification", "draft level"])
def test_a_window_is_transformers_own_by_position(name: str, window: int) -> None:
    """Keys outside of it do not count: the result is that of an attention over the others alone."""
    shape = SHAPES[name]
    call, rng = random_call(shape), np.random.default_rng(7)
    parents = np.array([rng.integers(max(-1, row - 4), row) if row else -1 for row in range(shape.after)], np.int64)
    call["tree_mask"] = depths_and_ancestors(parents)[1][None, -shape.new :]
    call["past_key"], call["past_value"] = (rng.standard_normal(call[n].shape) for n in ("past_key", "past_value"))
    out, keys, values = tree_attention(**call, sliding_window=window)

    total = shape.lengths[0] + shape.after
    visible = window_by_position(shape, window, parents, shape.lengths[0])
    group = shape.heads // shape.kv_heads
    expected = torch.nn.functional.scaled_dot_product_attention(
        torch.from_numpy(call["query"]).double(),
        *(torch.from_numpy(cache[:, :, :total]).double().repeat_interleave(group, dim=1) for cache in (keys, values)),
        attn_mask=torch.from_numpy(visible),
        scale=call["scale"],
    )
    np.testing.assert_allclose(out, expected.transpose(1, 2).numpy(), rtol=1e-4, atol=1e-5)


def test_a_window_by_index_is_another_one() -> None:
    """Of a root's five children the last sees the root and three committed rows, whatever lies between."""
    call = random_call(Shape(lengths=(6,), new=6, after=6, heads=2, kv_heads=1), dtype=np.float64)
    call["tree_mask"] = depths_and_ancestors(np.array([-1, 0, 0, 0, 0, 0]))[1][None]
    alone = {name: call[name][:, :, [0, 5]] for name in ("query", "key", "value")}
    alone = call | alone | {"tree_mask": np.tri(2, dtype=np.bool_)[None]}
    out, alone_out = (tree_attention(**arguments, sliding_window=5)[0] for arguments in (call, alone))
    np.testing.assert_allclose(out[:, 5], alone_out[:, 1], rtol=1e-12)
    itself = call["value"][0, :, 5].repeat(2, axis=0)  # all that a window of five rows of the buffer would show it
    assert np.abs(out[0, 5] - itself).max() > 1e-3


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize(("softcap", "with_sinks"), [(0.0, False), (2.0, False), (0.0, True)])
def test_caps_and_sinks_are_transformers_own(softcap: float, window: int, with_sinks: bool) -> None:
    """Gemma 2's eager attention caps the scores, gpt-oss's appends a sink to them: both on a chain."""
    shape = SHAPES["second chunk"]
    call, rng = random_call(shape), np.random.default_rng(3)
    sinks = rng.standard_normal(shape.heads).astype(np.float32) if with_sinks else None
    length, total = shape.lengths[0], shape.lengths[0] + shape.after
    call["tree_mask"] = np.tri(shape.new, dtype=np.bool_)[None]
    out, keys, values = tree_attention(**call, sinks=sinks, softcap=softcap, sliding_window=window)

    distance = np.arange(length, total)[:, None] - np.arange(total)
    hidden = (distance < 0) | (distance >= (window or total))
    arguments = [torch.from_numpy(call["query"]), *(torch.from_numpy(cache[:, :, :total]) for cache in (keys, values))]
    mask = torch.zeros(hidden.shape).masked_fill(torch.from_numpy(hidden), -torch.inf)[None, None]
    module = torch.nn.Module()
    module.num_key_value_groups = shape.heads // shape.kv_heads
    if sinks is None:
        expected, _ = gemma2_attention(module, *arguments, mask, scaling=call["scale"], softcap=softcap or None)
    else:
        module.sinks = torch.from_numpy(sinks)
        expected, _ = gpt_oss_attention(module, *arguments, mask, scaling=call["scale"])
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-4, atol=1e-5)
