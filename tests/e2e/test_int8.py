"""An INT8 bundle's answers are its plain decoding's, token for token, and its logits bit for bit, without exception."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eagle_graphs.manifest import manifest_from_json
from eagle_runtime import Session
from eagle_runtime.bundle import open_bundle
from tests.commands import eagle_export
from tests.conftest import export
from tests.exporter.test_targets import ARCHITECTURES
from tests.models import write_tiny_head, write_tiny_model

PROFILES = ("4", "8", "16")


def answers(session: Session, prompt: list[int], tokens: int, **options: float) -> dict[str, list[int]]:
    """What every profile and plain decoding say, from an empty cache each."""
    found = {}
    for profile in ("plain", *PROFILES):
        session.reset()
        answer = session.generate(token_ids=prompt, profile=profile, max_new_tokens=tokens, **options)  # type: ignore[arg-type]
        found[profile] = answer.token_ids
    return found


def random_prompts(count: int) -> Iterator[list[int]]:
    random = np.random.default_rng(11)
    for length in random.integers(1, 60, count):
        yield random.integers(2, 300, length).tolist()


def test_the_bundle_says_that_it_is_bitwise(tiny_int8_bundle: Path) -> None:
    manifest = open_bundle(tiny_int8_bundle).manifest
    (engine,) = manifest.engines
    assert (engine.kernels, engine.precision) == ("native", "int8")
    assert (engine.exactness.kind, engine.exactness.max_logit_difference) == ("bitwise", 0.0)
    report = json.loads((tiny_int8_bundle / "export-report.json").read_text())
    assert report["precision"] == "int8"
    assert 0 < max(entry["rms"] for entry in report["parity"]["native"] if entry["output"] == "logits") < 0.25


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_every_profile_of_a_tiny_model_says_what_plain_decoding_says(
    tiny_int8_bundle: Path, options: dict[str, float]
) -> None:
    with Session.open(tiny_int8_bundle, profile="8") as session:
        for prompt in random_prompts(8):
            found = answers(session, prompt, 40, **options)
            assert len(set(map(tuple, found.values()))) == 1, found


def test_bits_do_not_depend_on_threads_chunks_or_what_was_said_before(tiny_int8_bundle: Path) -> None:
    with (
        Session.open(tiny_int8_bundle, profile="plain", threads=1) as one,
        Session.open(tiny_int8_bundle, profile="8", threads=2) as two,
    ):
        for prompt in random_prompts(6):
            alone = one.logits(prompt)
            two.generate(token_ids=prompt[::-1] or [5], max_new_tokens=20)
            np.testing.assert_array_equal(two.logits(prompt).view(np.int32), alone.view(np.int32))


SIZES = ("--capacity", "160", "--prefill-chunk", "16", "--accept-probe", "--precision", "int8")


def write_tiny_pair(directory: Path, architecture: str) -> tuple[Path, Path]:
    write_tiny_model(directory / "target", architecture, layers=4, **ARCHITECTURES[architecture])
    write_tiny_head(directory / "head", own_embedding=True)
    return directory / "target", directory / "head"


@pytest.mark.parametrize("architecture", ["qwen2", "gemma3_text", "phi3"])
def test_other_architectures(architecture: str, tmp_path: Path) -> None:
    """Biases; norms behind the sublayers and a gate by GELU; fused projections."""
    export(*write_tiny_pair(tmp_path, architecture), tmp_path / "bundle", *SIZES)
    with Session.open(tmp_path / "bundle", profile="8") as session:
        assert session.engine.exactness.kind == "bitwise"
        for prompt in random_prompts(3):
            found = answers(session, prompt, 24)
            assert len(set(map(tuple, found.values()))) == 1, found


def test_a_mixture_of_experts_is_not_exact_and_must_be_asked_for(tmp_path: Path) -> None:
    """Its experts stay in float32, whose products round differently beside other rows."""
    target, head = write_tiny_pair(tmp_path, "mixtral")
    out = tmp_path / "bundle"
    refused = eagle_export("--model", target, "--draft", head, "--out", out, *SIZES)
    assert refused.status == 2
    assert refused.err.splitlines()[-1].startswith("error: in int8 this model's trees are not exact: ")
    assert not out.exists()
    export(target, head, out, *SIZES, "--allow-inexact")
    assert open_bundle(out).manifest.engines[0].exactness.kind in ("near-tie", "statistical")


def test_a_scales_file_of_an_earlier_export_gives_the_same_weights(
    tiny_int8_bundle: Path, tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    out, scales = tmp_path / "again", tiny_int8_bundle / "calibration.json"
    export(tiny_target, tiny_head, out, *SIZES, "--scales", str(scales))
    first, second = (manifest_from_json((path / "manifest.json").read_text()) for path in (tiny_int8_bundle, out))
    name = "onnxruntime-cpu-int8/weights.bin"
    assert first.files[name] == second.files[name]
    assert first.files["calibration.json"] == second.files["calibration.json"]


def test_scales_of_both_graphs_quantize_those_that_are_asked_for(
    tiny_int8_bundle: Path, tiny_target: Path, tiny_head: Path, tmp_path: Path
) -> None:
    more = ("--head-precision", "fp32", "--scales", str(tiny_int8_bundle / "calibration.json"))
    export(tiny_target, tiny_head, tmp_path / "bundle", *SIZES, *more)
    assert list(json.loads((tmp_path / "bundle" / "calibration.json").read_text())) == ["target"]


@pytest.mark.real_model
def test_every_profile_of_the_real_model_says_what_plain_decoding_says(
    request: pytest.FixtureRequest, demo_int8_bundle: Path, demo_prompts: list[list[dict[str, str]]]
) -> None:
    """All 24 prompts; greedy, and sampled with top-p and penalties."""
    tokens = 128 if request.config.getoption("--lossless-full") else 48
    sampled = {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    with Session.open(demo_int8_bundle, profile="8") as session:
        assert session.engine.exactness.kind == "bitwise"
        for seed, messages in enumerate(demo_prompts):
            prompt = session.encode(messages=messages)
            for options in ({}, {"seed": seed, **sampled}):
                found = answers(session, prompt, tokens, **options)
                assert len(set(map(tuple, found.values()))) == 1, (messages, options)
    assert seed == 23


@pytest.mark.real_model
def test_weights_stand_once_and_at_8_bits(demo_int8_bundle: Path) -> None:
    """The target has 134.5 million weights, the head 9.4 million beside them."""
    size = (demo_int8_bundle / "onnxruntime-cpu-int8" / "weights.bin").stat().st_size
    assert size < 1.1 * (134.5e6 + 9.4e6)
