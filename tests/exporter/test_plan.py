"""eagle-export --plan: sizes from the configs alone, and the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.plan import sizes, target_size
from tests.commands import assert_refused, assert_usage, eagle_export
from tests.heads import TinyHead
from tests.models import HIDDEN, VOCAB, write_tiny_model

MACHINE = ("--plan", "--bandwidth", 100, "--flops", "fp16=10,fp32=1", "--precision", "fp16")


@pytest.fixture
def pair(tiny_target: Path, tiny_head: Path, tmp_path: Path) -> tuple[object, ...]:
    """Options that name a target and a head of which there is nothing but the config."""
    for name, source in (("target", tiny_target), ("head", tiny_head)):
        (tmp_path / name).mkdir()
        shutil.copy(source / "config.json", tmp_path / name)
    return ("--model", tmp_path / "target", "--draft", tmp_path / "head")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["qwen2", "mixtral"])
def test_a_target_is_as_large_as_its_parameters(tmp_path: Path, model_type: str, tied: bool) -> None:
    experts = {"num_local_experts": 4} if model_type == "mixtral" else {}
    model = write_tiny_model(tmp_path, model_type, layers=2, tie_word_embeddings=tied, **experts)
    size = target_size(AutoConfig.from_pretrained(tmp_path))
    assert size.lm_head == VOCAB * HIDDEN
    assert size.embedding == (0 if tied else VOCAB * HIDDEN)
    assert size.linear + size.lm_head + size.embedding == sum(p.numel() for p in model.parameters())
    assert (size.kv.layers, size.kv.kv_heads, size.attention_heads) == (2, 2, 4)


@pytest.mark.parametrize(
    "head",
    [
        TinyHead(family="safeailab", kind="eagle1"),
        TinyHead(family="safeailab"),
        TinyHead(family="specforge", hidden=48),
        TinyHead(family="speculators", layers=2),
        TinyHead(family="modelopt", draft_vocab=VOCAB, head_dim=24),
        TinyHead(family="angelslim"),
    ],
    ids=lambda head: f"{head.family}-{head.kind}",
)
def test_a_head_is_as_large_as_its_matrices(head: TinyHead, tiny_target: Path, tmp_path: Path) -> None:
    config = find_checkpoint(str(head.write(tmp_path / "head")), what="head").config()
    target = AutoConfig.from_pretrained(tiny_target)
    with_head, size = sizes(target, config)
    matrices = {name: tensor.numel() for name, tensor in head.tensors().items() if tensor.ndim == 2}
    fused = matrices.pop("fc.weight") if head.kind == "eagle3" else 0
    matrices.pop("lm_head.weight", None)
    assert size.linear == sum(matrices.values())
    assert size.lm_head == head.hidden * (VOCAB if head.kind == "eagle1" else head.draft_vocab)
    assert (size.kv.layers, size.kv.kv_heads, size.kv.head_dim) == (head.layers, 2, head.head_dim)
    assert with_head.linear == target_size(target).linear + fused


def test_configs_are_all_that_a_plan_needs(pair: tuple[object, ...], tmp_path: Path) -> None:
    outcome = eagle_export(*pair, *MACHINE, "--memory", 1, "--accepted-length", "1.7,2,2.1", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    plan = json.loads(outcome.out)
    weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pair[1])).parameters())
    assert plan["weight_bytes"]["target"] == 2 * (weights + 3 * HIDDEN * HIDDEN)
    assert plan["profiles"].keys() == {"4", "8", "16"}
    assert [entry["accepted_length"] for entry in plan["profiles"].values()] == [1.7, 2.0, 2.1]
    assert [len(entry["draft_ms"]) for entry in plan["profiles"].values()] == [2, 3, 4]
    assert plan["plain_ms"] > 0
    assert plan["capacity_tokens"] > 1000
    assert {path.name for path in tmp_path.iterdir()} == {"target", "head"}, "a plan writes nothing"


def test_a_plan_for_people(pair: tuple[object, ...]) -> None:
    options = ("--plan", "--machine", "l4", "--precision", "fp8", "--acceptance", "0.6,0.2,0.1", "--profiles", "8,30")
    outcome = eagle_export(*pair, *options)
    assert (outcome.status, outcome.err) == (0, "")
    for words in ("least milliseconds on L4", "break-even", "best", "tokens of cache fit", "floors"):
        assert words in " ".join(outcome.out.split())


def test_estimates_are_slower_than_floors(pair: tuple[object, ...]) -> None:
    floor, estimate = (
        json.loads(eagle_export(*pair, *MACHINE, *more, "--json").out)["plain_ms"]
        for more in ((), ("--efficiency", 0.5, "--overhead-us", 10))
    )
    assert estimate == pytest.approx(2 * floor + 0.010)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--plan"], ["--plan needs --machine (t4, ", "--bandwidth and --flops"]),
        (["--plan", "--machine", "gtx"], ["--machine is 'gtx'", "known are t4, a100"]),
        (["--plan", "--machine", "a100", "--precision", "fp8"], ["A100 has no fp8 arithmetic", "--flops"]),
        (["--plan", "--bandwidth", 1, "--flops", "fast"], ["--flops is 'fast'", "fp16=121"]),
        (["--plan", "--bandwidth", 1, "--flops", "fp12=1"], ["rate for 'fp12'"]),
        (["--plan", "--bandwidth", 0, "--flops", "fp32=1"], ["bandwidth of this machine is 0"]),
        ([*MACHINE, "--efficiency", 2], ["expected above 0, at most 1"]),
        ([*MACHINE, "--accepted-length", "2,3"], ["2 values for 3 profiles"]),
        ([*MACHINE, "--accepted-length", "0.5"], ["--accepted-length is 0.5; expected 1 or more"]),
        ([*MACHINE, "--accepted-length", "two"], ["numbers separated by commas"]),
        ([*MACHINE, "--acceptance", "0.1,0.2"], ["--acceptance is 0.1,0.2; expected shares that fall"]),
        ([*MACHINE, "--acceptance", "0.2", "--accepted-length", "2"], ["leave one out"]),
        ([*MACHINE, "--context", -1], ["--context is -1"]),
        ([*MACHINE, "--memory", 1e-6], ["and the weights take"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_mistakes_are_told_in_one_line(pair: tuple[object, ...], options: list[object], words: list[str]) -> None:
    assert_refused(eagle_export(*pair, *options), *words)


def test_a_plan_needs_a_model(pair: tuple[object, ...]) -> None:
    assert_usage(eagle_export(*pair[2:], *MACHINE), "--model")
