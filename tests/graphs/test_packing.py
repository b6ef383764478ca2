"""8-bit weights: quantized and in the kernels' order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagle_graphs.native.packing import pack, quant_embedding, quantize_rows, unpack


@given(st.integers(1, 70), st.integers(1, 200), st.integers(0, 99))
def test_unpack_is_the_inverse_of_pack(rows: int, depth: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(-128, 128, (rows, depth), np.int8)
    packed = pack(values)
    assert packed.shape == (-(-rows // 16), -(-depth // 64) * 16, 16, 4)
    np.testing.assert_array_equal(unpack(packed, rows, depth), values)


def test_the_order_is_the_documented_one() -> None:
    values = np.random.default_rng(0).integers(-128, 128, (20, 70), np.int8)
    packed = pack(values)
    for n, k in np.ndindex(32, 128):
        expected = 128 + int(values[n, k]) if n < 20 and k < 70 else 128
        assert packed[n // 16, k // 4, n % 16, k % 4] == expected


def test_a_row_uses_the_whole_range() -> None:
    weight = np.array([[0.5, -2.54, 1.27], [0, 0, 0]], np.float32)
    values, scale = quantize_rows(weight)
    np.testing.assert_array_equal(values, [[25, -127, 64], [0, 0, 0]])
    np.testing.assert_allclose(scale, [0.02, 0])


def test_ties_go_to_even() -> None:
    values, _ = quantize_rows(np.array([[127, 0.5, 1.5, -2.5]], np.float32))
    np.testing.assert_array_equal(values, [[127, 0, 2, -2]])


def test_a_given_scale_cuts_off_what_lies_beyond() -> None:
    values, scale = quantize_rows(np.array([[1, -300, 200]], np.float32), np.ones(1, np.float32))
    np.testing.assert_array_equal(values, [[1, -127, 127]])
    np.testing.assert_array_equal(scale, [1])


def test_the_embedding_is_a_row_times_its_scale() -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(40, 100)).astype(np.float32)
    values, scale = quantize_rows(weight)
    rows = quant_embedding(np.array([[3, 39]]), pack(values), scale, depth=100)
    assert rows.shape == (1, 2, 100)
    assert np.abs(rows[0] - weight[[3, 39]]).max() <= scale.max() * 0.501
