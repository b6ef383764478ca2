"""The lowerings for the CPU, to ONNX Runtime's ops and to the native ones, against the op's numpy definition.

Each graph holds one TreeAttention and, in front of it, what a traced model has there: nothing, a transpose,
a split of the projections' rows into heads, or that and rotary embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_graphs import EagleError
from eagle_graphs import tree_attention as op
from eagle_graphs.lowering import lower_for_native_cpu, lower_for_onnxruntime_cpu
from eagle_graphs.native_ops import KEY_BLOCK
from eagle_graphs.tree import depths_and_ancestors
from tests.graphs.native import session_options

FRONTS = ("heads", "transposed", "split rows", "rotary")
"""What stands in front of TreeAttention; its inputs are [B, H, Q, D], [B, Q, H, D] or rows [B, Q, H * D]."""
USUAL = ("split rows", "rotary")
SCALE = 0.37
OPSET = 23


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One call."""

    committed: int
    new: int
    after: int
    heads: int
    kv_heads: int
    head_dim: int = 16
    spare: int = 3
    """Rows of the buffer behind the last one used."""
    rotary: dict[str, int] = field(default_factory=dict)
    """Attributes of RotaryEmbedding, beside num_heads."""
    attributes: dict[str, float] = field(default_factory=dict)
    """Attributes of TreeAttention, beside scale."""
    sinks: bool = False

    @property
    def capacity(self) -> int:
        return self.committed + self.after + self.spare

    @property
    def rotary_dim(self) -> int:
        return self.rotary.get("rotary_embedding_dim") or self.head_dim


SHAPES = {
    "first token": Shape(committed=0, new=1, after=1, heads=2, kv_heads=1),
    "plain decoding": Shape(committed=9, new=1, after=1, heads=4, kv_heads=4),
    "prefill": Shape(committed=0, new=12, after=12, heads=9, kv_heads=3, head_dim=64),
    "second chunk": Shape(committed=12, new=7, after=7, heads=9, kv_heads=3),
    "verification": Shape(committed=20, new=16, after=16, heads=9, kv_heads=3),
    "draft level": Shape(committed=20, new=8, after=24, heads=8, kv_heads=2),
    "nothing committed below a level": Shape(committed=0, new=2, after=5, heads=4, kv_heads=2),
    "full buffer": Shape(committed=6, new=4, after=4, heads=8, kv_heads=1, spare=0),
}


