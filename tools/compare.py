"""Compares a graph in torch, in ONNX Runtime and in TensorRT, output by output, and names the first layer that differs.

    python tools/compare.py target --model M --draft D --onnx BUNDLE/.../target-stock.onnx [--engine target.engine]

For models of your own, where an export's comparison fails or an engine gives other text than its ONNX. All run on one
feed: rows of a tree behind committed ones, whose cache the first ONNX graph has filled. The first of torch, the ONNX
graphs in their order and the engines is what the others are compared with. Layers are the linear ones, which a graph
names as the model's modules; `--mark-layers FILE` writes the ONNX with all of them as outputs, so that an engine built
from that file can be compared layer by layer too.

Needs `pip install polygraphy`, and for engines TensorRT's Python package and a GPU. Graphs with native kernels keep
their keys in blocks, which nothing else does: take the stock or the portable ones.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import onnx
import onnxruntime
import torch
import typer
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers.utils.logging import disable_progress_bar

from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads import Overrides, load_head
from eagle_exporter.parity import OutputParity, chain, placement
from eagle_exporter.pipeline import head_module
from eagle_exporter.target import TargetGraph, load_target, settle
from eagle_graphs import EagleError, GraphPorts, KVGeometry, Tree, draft_ports, target_ports, tree_from_parents
from eagle_graphs.command_line import run_command
from eagle_graphs.session_config import SESSION_CONFIG

LAYER = "layer "
"""In front of a module's name, an output that is no port."""
Feeds = dict[str, np.ndarray]
Graph = Literal["target", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchGraph:
    """A graph's module and its ports."""

    module: nn.Module
    ports: GraphPorts


class TorchRunner(BaseRunner):
    """Polygraphy's view of a module: ports by name, and what each of `layers` gives."""

    def __init__(self, graph: TorchGraph, layers: Sequence[str], feeds: Feeds) -> None:
        super().__init__(name="torch")
        self._graph, self._layers, self._feeds = graph, layers, feeds

    def infer_impl(self, feed_dict: Mapping[str, np.ndarray]) -> Feeds:
        """One pass."""
        given: Feeds = {}

        def keep(name: str) -> Any:
            return lambda _module, _args, output: given.__setitem__(LAYER + name, output.numpy().copy())

        modules = dict(self._graph.module.named_modules())
        hooks = [modules[name].register_forward_hook(keep(name)) for name in self._layers]
        ports = self._graph.ports
        feeds = (torch.from_numpy(_as_port(feed_dict[port.name], port.dtype)) for port in ports.inputs)
        started = time.perf_counter()
        try:
            with torch.no_grad():
                outputs = self._graph.module(*feeds)
        finally:
            self.inference_time = time.perf_counter() - started  # which Polygraphy adds up
            for hook in hooks:
                hook.remove()
        return {port.name: tensor.numpy() for port, tensor in zip(ports.outputs, outputs, strict=True)} | given

    def get_input_metadata_impl(self) -> TensorMetadata:
        """That of the feed, since caches may come in half precision."""
        metadata = TensorMetadata()
        for name, array in self._feeds.items():
            metadata.add(name, dtype=array.dtype, shape=array.shape)
        return metadata


def _as_port(array: np.ndarray, dtype: str) -> np.ndarray:
    """Caches of half precision as torch's module takes them."""
    return np.array(array, np.dtype(dtype))


def load_torch(graph: Graph, model: str, draft: str, *, capacity: int, top_k: int) -> TorchGraph:
    """The module that an export traces."""
    target = load_target(find_checkpoint(model, what="target"))
    head = load_head(find_checkpoint(draft, what="head"), target.config, Overrides())
    settle(target.model, capacity=capacity)
    module, spec = head_module(head, target, top_k=top_k), head.spec
    if graph == "draft":
        kv = KVGeometry(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim)
        return TorchGraph(module=module.eval(), ports=draft_ports(kv, hidden_width=spec.hidden_size, top_k=top_k))
    ports = target_ports(target.kv, vocab_size=int(target.config.vocab_size), feature_width=spec.hidden_size)
    return TorchGraph(module=TargetGraph(target.model, spec.taps, module.fuse_features).eval(), ports=ports)


def linear_layers(model: onnx.ModelProto, modules: Sequence[str] | None = None) -> dict[str, str]:
    """For each linear layer of a graph, in its order, the value that holds its output, by the module's name.

    modules: names that count; None for all nodes named as modules are, with dots.
    """
    products = ("MatMul", "Gemm")
    found: dict[str, str] = {}
    for node in model.graph.node:
        named = node.name in modules if modules is not None else "." in node.name and "/" not in node.name
        if node.op_type in products and named:
            found[node.name] = _with_bias(model, node.output[0])
    return found


def _with_bias(model: onnx.ModelProto, value: str) -> str:
    """`value`, or its sum with a constant where that is its only use."""
    users = [node for node in model.graph.node if value in node.input]
    constants = {initializer.name for initializer in model.graph.initializer}
    if len(users) == 1 and users[0].op_type == "Add" and constants & set(users[0].input):
        return str(users[0].output[0])
    return value


def marked(model: onnx.ModelProto, layers: Mapping[str, str]) -> onnx.ModelProto:
    """The model with its layers as further outputs, named LAYER + module."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for name, value in layers.items():
        copy.graph.node.append(onnx.helper.make_node("Identity", [value], [LAYER + name]))
        copy.graph.output.append(onnx.ValueInfoProto(name=LAYER + name))
    return copy


def onnx_session(path: Path, layers: Mapping[str, str] | None = None) -> onnxruntime.InferenceSession:
    """The graph in ONNX Runtime, with `layers` as outputs; its weights stay where they are."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for key, value in SESSION_CONFIG.items():
        options.add_session_config_entry(key, value)
    if layers:
        model = marked(onnx.load(path, load_external_data=False), layers)
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(path.parent.absolute())
        )
    try:
        source: Any = model.SerializeToString() if layers else str(path)
        return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no other base
        raise EagleError(f"ONNX Runtime cannot load {path}: {error}") from None


