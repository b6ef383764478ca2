"""How the kernels are launched: tiles, splits and grids, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_graphs.errors import EagleError

Grid = tuple[int, int, int]

LARGEST_HEAD = 256
_TILE_ROWS = 32  # of keys: the bits of one half of a word
_LEAST_SPLIT = 256
"""Rows below which another split costs more than it saves: its start, and its part of the combining pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What a layer's attention is compiled for. Numbers are those of the op `eagle::TreeAttention`."""

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    softcap: float = 0.0
    sliding_window: int = 0

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.query_heads < 1 or self.query_heads % self.kv_heads:
            raise EagleError(
                f"the attention kernel got {self.query_heads} query heads and {self.kv_heads} key heads; "
                "expected a multiple: use --attention native"
            )
        if not 1 <= self.head_dim <= LARGEST_HEAD:
            raise EagleError(
                f"the attention kernel got heads of {self.head_dim} numbers, expected up to {LARGEST_HEAD}: "
                "use --attention native"
            )

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Sizes that `kernels.attend` is compiled for."""

    block_m: int
    """Rows of queries, of one head each."""
    block_n: int
    """Rows of keys. The same whatever is asked for, and so is the order of every sum over them."""
    block_d: int
    """The head's width, rounded up to a power of two."""
    num_warps: int
    num_stages: int = 2


def tiles_for(attention: Attention, new_rows: int) -> Tiles:
    """Tiles for `new_rows` rows a slot, or for up to as many."""
    return tiles_of_height(attention, tile_heights(attention.group, attention.head_dim, new_rows)[-1])


def tile_heights(group: int, head_dim: int, new_rows: int) -> list[int]:
    """The `block_m` that are worth trying for `new_rows` rows a slot, rising: the last holds the most rows.

    With the highest, a program's shared memory is within the 48 KiB that a launch has without asking for more.
    """
    most = 64 if _block_d(head_dim) <= 128 else 16
    heights = [16]
    while heights[-1] < min(most, new_rows * group):
        heights.append(heights[-1] * 2)
    return heights


def tiles_of_height(attention: Attention, block_m: int) -> Tiles:
    """Tiles of `block_m` rows of queries; the warps are as many as keep every register of a thread."""
    block_d = _block_d(attention.head_dim)
    return Tiles(
        block_m=block_m, block_n=_TILE_ROWS, block_d=block_d, num_warps=8 if block_m * block_d >= 64 * 128 else 4
    )


def split_rows_for(kv_heads: int, *, slots: int, capacity: int, multiprocessors: int) -> int:
    """Committed rows of a split, a multiple of 64: enough splits for two programs a multiprocessor.

    Does not depend on the number of new rows, so that plain decoding and trees of every size share their splits.
    """
    splits = -(-2 * multiprocessors // (slots * kv_heads))
    return max(_LEAST_SPLIT, _round_up(-(-capacity // splits), 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call of `attend`, and of `combine` where there is more than one split."""

    tiles: Tiles
    splits: int
    grid: Grid
    combine_grid: Grid


def launch_for(attention: Attention, *, slots: int, new_rows: int, capacity: int, split_rows: int) -> Launch:
    """The launch for `new_rows` rows in each of `slots` slots over caches of `capacity` rows."""
    tiles, splits = tiles_for(attention, new_rows), -(-capacity // split_rows)
    return Launch(
        tiles=tiles,
        splits=splits,
        grid=(-(-new_rows * attention.group // tiles.block_m), splits, slots * attention.kv_heads),
        combine_grid=(slots * new_rows * attention.query_heads, 1, 1),
    )


def attend_options(tiles: Tiles) -> dict[str, int]:
    """Options of Triton's compiler for `kernels.attend`."""
    return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def attend_constants(attention: Attention, tiles: Tiles, split_rows: int) -> dict[str, float]:
    """The constants that `kernels.attend` is compiled with, by name."""
    assert split_rows % tiles.block_n == 0, "a split ends within a tile"
    return {
        "GROUP": attention.group,
        "KV_HEADS": attention.kv_heads,
        "HEAD_DIM": attention.head_dim,
        "SCALE": attention.scale,
        "SOFTCAP": attention.softcap,
        "WINDOW": attention.sliding_window,
        "SPLIT_ROWS": split_rows,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": tiles.block_d,
    }


def combine_constants(
    query_heads: int, head_dim: int, sliding_window: int, *, splits: int, split_rows: int
) -> dict[str, float]:
    """The constants that `kernels.combine` is compiled with, by name."""
    return {
        "QUERY_HEADS": query_heads,
        "HEAD_DIM": head_dim,
        "WINDOW": sliding_window,
        "SPLIT_ROWS": split_rows,
        "BLOCK_S": _next_power_of_two(splits),
        "BLOCK_D": _block_d(head_dim),
    }


def commit_constants(kv_heads: int, head_dim: int, longest_path: int) -> dict[str, float]:
    """The constants that `kernels.commit_path` is compiled with, by name."""
    return {
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_P": _next_power_of_two(longest_path),
        "BLOCK_D": _block_d(head_dim),
    }


def _block_d(head_dim: int) -> int:
    return max(16, _next_power_of_two(head_dim))


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