class Neutral:
    """A graph with one TreeAttention, as the exporter would leave it."""

    def __init__(self, shape: Shape, front: str) -> None:
        self.shape, self.front = shape, front
        self.inputs: list[ir.Value] = []
        self.initializers: list[ir.Value] = []
        self.nodes: list[ir.Node] = []

    def model(self) -> ir.Model:
        heads, kv_heads, head_dim = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        attention = self.node(
            op.NAME,
            [
                self.heads_in_front("query", heads, rotary=self.front == "rotary"),
                self.heads_in_front("key", kv_heads, rotary=self.front == "rotary"),
                self.heads_in_front("value", kv_heads, rotary=False),
                self.input("past_key", ["B", kv_heads, "C", head_dim]),
                self.input("past_value", ["B", kv_heads, "C", head_dim]),
                self.input("tree_mask", ["B", "Q", "S"], ir.DataType.BOOL),
                self.input("kv_length", ["B"], ir.DataType.INT64),
                *([self.input("sinks", [heads])] if self.shape.sinks else []),
            ],
            [
                ("attended", ["B", "Q", heads, head_dim]),
                *((name, ["B", kv_heads, "C", head_dim]) for name in ("present_key", "present_value")),
            ],
            {"scale": SCALE, **self.shape.attributes},
            domain=op.DOMAIN,
        )
        attended, *present = attention
        if self.front in USUAL:
            (out,) = self.reshape(attended, "out", ["B", "Q", heads * head_dim], [0, 0, -1])
        else:
            (out,) = self.node("Identity", [attended], [("out", ["B", "Q", heads, head_dim])])
        graph = ir.Graph(
            self.inputs,
            [out, *present],
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports={"": OPSET, op.DOMAIN: op.VERSION},
            name="neutral",
        )
        return ir.Model(graph, ir_version=10)

    def heads_in_front(self, name: str, heads: int, *, rotary: bool) -> ir.Value:
        """The value [B, heads, Q, D] that TreeAttention reads."""
        head_dim = self.shape.head_dim
        if self.front == "heads":
            return self.input(name, ["B", heads, "Q", head_dim])
        if self.front == "transposed":
            split = self.input(name, ["B", "Q", heads, head_dim])
        else:
            rows = self.input(name, ["B", "Q", heads * head_dim])
            (split,) = self.reshape(rows, f"{name}_split", ["B", "Q", heads, head_dim], [0, 0, heads, head_dim])
        moved = (f"{name}_heads", ["B", heads, "Q", head_dim])
        (value,) = self.node("Transpose", [split], [moved], {"perm": [0, 2, 1, 3]})
        if rotary:
            angles = [self.input(part, ["B", "Q", self.shape.rotary_dim // 2]) for part in ("cos", "sin")]
            rotated = (f"{name}_rotated", ["B", heads, "Q", head_dim])
            attributes = {"num_heads": heads, **self.shape.rotary}
            (value,) = self.node("RotaryEmbedding", [value, *angles], [rotated], attributes)
        return value

    def input(self, name: str, shape: list[str | int], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        found = next((value for value in self.inputs if value.name == name), None)
        if found is None:
            found = ir.val(name, dtype, shape)
            self.inputs.append(found)
        return found

    def reshape(self, value: ir.Value, name: str, shape: list[str | int], sizes: list[int]) -> Sequence[ir.Value]:
        tensor = ir.tensor(np.array(sizes, np.int64), name=f"{name}_sizes")
        sizes_value = ir.val(tensor.name, ir.DataType.INT64, [len(sizes)], const_value=tensor)
        self.initializers.append(sizes_value)
        return self.node("Reshape", [value, sizes_value], [(name, shape)])

    def node(
        self,
        op_type: str,
        inputs: list[ir.Value],
        outputs: list[tuple[str, list[str | int]]],
        attributes: dict[str, Any] | None = None,
        *,
        domain: str = "",
    ) -> Sequence[ir.Value]:
        values = [ir.val(name, ir.DataType.FLOAT, shape) for name, shape in outputs]
        self.nodes.append(ir.node(op_type, inputs, attributes, domain=domain, outputs=values))
        return values


def lowered(shape: Shape, front: str) -> ir.Model:
    return lower_for_onnxruntime_cpu(Neutral(shape, front).model())


def lowered_natively(shape: Shape, front: str) -> ir.Model:
    model = Neutral(shape, front).model()
    lower_for_native_cpu(model)
    return model


def session_of(model: ir.Model) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), session_options())


def random_inputs(shape: Shape, front: str, seed: int) -> dict[str, np.ndarray]:
    """Inputs of the graph. Rows of the buffer that nobody may read hold large numbers, to be seen where they leak."""
    rng = np.random.default_rng(seed)

    def normal(*axes: int) -> np.ndarray:
        return rng.standard_normal(axes).astype(np.float32)

    def projected(heads: int) -> np.ndarray:
        rows = normal(1, shape.new, heads, shape.head_dim)
        if front == "heads":
            return np.ascontiguousarray(rows.transpose(0, 2, 1, 3))
        return rows if front == "transposed" else rows.reshape(1, shape.new, -1)

    parents = np.array([rng.integers(-1, row) if row else -1 for row in range(shape.after)], np.int64)
    past = {name: normal(1, shape.kv_heads, shape.capacity, shape.head_dim) for name in ("past_key", "past_value")}
    for cache in past.values():
        cache[:, :, shape.committed + shape.after - shape.new :] = 1e4
    inputs = {
        "query": projected(shape.heads),
        "key": projected(shape.kv_heads),
        "value": projected(shape.kv_heads),
        **past,
        "tree_mask": depths_and_ancestors(parents)[1][None, -shape.new :],
        "kv_length": np.array([shape.committed]),
    }
    if shape.sinks:
        inputs["sinks"] = normal(shape.heads)
    if front == "rotary":
        angles = rng.uniform(0, 6, (1, shape.new, shape.rotary_dim // 2))
        inputs |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    return inputs


def expected(shape: Shape, front: str, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """out, present_key, present_value by numpy."""

    def heads_of(name: str, heads: int) -> np.ndarray:
        if front == "heads":
            return inputs[name]
        split = inputs[name].reshape(1, shape.new, heads, shape.head_dim).transpose(0, 2, 1, 3)
        return rotated(split, shape, inputs["cos"], inputs["sin"]) if front == "rotary" and name != "value" else split

    out, *present = op.tree_attention(
        heads_of("query", shape.heads),
        heads_of("key", shape.kv_heads),
        heads_of("value", shape.kv_heads),
        *(inputs[name] for name in ("past_key", "past_value", "tree_mask", "kv_length")),
        inputs.get("sinks"),
        scale=SCALE,
        **shape.attributes,  # type: ignore[arg-type]
    )
    return [out.reshape(1, shape.new, -1) if front in USUAL else out, *present]


def rotated(x: np.ndarray, shape: Shape, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RotaryEmbedding of opset 23. x: [B, H, Q, D]; cos, sin: [B, Q, rotary_dim / 2]."""
    turning, still = x[..., : shape.rotary_dim], x[..., shape.rotary_dim :]
    interleaved = shape.rotary.get("interleaved", 0)
    real, imaginary = (turning[..., ::2], turning[..., 1::2]) if interleaved else np.split(turning, 2, axis=-1)
    turned = real * cos[:, None] - imaginary * sin[:, None], real * sin[:, None] + imaginary * cos[:, None]
    joined = np.stack(turned, axis=-1).reshape(turning.shape) if interleaved else np.concatenate(turned, axis=-1)
    return np.concatenate((joined, still), axis=-1)


def run_in_place(session: onnxruntime.InferenceSession, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """out and the two caches, each of which is bound as past and as present. `inputs` stay as they are."""
    binding, held = session.io_binding(), {name: np.array(array, order="C") for name, array in inputs.items()}
    for name, array in held.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    for part in ("key", "value"):
        cache = held[f"past_{part}"]
        binding.bind_output(f"present_{part}", "cpu", 0, cache.dtype.type, cache.shape, cache.ctypes.data)
    binding.bind_output("out", "cpu")
    session.run_with_iobinding(binding)
    return [binding.get_outputs()[-1].numpy(), held["past_key"], held["past_value"]]


def check(shape: Shape, front: str, seed: int = 0) -> None:
    """In one buffer all is as defined; between two, ONNX Runtime leaves out the rows that nobody uses yet."""
    session, inputs = session_of(lowered(shape, front)), random_inputs(shape, front, seed)
    wanted = expected(shape, front, inputs)
    in_place = run_in_place(session, inputs)
    for found, array in zip(in_place, wanted, strict=True):
        assert found.shape == array.shape
        np.testing.assert_allclose(found, array, rtol=1e-4, atol=1e-5)
    used = shape.committed + shape.after
    out, *present = session.run(["out", "present_key", "present_value"], inputs)
    np.testing.assert_array_equal(out, in_place[0])
    for found, array in zip(present, in_place[1:], strict=True):
        np.testing.assert_array_equal(found[:, :, :used], array[:, :, :used])
    check_natively(shape, front, inputs, wanted)


def check_natively(shape: Shape, front: str, inputs: dict[str, np.ndarray], wanted: list[np.ndarray]) -> None:
    """The same with the native kernels, whose keys are in blocks; the buffer is rounded up to whole ones."""
    spare = -shape.capacity % KEY_BLOCK
    longer = {n: np.pad(inputs[n], ((0, 0), (0, 0), (0, spare), (0, 0))) for n in ("past_key", "past_value")}
    heads, head_dim = shape.kv_heads, shape.head_dim
    blocked = longer["past_key"].reshape(1, heads, -1, KEY_BLOCK, head_dim).swapaxes(3, 4)
    session = session_of(lowered_natively(shape, front))
    out, keys, values = run_in_place(session, inputs | longer | {"past_key": blocked})
    keys = keys.swapaxes(3, 4).reshape(values.shape)
    for found, array in zip((out, keys[:, :, : shape.capacity], values[:, :, : shape.capacity]), wanted, strict=True):
        assert found.shape == array.shape
        np.testing.assert_allclose(found, array, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_definition(shape: Shape, front: str) -> None:
    check(shape, front)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kv_heads, new = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    return Shape(
        committed=draw(st.integers(0, 24)),
        new=new,
        after=new + draw(st.integers(0, 9)),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((8, 16, 32))),
        spare=draw(st.integers(0, 4)),
    )


@settings(max_examples=60, deadline=None)
@given(shapes(), st.sampled_from(FRONTS), st.integers(0, 2**16))
def test_equals_the_definition_over_random_shapes(shape: Shape, front: str, seed: int) -> None:
    check(shape, front, seed)


@pytest.mark.parametrize(
    "attributes",
    [
        {"interleaved": 1},
        {"rotary_embedding_dim": 8},
        {"interleaved": 1, "rotary_embedding_dim": 8},
    ],
    ids=["interleaved", "partial", "both"],
)
def test_rotary_embeddings_keep_their_attributes(attributes: dict[str, int]) -> None:
    check(Shape(committed=5, new=4, after=4, heads=4, kv_heads=2, rotary=attributes), "rotary")


WINDOWS = {"a window of itself alone": 1, "a short window": 4, "a window into the prefix": 9, "a wide window": 1000}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_windows_count_positions(shape: Shape, window: int) -> None:
    check(replace(shape, attributes={"sliding_window": window}), "rotary")


def test_layers_of_one_window_share_its_bias() -> None:
    model = Neutral(SHAPES["verification"], "split rows").model()
    first = next(node for node in model.graph if node.op_type == op.NAME)
    for window in (4, 0, 4, 9):
        other = ir.node(
            op.NAME, first.inputs, {"scale": SCALE, "sliding_window": window}, domain=op.DOMAIN, num_outputs=3
        )
        other.outputs[0].shape = first.outputs[0].shape
        model.graph.insert_after(first, other)
        model.graph.outputs.append(other.outputs[0])
    lower_for_onnxruntime_cpu(model)
    biases = {node.inputs[10] for node in model.graph if node.op_type == "GroupQueryAttention"}
    assert len(biases) == 3


@pytest.mark.parametrize("name", ["first token", "prefill", "verification", "draft level"])
def test_scores_are_capped(name: str) -> None:
    check(replace(SHAPES[name], attributes={"softcap": 0.8}), "rotary")


@pytest.mark.parametrize("name", ["first token", "prefill", "verification", "draft level"])
def test_sinks_take_their_share(name: str) -> None:
    check(replace(SHAPES[name], sinks=True), "rotary")
    check(replace(SHAPES[name], sinks=True, attributes={"softcap": 0.8, "sliding_window": 5}), "split rows")


@pytest.mark.parametrize("attributes", [{}, {"sliding_window": 3}], ids=["full", "window"])
def test_one_graph_serves_all_sizes(attributes: dict[str, float]) -> None:
    """Rows written level by level give what they give in one pass."""
    whole = Shape(committed=10, new=9, after=9, heads=6, kv_heads=3, attributes=attributes)
    session, inputs = session_of(lowered(whole, "rotary")), random_inputs(whole, "rotary", seed=1)
    caches, outs = [inputs["past_key"], inputs["past_value"]], []
    for first, last in ((0, 1), (1, 5), (5, 9)):
        level = {name: inputs[name][:, first:last] for name in ("query", "key", "value", "cos", "sin")}
        level["tree_mask"] = inputs["tree_mask"][:, first:last, :last]
        level |= {"past_key": caches[0], "past_value": caches[1], "kv_length": inputs["kv_length"]}
        out, *caches = run_in_place(session, level)
        outs.append(out)
    for array, wanted in zip([np.concatenate(outs, axis=1), *caches], expected(whole, "rotary", inputs), strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("front", FRONTS)
def test_no_op_of_eagle_is_left_and_no_transpose_of_the_usual_pattern(front: str) -> None:
    model = lowered(SHAPES["verification"], front)
    ops = [(node.domain, node.op_type) for node in model.graph]
    assert ops.count(("com.microsoft", "GroupQueryAttention")) == 1
    assert op.DOMAIN not in {domain for domain, _ in ops} | model.opset_imports.keys()
    assert [value.name for value in model.graph.outputs] == ["out", "present_key", "present_value"]
    transposes = ops.count(("", "Transpose"))
    assert transposes == (3 if front == "heads" else 0)
    if front in USUAL:
        assert ("", "Reshape") not in ops


@pytest.mark.parametrize("front", FRONTS)
def test_the_native_op_takes_rows_and_rotates_itself(front: str) -> None:
    model = lowered_natively(SHAPES["verification"], front)
    ops = [node.op_type for node in model.graph]
    assert ops.count("TreeAttention") == 1
    assert op.DOMAIN not in model.opset_imports
    if front in USUAL:
        assert ops == ["TreeAttention"]
    shapes = {value.name: list(value.shape) for value in (*model.graph.inputs, *model.graph.outputs)}
    assert shapes["past_key"] == shapes["present_key"] == ["B", 3, "C/16", 16, 16]
    assert shapes["past_value"] == ["B", 3, "C", 16]


def test_a_rotation_of_the_queries_alone_stays_outside() -> None:
    made = Neutral(SHAPES["verification"], "rotary")
    model = made.model()
    attention = next(node for node in model.graph if node.op_type == op.NAME)
    attention.replace_input_with(1, attention.inputs[1].producer().inputs[0])
    lower_for_native_cpu(model)
    (native,) = [node for node in model.graph if node.op_type == "TreeAttention"]
    assert "RotaryEmbedding" in [node.op_type for node in model.graph]
    assert len(native.inputs) == 7


def test_rows_that_were_split_from_one_value_are_packed_again() -> None:
    made = Neutral(SHAPES["verification"], "rotary")
    model, (heads, kv_heads, head_dim) = made.model(), (9, 3, 16)
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    tensor = ir.tensor(np.array(sizes), name="sizes")
    widths = ir.val("sizes", ir.DataType.INT64, [3], const_value=tensor)
    model.graph.register_initializer(widths)
    packed = ir.val("packed", ir.DataType.FLOAT, ["B", "Q", sum(sizes)])
    split = ir.node("Split", [packed, widths], {"axis": -1}, num_outputs=3)
    model.graph.insert_before(next(iter(model.graph)), split)
    for name, part in zip(("query", "key", "value"), split.outputs, strict=True):
        rows = next(value for value in model.graph.inputs if value.name == name)
        part.shape, part.type = rows.shape, rows.type
        rows.replace_all_uses_with(part)
        model.graph.inputs.remove(rows)
    model.graph.inputs.append(packed)
    lower_for_native_cpu(model)
    (native,) = model.graph
    assert native.inputs[:3] == (packed, None, None)

    inputs = random_inputs(SHAPES["verification"], "rotary", seed=3)
    wanted = expected(SHAPES["verification"], "rotary", inputs)
    rows = [inputs.pop(name) for name in ("query", "key", "value")]
    blocks = np.pad(inputs["past_key"], ((0, 0), (0, 0), (0, -SHAPES["verification"].capacity % KEY_BLOCK), (0, 0)))
    inputs["past_value"] = np.pad(inputs["past_value"], ((0, 0), (0, 0), (0, blocks.shape[2] - 39), (0, 0)))
    inputs["past_key"] = blocks.reshape(1, 3, -1, KEY_BLOCK, head_dim).swapaxes(3, 4)
    out, *_ = run_in_place(session_of(model), inputs | {"packed": np.concatenate(rows, axis=-1)})
    np.testing.assert_allclose(out, wanted[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [SHAPES["verification"], SHAPES["draft level"]], ids=["verification", "draft level"])
def test_only_the_new_rows_of_a_shared_buffer_are_written(shape: Shape) -> None:
    inputs = random_inputs(shape, "rotary", seed=2)
    _, *caches = run_in_place(session_of(lowered(shape, "rotary")), inputs)
    written = slice(shape.committed + shape.after - shape.new, shape.committed + shape.after)
    for name, cache in zip(("past_key", "past_value"), caches, strict=True):
        np.testing.assert_array_equal(np.delete(cache, written, axis=2), np.delete(inputs[name], written, axis=2))
        assert (cache[:, :, written] != inputs[name][:, :, written]).all()


def test_an_open_number_of_heads_is_refused() -> None:
    model = Neutral(SHAPES["verification"], "heads").model()
    attention = next(node for node in model.graph if node.op_type == op.NAME)
    attention.outputs[0].shape = ir.Shape(["B", "Q", "H", 16])
    with pytest.raises(EagleError, match="fixed number of heads"):
        lower_for_onnxruntime_cpu(model)
