"""The tree-attention kernel on a GPU: its numbers against numpy's, its time against reading the cache once.

    python tools/gpu_kernel.py [--device cpu]

Needs torch with CUDA and triton. `--device cpu` with TRITON_INTERPRET=1 tries the script itself, without times.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch

from eagle_graphs import tree_attention, tree_from_parents
from eagle_graphs.plugin.calls import tree_attention as run_kernel
from eagle_graphs.plugin.launch import Attention, split_rows_for
from eagle_graphs.plugin.masks import pack_mask

CASES = [  # query heads, key heads, head size, rows, committed rows, window, soft-cap
    (9, 3, 64, 1, 256, 0, 0.0),
    (9, 3, 64, 16, 256, 0, 0.0),
    (32, 8, 128, 1, 4000, 0, 0.0),
    (32, 8, 128, 60, 4000, 0, 0.0),
    (16, 8, 128, 30, 1000, 512, 50.0),
]
TOLERANCE = 2e-3
"""Of float16, relative to the largest magnitude."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--bandwidth", type=float, help="GB/s of the memory, for the floor")
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    worst = 0.0
    for case in CASES if on_gpu else CASES[:2]:
        heads, kv_heads, size, rows, length, window, softcap = case
        attention = Attention(
            query_heads=heads,
            kv_heads=kv_heads,
            head_dim=size,
            scale=size**-0.5,
            sliding_window=window,
            softcap=softcap,
        )
        random = np.random.default_rng(0)
        parents = np.array([-1, *(int(random.integers(0, row)) for row in range(1, rows))])
        mask = tree_from_parents(np.zeros(rows, np.int64), parents).mask[None]
        capacity = -(-(length + rows) // 64) * 64

        def numbers(*shape: int, random: np.random.Generator = random) -> np.ndarray:
            return random.standard_normal(shape).astype(np.float16)

        query = numbers(1, heads, rows, size)
        key, value = numbers(1, kv_heads, rows, size), numbers(1, kv_heads, rows, size)
        keys, values = numbers(1, kv_heads, capacity, size), numbers(1, kv_heads, capacity, size)
        q, k, v, past_k, past_v = (array.astype(np.float32) for array in (query, key, value, keys, values))
        expected, *_ = tree_attention.tree_attention(
            *(q, k, v, past_k, past_v, mask, np.array([length])),
            scale=size**-0.5,
            softcap=softcap,
            sliding_window=window,
        )
        units = torch.cuda.get_device_properties(0).multi_processor_count if on_gpu else 4
        arrays = (query, key, value, keys, values, pack_mask(mask))
        given = [torch.from_numpy(array).to(options.device) for array in arrays]
        lengths = torch.tensor([length], device=options.device)

        def run(
            attention: Attention = attention,
            given: list[torch.Tensor] = given,
            lengths: torch.Tensor = lengths,
            split: int = split_rows_for(attention.kv_heads, slots=1, capacity=capacity, multiprocessors=units),
        ) -> torch.Tensor:
            q, k, v, past_k, past_v, words = given
            return run_kernel(attention, q, k, v, past_k, past_v, words, lengths, lengths, split_rows=split)

        error = float(np.abs(run().float().cpu().numpy() - expected).max() / max(1.0, np.abs(expected).max()))
        worst = max(worst, error)
        line = f"{heads}/{kv_heads} heads of {size}, {rows} rows behind {length}: error {error:.1e}"
        if on_gpu:
            microseconds = timed(run)
            moved = 2 * kv_heads * min(length, window or length) * size * 2
            line += f", {microseconds:.1f} us"
            if options.bandwidth:
                floor = moved / options.bandwidth / 1e3
                line += f" (reading the cache once: {floor:.1f} us, {floor / microseconds:.0%})"
        print(line)
    return 0 if worst <= TOLERANCE else 1


def timed(run: object) -> float:
    """Microseconds of one call, by CUDA's events, the caches of the GPU emptied in front of each."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(20):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        run()  # type: ignore[operator]
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return float(np.median(times))


if __name__ == "__main__":
    sys.exit(main())
