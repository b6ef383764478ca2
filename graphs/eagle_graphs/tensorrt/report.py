"""The report of an engine: what it is made of in each pass, and what did not become the fast kernels it should be.

A product of quantized weights is *fused* where the kernel that computes it reads integers or 8-bit floats; else the
weights are unpacked in each pass. An attention is fused where one kernel does all of it, or the plugin's two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from eagle_graphs.passes import Pass
from eagle_graphs.tensorrt.build import Built
from eagle_graphs.tensorrt.description import Layer
from eagle_graphs.tensorrt.library import Attention

_SHORT = ("FP8", "Int8", "Int4", "FP4")
"""Element types that a fused product of quantized weights reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassReport:
    """One optimization profile."""

    name: str
    inputs: dict[str, tuple[int, ...]]
    """Shape of each input but the caches."""
    layers: dict[str, int]
    """By kind."""
    products: dict[str, int]
    """Products of weights by the narrowest element type that their kernels read."""
    attentions: int
    decomposed: tuple[str, ...]
    """Attentions that no single kernel computes."""
    unfused: tuple[str, ...]
    """Products whose quantized weights are unpacked first."""
    memory: int | None
    """Bytes of activations; None where the library does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """One engine file."""

    graph: str
    size: int
    """Bytes of the file."""
    attention: Attention
    """Whose: the library's own, or the kernels of `eagle_graphs.plugin`."""
    weights: int
    """Bytes of weights in memory."""
    cache: tuple[str, tuple[int, ...], int]
    """Element type, shape and number of the caches, each bound as input and output alike."""
    outputs: dict[str, str]
    """Element type of each output but the caches."""
    passes: tuple[PassReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def problems(self) -> list[str]:
        """What makes the engine slower than it should be; its results are right all the same."""
        found = []
        for each in self.passes:
            if each.decomposed:
                found.append(
                    f"{self.graph}, {each.name}: {len(each.decomposed)} of {each.attentions} attentions fell apart "
                    f"into several kernels ({', '.join(each.decomposed[:3])})"
                )
            if each.unfused:
                found.append(
                    f"{self.graph}, {each.name}: the quantized weights of {len(each.unfused)} products are unpacked in "
                    f"each pass ({', '.join(each.unfused[:3])})"
                )
        return found


def report_from_engine(graph: str, passes: Sequence[Pass], built: Built) -> EngineReport:
    """The report of the engine `built` of the graph named, whose profiles are `passes`."""
    description = built.description
    caches = [tensor for tensor in description.inputs if tensor.name.startswith("past_")]
    memory = description.memory if len(description.memory) == len(passes) else (None,) * len(passes)
    return EngineReport(
        graph=graph,
        size=built.size,
        attention=built.network.attention,
        weights=description.weights,
        cache=(caches[0].dtype, caches[0].shapes[0], len(caches)),
        outputs={t.name: t.dtype for t in description.outputs if not t.name.startswith("present_")},
        passes=tuple(
            _pass_report(
                each.name,
                {t.name: t.shapes[index] for t in description.inputs if t not in caches},
                [layer for layer in description.layers if layer.profile == index],
                built,
                memory[index],
            )
            for index, each in enumerate(passes)
        ),
    )


def _pass_report(
    name: str, inputs: dict[str, tuple[int, ...]], layers: Sequence[Layer], built: Built, memory: int | None
) -> PassReport:
    network = built.network
    of_node: dict[str, list[Layer]] = {}
    for layer in layers:
        for node in layer.nodes:
            of_node.setdefault(node, []).append(layer)
    narrowest = {
        node: _narrowest([dtype for layer in of_node.get(node, ()) for dtype in layer.reads])
        for node in network.products
        if node not in network.attentions
    }
    return PassReport(
        name=name,
        inputs=inputs,
        layers=dict(Counter(layer.kind for layer in layers)),
        products=dict(Counter(narrowest.values())),
        attentions=len(network.attentions),
        decomposed=tuple(
            node
            for node in network.attentions
            if network.attention == "native" and not any("mha" in layer.name for layer in of_node.get(node, ()))
        ),
        unfused=tuple(node for node, dtype in narrowest.items() if node in network.quantized and dtype not in _SHORT),
        memory=memory,
    )


def _narrowest(dtypes: Sequence[str]) -> str:
    order = ("FP4", "Int4", "FP8", "Int8", "Half", "BFloat16", "Float")
    return next((dtype for dtype in order if dtype in dtypes), "none")


def report_table(report: EngineReport) -> Table:
    """The readable form."""
    dtype, shape, count = report.cache
    size = f"{report.size / 1e6:.0f} MB, {report.attention} attention"
    title = f"{report.graph}: {size}, {count} caches {dtype} {'x'.join(map(str, shape))}"
    table = Table("pass", "kernels", "products", "attention", "activations", title=title)
    for each in report.passes:
        products = ", ".join(f"{count} {dtype}" for dtype, count in sorted(each.products.items()))
        fused = each.attentions - len(each.decomposed)
        table.add_row(
            each.name,
            str(sum(each.layers.values())),
            products + (f" ({len(each.unfused)} unpacked)" if each.unfused else ""),
            f"{fused} of {each.attentions} fused",
            "?" if each.memory is None else f"{each.memory / 1e6:.1f} MB",
            style="yellow" if each.decomposed or each.unfused else "",
        )
    return table


def print_reports(console: Console, reports: Sequence[EngineReport]) -> None:
    """The readable form, and what the user should know."""
    for report in reports:
        console.print(report_table(report))
        for problem in report.problems():
            console.print(f"[yellow]slow[/yellow]  {problem}", highlight=False)
