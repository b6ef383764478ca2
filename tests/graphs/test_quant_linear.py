"""The ops QuantLinear and QuantEmbedding against their definition in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import TensorProto

from eagle_graphs.native.packing import Prologue, pack, quant_embedding, quant_linear, quantize_rows, unpack
from tests.graphs.native import offered_instruction_sets, session_of_one_op

Array = npt.NDArray[Any]

PROLOGUES: tuple[Prologue, ...] = ("none", "rms_norm", "silu_mul", "gelu_tanh_mul")
INPUTS = ("x", "weight", "weight_scale", "bias", "residual", "norm_weight", "order")
EPSILON = 1e-5
# (N, K, rows): below a block, ragged, whole, and large enough for several tiles of rows and chunks of columns
SHAPES = [(3, 5, 1), (50, 100, 5), (64, 128, 16), (33, 64, 17), (400, 448, 40)]


ELEMENTS = {
    np.float32: TensorProto.FLOAT,
    np.int64: TensorProto.INT64,
    np.int32: TensorProto.INT32,
    np.uint8: TensorProto.UINT8,
    np.int8: TensorProto.INT8,
}


def session(
    op: str, inputs: dict[str, Array], isa: str = "", threads: int = 1, **attributes: Any
) -> ort.InferenceSession:
    names = [name if name in inputs else "" for name in (INPUTS if op == "QuantLinear" else inputs)]
    elements = {name: ELEMENTS[array.dtype.type] for name, array in inputs.items()}
    return session_of_one_op(op, names, ["y"], elements, attributes, threads=threads, isa=isa)


class Layer:
    """A random layer with everything that the op takes."""

    def __init__(
        self, columns: int, depth: int, prologue: Prologue = "none", wide: int = 0, ordered: bool = False, seed: int = 0
    ) -> None:
        self.rng = np.random.default_rng(seed)
        values, scale = quantize_rows(self.normal(columns, depth))
        self.inputs = {"weight": pack(values), "weight_scale": scale, "bias": self.normal(columns)}
        self.attributes: dict[str, Any] = {"prologue": prologue, "wide": wide}
        if prologue == "rms_norm":
            self.inputs["norm_weight"] = self.normal(depth)
            self.attributes["epsilon"] = EPSILON
        if ordered:
            self.inputs["order"] = self.rng.permutation(depth).astype(np.int32)
        self.columns, self.depth = columns, depth
        self.width = 2 * depth if prologue.endswith("mul") else depth

    def normal(self, *shape: int) -> Array:
        return self.rng.normal(size=shape).astype(np.float32)

    def rows(self, *shape: int) -> dict[str, Array]:
        """x and residual of so many rows."""
        return {"x": 3 * self.normal(*shape, self.width), "residual": self.normal(*shape, self.columns)}

    def run(self, rows: dict[str, Array], isa: str = "", threads: int = 1) -> Array:
        inputs = self.inputs | rows
        made = session("QuantLinear", inputs, isa, threads, N=self.columns, K=self.depth, **self.attributes)
        return made.run(None, inputs)[0]

    def expected(self, rows: dict[str, Array]) -> Array:
        inputs = [(self.inputs | rows).get(name) for name in INPUTS[3:]]
        weight, scale = self.inputs["weight"], self.inputs["weight_scale"]
        return quant_linear(rows["x"], weight, scale, *inputs, depth=self.depth, **self.attributes)


def assert_same_bits(actual: Array, expected: Array) -> None:
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))


@pytest.fixture(params=offered_instruction_sets())
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("prologue", ["none", "rms_norm"])
@pytest.mark.parametrize(("columns", "depth", "rows"), SHAPES)
def test_bits_are_those_of_the_definition(isa: str, columns: int, depth: int, rows: int, prologue: Prologue) -> None:
    layer = Layer(columns, depth, prologue)
    given = layer.rows(1, rows)
    assert_same_bits(layer.run(given, isa), layer.expected(given))


@pytest.mark.parametrize("prologue", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize(("columns", "depth", "rows"), SHAPES)
def test_an_exponential_may_move_a_value_to_the_next_integer(
    isa: str, columns: int, depth: int, rows: int, prologue: Prologue
) -> None:
    layer = Layer(columns, depth, prologue)
    given = layer.rows(1, rows)
    y, expected = layer.run(given, isa), layer.expected(given)
    np.testing.assert_allclose(y, expected, rtol=0, atol=np.abs(expected).max() / 127)
    assert np.mean(np.abs(y - expected) > 1e-5 * np.abs(expected).max()) < 0.2


@pytest.mark.parametrize("prologue", ["silu_mul", "gelu_tanh_mul"])
def test_gates_of_any_size(isa: str, prologue: Prologue) -> None:
    layer = Layer(16, 16, prologue)
    gate = np.array([-1e30, -1e4, -100, -88, -20, -1, -1e-3, -0.0, 0, 1e-30, 1e-3, 1, 20, 88, 100, 1e4], np.float32)
    x = np.stack([np.concatenate((gate[: i + 1], np.zeros(15 - i), np.ones(16))) for i in range(16)]).astype(np.float32)
    given = {"x": x}
    np.testing.assert_allclose(layer.run(given, isa), layer.expected(given), rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(("depth", "wide"), [(128, 64), (576, 192), (100, 64), (100, 128), (64, 64)])
@pytest.mark.parametrize("rows", [1, 7, 16, 33])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("prologue", ["none", "rms_norm"])
def test_wide_inputs_have_16_bits(
    isa: str, depth: int, wide: int, rows: int, ordered: bool, prologue: Prologue
) -> None:
    layer = Layer(40, depth, prologue, wide, ordered)
    given = layer.rows(rows)
    large = layer.inputs["order"][:wide] if ordered else np.arange(min(wide, depth))
    given["x"][:, large] *= 1000
    y = layer.run(given, isa)
    assert_same_bits(y, layer.expected(given))
    if prologue == "none":
        weight = unpack(layer.inputs["weight"], 40, depth) * layer.inputs["weight_scale"][:, None]
        inputs = given["x"][:, layer.inputs["order"]] if ordered else given["x"]
        exact = inputs @ weight.T + layer.inputs["bias"] + given["residual"]
        assert np.abs(y - exact).max() < 1e-4 * np.abs(exact).max()


def test_a_16_bit_integer_is_cut_where_its_lower_half_is_8_bits(isa: str) -> None:
    """Every integer of 16 bits, beside the largest, which makes the scale 1."""
    x = np.zeros((65279, 64), np.float32)
    x[:, 0], x[:, 1] = 32639, np.arange(-32639, 32640)
    weight = np.zeros((16, 64), np.int8)
    weight[:, 1] = 1
    inputs = {"x": x, "weight": pack(weight), "weight_scale": np.ones(16, np.float32)}
    (y,) = session("QuantLinear", inputs, isa, N=16, K=64, wide=64).run(None, inputs)
    np.testing.assert_array_equal(y, np.broadcast_to(x[:, 1:2], y.shape))


def test_integers_are_exact(isa: str) -> None:
    """With scales of 1 the result is the integer product, at the ends of the range too."""
    rng = np.random.default_rng(0)
    x = rng.integers(-127, 128, (9, 1000)).astype(np.float32)
    x[:, 0] = 127
    x[0], x[1] = 127, -127
    weight = rng.integers(-128, 128, (50, 1000), np.int8)
    weight[0], weight[1] = 127, -128
    inputs = {"x": x, "weight": pack(weight), "weight_scale": np.ones(50, np.float32)}
    (y,) = session("QuantLinear", inputs, isa, N=50, K=1000).run(None, inputs)
    np.testing.assert_array_equal(y, (x.astype(np.int64) @ weight.T.astype(np.int64)).astype(np.float32))


@pytest.mark.parametrize("prologue", PROLOGUES)
def test_a_row_has_the_same_bits_in_any_company(isa: str, prologue: Prologue) -> None:
    layer = Layer(400, 448, prologue)
    given = layer.rows(40)
    alone = np.concatenate([layer.run({name: a[i : i + 1] for name, a in given.items()}, isa) for i in range(40)])
    for rows in (2, 3, 5, 16, 17, 40):
        for threads in (1, 2):
            for _ in range(2):
                some = {name: a[-rows:] for name, a in given.items()}
                assert_same_bits(layer.run(some, isa, threads), alone[-rows:])


@pytest.mark.parametrize("prologue", PROLOGUES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_the_others_alone(
    isa: str, prologue: Prologue, value: float
) -> None:
    layer = Layer(50, 128, prologue)
    given = layer.rows(20)
    clean = layer.run(given, isa)
    for row, column in ((2, 0), (7, 127), (19, layer.width - 1)):
        given["x"][row, column] = value
    y = layer.run(given, isa, threads=2)
    assert np.isnan(y[[2, 7, 19]]).all()
    others = np.delete(np.arange(20), [2, 7, 19])
    assert_same_bits(y[others], clean[others])


@pytest.mark.parametrize("place", [3, 100])
def test_a_part_that_is_not_finite_spoils_the_row(isa: str, place: int) -> None:
    layer = Layer(50, 128, wide=64)
    given = layer.rows(2)
    given["x"][0, place] = np.nan
    assert np.isnan(layer.run(given, isa)).all(axis=1).tolist() == [True, False]


def test_rows_of_zeros_and_of_almost_zeros_give_the_bias(isa: str) -> None:
    layer = Layer(50, 100)
    x = np.zeros((3, 100), np.float32)
    x[1], x[2] = 1e-38, 1e-45
    assert_same_bits(layer.run({"x": x}, isa), np.broadcast_to(layer.inputs["bias"], (3, 50)).copy())


def test_bias_and_residual_are_optional() -> None:
    layer = Layer(50, 100)
    given = layer.rows(2, 3)
    for left_out in ("bias", "residual"):
        (layer.inputs if left_out == "bias" else given).pop(left_out)
        assert_same_bits(layer.run(given), layer.expected(given))


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 2, 3)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    layer = Layer(20, 30)
    given = layer.rows(*shape)
    y = layer.run(given)
    assert y.shape == (*shape, 20)
    assert_same_bits(y, layer.expected(given))


def test_no_rows() -> None:
    layer = Layer(20, 30)
    assert layer.run(layer.rows(1, 0)).shape == (1, 0, 20)


def reshaped(name: str, *shape: int) -> Any:
    return lambda inputs: inputs.update({name: np.zeros(shape, inputs[name].dtype)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (reshaped("x", 2, 99), r"x has the shape \[2, 99\], expected 100 as the last dimension"),
        (reshaped("weight", 4, 24, 16, 4), r"weight has the shape \[4, 24, 16, 4\], expected \[4, 32, 16, 4\]"),
        (reshaped("weight", 3, 32, 16, 4), r"weight has the shape \[3, 32, 16, 4\]"),
        (reshaped("weight", 50, 100), r"weight has the shape \[50, 100\]"),
        (reshaped("weight_scale", 49), r"weight_scale has the shape \[49\], expected \[50\]"),
        (reshaped("bias", 1), r"bias has the shape \[1\], expected \[50\]"),
        (reshaped("residual", 50), r"residual has the shape \[50\], expected \[2, 50\]"),
        (reshaped("norm_weight", 50), r"norm_weight has the shape \[50\], expected \[100\]"),
        (lambda inputs: inputs.pop("norm_weight"), "norm_weight is missing, but the prologue is rms_norm"),
    ],
)
def test_wrong_inputs_are_refused(change: Any, message: str) -> None:
    layer = Layer(50, 100, "rms_norm")
    inputs = layer.inputs | layer.rows(2)
    change(inputs)
    made = session("QuantLinear", inputs, N=50, K=100, **layer.attributes)
    with pytest.raises(Exception, match=f"QuantLinear: {message}"):
        made.run(None, inputs)


def test_a_norm_weight_without_a_norm_is_refused() -> None:
    layer = Layer(50, 100)
    layer.inputs["norm_weight"] = layer.normal(100)
    with pytest.raises(Exception, match="norm_weight is given, but the prologue is not rms_norm"):
        layer.run(layer.rows(2))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"prologue": "relu"}, "prologue is 'relu', expected none, rms_norm, silu_mul or gelu_tanh_mul"),
        ({"wide": 32}, "wide is 32, expected a multiple of 64 that is not above K 100"),
        ({"wide": -64}, "wide is -64"),
        ({"wide": 192}, "wide is 192"),
        ({"N": 0}, "N is 0 and K 100, expected more than 0"),
        ({"K": 70000}, "K is 70000, expected at most 65792"),
        ({"prologue": "rms_norm"}, "epsilon"),
    ],
)
def test_wrong_attributes_are_refused(attributes: dict[str, Any], message: str) -> None:
    inputs = Layer(50, 100).inputs | {"x": np.zeros((1, 100), np.float32)}
    with pytest.raises(Exception, match=message):
        session("QuantLinear", inputs, **({"N": 50, "K": 100} | attributes))


@pytest.mark.parametrize("bad", [-1, 100])
def test_an_order_of_what_is_no_input_is_refused(bad: int) -> None:
    layer = Layer(50, 100, ordered=True)
    layer.inputs["order"][7] = bad
    with pytest.raises(Exception, match=f"QuantLinear: order has {bad}, expected 0 to 99"):
        layer.run(layer.rows(1))


def test_signed_weights_are_refused() -> None:
    layer = Layer(50, 100)
    layer.inputs["weight"] = layer.inputs["weight"].view(np.int8)
    with pytest.raises(Exception, match="weight"):
        layer.run(layer.rows(1))


@pytest.mark.parametrize("ordered", [False, True])
def test_embedding_bits_are_those_of_the_definition(isa: str, ordered: bool) -> None:
    layer = Layer(50, 100, ordered=ordered)
    inputs = {"ids": layer.rng.integers(0, 50, (2, 9)), **layer.inputs}
    del inputs["bias"]
    (y,) = session("QuantEmbedding", inputs, isa, N=50, K=100).run(None, inputs)
    expected = quant_embedding(*(inputs.get(name) for name in ("ids", "weight", "weight_scale", "order")), depth=100)
    assert_same_bits(y, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inputs: inputs.update(ids=np.array([[1, 50]])), "id 50 is not in the vocabulary of 50"),
        (lambda inputs: inputs.update(ids=np.array([[-1]])), "id -1 is not in the vocabulary of 50"),
        (reshaped("ids", 3), r"ids has the shape \[3\], expected 2 dimensions"),
        (reshaped("weight", 4, 24, 16, 4), r"weight has the shape \[4, 24, 16, 4\], expected \[4, 32, 16, 4\]"),
        (reshaped("weight_scale", 64), r"weight_scale has the shape \[64\], expected \[50\]"),
    ],
)
def test_wrong_embedding_inputs_are_refused(change: Any, message: str) -> None:
    inputs = {"ids": np.zeros((1, 2), np.int64), **Layer(50, 100).inputs}
    del inputs["bias"]
    change(inputs)
    made = session("QuantEmbedding", inputs, N=50, K=100)
    with pytest.raises(Exception, match=f"QuantEmbedding: {message}"):
        made.run(None, inputs)
