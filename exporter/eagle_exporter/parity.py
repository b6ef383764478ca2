"""Comparing the lowered graphs with torch: every output, on real prompts, in chains and in trees."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from eagle_graphs import EagleError, GraphPorts, Tree, tree_from_parents
from eagle_graphs.native import import_onnxruntime, library_path
from eagle_graphs.native_ops import KEY_BLOCK
from eagle_graphs.session_config import SESSION_CONFIG

Array = npt.NDArray[Any]
Feeds = dict[str, Array]

TOLERANCE = 1e-3
"""Largest difference allowed, relative to the largest magnitude of the output in torch (at least 1)."""


@dataclass(slots=True, kw_only=True)
class OutputParity:
    """The worst element of one output over all comparisons."""

    graph: str
    output: str
    compared: int = 0
    """Elements compared."""
    worst: float = 0.0
    """Largest absolute difference; for ids the share of differing ones that are no tie."""
    relative: float = 0.0
    """The same over the output's largest magnitude (at least 1)."""
    where: str = ""
    """Case and index of the worst element, and both values."""
    error: float = 0.0
    """Sum of squares of all differences."""
    power: float = 0.0
    """Sum of squares of the output in torch."""

    @property
    def rms(self) -> float:
        """Root mean square of the differences over that of the output in torch."""
        return math.sqrt(self.error / self.power) if self.power else math.inf if self.error else 0.0

    def add(self, case: str, found: Array, expected: Array) -> None:
        """Compares one pair of arrays."""
        difference = np.abs(found.astype(np.float64) - expected.astype(np.float64))
        difference = np.where(np.isnan(difference), np.inf, difference)
        self.compared += difference.size
        self.error += float(np.square(difference).sum())
        self.power += float(np.square(expected.astype(np.float64)).sum())
        scale = max(1.0, float(np.abs(expected.astype(np.float64)).max(initial=0)))
        index = np.unravel_index(int(difference.argmax()), difference.shape)
        if difference[index] > self.worst or not self.where:
            self.worst, self.relative = float(difference[index]), float(difference[index]) / scale
            at = ",".join(str(int(i)) for i in index)
            self.where = f"{case}[{at}]: {found[index]!s} for {expected[index]!s}"

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self) | {"rms": self.rms}


