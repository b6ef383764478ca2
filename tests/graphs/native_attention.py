"""Calls of the native TreeAttention, and what they should give.

A call holds what the op's definition takes, heads apart and keys in rows; what the op takes is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto

from eagle_graphs.tree import depths_and_ancestors
from eagle_graphs.tree_attention import NAME, tree_attention
from tests.graphs.native import session_of_one_op

INPUTS = ["query", "key", "value", "past_key", "past_value", "tree_mask", "kv_length", "cos", "sin", "sinks"]
OUTPUTS = ("out", "present_key", "present_value")
ELEMENTS = {"tree_mask": TensorProto.BOOL, "kv_length": TensorProto.INT64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """B slots, Q new rows, S rows after the committed ones, a cache of C rows, rotary over R of D numbers."""

    query: np.ndarray
    """[B, Hq, Q, D]"""
    key: np.ndarray
    """[B, Hkv, Q, D]"""
    value: np.ndarray
    """[B, Hkv, Q, D]"""
    past_key: np.ndarray
    """[B, Hkv, C, D]"""
    past_value: np.ndarray
    """[B, Hkv, C, D]"""
    tree_mask: np.ndarray
    """[B, Q, S]"""
    kv_length: np.ndarray
    """[B]"""
    attributes: dict[str, Any]
    """Those of the op but the numbers of heads."""
    angles: np.ndarray | None = None
    """[B, Q, R/2]"""
    sinks: np.ndarray | None = None
    """[Hq]"""
    packed: bool = False

    def inputs(self) -> dict[str, np.ndarray]:
        """What the op takes."""
        rows = {name: rows_from_heads(getattr(self, name)) for name in ("query", "key", "value")}
        if self.packed:
            rows = {"query": np.concatenate(list(rows.values()), axis=2)}
        given = rows | {
            "past_key": blocks_from_rows(self.past_key),
            "past_value": self.past_value.copy(),
            "tree_mask": self.tree_mask,
            "kv_length": self.kv_length,
        }
        if self.angles is not None:
            given |= {"cos": np.cos(self.angles), "sin": np.sin(self.angles)}
        if self.sinks is not None:
            given |= {"sinks": self.sinks}
        return given

    def session(self, threads: int = 1, isa: str = "") -> ort.InferenceSession:
        heads = {"num_heads": self.query.shape[1], "kv_num_heads": self.key.shape[1]}
        attributes = tuple(sorted((heads | self.attributes).items()))
        return session_of(tuple(self.inputs()), attributes, threads, isa)

    def run(self, threads: int = 1, isa: str = "") -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The op's out [B, Q, Hq, D] and its present keys and values in rows."""
        out, present_key, present_value = self.session(threads, isa).run(None, self.inputs())
        slots, heads, new, width = self.query.shape
        return out.reshape(slots, new, heads, width), rows_from_blocks(present_key), present_value

    def defined(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the definition gives in float64."""
        query, key = (self.rotated(getattr(self, name).astype(np.float64)) for name in ("query", "key"))
        attributes = {name: value for name, value in self.attributes.items() if name != "interleaved"}
        return tree_attention(
            query,
            key,
            self.value.astype(np.float64),
            self.past_key.astype(np.float64),
            self.past_value.astype(np.float64),
            self.tree_mask,
            self.kv_length,
            self.sinks,
            **attributes,
        )

    def rotated(self, rows: np.ndarray) -> np.ndarray:
        """[B, H, Q, D] turned by the angles, as transformers' `rotate_half` does or by pairs of neighbours."""
        if self.angles is None:
            return rows
        half = self.angles.shape[2]
        pairs = rows[..., : 2 * half].astype(np.complex128)
        neighbours = bool(self.attributes.get("interleaved"))
        first, second = (pairs[..., ::2], pairs[..., 1::2]) if neighbours else (pairs[..., :half], pairs[..., half:])
        turned = (first + 1j * second) * np.exp(1j * self.angles[:, None].astype(np.float64))
        both = np.stack((turned.real, turned.imag), axis=-1 if neighbours else -2)
        return np.concatenate((both.reshape(pairs.shape), rows[..., 2 * half :]), axis=-1)

    def rows(self, slot: int, rows: list[int], mask: np.ndarray, length: int) -> Call:
        """The call of one slot's `rows` alone, with their own mask [Q, S], after `length` rows of this call's cache."""
        new = {name: getattr(self, name)[slot : slot + 1, :, rows] for name in ("query", "key", "value")}
        return replace(
            self,
            **new,
            past_key=self.past_key[slot : slot + 1],
            past_value=self.past_value[slot : slot + 1],
            tree_mask=mask[None],
            kv_length=np.array([length], np.int64),
            angles=None if self.angles is None else self.angles[slot : slot + 1, rows],
        )


def rows_from_heads(heads: np.ndarray) -> np.ndarray:
    """[B, H, Q, D] as [B, Q, H*D]."""
    slots, count, new, width = heads.shape
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(slots, new, count * width)


def blocks_from_rows(keys: np.ndarray) -> np.ndarray:
    """[B, H, C, D] as [B, H, C/16, D, 16]."""
    slots, heads, rows, width = keys.shape
    return np.ascontiguousarray(keys.reshape(slots, heads, rows // 16, 16, width).swapaxes(3, 4))


def rows_from_blocks(blocks: np.ndarray) -> np.ndarray:
    """[B, H, C/16, D, 16] as [B, H, C, D]."""
    slots, heads, count, width, lanes = blocks.shape
    return np.ascontiguousarray(blocks.swapaxes(3, 4)).reshape(slots, heads, count * lanes, width)


@cache
def session_of(given: tuple[str, ...], attributes: tuple[tuple[str, Any], ...], threads: int, isa: str) -> Any:
    names = [name if name in given else "" for name in INPUTS]
    return session_of_one_op(NAME, names, OUTPUTS, ELEMENTS, dict(attributes), threads=threads, isa=isa)


def random_call(
    *,
    lengths: tuple[int, ...],
    new: int,
    after: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    capacity: int | None = None,
    rotary: int = 0,
    sinks: bool = False,
    packed: bool = False,
    chain: bool = False,
    seed: int = 0,
    **attributes: Any,
) -> Call:
    """A call over one random tree (or a chain) a slot. Cache rows without a meaning are NaN, to show where they leak.

    With `after` more than `new`, the tree's first rows are in the cache.
    """
    rng = np.random.default_rng(seed)
    after = after or new
    slots = len(lengths)
    capacity = capacity or (max(lengths) + after + 15) // 16 * 16

    def normal(*axes: int) -> np.ndarray:
        return rng.standard_normal(axes).astype(np.float32)

    past_key, past_value = (normal(slots, kv_heads, capacity, head_dim) for _ in range(2))
    for slot, length in enumerate(lengths):
        past_key[slot, :, length + after - new :] = past_value[slot, :, length + after - new :] = np.nan
    parents = [[row - 1 if chain or not row else int(rng.integers(-1, row)) for row in range(after)] for _ in lengths]
    masks = [depths_and_ancestors(np.array(tree, np.int64))[1][after - new :] for tree in parents]
    return Call(
        query=normal(slots, heads, new, head_dim),
        key=normal(slots, kv_heads, new, head_dim),
        value=normal(slots, kv_heads, new, head_dim),
        past_key=past_key,
        past_value=past_value,
        tree_mask=np.stack(masks),
        kv_length=np.array(lengths, np.int64),
        angles=normal(slots, new, rotary // 2) if rotary else None,
        sinks=normal(heads) if sinks else None,
        packed=packed,
        attributes={"scale": 1.5 / head_dim**0.5} | attributes,
    )
