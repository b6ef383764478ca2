"""The runtime stays light: importing it brings in nothing that only the export needs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "safetensors",
    "huggingface_hub",
    "eagle_exporter",
    "eagle_calibration",
}


@pytest.mark.parametrize("module", ["eagle_runtime", "eagle_runtime.cli", "eagle_runtime.measure"])
def test_nothing_heavy_is_imported(module: str) -> None:
    code = f"import json, sys, {module}; print(json.dumps([name.split('.')[0] for name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded = set(json.loads(done.stdout))
    assert "eagle_runtime" in loaded
    assert not loaded & HEAVY