class LoweredGraph:
    """One lowered graph in ONNX Runtime."""

    def __init__(self, path: Path, ports: GraphPorts, *, native: bool = False) -> None:
        onnxruntime = import_onnxruntime()
        self.ports = ports
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        for setting, value in SESSION_CONFIG.items():
            options.add_session_config_entry(setting, value)
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # torch needs the cores in turn
        if native:
            options.register_custom_ops_library(str(library_path()))
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def empty_caches(self, rows: int) -> Feeds:
        """Caches of zeros with at least `rows` rows, one slot."""
        blocks = -(-rows // KEY_BLOCK)
        sizes = {"B": 1, "C": blocks * KEY_BLOCK, f"C/{KEY_BLOCK}": blocks}
        return {
            port.name: np.zeros([a if isinstance(a, int) else sizes[a] for a in port.axes], np.dtype(port.dtype))
            for port in self.ports.inputs
            if port.name.startswith("past_")
        }

    def run(self, feeds: Feeds) -> Feeds:
        """The lowered graph's outputs by name."""
        return dict(zip((port.name for port in self.ports.outputs), self._session.run(None, feeds), strict=True))

    def run_in_place(self, feeds: Feeds) -> Feeds:
        """The outputs but for the caches, which are written where they stand in `feeds`, as the runtime has them."""
        binding, results = self._session.io_binding(), {}
        caches, sizes = self.ports.cache_outputs, {"R": len(feeds["logit_rows"])}
        for name, array in feeds.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for port in self.ports.outputs:
            if port.name in caches:
                array = feeds[caches[port.name]]
            else:
                shape = [axis if isinstance(axis, int) else sizes[axis] for axis in port.axes]
                array = results[port.name] = np.zeros(shape, np.dtype(port.dtype))
            binding.bind_output(port.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        self._session.run_with_iobinding(binding)
        return results


class GraphUnderTest(LoweredGraph):
    """A lowered graph and its module in torch, fed alike."""

    def __init__(self, name: str, path: Path, module: nn.Module, ports: GraphPorts, *, native: bool = False) -> None:
        super().__init__(path, ports, native=native)
        self.name, self.module = name, module
        self.parity: dict[str, OutputParity] = {}

    def run_torch(self, feeds: Feeds) -> Feeds:
        """The module's outputs by name."""
        with torch.no_grad():
            outputs = self.module(*(torch.from_numpy(_for_torch(feeds[port.name])) for port in self.ports.inputs))
        return {port.name: output.numpy() for port, output in zip(self.ports.outputs, outputs, strict=True)}

    def compare(self, case: str, feeds: Feeds) -> tuple[Feeds, Feeds]:
        """Runs both on the same feeds, notes how far every output differs, and returns both results."""
        found, expected = self.run(feeds), self.run_torch(feeds)
        for port in self.ports.outputs:
            name = port.name
            group = "present" if name.startswith("present_") else name
            entry = self.parity.setdefault(group, OutputParity(graph=self.name, output=group))
            ours, theirs = found[name], expected[name]
            if group == "present":
                first = int(feeds["kv_length"][0])
                rows = slice(first, first + feeds["tree_mask"].shape[2])
                ours, theirs = _by_rows(ours)[:, :, rows], theirs[:, :, rows]
            elif name == "argmax_ids":
                ours, theirs = _ids_up_to_ties(ours, theirs, expected["logits"])
            elif name == "topk_ids":
                ours, theirs = _topk_up_to_ties(found, expected)
            entry.add(case, ours, theirs)
        return found, expected


def _for_torch(array: Array) -> Array:
    """By rows, and in float32 where a cache is in half precision."""
    return _by_rows(array.astype(np.float32) if array.dtype == np.float16 else array)


def _by_rows(array: Array) -> Array:
    """A cache [B, H, C, D], whose keys may be in blocks [B, H, C / b, D, b]; other arrays as they are."""
    if array.ndim != 5:
        return array
    slots, heads, blocks, head_dim, block = array.shape
    return np.ascontiguousarray(array.swapaxes(3, 4)).reshape(slots, heads, blocks * block, head_dim)


def _ids_up_to_ties(found: Array, expected: Array, logits: Array) -> tuple[Array, Array]:
    """Argmax ids; a different id counts as equal where torch's own logits of both differ by rounding alone."""
    rows = np.arange(len(found))
    tie = logits[rows, expected] - logits[rows, found] <= TOLERANCE
    return np.where(tie, expected, found), expected


def _topk_up_to_ties(found: Feeds, expected: Feeds) -> tuple[Array, Array]:
    """Top-k ids; a different id counts as equal where torch's value at that rank is the same up to rounding."""
    tie = np.abs(found["topk_logprobs"] - expected["topk_logprobs"]) <= TOLERANCE
    neighbours = np.abs(np.diff(expected["topk_logprobs"], axis=-1, append=-np.inf)) <= TOLERANCE
    neighbours |= np.abs(np.diff(expected["topk_logprobs"], axis=-1, prepend=np.inf)) <= TOLERANCE
    return np.where(tie & neighbours, expected["topk_ids"], found["topk_ids"]), expected["topk_ids"]


def check_tolerance(entries: Sequence[OutputParity], *, quantized: Mapping[str, float]) -> None:
    """Raises EagleError, naming the worst element, where an output is not torch's.

    quantized: graphs whose outputs may be off by rounding, and by how much: the error over all elements, as a root mean
        square over that of the output in torch. Ids among them are not judged.
    """
    rounded = [entry for entry in entries if entry.graph in quantized and not entry.output.endswith("_ids")]
    if rounded:
        worst = max(rounded, key=lambda entry: entry.rms / quantized[entry.graph])
        if not worst.rms <= quantized[worst.graph]:
            raise EagleError(
                f"the quantized {worst.graph} graph is too far from torch: {worst.output} is off by {worst.rms:.0%} "
                f"(root mean square; {quantized[worst.graph]:.0%} allowed). No bundle was written; "
                "export with --precision fp32, or bf16 for TensorRT"
            )
    failed = [entry for entry in entries if entry.graph not in quantized and entry.relative > TOLERANCE]
    if failed:
        worst = max(failed, key=lambda entry: entry.relative)
        raise EagleError(
            f"the compiled {worst.graph} graph is not what it was made from: {worst.output} differs by "
            f"{worst.worst:.3g} (relative {worst.relative:.3g}, tolerance {TOLERANCE:g}) at {worst.where}. No bundle "
            "was written; please report this with the model's name"
        )


def tree_shapes() -> dict[str, Tree]:
    """Trees to compare on: one row, a chain, siblings only, and a mixed tree. Tokens are filled in later."""
    parents = {
        "single": [-1],
        "chain": [-1, 0, 1, 2, 3],
        "star": [-1, 0, 0, 0, 0, 0],
        "mixed": [-1, 0, 1, 2, 1, 0, 5, 0],
    }
    return {name: tree_from_parents(np.zeros(len(p), np.int64), np.array(p)) for name, p in parents.items()}


def placement(tree: Tree, length: int, *, earlier: int = 0, logit_rows: Array | None = None) -> Feeds:
    """Inputs that place the rows of `tree` behind `length` committed rows; `earlier` rows lie between, unseen."""
    mask = np.concatenate((np.zeros((len(tree), earlier), np.bool_), tree.mask), axis=1)
    return {
        "position_ids": (length + tree.depths)[None],
        "tree_mask": mask[None],
        "kv_length": np.array([length], np.int64),
        "logit_rows": np.arange(len(tree)) if logit_rows is None else logit_rows,
    }


def chain(tokens: Sequence[int]) -> Tree:
    """A path of tokens, each the parent of the next."""
    return tree_from_parents(np.asarray(tokens, np.int64), np.arange(-1, len(tokens) - 1))
