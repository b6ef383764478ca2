"""Options of eagle-export for GPUs that do not belong together, each refused in one line before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import assert_refused, eagle_export

RTX = ("--backend", "tensorrt-rtx")
REFUSED = {
    "a CPU's precision": ((*RTX, "--precision", "fp32"), "tensorrt-rtx takes fp16, bf16, fp8, int8, int4"),
    "a GPU's precision": (("--precision", "bf16"), "onnxruntime takes fp32, int8, int8-weights, int4, fp8"),
    "a GPU without a backend": (("--gpu", "sm89"), "are for --backend tensorrt-rtx and tensorrt: leave them out"),
    "a level without a backend": (("--builder-level", "0"), "are for --backend tensorrt-rtx and tensorrt"),
    "a CPU's kernels": ((*RTX, "--kernels", "native"), "are for --backend onnxruntime: leave them out"),
    "the plugin": ((*RTX, "--attention", "plugin"), "whose library takes no plugins"),
    "no such GPU": ((*RTX, "--gpu", "sm90"), "--gpu names 'sm90'; TensorRT-RTX builds for sm75, sm80, sm86"),
    "a GPU without such numbers": ((*RTX, "--precision", "fp8", "--gpu", "sm86"), "fp8 does not run on sm86"),
    "no such level": ((*RTX, "--builder-level", "9"), "--builder-level is 9; expected 0"),
    "weights nowhere": ((*RTX, "--strip-weights"), "add --portable"),
    "scales of nothing": ((*RTX, "--calibration-data", "x.jsonl"), "found fp16, which measures nothing on prompts"),
    "a calibrator of nothing": ((*RTX, "--calibrator", "entropy"), "--calibrator is for --precision fp8; found fp16"),
    "two kinds of scales": (
        (*RTX, "--precision", "int8", "--head-precision", "fp8"),
        "int8 for the target and fp8 for the head do not go together",
    ),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_options_that_do_not_belong_together(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    assert_refused(eagle_export("--model", "m", "--draft", "d", "--out", tmp_path / "out", *options), words)
    assert list(tmp_path.iterdir()) == []
