"""Small graphs in ONNX's text form, with weights, for the passes of the lowering."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from tests.seeded import RANDOM

LINEAR_FORMS = {
    "MatMul": ("agraph (float[B, Q, 96] x) => (float[B, Q, 40] y) {y = MatMul(x, w)}", {"w": (96, 40)}),
    "MatMul and Add": (
        "agraph (float[B, Q, 96] x) => (float[B, Q, 40] y) {p = MatMul(x, w) y = Add(b, p)}",
        {"w": (96, 40), "b": (40,)},
    ),
    "Gemm": (
        "agraph (float[R, 96] x) => (float[R, 40] y) {y = Gemm<transB = 1>(x, w, b)}",
        {"w": (40, 96), "b": (40,)},
    ),
    "Gemm of columns": ("agraph (float[R, 96] x) => (float[R, 40] y) {y = Gemm(x, w)}", {"w": (96, 40)}),
}
"""Every form of a linear layer of 96 inputs and 40 outputs, and the shapes of its weights."""


def weights(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def model(text: str, **initializers: np.ndarray) -> ir.Model:
    """A model in ONNX's text form, with these initializers."""
    opsets = '<ir_version: 10, opset_import: ["": 23, "eagle.cpu": 1]>'
    made = ir.from_proto(onnx.parser.parse_model(f"{opsets} {text}"))
    for name, array in initializers.items():
        values = {v.name: v for node in made.graph for v in node.inputs if v is not None}
        tensor = ir.tensor(array, name=name)
        old = values[name]
        old.const_value, old.type, old.shape = tensor, ir.TensorType(tensor.dtype), ir.Shape(array.shape)
        made.graph.register_initializer(old)
    proto = onnx.shape_inference.infer_shapes(ir.to_proto(made))
    return ir.from_proto(proto)


def linear_form(name: str) -> tuple[ir.Model, np.ndarray, dict[str, np.ndarray], np.ndarray]:
    """One of LINEAR_FORMS: the model, its matrix [40, 96], all its arrays, and rows to feed it."""
    text, shapes = LINEAR_FORMS[name]
    arrays = {name: weights(*shape) for name, shape in shapes.items()}
    matrix = arrays["w"] if arrays["w"].shape[0] == 40 else arrays["w"].T
    return (
        model(text, **arrays),
        np.ascontiguousarray(matrix),
        arrays,
        weights(*((2, 3, 96) if "[B" in text else (5, 96))),
    )


def ops(graph: ir.Model) -> list[str]:
    return [node.op_type for node in graph.graph]
