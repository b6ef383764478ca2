"""Random numbers without a generator: each is a function of the seed and of what it is for.

A generator's state would have to follow every accepted path and be taken back with every rejected one.
Keyed noise needs none of that: the number for (seed, stream, position, token) is the same whichever tree it is
asked for in, so that a tree and plain decoding draw the same token.

The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), whose
n-th output can be computed at once. Keys are made of its outputs too, one level for each part of the key.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from eagle_graphs.tree import Ids

Bits = npt.NDArray[np.uint64]
Floats64 = npt.NDArray[np.float64]

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1

BLOCK = 256
"""Tokens whose largest noise is drawn first."""
_LARGEST, _OWNER, _OTHERS = 0, 1, 2
"""Parts of a block's noise; the last of a key's numbers."""


def key_from(*parts: int) -> int:
    """A key from numbers of 0 to 2^64 - 1, such as seed, stream and position."""
    key = 0
    for part in parts:
        key = (key + (part + 1) * _GOLDEN) & _WORD
        key = ((key ^ (key >> 30)) * _FIRST) & _WORD
        key = ((key ^ (key >> 27)) * _SECOND) & _WORD
        key ^= key >> 31
    return key


def bits_from(key: int | Bits, ids: Ids) -> Bits:
    """64 random bits for each of `ids`, as a new array; keys and ids broadcast. The same as key_from's next level."""
    bits = (ids + 1).astype(np.uint64)
    bits *= np.uint64(_GOLDEN)
    bits = bits + (np.uint64(key) if isinstance(key, int) else key)
    shifted = bits >> np.uint64(30)
    bits ^= shifted
    bits *= np.uint64(_FIRST)
    bits ^= np.right_shift(bits, np.uint64(27), out=shifted)
    bits *= np.uint64(_SECOND)
    bits ^= np.right_shift(bits, np.uint64(31), out=shifted)
    return bits


def uniforms_from(bits: Bits) -> Floats64:
    """Uniform numbers strictly between 0 and 1: the odd multiples of 2^-53."""
    odd: Floats64 = ((bits >> np.uint64(11)) | np.uint64(1)).astype(np.float64)
    odd *= 2.0**-53
    return odd


def gumbels_from(bits: Bits) -> Floats64:
    """Standard Gumbel noise."""
    return -np.log(-np.log(uniforms_from(bits)))


def uniform(key: int, token: int) -> float:
    """The uniform number of one token."""
    return float(uniforms_from(bits_from(key, np.array([token])))[0])


def largest_noise(key: int, blocks: Ids) -> Floats64:
    """[n] the largest noise in each of `blocks`: of BLOCK Gumbels it is one too, moved by log BLOCK."""
    return gumbels_from(bits_from(key_from(key, _LARGEST), blocks)) + math.log(BLOCK)


def noise(key: int, blocks: Ids) -> Floats64:
    """[n, BLOCK] independent standard Gumbel noise of the tokens of `blocks`.

    Drawn from the top, as in Maddison, Tarlow and Minka, "A* sampling", 2014: the largest, whose it is, and the others
    under the condition that they are smaller.
    """
    largest = largest_noise(key, blocks)
    owners = bits_from(key_from(key, _OWNER), blocks) >> np.uint64(64 - 8)
    tokens = blocks[:, None] * BLOCK + np.arange(BLOCK)
    others = uniforms_from(bits_from(key_from(key, _OTHERS), tokens))
    values: Floats64 = -np.log(np.exp(-largest)[:, None] - np.log(others))
    values[np.arange(len(blocks)), owners.astype(np.int64)] = largest
    return values


def perturbed(logits: npt.NDArray[np.floating], key: int) -> Floats64:
    """[V] the logits and their noise, whose largest is drawn."""
    blocks = np.arange(-(-len(logits) // BLOCK))
    sums: Floats64 = logits + noise(key, blocks).ravel()[: len(logits)]
    return sums


def draw(logits: npt.NDArray[np.floating], key: int) -> int:
    """Draws from softmax(logits) [V] by Gumbel-max: the index whose logit and noise sum to the most.

    The best sum in the likeliest token's block is a floor under the winner's. Of the other blocks only those are
    looked into whose largest logit and largest noise could pass it: a few in a hundred for a language model.
    """
    peaks = np.maximum.reduceat(logits, np.arange(0, len(logits), BLOCK))
    first = int(peaks.argmax())
    token, floor = _best_of(logits, key, np.array([first]))
    bounds = peaks + largest_noise(key, np.arange(len(peaks)))
    bounds[first] = -np.inf
    others = np.flatnonzero(bounds >= floor)
    if not len(others):
        return token
    other, value = _best_of(logits, key, others)
    return other if value > floor else token


def _best_of(logits: npt.NDArray[np.floating], key: int, blocks: Ids) -> tuple[int, float]:
    """The best token of some blocks, and its sum."""
    tokens = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
    inside = tokens < len(logits)  # the last block may be cut
    sums = logits[tokens[inside]] + noise(key, blocks).ravel()[inside]
    best = int(sums.argmax())
    return int(tokens[inside][best]), float(sums[best])


def draw_distinct(logits: npt.NDArray[np.floating], ids: Ids, count: int, key: int) -> Ids:
    """[count] indices drawn from softmax(logits) [K] without replacement, in order; the noise is that of `ids` [K].

    The largest of the perturbed logits are such a sample (Kool, van Hoof and Welling, "Stochastic beams and where to
    find them", 2019).
    """
    return np.argsort(-(logits + gumbels_from(bits_from(key, ids))), kind="stable")[:count]
