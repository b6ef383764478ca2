"""What users get wrong, in options of eagle-export: status 2, one clear line, nothing left on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.commands import assert_refused, assert_usage, eagle_export
from tests.e2e.exports import export


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        ("0", "a profile of 0 nodes is out of range: use 2 to 128"),
        ("1", "a profile of 1 nodes is out of range"),
        ("-4", "a profile of -4 nodes is out of range"),
        ("129", "a profile of 129 nodes is out of range"),
        ("16,8,4", "must rise and differ; found '16,8,4': write 4,8,16"),
        ("4,4,8", "must rise and differ; found '4,4,8': write 4,8"),
        ("4,eight", "separated by commas, as in 4,8,16; found '4,eight'"),
        ("4.5", "found '4.5'"),
        ("4,,8", "found '4,,8'"),
        ("", "found ''"),
    ],
)
def test_profiles_that_cannot_be(tiny_target: Path, tiny_head: Path, out: Path, profiles: str, words: str) -> None:
    assert_refused(export(tiny_target, tiny_head, out, "--profiles", profiles), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--capacity", 0], "--capacity is 0; this model takes 1 to 512 positions"),
        (["--capacity", -1], "--capacity is -1"),
        (["--capacity", 513], "--capacity is 513"),
        (["--prefill-chunk", 0], "--prefill-chunk is 0; expected 1 to the capacity, 512"),
        (["--capacity", 64, "--prefill-chunk", 65], "--prefill-chunk is 65; expected 1 to the capacity, 64"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(tiny_target: Path, tiny_head: Path, out: Path, options: list[Any], words: str) -> None:
    assert_refused(export(tiny_target, tiny_head, out, *options), words)


def int8(*more: str) -> tuple[str, ...]:
    return ("--precision", "int8", *more)


def fp8(*more: str) -> tuple[str, ...]:
    return ("--precision", "fp8", *more)


STOCK = ("--kernels", "stock")
NOTHING_MEASURED = ", which measures nothing on prompts: leave them out"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--scales", "x"), "found --precision fp32" + NOTHING_MEASURED),
        (("--precision", "int4", "--calibration-data", "x"), "found --precision int4" + NOTHING_MEASURED),
        (("--precision", "int8-weights", "--scales", "x"), "found --precision int8-weights" + NOTHING_MEASURED),
        (int8(*STOCK, "--scales", "x"), "found --precision int8 --kernels stock" + NOTHING_MEASURED),
        (int8("--scales", "x", "--calibration-data", "x"), "leave the one or the other out"),
        (fp8("--scales", "x", "--calibrator", "minmax"), "leave the one or the other out"),
        (int8("--calibrator", "minmax"), "--calibrator is for --precision fp8; found --precision int8: leave it out"),
        (fp8("--head-precision", "int8"), "found --precision fp8 --head-precision int8: choose one of them"),
        (fp8("--allow-inexact"), "is for --precision int8, int8-weights and int4; found --precision fp8: leave it out"),
        (("--allow-inexact",), "found --precision fp32: leave it out"),
        (int8(*STOCK), "accept such text with --kernels stock --allow-inexact"),
    ],
    ids=str,
)
def test_options_of_precisions_that_do_not_belong_together(
    tiny_target: Path, tiny_head: Path, out: Path, options: tuple[str, ...], words: str
) -> None:
    assert_refused(export(tiny_target, tiny_head, out, *options), words)


@pytest.mark.parametrize(
    "option",
    [
        ("--backend", "tflite"),
        ("--precision", "fp4"),
        ("--calibrator", "mean"),
        ("--capacity", "many"),
        ("--quantize", "int8"),
    ],
    ids=" ".join,
)
def test_options_that_the_parser_refuses(
    tiny_target: Path, tiny_head: Path, out: Path, option: tuple[str, str]
) -> None:
    assert_usage(export(tiny_target, tiny_head, out, *option), option[0])


def test_a_missing_option(tiny_target: Path, out: Path) -> None:
    assert_usage(eagle_export("--model", tiny_target, "--out", out), "--draft")


SIZES = ("--capacity", "160", "--prefill-chunk", "16")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (int8("--scales", "nowhere.json"), "--scales nowhere.json is no calibration of int8"),
        (fp8("--scales", "nowhere.json"), "--scales nowhere.json is no calibration of fp8"),
        (int8("--calibration-data", "nowhere.jsonl"), "cannot read the prompts from nowhere.jsonl"),
    ],
    ids=str,
)
def test_files_of_a_calibration_that_are_not_there(
    target: Path, tiny_head: Path, tmp_path: Path, more: tuple[str, ...], words: str
) -> None:
    outcome = eagle_export(
        "--model", target, "--draft", tiny_head, "--out", tmp_path / "bundle", "--accept-probe", *SIZES, *more
    )
    assert outcome.status == 2
    assert words in outcome.err.splitlines()[-1]
    assert not (tmp_path / "bundle").exists()


def test_scales_of_another_model_are_refused(
    target: Path, tiny_head: Path, tiny_int8_bundle: Path, tmp_path: Path
) -> None:
    text = (tiny_int8_bundle / "calibration.json").read_text().replace("layers.1.", "layers.7.")
    (tmp_path / "scales.json").write_text(text)
    more = ("--accept-probe", "--precision", "int8", "--scales", tmp_path / "scales.json")
    outcome = eagle_export("--model", target, "--draft", tiny_head, "--out", tmp_path / "bundle", *SIZES, *more)
    assert outcome.status == 2
    assert "is of another model: its target has ('model.model.layers.7." in outcome.err.splitlines()[-1]
