"""tools/compare.py on real graphs: what agrees, and a layer that was spoilt on purpose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from eagle_graphs import EagleError
from tests.commands import Outcome, _run
from tools import compare

SPOILT = "model.model.layers.3.mlp.up_proj"


def run(*arguments: object) -> Outcome:
    return _run(lambda: compare.app(), "compare.py", arguments, b"")


def graph_of(bundle: Path, name: str) -> Path:
    return bundle / "onnxruntime-cpu-fp32" / f"{name}-stock.onnx"


@pytest.fixture(scope="module")
def spoilt(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's graph with one weight of one layer wrong."""
    model = onnx.load(graph_of(tiny_bundle, "target"))
    (node,) = (node for node in model.graph.node if node.name == SPOILT)
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == node.input[1])
    values = numpy_helper.to_array(weight).copy()
    values[0, 0] += 5
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    path = tmp_path_factory.mktemp("spoilt") / "spoilt.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("name", ["target", "draft"])
def test_torch_and_onnx_agree_in_every_layer(tiny_bundle: Path, tiny_target: Path, tiny_head: Path, name: str) -> None:
    graph = graph_of(tiny_bundle, name)
    layers = compare.linear_layers(onnx.load(graph, load_external_data=False))
    assert len(layers) >= (6 * 7 if name == "target" else 7), layers.keys()
    outcome = run(name, "--model", tiny_target, "--draft", tiny_head, "--onnx", graph)
    assert (outcome.status, outcome.out.splitlines()[-1]) == (0, "no output and no layer differs")


def test_the_first_layer_that_differs_is_named(
    tiny_bundle: Path, tiny_target: Path, tiny_head: Path, spoilt: Path
) -> None:
    graph = graph_of(tiny_bundle, "target")
    outcome = run("target", "--model", tiny_target, "--draft", tiny_head, "--onnx", graph, "--onnx", spoilt)
    assert outcome.status == 1
    good, bad = outcome.out.split("spoilt.onnx against torch")
    assert "no output and no layer differs" in good
    assert f"first that differs: layer {SPOILT}" in bad
    assert "model.model.layers.3.mlp.gate_proj" not in bad
    assert "features" in bad


def test_marked_layers_become_outputs_of_a_graph_that_still_runs(
    tiny_bundle: Path, spoilt: Path, tmp_path: Path
) -> None:
    graph = graph_of(tiny_bundle, "target")
    outcome = run("target", "--onnx", graph, "--onnx", spoilt, "--mark-layers", tmp_path / "marked.onnx")
    assert outcome.status == 1
    session = compare.onnx_session(tmp_path / "marked.onnx")
    names = [output.name for output in session.get_outputs()]
    assert {f"{compare.LAYER}model.lm_head", f"{compare.LAYER}{SPOILT}"} <= set(names)
    feeds = compare.feed(session, rows=5, committed=9, room=24, vocab=256)
    given = dict(zip(names, session.run(None, feeds), strict=True))
    np.testing.assert_array_equal(given[f"{compare.LAYER}model.lm_head"], given["logits"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify"], "expected target or draft"),
        (["target", "--model", "m"], "both"),
        (["target"], "nothing to compare"),
    ],
)
def test_mistakes_are_told(tiny_bundle: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(EagleError, match=words):
        run(*arguments, "--onnx", graph_of(tiny_bundle, "target"))
