"""The host side of the Triton kernels: packed masks, tiles, splits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from eagle_graphs import EagleError
from eagle_graphs.plugin.launch import Attention, launch_for, split_rows_for, tile_heights, tiles_for
from eagle_graphs.plugin.masks import pack_mask, unpack_mask, words_for

LLAMA = Attention(query_heads=32, kv_heads=8, head_dim=128, scale=0.1)


@given(mask=arrays.arrays(np.bool_, st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 140))))
def test_packing_and_unpacking(mask: np.ndarray) -> None:
    words = pack_mask(mask)
    assert words.dtype == np.int64
    assert words.shape == (*mask.shape[:2], words_for(mask.shape[2]))
    np.testing.assert_array_equal(unpack_mask(words, mask.shape[2]), mask)


@pytest.mark.parametrize("column", [0, 1, 31, 32, 63, 64, 69])
def test_a_column_is_one_bit_of_one_word(column: int) -> None:
    words = pack_mask(np.arange(70)[None] == column)
    expected = [0, 0]
    expected[column // 64] = 1 << column % 64
    assert [int(word) % 2**64 for word in words[0]] == expected


def test_tiles_hold_the_rows_of_a_group() -> None:
    assert tile_heights(4, 128, new_rows=1) == [16]
    assert tile_heights(4, 128, new_rows=8) == [16, 32]
    assert tile_heights(4, 128, new_rows=60) == [16, 32, 64]
    assert tile_heights(4, 256, new_rows=60) == [16]


@pytest.mark.parametrize("new_rows", [1, 10, 60, 512])
def test_the_order_of_sums_does_not_depend_on_the_rows(new_rows: int) -> None:
    assert tiles_for(LLAMA, new_rows).block_n == tiles_for(LLAMA, 1).block_n
    launch = launch_for(LLAMA, slots=1, new_rows=new_rows, capacity=4096, split_rows=256)
    assert launch.splits == launch_for(LLAMA, slots=1, new_rows=1, capacity=4096, split_rows=256).splits


def test_every_row_and_every_committed_row_has_a_program() -> None:
    launch = launch_for(LLAMA, slots=3, new_rows=60, capacity=1000, split_rows=256)
    blocks, splits, planes = launch.grid
    assert blocks * launch.tiles.block_m >= 60 * 4 > (blocks - 1) * launch.tiles.block_m
    assert splits * 256 >= 1000 > (splits - 1) * 256
    assert planes == 24
    assert launch.combine_grid == (3 * 60 * 32, 1, 1)


@pytest.mark.parametrize(
    ("slots", "capacity", "multiprocessors", "expected"),
    [(1, 4096, 108, 256), (1, 131072, 132, 4032), (64, 4096, 108, 4096), (1, 100, 108, 256)],
)
def test_splits_fill_the_gpu(slots: int, capacity: int, multiprocessors: int, expected: int) -> None:
    assert split_rows_for(LLAMA.kv_heads, slots=slots, capacity=capacity, multiprocessors=multiprocessors) == expected


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "message"),
    [(9, 2, 64, "got 9 query heads and 2 key heads"), (8, 2, 512, "heads of 512 numbers, expected up to 256")],
)
def test_what_the_kernel_cannot_do_is_said(heads: int, kv_heads: int, head_dim: int, message: str) -> None:
    with pytest.raises(EagleError, match=message):
        Attention(query_heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=1.0)
