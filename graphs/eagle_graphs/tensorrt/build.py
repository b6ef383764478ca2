"""Building one engine: a graph in standard ONNX, an optimization profile for each pass, all shapes frozen.

No GPU is needed for TensorRT-RTX. The network is strongly typed: each product has the type that the graph gives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from eagle_graphs.errors import EagleError
from eagle_graphs.passes import Pass
from eagle_graphs.ports import GraphPorts
from eagle_graphs.tensorrt.description import Description, description_from_log
from eagle_graphs.tensorrt.gpu import Gpu, choose_gpu
from eagle_graphs.tensorrt.library import Attention, Backend, check_attention, choose_architectures, import_tensorrt

LARGEST_TENSOR = 2**31 - 1
"""Numbers that a tensor may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """How engines are built. Raises EagleError on a level that there is none of."""

    backend: Backend
    architectures: tuple[str, ...]
    """GPUs to build for; none for the one at hand."""
    strip_weights: bool = False
    """Leave out the weights, which are put in again when the engine is loaded."""
    level: int | None = None
    """Optimization level, 0 to 5; None for the library's own."""
    plugin_gpu: Gpu | None = None
    """The GPU that the attention's plugins are compiled for; None for the library's own attention."""

    @property
    def attention(self) -> Attention:
        """Whose attention the engine has."""
        return "native" if self.plugin_gpu is None else "plugin"

    def __post_init__(self) -> None:
        if self.level is not None and not 0 <= self.level <= 5:
            raise EagleError(f"--builder-level is {self.level}; expected 0 (builds fast) to 5 (runs fast)")


def build_options(
    backend: Backend, *, precision: str, gpu: str | None, strip_weights: bool, level: int | None, attention: Attention
) -> BuildOptions:
    """The options that a command names. gpu: "sm89,sm120", or None for all that the library builds for.

    Raises EagleError where the library, or what plugins need, is missing, or cannot build so.
    """
    check_attention(backend, attention)
    plugin_gpu = choose_gpu(gpu) if attention == "plugin" else None
    asked = () if gpu is None or plugin_gpu is not None else tuple(dict.fromkeys(gpu.split(",")))
    return BuildOptions(
        backend=backend,
        architectures=choose_architectures(backend, asked, precision),
        strip_weights=strip_weights,
        level=level,
        plugin_gpu=plugin_gpu,
    )


class Progress(Protocol):
    """What is told of a build under way. A phase may have a parent, and phases of one parent follow one another."""

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """A phase begins."""
        ...

    def step(self, phase: str, done: int) -> None:
        """So many of its steps are done."""
        ...

    def finish(self, phase: str) -> None:
        """It has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The nodes of the graph that a report follows into the engine, by name."""

    attention: Attention
    """Whose it is."""
    attentions: tuple[str, ...]
    products: tuple[str, ...]
    quantized: frozenset[str]
    """Products whose weights come out of a DequantizeLinear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """An engine."""

    size: int
    """Bytes of its file."""
    network: Network
    description: Description


@dataclass(slots=True)
class BuildLog:
    """All that the library said."""

    messages: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Keeps it as a file."""
        path.write_text("\n".join(self.messages) + "\n", "utf-8")


def build_engine(
    graph: Path,
    engine: Path,
    ports: GraphPorts,
    passes: Sequence[Pass],
    options: BuildOptions,
    *,
    capacity: int,
    progress: Progress,
    log: BuildLog,
) -> Built:
    """Builds the engine file `engine` from the ONNX file `graph`.

    Args:
        graph: in standard ONNX, its weights beside it; its attention in plugins where the options name a GPU for them.
        engine: file to write.
        ports: of the graph.
        passes: one for each optimization profile, in their order.
        options: how.
        capacity: rows of the cache (C).
        progress: is told how far it is.
        log: takes what the library says; the caller may keep it where this raises.

    Raises:
        EagleError: the library is missing, a tensor is too large, or the library refuses the graph; then it says at
            which node and why.
    """
    trt = import_tensorrt(options.backend)
    shapes = [{port.name: port.shape(_sizes(each, capacity)) for port in ports.inputs} for each in passes]
    _check_sizes(shapes, capacity)
    stops: list[BaseException] = []
    logger = _logger(trt, log, stops)
    builder = trt.Builder(logger)
    network = builder.create_network(_network_flags(trt, options))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(_onnx(graph, passes, options), str(graph)):
        raise EagleError(f"{_library(trt)} cannot read {graph.name}: {_parser_error(parser)}")
    config = _config(trt, builder, options)
    config.progress_monitor = _monitor(trt, progress, stops)
    for each in shapes:
        profile = builder.create_optimization_profile()
        for name, shape in each.items():
            profile.set_shape(name, shape, shape, shape)
        config.add_optimization_profile(profile)
    serialized = builder.build_serialized_network(network, config)
    if stops:
        raise stops[0]
    if serialized is None:
        reason = _shortened(log.errors[-1]) if log.errors else "it gives no reason"
        if options.strip_weights and "CUDA" in reason:
            reason = f"engines without weights are built where there is a GPU: leave out --strip-weights ({reason})"
        raise EagleError(f"{_library(trt)} cannot build an engine of {graph.name}: {reason}")
    engine.write_bytes(serialized)
    return Built(
        size=engine.stat().st_size,
        network=_network(trt, network, options.attention),
        description=description_from_log(log.messages),
    )


