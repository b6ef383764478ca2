"""The Triton kernels compiled for GPUs, on a machine that needs none. A process of its own: this one interprets."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CAPABILITIES = [80, 89, 90, 120]
SHARED_MEMORY = 48 * 1024
"""Bytes that a launch has without asking for more."""

COMPILE = """
import json
from dataclasses import asdict
from eagle_graphs.plugin.compile import TARGETS, compile_attend, report
from eagle_graphs.plugin.launch import Attention

def told(kernel):
    return asdict(kernel) | {"cubin": kernel.cubin[:4].decode("latin-1")}

heaviest = Attention(query_heads=32, kv_heads=8, head_dim=128, scale=0.09, softcap=30.0, sliding_window=1024)
lines = [
    told(line.kernel) | {"capability": line.capability, "call": line.call} for line in report({"": heaviest}, rows=[16])
]
whole = compile_attend(heaviest, 80, block_m=16, split_rows=4096, split=False, sinks=True, dtype="bf16")
print(json.dumps({"targets": TARGETS, "lines": lines, "whole": told(whole)}))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def parameters(ptx: str) -> list[str]:
    """p for each pointer that the kernel takes, i for each integer, in order."""
    listed = re.search(r"\.visible \.entry \w+\((.*?)\)", ptx, re.DOTALL)
    assert listed
    return ["p" if ".u64" in line else "i" for line in listed[1].strip().splitlines()]


def test_every_target_has_every_kernel(compiled: dict[str, Any]) -> None:
    assert compiled["targets"] == CAPABILITIES
    seen = {(line["capability"], line["call"]) for line in compiled["lines"]}
    calls = ("attend, 16 rows", "combine, 8 splits", "commit, 16 rows")
    assert seen == {(capability, call) for capability in CAPABILITIES for call in calls}


def test_no_register_is_spilled_and_shared_memory_suffices(compiled: dict[str, Any]) -> None:
    for line in compiled["lines"]:
        assert line["spilled"] == 0, f"{line['call']} for {line['capability']} spills {line['spilled']} bytes"
        assert 0 < line["registers"] <= 255
        assert line["shared"] <= SHARED_MEMORY


def test_the_code_is_for_its_target_and_names_no_file(compiled: dict[str, Any]) -> None:
    for line in compiled["lines"]:
        assert f".target sm_{line['capability']}" in line["ptx"]
        assert f".entry {line['name']}(" in line["ptx"]
        assert str(Path.cwd()) not in line["ptx"]
        assert ".file" not in line["ptx"]
        assert line["cubin"] == "\x7fELF"


def test_parameters_are_the_kernels_own(compiled: dict[str, Any]) -> None:
    """Triton's two of scratch memory are gone: inputs, integers, outputs are what is left."""
    expected = {"attend": "pppppppp iii pppp", "combine": "ppp ii p", "commit_path": "ppp iii p"}
    for line in compiled["lines"]:
        assert "".join(parameters(line["ptx"])) == expected[line["name"]].replace(" ", "")
    assert "".join(parameters(compiled["whole"]["ptx"])) == "ppppppppp" + "iii" + "ppp"


def test_a_call_without_splits_in_bfloat16(compiled: dict[str, Any]) -> None:
    assert compiled["whole"]["spilled"] == 0
    assert ".bf16" in compiled["whole"]["ptx"]


def test_a_path_is_read_before_it_is_written(compiled: dict[str, Any]) -> None:
    """All threads of a program have their rows before the first of them writes."""
    for line in compiled["lines"]:
        if line["name"] == "commit_path":
            order = re.findall(r"ld\.global|bar\.sync|st\.global", line["ptx"])
            read, barrier = len(order) - order[::-1].index("ld.global"), order.index("bar.sync")
            assert read <= barrier < order.index("st.global")
