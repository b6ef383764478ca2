"""What each graph takes and gives: names, element types and symbolic axes.

    B  slots (sequences)                    S  rows after the committed ones, S >= Q
    Q  new rows                             C  rows of the cache buffer
    R  rows whose logits are asked for      K  children of a node
    C/b  blocks of b rows
    h  hidden width of the head             V  vocabulary of the target

New rows are written at kv_length + S - Q. In a verification S = Q; a later level of drafting sees
the rows of the earlier ones (S > Q) though none of them is committed. `logit_rows` are flat indices
into the B * Q new rows. A `present_*` output is its `past_*` input: the runtime binds one buffer
to both, and the graph writes only the new rows.

Where a graph keeps its keys in blocks (`key_block` b > 1), a key cache is [B, Hkv, C / b, D, b]: the same bytes as
[B, Hkv, C, D], with each block transposed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

DTYPES = ("bool", "int64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One input or output of a graph."""

    name: str
    dtype: str
    """An element type, by numpy's name; numpy itself has no bfloat16."""
    axes: tuple[str | int, ...]
    """Size of each axis: a number where it is fixed, a letter of the table above where not."""

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Its shape where the axes have these sizes."""
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Shape of a graph's cache, one pair of keys and values a layer."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPorts:
    """All ports of a graph, caches last."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def with_caches(self, dtype: str) -> GraphPorts:
        """The same with caches of another element type."""

        def change(port: Port) -> Port:
            return replace(port, dtype=dtype) if port.name.startswith(("past_", "present_")) else port

        return GraphPorts(inputs=tuple(map(change, self.inputs)), outputs=tuple(map(change, self.outputs)))

    def fixed(self, **sizes: int) -> GraphPorts:
        """The same with these axes at fixed sizes."""

        def fix(port: Port) -> Port:
            return replace(
                port, axes=tuple(axis if isinstance(axis, int) else sizes.get(axis, axis) for axis in port.axes)
            )

        return GraphPorts(inputs=tuple(map(fix, self.inputs)), outputs=tuple(map(fix, self.outputs)))


def cache_names(prefix: str, layers: int) -> list[str]:
    """Names of the caches, in the order of the ports: key and value of layer 0, of layer 1, ..."""
    return [f"{prefix}_{part}_{layer}" for layer in range(layers) for part in ("key", "value")]


def _caches(prefix: str, kv: KVGeometry, key_block: int) -> tuple[Port, ...]:
    values: tuple[str | int, ...] = ("B", kv.kv_heads, "C", kv.head_dim)
    keys = values if key_block == 1 else ("B", kv.kv_heads, f"C/{key_block}", kv.head_dim, key_block)
    return tuple(
        Port(name=name, dtype=kv.dtype, axes=keys if "_key_" in name else values)
        for name in cache_names(prefix, kv.layers)
    )


_PLACEMENT = (
    Port(name="position_ids", dtype="int64", axes=("B", "Q")),
    Port(name="tree_mask", dtype="bool", axes=("B", "Q", "S")),
    Port(name="kv_length", dtype="int64", axes=("B",)),
    Port(name="logit_rows", dtype="int64", axes=("R",)),
)


def target_ports(kv: KVGeometry, *, vocab_size: int, feature_width: int, key_block: int = 1) -> GraphPorts:
    """Ports of the target: verification, plain decoding and prefill alike."""
    return GraphPorts(
        inputs=(Port(name="input_ids", dtype="int64", axes=("B", "Q")), *_PLACEMENT, *_caches("past", kv, key_block)),
        outputs=(
            Port(name="argmax_ids", dtype="int64", axes=("R",)),
            Port(name="logits", dtype="float32", axes=("R", vocab_size)),
            Port(name="finite", dtype="bool", axes=("R",)),
            Port(name="features", dtype="float32", axes=("B", "Q", feature_width)),
            *_caches("present", kv, key_block),
        ),
    )


def draft_ports(kv: KVGeometry, *, hidden_width: int, top_k: int, key_block: int = 1) -> GraphPorts:
    """Ports of the draft head: token i + 1 beside the feature of token i in every row."""
    return GraphPorts(
        inputs=(
            Port(name="token_ids", dtype="int64", axes=("B", "Q")),
            Port(name="hidden", dtype="float32", axes=("B", "Q", hidden_width)),
            *_PLACEMENT,
            *_caches("past", kv, key_block),
        ),
        outputs=(
            Port(name="hidden_out", dtype="float32", axes=("R", hidden_width)),
            Port(name="topk_ids", dtype="int64", axes=("R", top_k)),
            Port(name="topk_logprobs", dtype="float32", axes=("R", top_k)),
            *_caches("present", kv, key_block),
        ),
    )