def feed(session: onnxruntime.InferenceSession, *, rows: int, committed: int, room: int, vocab: int) -> Feeds:
    """A tree of `rows` rows behind `committed` ones, which the graph itself has put into the cache.

    room: rows of the cache where the graph leaves them open.
    """
    random = np.random.default_rng(0)
    first = _placed(session, chain(random.integers(0, vocab, committed).tolist()), 0, {}, room, random)
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(None, first), strict=True))
    caches = {name.replace("present_", "past_"): value for name, value in outputs.items() if "present_" in name}
    parents = np.array([-1, *(int(random.integers(0, row)) for row in range(1, rows))])
    tree = tree_from_parents(random.integers(0, vocab, rows), parents)
    return _placed(session, tree, committed, caches, room, random)


def _placed(
    session: onnxruntime.InferenceSession,
    tree: Tree,
    length: int,
    caches: Feeds,
    room: int,
    random: np.random.Generator,
) -> Feeds:
    feeds: Feeds = {**placement(tree, length), **caches}
    for value in session.get_inputs():
        if value.name in ("input_ids", "token_ids"):
            feeds[value.name] = tree.tokens[None]
        elif value.name == "hidden":
            feeds[value.name] = random.standard_normal((1, len(tree), value.shape[2]), np.float32)
        elif value.name not in feeds:
            sizes = {"B": 1, "C": room}
            dtype = {"float": np.float32, "float16": np.float16}[value.type.removeprefix("tensor(").removesuffix(")")]
            feeds[value.name] = np.zeros([sizes.get(size, size) for size in value.shape], dtype)
    return feeds


def compare(found: Feeds, expected: Feeds, order: Sequence[str], graph: str) -> list[OutputParity]:
    """How far `found` is from `expected`, in `order`, for the outputs that both have."""
    entries = []
    for name in order:
        if name in found and name in expected:
            entry = OutputParity(graph=graph, output=name)
            entry.add("", np.asarray(found[name]), np.asarray(expected[name]))
            entries.append(entry)
    return entries


def first_difference(entries: Sequence[OutputParity], tolerance: float) -> str | None:
    """The first layer, and where all layers agree the first output, that is off; None where all agree."""
    off = [entry.output for entry in entries if not entry.relative <= tolerance]
    return next((name for name in off if name.startswith(LAYER)), off[0] if off else None)


def _engine_runner(path: Path, flavour: str) -> BaseRunner:
    from polygraphy import config
    from polygraphy.backend.common import BytesFromPath
    from polygraphy.backend.trt import EngineFromBytes, TrtRunner

    config.USE_TENSORRT_RTX = flavour == "tensorrt-rtx"
    return TrtRunner(EngineFromBytes(BytesFromPath(str(path))), name=path.name)


