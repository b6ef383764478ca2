"""The native ops under test."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from eagle_graphs.native import DOMAIN, library_path


def library() -> Path:
    """The installed library, or the one that $EAGLE_NATIVE_LIBRARY names."""
    if given := os.environ.get("EAGLE_NATIVE_LIBRARY"):
        return Path(given)
    path = library_path()
    assert path is not None, "the native ops are not built: install the package again, with a C++ compiler (g++)"
    return path


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Libraries registered inside run the kernels of `name`, or, where it is empty, of the best."""
    before = os.environ.get("EAGLE_CPU_ISA")
    os.environ["EAGLE_CPU_ISA"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["EAGLE_CPU_ISA"]
        else:
            os.environ["EAGLE_CPU_ISA"] = before


def session_options(threads: int = 1) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.enable_cpu_mem_arena = False  # each buffer an allocation of its own, whose ends a sanitizer sees
    options.register_custom_ops_library(str(library()))
    return options


def offered_instruction_sets() -> list[str]:
    """Those of this CPU, as the library names them."""
    with instruction_set("?"), pytest.raises(Exception, match=r"this CPU offers") as refused:
        session_options()
    found = re.search(r"this CPU offers ([\w, ]+):", str(refused.value))
    assert found
    return found[1].split(", ")


def session_of_one_op(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    elements: Mapping[str, int],
    attributes: Mapping[str, object],
    *,
    threads: int = 1,
    isa: str = "",
) -> ort.InferenceSession:
    """A graph of the one op. An empty name among `inputs` is an input left out; `elements` has the others' types."""
    node = helper.make_node(name, inputs, outputs, domain=DOMAIN, **attributes)
    graph = helper.make_graph(
        [node],
        name,
        [helper.make_tensor_value_info(port, elements.get(port, TensorProto.FLOAT), None) for port in inputs if port],
        [helper.make_tensor_value_info(port, elements.get(port, TensorProto.FLOAT), None) for port in outputs],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    with instruction_set(isa):
        options = session_options(threads)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
