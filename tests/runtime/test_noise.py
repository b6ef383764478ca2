"""Keyed noise: the hash is SplitMix64, numbers are uniform and independent over ids, positions, streams and seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eagle_runtime.noise import (
    BLOCK,
    bits_from,
    draw,
    draw_distinct,
    gumbels_from,
    key_from,
    noise,
    perturbed,
    uniform,
    uniforms_from,
)
from tests.worlds import chi_square_p

MANY = 200_000
LEAST_P = 1e-3


def split_mix_64(state: int, count: int) -> list[int]:
    """The published generator, step by step."""
    word, found = (1 << 64) - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & word
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        found.append(z ^ (z >> 31))
    return found


def test_the_hash_is_splitmix64() -> None:
    assert split_mix_64(1234567, 2) == [6457827717110365317, 3203168211198807973]  # its published test vector
    assert bits_from(1234567, np.arange(50)).tolist() == split_mix_64(1234567, 50)
    assert [key_from(7, position) for position in range(20)] == bits_from(key_from(7), np.arange(20)).tolist()


def test_keys_of_any_size() -> None:
    assert len({key_from(seed, 0, 5) for seed in (0, 1, 2**32, 2**63, 2**64 - 1)}) == 5
    assert 0 < uniform(key_from(2**64 - 1, 3), 2**40) < 1


def test_uniform_numbers_are_never_0_or_1() -> None:
    ends = uniforms_from(np.array([0, 1, 2**64 - 1], np.uint64))
    assert ends.tolist() == [2.0**-53, 2.0**-53, 1 - 2.0**-53]
    assert np.isfinite(gumbels_from(np.array([0, 2**64 - 1], np.uint64))).all()


def kolmogorov(sample: np.ndarray) -> float:
    """p-value of a sample against the uniform law, by Kolmogorov's asymptotic series."""
    ordered, count = np.sort(sample), len(sample)
    steps = np.arange(count + 1) / count
    distance = max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()) * math.sqrt(count)
    return 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * distance * distance) for k in range(1, 101))


def over_ids() -> np.ndarray:
    return uniforms_from(bits_from(key_from(0, 1, 2), np.arange(MANY)))


def over_positions() -> np.ndarray:
    keys = bits_from(key_from(0, 1), np.arange(MANY))
    return uniforms_from(bits_from(keys, np.full(MANY, 17)))


def over_seeds() -> np.ndarray:
    return np.array([uniform(key_from(seed, 1, 2), 3) for seed in range(20_000)])


@pytest.mark.parametrize("numbers", [over_ids, over_positions, over_seeds])
def test_uniform_over_every_part_of_the_key(numbers) -> None:
    sample = numbers()
    assert kolmogorov(sample) > LEAST_P
    # Neighbours are independent: pairs fall evenly into 32 x 32 cells, and low bits do as well as high ones.
    for scale in (1.0, 2.0**20):
        cells = np.floor(sample * scale % 1 * 32).astype(int)
        pairs = np.bincount(cells[:-1:2] * 32 + cells[1::2], minlength=1024)
        assert chi_square_p(pairs, np.full(1024, pairs.sum() / 1024)) > LEAST_P


def test_streams_and_positions_are_not_correlated() -> None:
    ids = np.arange(MANY)
    rows = [uniforms_from(bits_from(key_from(0, s, t), ids)) for s in range(3) for t in range(3)]
    correlation = np.corrcoef(rows) - np.eye(9)
    assert np.abs(correlation).max() < 5 / math.sqrt(MANY)


def test_block_noise_is_standard_gumbel_and_independent() -> None:
    values = noise(key_from(3), np.arange(4000))
    assert kolmogorov(np.exp(-np.exp(-values.ravel()))) > LEAST_P
    columns = np.exp(-np.exp(-values))
    assert np.abs(np.corrcoef(columns[:, :40].T) - np.eye(40)).max() < 6 / math.sqrt(4000)
    owners = np.bincount(values.argmax(axis=1), minlength=BLOCK)  # in every place alike
    assert chi_square_p(owners, np.full(BLOCK, 4000 / BLOCK)) > LEAST_P
    assert kolmogorov(np.exp(-BLOCK * np.exp(-values.max(axis=1)))) > LEAST_P
    second = np.sort(columns, axis=1)[:, -2]  # of 256 uniform numbers: P(second largest < u) = 256 u^255 - 255 u^256
    assert kolmogorov(BLOCK * second ** (BLOCK - 1) - (BLOCK - 1) * second**BLOCK) > LEAST_P


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 5000])
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
def test_a_draw_is_the_largest_perturbed_logit(size: int, scale: float) -> None:
    """Blocks that are passed over could not have won."""
    for seed in range(40):
        logits = (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)
        logits[seed % size :: 7] = -np.inf
        logits[0] = 0
        assert draw(logits, key_from(seed)) == perturbed(logits, key_from(seed)).argmax()


def test_a_draw_does_not_depend_on_how_large_the_vocabulary_is() -> None:
    logits = np.random.default_rng(0).standard_normal(700).astype(np.float32)
    longer = np.append(logits, np.full(3000, -np.inf, np.float32))
    assert [draw(logits, key_from(i)) for i in range(50)] == [draw(longer, key_from(i)) for i in range(50)]


def test_draws_over_many_blocks_have_their_law() -> None:
    logits = np.random.default_rng(1).standard_normal(3000).astype(np.float32) * 2
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    counts = np.bincount([draw(logits, key_from(9, i)) for i in range(20_000)], minlength=3000)
    assert chi_square_p(counts, p * 20_000) > LEAST_P


def test_distinct_draws_are_draws_without_replacement() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    ids = np.array([7, 900, 3, 41])
    counts = np.zeros((4, 4))
    for i in range(20_000):
        first, second = draw_distinct(np.log(p), ids, 2, key_from(2, i))
        counts[first, second] += 1
    expected = p[:, None] * p[None, :] / (1 - p[:, None]) * (1 - np.eye(4))
    assert chi_square_p(counts.ravel(), expected.ravel() * 20_000) > LEAST_P
