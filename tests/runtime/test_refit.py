"""The names by which weights are put into an engine, in TensorRT-RTX's own bindings: to call them takes a GPU."""

from __future__ import annotations

import pytest
import tensorrt_rtx as trt


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        ("ICudaEngine", ("refittable",)),
        ("Refitter", ("get_missing_weights", "refit_cuda_engine")),
        ("OnnxParserRefitter", ("refit_from_file", "num_errors", "get_error")),
        ("ParserError", ("desc",)),
    ],
)
def test_the_library_has_the_names(owner: str, names: tuple[str, ...]) -> None:
    assert set(names) <= set(dir(getattr(trt, owner)))


def test_refitters_are_made_of_an_engine_and_of_a_refitter() -> None:
    assert "engine: tensorrt_rtx" in (trt.Refitter.__init__.__doc__ or "")
    assert "refitter: tensorrt_rtx" in (trt.OnnxParserRefitter.__init__.__doc__ or "")
