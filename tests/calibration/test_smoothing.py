"""Static INT8 scales with SmoothQuant's factors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from eagle_calibration.observe import ObservedRows
from eagle_calibration.smoothing import find_smoothing, smoothing_from_file
from eagle_graphs import EagleError
from tests.calibration.test_plan import layer
from tests.seeded import RANDOM


def found_for(rows: np.ndarray, matrix: np.ndarray) -> tuple[float, np.ndarray]:
    observed = ObservedRows()
    observed.add("layer", torch.from_numpy(rows))
    x = ir.val("x", ir.DataType.FLOAT, ["R", rows.shape[1]])
    smoothing = find_smoothing([layer("layer", x, matrix)], observed)
    how = smoothing.known()["layer"]
    return how.scale, how.smoothing


def test_inputs_and_their_weights_become_alike() -> None:
    rows = RANDOM.standard_normal((400, 12)).astype(np.float32)
    rows[:, 3] *= 100
    matrix = RANDOM.standard_normal((8, 12)).astype(np.float32)
    scale, smoothing = found_for(rows, matrix)
    largest, heaviest = np.abs(rows).max(axis=0), np.abs(matrix).max(axis=0)
    np.testing.assert_allclose(largest / smoothing, heaviest * smoothing, rtol=1e-4)
    assert scale == pytest.approx((largest / smoothing).max() / 127, rel=1e-5)


def test_it_sees_every_row_however_many_are_kept() -> None:
    rows = np.ones((3000, 4), np.float32)
    rows[1501, 2] = 64
    scale, smoothing = found_for(rows, np.ones((2, 4), np.float32))
    assert smoothing.tolist() == [1, 1, 8, 1]
    assert scale == pytest.approx(8 / 127)


def test_inputs_that_are_never_used_keep_their_size() -> None:
    rows, matrix = np.ones((3, 3), np.float32), np.ones((2, 3), np.float32)
    rows[:, 0], matrix[:, 1] = 0, 0
    assert found_for(rows, matrix)[1].tolist() == [1, 1, 1]


def test_a_layer_that_never_ran_has_no_scale() -> None:
    x = ir.val("x", ir.DataType.FLOAT, ["R", 4])
    smoothing = find_smoothing([layer("unseen", x, np.ones((2, 4), np.float32))], ObservedRows())
    assert smoothing.known() == {}
    assert smoothing.layers[0].scale is None


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    x = ir.val("x", ir.DataType.FLOAT, ["R", 4])
    observed = ObservedRows()
    observed.add("a", torch.rand(5, 4))
    layers = [layer(name, x, np.ones((2, 4), np.float32)) for name in ("a", "unseen")]
    found = {"target": find_smoothing(layers, observed)}
    path = tmp_path / "gpu-calibration.json"
    path.write_text(json.dumps({name: part.to_dict() for name, part in found.items()}))
    assert smoothing_from_file(path) == found


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"target": {"layers": [{"name": "a"}]}}',
        '{"target": {"layers": [{"name": "a", "inputs": 2, "outputs": 1, "scale": 1.0, "smoothing": [1.0]}]}}',
        '{"target": {"layers": [{"name": "a", "inputs": 1, "outputs": 1, "scale": 1.0, "smoothing": [0.0]}]}}',
    ],
)
def test_what_holds_no_smoothing_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(EagleError, match=r"other.json is no calibration of int8 for TensorRT"):
        smoothing_from_file(path)
