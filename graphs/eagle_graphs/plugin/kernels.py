"""The kernels, in Triton: attention of a tree over an in-place cache, and the move of accepted rows.

Letters are those of `tree_attention`, and W words of the mask a row. Tiles:

    BLOCK_M  rows of queries: of each row of the tree the GROUP query heads of one key head
    BLOCK_N  rows of keys: 32, so that a tile's bits are one half of a word of the mask
    BLOCK_D  the head's width, rounded up to a power of two

Pointers and integers stand in the order that TensorRT passes them in: inputs, scalars, outputs. What is known when
a model is exported (heads, scale, cap, window) is compiled in, since TensorRT passes no floating-point scalars.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    query,  # [B, Hq, Q, D]
    key,  # [B, Hkv, Q, D]
    value,  # [B, Hkv, Q, D]
    past_key,  # [B, Hkv, C, D]
    past_value,  # [B, Hkv, C, D]
    words,  # [B, Q, W] int64: bit j % 64 of word j // 64: the row sees the j-th row after the committed ones
    kv_length,  # [B] int64
    write_row,  # [B] int64: where the new rows go; rows from kv_length on are those of earlier levels
    sinks,  # [Hq], or None
    new_rows,
    word_count,
    capacity,
    out,  # [B, Q, Hq, D]; or, where there are statistics, float32 [B, Q, Hq, splits, D]: sums not yet divided
    statistics,  # None, or float32 [B, Q, Hq, splits, 2]: the highest score, in powers of two, and the weights' sum
    present_key,  # past_key
    present_value,  # past_value
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One block of rows of one key head, over one split of the cache. Grid: (blocks, splits, B * Hkv).

    Split s has the committed rows [s * SPLIT_ROWS, (s + 1) * SPLIT_ROWS). The one in which they end goes on with the
    tree, and its first block writes the new rows to the cache. The new rows are read where they came from, and
    nobody reads what is written: so no program waits for another.
    """
    block, split, plane = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = plane // KV_HEADS
    length = tl.load(kv_length + slot).to(tl.int32)
    lowest = _lowest_row(length, WINDOW)
    if split > length // SPLIT_ROWS or (split + 1) * SPLIT_ROWS <= lowest:
        return

    member = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row, head = member // GROUP, (plane % KV_HEADS) * GROUP + member % GROUP
    is_row = row < new_rows
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    row_in = (slot * KV_HEADS * GROUP + head) * new_rows + row
    q = tl.load(query + row_in[:, None] * HEAD_DIM + column[None, :], mask=is_row[:, None] & in_head[None, :], other=0)
    row_masks = words.to(tl.pointer_type(tl.uint32)) + (slot * new_rows + row) * word_count * 2
    seen = tl.zeros([BLOCK_M], tl.int32)  # rows of the tree that a row sees; counted only for a window
    if WINDOW > 0:
        for half in range(word_count * 2):
            seen += _ones(tl.load(row_masks + half, mask=is_row, other=0))

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    cache = plane * capacity * HEAD_DIM
    first = tl.maximum(split * SPLIT_ROWS, lowest // BLOCK_N * BLOCK_N)
    last = tl.minimum((split + 1) * SPLIT_ROWS, length)
    for start in range(first, last, BLOCK_N):
        place = start + tl.arange(0, BLOCK_N)
        mask = (place < last)[:, None] & in_head[None, :]
        at = cache + place.to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
        scores = _scores(q, tl.load(past_key + at, mask=mask, other=0), SCALE, SOFTCAP)
        visible = tl.broadcast_to((place < last)[None, :], [BLOCK_M, BLOCK_N])
        if WINDOW > 0:
            visible &= (length - place)[None, :] + seen[:, None] <= WINDOW
        v = tl.load(past_value + at, mask=mask, other=0)
        highest, weight, acc = _add(scores, visible, v, highest, weight, acc)

    if split == length // SPLIT_ROWS:
        earlier = tl.load(write_row + slot).to(tl.int32) - length
        after = earlier + new_rows
        # What a pass needs is cheaper to compute again than to keep in registers (`disable_licm`).
        for start in tl.range(0, after, BLOCK_N, num_stages=1, disable_licm=True):
            bit = start + tl.arange(0, BLOCK_N)
            new = (bit >= earlier)[:, None]
            mask = (bit < after)[:, None] & in_head[None, :]
            at_cache = cache + (length + bit).to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
            at_input = (plane * new_rows + bit - earlier)[:, None] * HEAD_DIM + column[None, :]
            scores = _scores(
                q, tl.load(tl.where(new, key + at_input, past_key + at_cache), mask=mask, other=0), SCALE, SOFTCAP
            )

            bits = tl.load(row_masks + start // BLOCK_N, mask=is_row, other=0)
            from_here = bits[:, None] >> tl.arange(0, BLOCK_N).to(tl.uint32)[None, :]
            visible = (from_here & 1) != 0
            if WINDOW > 0:
                seen -= _ones(bits)  # now those behind this tile
                visible &= seen[:, None] + _ones(from_here) <= WINDOW
            # A row that another one must not see may hold anything, and zero times infinity is no zero.
            from_v = tl.where(new, value + at_input, past_value + at_cache)
            sizes = tl.abs(tl.load(from_v, mask=mask, other=0).to(tl.float32))
            finite = tl.min((sizes < float("inf")).to(tl.int32), axis=1) != 0
            v = tl.load(from_v, mask=mask & finite[:, None], other=0)
            highest, weight, acc = _add(scores, visible, v, highest, weight, acc)
            poisoned = tl.max((visible & (finite == 0)[None, :]).to(tl.int32), axis=1) != 0
            weight = tl.where(poisoned, float("nan"), weight)
        if block == 0:
            for start in tl.range(0, new_rows, BLOCK_N, num_stages=1):
                place = start + tl.arange(0, BLOCK_N)
                mask = (place < new_rows)[:, None] & in_head[None, :]
                source = (plane * new_rows + place)[:, None] * HEAD_DIM + column[None, :]
                target = cache + (length + earlier + place).to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
                tl.store(present_key + target, tl.load(key + source, mask=mask), mask=mask)
                tl.store(present_value + target, tl.load(value + source, mask=mask), mask=mask)

    row_out = (slot * new_rows + row) * (KV_HEADS * GROUP) + head
    if statistics is None:
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            top = tl.maximum(highest, sink)
            acc *= tl.exp2(highest - top)[:, None]
            weight = weight * tl.exp2(highest - top) + tl.exp2(sink - top)
        acc /= weight[:, None]
    else:
        row_out = row_out * tl.num_programs(1) + split
        tl.store(statistics + row_out * 2, highest, mask=is_row)
        tl.store(statistics + row_out * 2 + 1, weight, mask=is_row)
    mask = is_row[:, None] & in_head[None, :]
    tl.store(out + row_out[:, None] * HEAD_DIM + column[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def combine(
    partial,  # float32 [B, Q, Hq, splits, D]
    statistics,  # float32 [B, Q, Hq, splits, 2]
    kv_length,  # [B] int64
    sinks,  # [Hq], or None
    new_rows,
    splits,
    out,  # [B, Q, Hq, D]
    QUERY_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT_ROWS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The parts of one row that `attend` wrote, brought together. Grid: (B * Q * Hq,)."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(kv_length + row // (new_rows * QUERY_HEADS)).to(tl.int32)
    split, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    used = (split >= _lowest_row(length, WINDOW) // SPLIT_ROWS) & (split <= length // SPLIT_ROWS)
    at = row * splits + split
    highest = tl.load(statistics + at * 2, mask=used, other=float("-inf"))
    weight = tl.load(statistics + at * 2 + 1, mask=used, other=0)
    mask = used[:, None] & (column < HEAD_DIM)[None, :]
    acc = tl.load(partial + at[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0)
    top = tl.max(highest, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + row % QUERY_HEADS).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    share = tl.exp2(highest - top)
    total = tl.sum(weight * share, axis=0)
    if sinks is not None:
        total += tl.exp2(sink - top)
    result = tl.sum(acc * share[:, None], axis=0) / total
    tl.store(out + row * HEAD_DIM + column, result.to(out.dtype.element_ty), mask=column < HEAD_DIM)


@triton.jit
def commit_path(
    path,  # [B, P] int64: rows to keep, counted from the first reserved one
    count,  # [B] int64: how many of them
    kv_length,  # [B] int64: committed rows before this
    slots,
    path_width,
    rows,
    cache,  # [layers, 2, B, Hkv, rows, D]
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Moves the rows of an accepted path behind the committed ones. Grid: (layers * 2 * B * Hkv,).

    A program has all rows of one layer's keys or values of one head, and holds them all before it writes the first:
    however they overlap.
    """
    plane = tl.program_id(0).to(tl.int64)
    slot = plane // KV_HEADS % slots
    step, column = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    kept = step < tl.load(count + slot)
    source = tl.load(path + slot * path_width + step, mask=kept, other=0)
    start = plane * rows + tl.load(kv_length + slot)
    mask = (kept & (source != step))[:, None] & (column < HEAD_DIM)[None, :]
    moved = tl.load(cache + (start + source)[:, None] * HEAD_DIM + column[None, :], mask=mask)
    tl.debug_barrier()  # other threads of this program read what this one is about to overwrite
    tl.store(cache + (start + step)[:, None] * HEAD_DIM + column[None, :], moved, mask=mask)


@triton.jit
def _scores(q, k, SCALE: tl.constexpr, SOFTCAP: tl.constexpr):
    """[BLOCK_M, BLOCK_N] in powers of two."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:
        scores = _tanh(scores * (SCALE / SOFTCAP)) * (SOFTCAP * LOG2_E)
    else:
        scores *= SCALE * LOG2_E
    return scores


@triton.jit
def _add(scores, visible, v, highest, weight, acc):
    """One tile of keys into a running softmax: its highest score, its weights' sum, its weighted values."""
    scores = tl.where(visible, scores, float("-inf"))
    top = tl.maximum(highest, tl.max(scores, axis=1))
    base = tl.where(top == float("-inf"), 0.0, top)  # a row that has seen nothing yet
    shrink = tl.exp2(highest - base)
    weights = tl.exp2(scores - base[:, None])
    weight = weight * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return top, weight, acc


@triton.jit
def _tanh(x):
    return 1 - 2 / (tl.exp(2 * x) + 1)


@triton.jit
def _lowest_row(length, WINDOW: tl.constexpr):
    """The first committed row that any row sees: one that sees nothing but itself behind them sees the most."""
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(length + 1 - WINDOW, 0)
    return lowest


@triton.jit
def _ones(words):
    """Set bits of uint32."""
    words -= (words >> 1) & 0x55555555
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    words = (words + (words >> 4)) & 0x0F0F0F0F
    return ((words * 0x01010101) >> 24).to(tl.int32)
