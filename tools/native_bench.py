"""Times the native TreeAttention beside com.microsoft.GroupQueryAttention, as a model's layers in one graph.

    python tools/native_bench.py --past 256 --rows 1,8,16

Each line is a number of new rows; its figures are the medians, in milliseconds, of all the layers together. The two
take turns, a session at a time: the idle threads of a second one would spin.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from eagle_graphs.native import DOMAIN, library_path

ELEMENTS = {np.dtype(np.float32): 1, np.dtype(np.int32): 6, np.dtype(np.int64): 7, np.dtype(bool): 9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    past: int
    new: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int

    @property
    def capacity(self) -> int:
        return (self.past + self.new + 15) // 16 * 16


class Layers:
    """A graph of one attention op a layer, each with its own cache, each with the one before as its query."""

    def __init__(self, shape: Shape, op: str, domain: str, cache_shapes: tuple[tuple[int, ...], ...]) -> None:
        new, width = shape.new, shape.head_dim
        self.shape, self.op, self.domain = shape, op, domain
        self.feeds = {
            "x0": normal(1, new, shape.heads * width),
            "key": normal(1, new, shape.kv_heads * width),
            "value": normal(1, new, shape.kv_heads * width),
        }
        for layer in range(shape.layers):
            for name, axes in zip(("past_key", "past_value"), cache_shapes, strict=True):
                self.feeds[f"{name}{layer}"] = normal(*axes)
        self.common: dict[str, np.ndarray] = {}
        self.attributes = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads, "scale": width**-0.5}

    def session(self, threads: int) -> ort.InferenceSession:
        feeds = self.feeds | self.common
        nodes, results = [], []
        for layer in range(self.shape.layers):
            caches = [f"past_key{layer}", f"past_value{layer}"]
            outputs = [f"x{layer + 1}", f"present_key{layer}", f"present_value{layer}"]
            inputs = [f"x{layer}", "key", "value", *caches, *self.common]
            nodes.append(helper.make_node(self.op, inputs, outputs, domain=self.domain, **self.attributes))
            results += outputs[1:]
        results.append(f"x{self.shape.layers}")
        graph = helper.make_graph(
            nodes,
            "layers",
            [helper.make_tensor_value_info(name, ELEMENTS[array.dtype], None) for name, array in feeds.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
        )
        opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 21), (self.domain, 1))]
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.register_custom_ops_library(str(library_path()))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def times(self, threads: int, rounds: int) -> list[float]:
        """Seconds of each round."""
        session = self.session(threads)
        binding = session.io_binding()
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in (self.feeds | self.common).items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for layer in range(self.shape.layers):
            binding.bind_ortvalue_output(f"present_key{layer}", values[f"past_key{layer}"])
            binding.bind_ortvalue_output(f"present_value{layer}", values[f"past_value{layer}"])
        binding.bind_output(f"x{self.shape.layers}")
        seconds = []
        for _ in range(rounds + 3):
            start = time.perf_counter()
            session.run_with_iobinding(binding)
            seconds.append(time.perf_counter() - start)
        return seconds[3:]


def native(shape: Shape) -> Layers:
    heads, capacity, width = shape.kv_heads, shape.capacity, shape.head_dim
    caches = ((1, heads, capacity // 16, width, 16), (1, heads, capacity, width))
    layers = Layers(shape, "TreeAttention", DOMAIN, caches)
    layers.common = {
        "tree_mask": np.tri(shape.new, dtype=bool)[None],
        "kv_length": np.array([shape.past], np.int64),
        "cos": normal(1, shape.new, width // 2),
        "sin": normal(1, shape.new, width // 2),
    }
    return layers


def group_query_attention(shape: Shape) -> Layers:
    cache = (1, shape.kv_heads, shape.capacity, shape.head_dim)
    layers = Layers(shape, "GroupQueryAttention", "com.microsoft", (cache, cache))
    rows = shape.past + shape.new
    layers.common = {
        "seqlens_k": np.array([rows - 1], np.int32),
        "total_sequence_length": np.array(rows, np.int32),
        "cos_cache": normal(shape.capacity, shape.head_dim // 2),
        "sin_cache": normal(shape.capacity, shape.head_dim // 2),
    }
    layers.attributes |= {"do_rotary": 1}
    return layers


def normal(*axes: int) -> np.ndarray:
    """Random numbers that begin at a cache line, as a cache pool's do."""
    count = int(np.prod(axes))
    buffer = np.empty(count + 16, np.float32)
    start = -buffer.ctypes.data % 64 // 4
    array = buffer[start : start + count].reshape(axes)
    array[...] = np.random.default_rng(count).standard_normal(axes, np.float32)
    return array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--past", type=int, default=256)
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--heads", default="9,3,64", help="query heads, key heads, numbers of a head")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    heads, kv_heads, head_dim = map(int, given.heads.split(","))
    for new in map(int, given.rows.split(",")):
        shape = Shape(
            past=given.past, new=new, heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=given.layers
        )  # fmt: skip
        both = (native(shape), group_query_attention(shape))
        seconds: tuple[list[float], list[float]] = ([], [])
        for _ in range(given.turns):
            for layers, times in zip(both, seconds, strict=True):
                times += layers.times(given.threads, given.rounds)
        mine, theirs = (statistics.median(times) * 1e3 for times in seconds)
        figures = f"TreeAttention {mine:.2f}, GroupQueryAttention {theirs:.2f}, {theirs / mine:.2f}x"
        print(f"past {given.past}, {new} rows: {figures}", flush=True)


if __name__ == "__main__":
    main()