def _runners(
    graph: TorchGraph | None, onnx_files: Sequence[Path], engines: Sequence[Path], flavour: str, feeds: Feeds
) -> Iterator[tuple[BaseRunner, list[str]]]:
    """Each runner, and the layers that it gives in its order."""
    modules = None
    if graph is not None:
        modules = [name for name, module in graph.module.named_modules() if isinstance(module, nn.Linear)]
        present = linear_layers(onnx.load(onnx_files[0], load_external_data=False), modules)
        yield TorchRunner(graph, list(present), feeds), list(present)
    for path in onnx_files:
        layers = linear_layers(onnx.load(path, load_external_data=False), modules)
        session = onnx_session(path, layers)
        yield OnnxrtRunner(session, name=path.name), list(layers)
    for path in engines:
        yield _engine_runner(path, flavour), []


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    graph: Annotated[str, typer.Argument(help="target or draft.")],
    onnx_file: Annotated[list[Path], typer.Option("--onnx", help="A graph of a bundle; may be repeated.")],
    model: Annotated[str | None, typer.Option(help="Target checkpoint, for torch.")] = None,
    draft: Annotated[str | None, typer.Option(help="Head checkpoint, likewise.")] = None,
    engine: Annotated[list[Path] | None, typer.Option(help="A serialized TensorRT engine; may be repeated.")] = None,
    flavour: Annotated[str, typer.Option(help="Of the engines: tensorrt or tensorrt-rtx.")] = "tensorrt-rtx",
    rows: Annotated[int, typer.Option(help="Rows of the tree; for an engine one of its profiles.")] = 8,
    committed: Annotated[int, typer.Option(help="Rows in front of it.")] = 24,
    vocab: Annotated[int, typer.Option(help="Token ids are drawn below this.")] = 256,
    tolerance: Annotated[float, typer.Option(help="Relative to an output's largest magnitude.")] = 1e-3,
    mark_layers: Annotated[Path | None, typer.Option(help="Write the first graph with its layers as outputs.")] = None,
) -> None:
    """Compares and prints a table for each pair; status 1 where something differs."""
    if graph not in ("target", "draft"):
        raise EagleError(f"the graph is {graph!r}; expected target or draft")
    if (model is None) != (draft is None):
        raise EagleError("torch needs both --model and --draft")
    if mark_layers is not None:
        source = onnx.load(onnx_file[0])
        onnx.save(marked(source, linear_layers(source)), mark_layers, save_as_external_data=True)
    G_LOGGER.module_severity = G_LOGGER.ERROR
    disable_progress_bar()
    plain = onnx_session(onnx_file[0])
    feeds = feed(plain, rows=rows, committed=committed, room=committed + rows + 16, vocab=vocab)
    module = None
    if model is not None and draft is not None:
        top_k = next((value.shape[1] for value in plain.get_outputs() if value.name == "topk_ids"), 1)
        module = load_torch("draft" if graph == "draft" else "target", model, draft, capacity=committed, top_k=top_k)
    pairs = list(_runners(module, onnx_file, engine or [], flavour, feeds))
    if len(pairs) < 2:
        raise EagleError("there is nothing to compare with: give --model and --draft, a second --onnx or an --engine")
    results = Comparator.run([runner for runner, _ in pairs], data_loader=[feeds])
    outputs = {name: dict(iterations[0]) for name, iterations in results}
    order = [LAYER + name for name in dict.fromkeys(layer for _, layers in pairs for layer in layers)]
    (reference, expected), *others = outputs.items()
    order += [name for name in expected if not name.startswith(LAYER)]
    console, differs = Console(), False
    for name, found in others:
        entries = compare(found, expected, order, graph)
        console.print(_table(entries, f"{name} against {reference}, tolerance {tolerance:g}", tolerance))
        first = first_difference(entries, tolerance)
        differs |= first is not None
        console.print(f"first that differs: {first}" if first else "no output and no layer differs", highlight=False)
    sys.exit(1 if differs else 0)


def _table(entries: Sequence[OutputParity], title: str, tolerance: float) -> Table:
    """Ports, and of the layers those that differ."""
    table = Table("output", "elements", "rms", "worst", "relative", title=title)
    for entry in entries:
        off = not entry.relative <= tolerance
        if off or not entry.output.startswith((LAYER, "present_")):
            cells = (f"{entry.compared:,}", f"{entry.rms:.2g}", f"{entry.worst:.2g}", f"{entry.relative:.2g}")
            table.add_row(entry.output, *cells, style="red" if off else "")
    return table


if __name__ == "__main__":
    run_command(app)
