"""Bundles quantized with ONNX Runtime's own ops: every profile against plain decoding, within the class they state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from eagle_calibration.scales import scales_from_file
from eagle_graphs import EagleError
from eagle_graphs.manifest import Engine, manifest_from_json
from eagle_runtime import Session
from eagle_runtime.bundle import open_bundle
from eagle_runtime.compare import first_difference
from tests.commands import eagle_export
from tests.models import write_tiny_head, write_tiny_target

PROFILES = ("4", "8", "16")
SIZES = ("--capacity", 160, "--prefill-chunk", 16, "--accept-probe")
EXPORTS = {
    "int4": ("--precision", "int4"),
    "int8-weights": ("--precision", "int8-weights"),
    "int8": ("--precision", "int8", "--kernels", "stock", "--allow-inexact"),
    "fp8": ("--precision", "fp8", "--calibrator", "percentile"),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny target that rounding to 4 bits does not throw off, and a head for it."""
    directory = tmp_path_factory.mktemp("models")
    write_tiny_target(directory / "target", initializer_range=0.1)
    write_tiny_head(directory / "head")
    return directory / "target", directory / "head"


def export(checkpoints: tuple[Path, Path], out: Path, *options: object) -> Path:
    target, head = checkpoints
    outcome = eagle_export("--model", target, "--draft", head, "--out", out, *SIZES, *options)
    assert outcome.status == 0, outcome.err
    return out


@pytest.fixture(scope="module", params=EXPORTS)
def bundle(
    request: pytest.FixtureRequest, checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Of each precision, one after the other."""
    return export(checkpoints, tmp_path_factory.mktemp("bundles") / request.param, *EXPORTS[request.param])


def engines(bundle: Path) -> tuple[Engine, ...]:
    return open_bundle(bundle).manifest.engines


def test_the_report_says_what_was_measured(bundle: Path) -> None:
    report = json.loads((bundle / "export-report.json").read_text())
    assert {engine.precision for engine in engines(bundle)} == {report["precision"]} == {bundle.name}
    assert report["quality"]["divergence"] > 0
    assert (bundle / "calibration.json").exists() == (bundle.name == "fp8")
    for engine in engines(bundle):
        assert report["exactness"][engine.kernels]["kind"] == engine.exactness.kind
        assert report["agreement"][engine.kernels]["prompts"] == 4


def test_every_profile_says_what_plain_decoding_says_within_its_class(bundle: Path) -> None:
    for engine in engines(bundle):
        random = np.random.default_rng(11)
        with Session.open(bundle, profile="8", kernels=engine.kernels) as session:
            for length in random.integers(1, 60, 8):
                prompt = random.integers(2, 300, length).tolist()
                found = {}
                for profile in ("plain", *PROFILES):
                    session.reset()
                    found[profile] = session.generate(token_ids=prompt, profile=profile, max_new_tokens=40).token_ids
                for profile in PROFILES:
                    difference = first_difference(session, prompt, found[profile], found["plain"])
                    if engine.exactness.kind == "bitwise":
                        assert difference is None
                    elif difference is not None:
                        assert difference.gap <= engine.exactness.logit_gap, str(difference)


@pytest.mark.parametrize("bundle", ["int4", "int8-weights"], indirect=True)
def test_the_tied_embedding_stands_in_the_file_once(bundle: Path) -> None:
    for engine in engines(bundle):
        places = {}
        for path in (engine.target, engine.draft):
            for node in ir.load(bundle / path).graph:
                if node.op_type == "GatherBlockQuantized" or node.name in ("model.lm_head", "lm_head"):
                    tensor = node.inputs[0 if node.op_type == "GatherBlockQuantized" else 1].const_value
                    assert isinstance(tensor, ir.ExternalTensor)
                    places[path, node.op_type] = tensor.offset
        embedded, product = (places[engine.target, kind] for kind in ("GatherBlockQuantized", "MatMulNBits"))
        assert (
            embedded == product == places[engine.draft, "GatherBlockQuantized"] != places[engine.draft, "MatMulNBits"]
        )


@pytest.mark.parametrize("bundle", ["fp8"], indirect=True)
def test_a_scales_file_of_an_earlier_export_gives_the_same_weights(
    bundle: Path, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    scales = bundle / "calibration.json"
    again = export(checkpoints, tmp_path / "again", "--precision", "fp8", "--scales", scales)
    first, second = (manifest_from_json((path / "manifest.json").read_text()) for path in (bundle, again))
    for name in ("onnxruntime-cpu-fp8/weights.bin", "onnxruntime-cpu-fp8/target-native.onnx", "calibration.json"):
        assert first.files[name] == second.files[name]


def test_the_scales_of_int8_are_not_those_of_fp8(tiny_int8_bundle: Path) -> None:
    with pytest.raises(EagleError, match="is no calibration of fp8"):
        scales_from_file(tiny_int8_bundle / "calibration.json")
