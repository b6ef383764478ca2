"""Static scales for 8-bit floats: from rows, and from the file of an earlier export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle_calibration.observe import ObservedRows
from eagle_calibration.scales import Calibrator, find_scales, scales_from_file
from eagle_graphs import EagleError
from eagle_graphs.lowering.float8 import LARGEST
from eagle_graphs.lowering.linear import Linear, linears
from tests.graphs.small_graphs import model, weights

CALIBRATORS: tuple[Calibrator, ...] = ("minmax", "percentile", "entropy")


@pytest.fixture(scope="module")
def layers() -> list[Linear]:
    """Two that read the same rows, and one."""
    graph = model(
        "agraph (float[R, 64] x, float[R, 32] z) => (float[R, 16] a, float[R, 16] b, float[R, 16] c)"
        "{a = MatMul(x, u) b = MatMul(x, v) c = MatMul(z, w)}",
        u=weights(64, 16),
        v=weights(64, 16),
        w=weights(32, 16),
    )
    found = linears(graph.graph)
    for layer, name in zip(found, ("first", "second", "third"), strict=True):
        layer.nodes[0].name = name
    return found


def observed(**rows: np.ndarray) -> ObservedRows:
    """Each in two calls."""
    found = ObservedRows()
    for name, array in rows.items():
        for half in np.array_split(array, 2):
            found.add(name, torch.from_numpy(half)[None])
    return found


def limits(layers: list[Linear], calibrator: Calibrator, **rows: np.ndarray) -> dict[str, float]:
    """The largest magnitude that each scale leaves in range."""
    return {name: LARGEST * scale for name, scale in find_scales(layers, observed(**rows), calibrator).known().items()}


@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_even_numbers_keep_their_whole_range(layers: list[Linear], calibrator: Calibrator) -> None:
    rows = np.random.default_rng(0).uniform(-3, 3, (4000, 64)).astype(np.float32)
    found = limits(layers, calibrator, first=rows)
    assert found.keys() == {"first", "second"}  # the third was never seen
    assert found["first"] == found["second"] == pytest.approx(3, rel=0.01)


def test_the_calibrators_differ_in_what_they_cut_off(layers: list[Linear]) -> None:
    rows = np.random.default_rng(0).standard_normal((200, 64)).astype(np.float32)
    rows[17, :2] = -100, 50
    found = {calibrator: limits(layers, calibrator, first=rows)["first"] for calibrator in CALIBRATORS}
    assert found["minmax"] == pytest.approx(100)
    assert 50 < found["percentile"] < 100
    assert found["entropy"] < 10


def test_the_largest_number_counts_even_in_a_row_that_is_not_kept(layers: list[Linear]) -> None:
    rows = np.ones((4000, 64), np.float32)
    for row in range(17, 4000, 1000):
        rows[row, 5] = row
    assert limits(layers, "minmax", first=rows)["first"] == pytest.approx(3017)


@pytest.mark.parametrize("calibrator", CALIBRATORS)
def test_rows_of_zeros_have_a_scale(layers: list[Linear], calibrator: Calibrator) -> None:
    (scale,) = set(find_scales(layers, observed(first=np.zeros((8, 64), np.float32)), calibrator).known().values())
    assert np.float32(scale) > 0


def test_nothing_is_printed(layers: list[Linear], capsys: pytest.CaptureFixture[str]) -> None:
    limits(layers, "entropy", first=weights(300, 64))
    assert capsys.readouterr().out == ""


def test_a_file_gives_back_what_was_written(layers: list[Linear], tmp_path: Path) -> None:
    scales = find_scales(layers, observed(first=weights(300, 64)), "percentile")
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"target": scales.to_dict()}))
    assert scales_from_file(path) == {"target": scales}


def scales_as_json(**changes: object) -> str:
    layer = {"name": "a", "inputs": 2, "outputs": 2, "scale": 0.5}
    return json.dumps({"target": {"calibrator": "minmax", "layers": [layer]} | changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"target": []}',
        scales_as_json(calibrator="largest"),
        scales_as_json(layers=[{"name": "a"}]),
        json.dumps({"target": {"layers": []}}),
    ],
)
def test_files_that_hold_no_scales(tmp_path: Path, text: str) -> None:
    path = tmp_path / "scales.json"
    path.write_text(text)
    with pytest.raises(EagleError, match="is no calibration of fp8"):
        scales_from_file(path)
