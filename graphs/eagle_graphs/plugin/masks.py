"""A tree's mask as the kernel reads it: 64 rows to a word."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WORD_BITS = 64


def words_for(rows: int) -> int:
    """Words that a mask of `rows` columns takes."""
    return -(-rows // WORD_BITS)


def pack_mask(tree_mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """[..., S] bool as [..., ceil(S/64)] int64: column j is bit j % 64 of word j // 64, and bits beyond S are 0."""
    *rows, columns = tree_mask.shape
    padded = np.zeros((*rows, words_for(columns) * WORD_BITS), np.bool_)
    padded[..., :columns] = tree_mask
    return np.packbits(padded, axis=-1, bitorder="little").view("<i8")


def unpack_mask(words: npt.NDArray[np.int64], columns: int) -> npt.NDArray[np.bool_]:
    """The mask [..., columns] that `pack_mask` was given."""
    bits = np.unpackbits(words.astype("<i8").view(np.uint8), axis=-1, count=columns, bitorder="little")
    return bits.astype(np.bool_)
