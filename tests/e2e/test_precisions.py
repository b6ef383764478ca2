"""Bundles quantized with ONNX Runtime's own ops: every profile against plain decoding, within the class they state."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from eagle_graphs.manifest import Engine
from eagle_runtime import Session
from eagle_runtime.bundle import open_bundle
from eagle_runtime.compare import first_difference
from tests.commands import eagle_export
from tests.models import write_tiny_head, write_tiny_target

PROFILES = ("4", "8", "16")
SIZES = ("--capacity", 160, "--prefill-chunk", 16, "--accept-probe")
INEXACT = "--allow-inexact"
EXPORTS = {
    "int4": ("--precision", "int4", INEXACT),  # bitwise with the native kernels and ONNX Runtime's for AVX-512
    "int8-weights": ("--precision", "int8-weights", "--head-precision", "int8", INEXACT),  # likewise
    "int8": ("--precision", "int8", "--kernels", "stock", INEXACT),
    "fp8": ("--precision", "fp8", "--calibrator", "percentile", "--kernels", "native"),
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
    assert report["head_precision"] == ("int8" if bundle.name == "int8-weights" else bundle.name)
    assert report["quality"]["divergence"] > 0
    calibrated = {"fp8": {"target", "draft"}, "int8-weights": {"draft"}}.get(bundle.name)
    path = bundle / "calibration.json"
    assert (json.loads(path.read_text()).keys() if path.exists() else None) == calibrated
    for engine in engines(bundle):
        assert report["exactness"][engine.kernels]["kind"] == engine.exactness.kind
        assert report["agreement"][engine.kernels]["prompts"] > 0


def test_every_profile_says_what_plain_decoding_says_within_its_class(bundle: Path) -> None:
    for engine in engines(bundle):
        random = np.random.default_rng(11)
        with Session.open(bundle, profile="8", kernels=engine.kernels) as session:
            for length in random.integers(1, 60, 4):
                prompt = random.integers(2, 300, length).tolist()
                found = {}
                for profile in ("plain", *PROFILES):
                    session.reset()
                    found[profile] = session.generate(token_ids=prompt, profile=profile, max_new_tokens=32).token_ids
                for profile in PROFILES:
                    difference = first_difference(session, prompt, found[profile], found["plain"])
                    if engine.exactness.kind == "bitwise":
                        assert difference is None
                    elif difference is not None:
                        assert difference.gap <= engine.exactness.logit_gap, str(difference)


@pytest.mark.parametrize("bundle", ["int4"], indirect=True)
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
