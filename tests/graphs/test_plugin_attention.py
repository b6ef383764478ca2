"""The lowering to the plugins: what it passes them, what a GPU adds, and the mask that is packed in the graph."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx_ir.passes.common import RemoveUnusedNodesPass

from eagle_graphs import EagleError, tree_attention
from eagle_graphs.lowering.plugin_attention import lower_for_plugins, onnx_for_gpu
from eagle_graphs.plugin.masks import pack_mask

FLOAT, BOOL, INT64 = ir.DataType.FLOAT, ir.DataType.BOOL, ir.DataType.INT64
PORTS = {
    "query": (FLOAT, ["B", 6, "Q", 16]),
    "key": (FLOAT, ["B", 2, "Q", 16]),
    "value": (FLOAT, ["B", 2, "Q", 16]),
    "past_key": (FLOAT, ["B", 2, 512, 16]),
    "past_value": (FLOAT, ["B", 2, 512, 16]),
    "tree_mask": (BOOL, ["B", "Q", "S"]),
    "kv_length": (INT64, ["B"]),
}


def neutral(**attributes: float) -> ir.Model:
    """A graph of one attention."""
    inputs = [ir.Value(name=name, shape=ir.Shape(s), type=ir.TensorType(t)) for name, (t, s) in PORTS.items()]
    node = ir.node(
        tree_attention.NAME, inputs, {"scale": 0.25, **attributes}, domain=tree_attention.DOMAIN, num_outputs=3
    )
    out, present_key, present_value = node.outputs
    for value, name, shape in (
        (out, "out", ["B", "Q", 6, 16]),
        (present_key, "present_key", PORTS["past_key"][1]),
        (present_value, "present_value", PORTS["past_value"][1]),
    ):
        value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(FLOAT)
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 23, tree_attention.DOMAIN: 1}, name="g")
    return ir.Model(graph, ir_version=10)


def lowered(**attributes: float) -> ir.Model:
    model = neutral(**attributes)
    lower_for_plugins(model, capacity=512, dtype=ir.DataType.FLOAT16)
    return model


def told(node: ir.Node) -> dict[str, object]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


def test_an_attention_becomes_two_plugins() -> None:
    model = lowered(softcap=30.0, sliding_window=100)
    attend, combine = (node for node in model.graph if node.domain == "eagle")
    shared = {"sliding_window": 100, "plugin_namespace": "eagle", "plugin_version": "1"}
    assert told(attend) == {"scale": 0.25, "softcap": 30.0} | shared
    assert told(combine) == shared
    assert (attend.name, combine.name) == ("attention.0", "attention.0.combine")
    assert [value.name for value in model.graph.outputs] == ["out", "present_key", "present_value"]
    assert [attend.outputs[i].name for i in (2, 3)] == ["present_key", "present_value"]
    assert [value.dtype for value in model.graph.outputs] == [FLOAT, ir.DataType.FLOAT16, ir.DataType.FLOAT16]
    assert [attend.inputs[i].name for i in (3, 4, 6)] == ["past_key", "past_value", "kv_length"]
    assert [combine.inputs[i] for i in range(3)] == [*attend.outputs[:2], attend.inputs[6]]


def test_a_gpu_tells_the_plugins_what_it_is(tmp_path: Path) -> None:
    ir.save(lowered(), tmp_path / "graph.onnx")
    small = {"capability": 87, "multiprocessors": 1}
    for gpu, split_rows in ((small, 512), ({"capability": 120, "multiprocessors": 170}, 256)):
        built = onnx_for_gpu(tmp_path / "graph.onnx", new_rows=60, **gpu)
        (tmp_path / "built.onnx").write_bytes(built)
        attend, combine = (node for node in ir.load(tmp_path / "built.onnx").graph if node.domain == "eagle")
        added = {"split_rows": split_rows, "capability": gpu["capability"]}
        assert told(attend).items() >= (added | {"new_rows": 60}).items()
        assert told(combine).items() >= added.items()
        assert "new_rows" not in told(combine)


@pytest.mark.parametrize(("new", "after"), [(1, 1), (4, 4), (60, 60), (64, 64), (8, 24), (5, 70)])
def test_words_and_rows_that_the_graph_computes(new: int, after: int) -> None:
    """Run by ONNX Runtime, up to the plugins."""
    model = lowered()
    attend = next(node for node in model.graph if node.op_type == "attend")
    words, write_row = attend.inputs[5], attend.inputs[7]
    assert words is not None
    assert write_row is not None
    words.name, write_row.name = "words", "write_row"
    words.type = write_row.type = ir.TensorType(INT64)
    model.graph.outputs[:] = [words, write_row]
    RemoveUnusedNodesPass()(model)
    model.graph.inputs[:] = [value for value in model.graph.inputs if value.name in ("tree_mask", "kv_length")]
    for value in model.graph.inputs:
        value.shape = ir.Shape(PORTS[value.name or ""][1])  # two slots
    del model.opset_imports["eagle"]
    mask = np.random.default_rng(0).random((2, new, after)) < 0.5
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    given = {"tree_mask": mask, "kv_length": np.array([7, 0])}
    found, rows = session.run(None, given)
    np.testing.assert_array_equal(found, pack_mask(mask))
    np.testing.assert_array_equal(rows, np.array([7, 0]) + after - new)


def test_a_type_without_kernels_is_said() -> None:
    with pytest.raises(EagleError, match="got FLOAT, expected FLOAT16 or BFLOAT16: use --attention native"):
        lower_for_plugins(neutral(), capacity=512, dtype=FLOAT)


def test_an_attention_beyond_the_kernels_is_said() -> None:
    model = neutral()
    for value in model.graph.inputs:
        if value.name in ("past_key", "past_value"):
            value.shape = ir.Shape(["B", 2, 512, 320])
    with pytest.raises(EagleError, match="heads of 320 numbers, expected up to 256: use --attention native"):
        lower_for_plugins(model, capacity=512, dtype=ir.DataType.FLOAT16)