def _sizes(each: Pass, capacity: int) -> dict[str, int]:
    return {"B": 1, "C": capacity, **each.sizes}


def _check_sizes(shapes: Sequence[dict[str, tuple[int, ...]]], capacity: int) -> None:
    caches = (math.prod(shape) for each in shapes for name, shape in each.items() if name.startswith("past_"))
    largest = max(caches, default=0)
    if largest > LARGEST_TENSOR:
        most = capacity * LARGEST_TENSOR // largest
        raise EagleError(
            f"a cache of {capacity} rows has {largest} numbers, TensorRT's tensors hold at most {LARGEST_TENSOR}: "
            f"export with a --capacity so small that capacity and the largest pass are at most {most} rows"
        )


def _network_flags(trt: Any, options: BuildOptions) -> int:
    kinds = trt.NetworkDefinitionCreationFlag
    strongly_typed = getattr(kinds, "STRONGLY_TYPED", None)  # later versions know no other kind
    flags = [] if strongly_typed is None else [strongly_typed]
    if options.plugin_gpu is not None:
        ahead_of_time = getattr(kinds, "PREFER_AOT_PYTHON_PLUGINS", None)
        if ahead_of_time is None:
            raise EagleError(
                f"{_library(trt)} takes no plugins that are compiled ahead of time: install a later version, or use "
                "--attention native"
            )
        flags.append(ahead_of_time)
    return sum(1 << int(flag) for flag in flags)


def _onnx(graph: Path, passes: Sequence[Pass], options: BuildOptions) -> bytes:
    """What the parser reads. Plugins are registered, and told what they are for."""
    if (gpu := options.plugin_gpu) is None:
        return graph.read_bytes()
    from eagle_graphs.lowering.plugin_attention import onnx_for_gpu  # onnx-ir and Triton are needed here alone

    import_module("eagle_graphs.plugin.tensorrt_plugin")  # which registers the plugins
    new_rows = max(each.rows for each in passes)
    return onnx_for_gpu(graph, new_rows=new_rows, capability=gpu.capability, multiprocessors=gpu.multiprocessors)


def _config(trt: Any, builder: Any, options: BuildOptions) -> Any:
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # or an engine does not say what it is made of
    if options.level is not None:
        config.builder_optimization_level = options.level
    if options.architectures:
        config.num_compute_capabilities = len(options.architectures)
        for index, name in enumerate(options.architectures):
            config.set_compute_capability(trt.ComputeCapability.__members__[name.upper()], index)
    if options.strip_weights:
        config.set_flag(trt.BuilderFlag.STRIP_PLAN)
        config.set_flag(trt.BuilderFlag.REFIT_IDENTICAL)
    if options.plugin_gpu is not None:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)  # caches are written in place
    return config


def _network(trt: Any, network: Any, attention: Attention) -> Network:
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)}
    kinds = trt.LayerType
    products = [layer for layer in layers if layer.type == kinds.MATRIX_MULTIPLY]

    def is_dequantized(tensor: Any) -> bool:
        maker = makers.get(tensor.name)
        while maker is not None and maker.type in (kinds.SHUFFLE, kinds.UNSQUEEZE):
            maker = makers.get(maker.get_input(0).name)
        return maker is not None and maker.type == kinds.DEQUANTIZE

    def is_attention(layer: Any) -> bool:
        """An attention is one layer, a plugin and what brings its parts together, or products written out."""
        if attention == "plugin":
            return layer.type == kinds.PLUGIN_V3 and not layer.name.endswith(".combine")
        return layer.type == kinds.ATTENTION_INPUT or (layer in products and layer.name.startswith("attention."))

    suffix = "_AttentionInput"
    return Network(
        attention=attention,
        attentions=tuple(layer.name.removesuffix(suffix) for layer in layers if is_attention(layer)),
        products=tuple(layer.name for layer in products),
        quantized=frozenset(layer.name for layer in products if is_dequantized(layer.get_input(1))),
    )


def _library(trt: Any) -> str:
    return f"{'TensorRT-RTX' if trt.__name__ == 'tensorrt_rtx' else 'TensorRT'} {trt.__version__}"


def _parser_error(parser: Any) -> str:
    errors = [parser.get_error(index) for index in range(parser.num_errors)]
    if not errors:
        return "it gives no reason"
    first = errors[0]
    name = first.node_name() or "without a name"
    return f"at the node {name} ({first.node_operator()}): {_shortened(first.desc())}"


def _shortened(message: str) -> str:
    line = " ".join(message.split())
    return line if len(line) <= 300 else f"{line[:300]}..."


def _logger(trt: Any, log: BuildLog, stops: list[BaseException]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            with _kept(stops):
                log.messages.append(message)
                if severity <= trt.ILogger.Severity.ERROR:
                    log.errors.append(message)

    return Logger()


def _monitor(trt: Any, progress: Progress, stops: list[BaseException]) -> Any:
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            with _kept(stops):
                progress.start(phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            with _kept(stops):
                progress.step(phase_name, step + 1)
            return not stops

        def phase_finish(self, phase_name: str) -> None:
            with _kept(stops):
                progress.finish(phase_name)

    return Monitor()


@contextmanager
def _kept(stops: list[BaseException]) -> Iterator[None]:
    """Keeps what is raised, Ctrl-C above all, from passing through the library: the build ends at its next step."""
    try:
        yield
    except BaseException as stop:
        stops.append(stop)
