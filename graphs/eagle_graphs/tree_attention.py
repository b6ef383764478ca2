"""`eagle::TreeAttention`: the one op that a traced model's attention becomes.

    out, present_key, present_value = TreeAttention(query, key, value, past_key, past_value,
                                                    tree_mask, kv_length, sinks)

    query       [B, Hq, Q, D]    rotary already applied
    key, value  [B, Hkv, Q, D]   Hq is a multiple of Hkv
    past_*      [B, Hkv, C, D]   the cache; rows before kv_length are committed
    tree_mask   [B, Q, S] bool   which of the S rows after the committed ones each new row sees
    kv_length   [B] int64        committed rows of each slot
    sinks       [Hq]             optional: a score of nothing, which takes its share of the softmax
    out         [B, Q, Hq, D]
    present_*   [B, Hkv, C, D]   the cache with the new rows at kv_length + S - Q

Every new row sees all committed rows and, after them, the rows that its mask names: in a tree its ancestors
and itself. It must see at least one row; a row of padding sees itself.

Attributes:

    scale           multiplies the scores
    softcap         c > 0: a score s becomes c * tanh(s / c), after the scale; 0: none
    sliding_window  w > 0: a key is visible if position(query) - position(key) < w; 0: none

The rows that a new row sees are one path: they follow one another in position as they do in the buffer, and
the row itself is the last. So a key's distance is the number of rows seen after it, and a window of w
positions is *the last w rows that the row sees*. No positions are needed, whatever the tree, and the rows of
earlier levels (S > Q) need no mask of their own. Index in the buffer is no measure: siblings lie between.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

DOMAIN = "eagle"
NAME = "TreeAttention"
VERSION = 1

Array = npt.NDArray[np.floating]


def tree_attention(
    query: Array,
    key: Array,
    value: Array,
    past_key: Array,
    past_value: Array,
    tree_mask: npt.NDArray[np.bool_],
    kv_length: npt.NDArray[np.int64],
    sinks: Array | None = None,
    *,
    scale: float,
    softcap: float = 0.0,
    sliding_window: int = 0,
) -> tuple[Array, Array, Array]:
    """The op in numpy: the definition that every lowering and kernel is compared with.

    Shapes as in the module's table. The caches given are left as they are; the results are new.
    """
    slots, query_heads, new_rows, _ = query.shape
    group = query_heads // key.shape[1]
    total = tree_mask.shape[2]
    present_key, present_value = past_key.copy(), past_value.copy()
    out = np.empty((slots, new_rows, *query.shape[1::2]), query.dtype)
    for slot in range(slots):
        length = int(kv_length[slot])
        rows = slice(length + total - new_rows, length + total)
        present_key[slot, :, rows] = key[slot]
        present_value[slot, :, rows] = value[slot]
        visible = np.concatenate((np.ones((new_rows, length), np.bool_), tree_mask[slot]), axis=1)
        if sliding_window:
            visible &= visible[:, ::-1].cumsum(axis=1)[:, ::-1] <= sliding_window
        for head in range(query_heads):
            keys = present_key[slot, head // group, : length + total]
            scores = query[slot, head] @ keys.T * scale
            if softcap:
                scores = np.tanh(scores / softcap) * softcap
            scores = np.where(visible, scores, -np.inf)
            sink = -np.inf if sinks is None else sinks[head]
            highest = np.maximum(scores.max(axis=1, keepdims=True), sink)
            weights = np.exp(scores - highest)
            weights /= weights.sum(axis=1, keepdims=True) + np.exp(sink - highest)
            out[slot, :, head] = weights @ present_value[slot, head // group, : length + total]
    return out, present_key, present_value
