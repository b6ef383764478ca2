"""The probe finds what no shape shows: wrong taps, a wrong rope base, another target's head, transposed weights.

On a tiny head that knows its target; and on the demo's own head and model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from eagle_calibration.prompts import load_prompts
from eagle_exporter import probe as probing
from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads import Overrides, TargetShape, load_head
from eagle_exporter.pipeline import head_module
from eagle_exporter.probe import ABOUT_ONE, Answer, Probe, ProbedConvention, read_answers, run_probe
from eagle_exporter.report import probe_table
from eagle_exporter.target import Target, load_target
from eagle_exporter.tokenizer import prompt_tokens
from eagle_graphs import EagleError
from tests.commands import assert_refused, eagle_export
from tests.conftest import DEMO_HEAD, demo_model
from tests.heads import TinyHead
from tests.models import VOCAB, write_tiny_target
from tests.overfit import calibration_answers, overfit_head

KNOWING = TinyHead(family="safeailab", draft_vocab=VOCAB)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, its answers to the calibration prompts, and a head that knows them."""

    model: Path
    target: Target
    answers: list[Answer]
    head: Path

    def probe(self, head: Path | None = None, **stated: object) -> Probe:
        """What the probe says where the user states these conventions."""
        checkpoint = find_checkpoint(str(head or self.head), what="head")
        loaded = load_head(checkpoint, self.target.config, Overrides(**stated))
        module = head_module(loaded, self.target, top_k=4)
        return run_probe(module, loaded.spec, TargetShape.of(self.target.config), self.answers)


@pytest.fixture(scope="module")
def pair(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tiny_target, tmp_path_factory.mktemp("knowing"), KNOWING)


def make_pair(model: Path, directory: Path, head: TinyHead) -> Pair:
    torch_model = LlamaForCausalLM.from_pretrained(model)
    overfit_head(directory, head, torch_model, calibration_answers(torch_model))
    target = load_target(find_checkpoint(str(model), what="target"))
    return Pair(model=model, target=target, answers=answers_of(target), head=directory)


def answers_of(target: Target) -> list[Answer]:
    prompts = prompt_tokens(target.tokenizer, load_prompts(), longest=400)
    return read_answers(target, prompts)


def edited(pair: Pair, directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(pair.head / "model.safetensors")
    edit(tensors)
    directory.mkdir()
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text((pair.head / "config.json").read_text())
    return directory


def test_the_right_conventions_pass(pair: Pair) -> None:
    probe = pair.probe()
    assert probe.problem() is None, probe.to_dict()
    assert probe.stated.length > 2
    assert [convention.name for convention in probe.conventions] == [
        "taps 2,3,3, rope theta 20000, positions from 0",
        "taps 1,2,2",
        "taps 3,4,4",
        "rope theta 10000",
        "positions from 1",
    ]
    assert probe.places == sum(len(answer.starts) for answer in pair.answers) > 100


@pytest.mark.parametrize("taps", [(1, 2, 2), (3, 4, 4)])
def test_taps_off_by_one_are_found(pair: Pair, taps: tuple[int, ...]) -> None:
    probe = pair.probe(taps=taps)
    assert probe.stated.length < pair.probe().stated.length - 0.5
    with pytest.raises(EagleError, match=r"the probe: .* with taps 2,3,3 .* set --taps 2,3,3, or keep it with --acc"):
        probe.check()


def test_a_rope_base_that_was_not_trained_with_is_found(tiny_target: Path, pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(EagleError, match=r"with rope theta 10000 .* set --rope-theta 10000"):
        pair.probe(rope_theta=1e9).check()


def test_a_shift_of_all_positions_changes_nothing_under_rotary_embeddings(pair: Pair) -> None:
    probe = pair.probe()
    gain, _ = probe.conventions[-1].gain_over(probe.stated)
    assert probe.conventions[-1].name == "positions from 1"
    assert abs(gain) < 0.01
    assert pair.probe(position_offset=1).problem() is None


def test_positions_off_by_one_between_extension_and_levels_are_found(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a shift of all positions cannot show: chains that start one place late."""
    right = pair.probe().stated.length
    forward = probing.nn.Module.__call__

    def late(module: torch.nn.Module, *inputs: torch.Tensor, **named: object) -> object:
        if type(module).__name__ == "Eagle3Head" and inputs[2].shape[1] < inputs[3].shape[2]:  # a level
            inputs = (*inputs[:2], inputs[2] + 3, *inputs[3:])
        return forward(module, *inputs, **named)

    monkeypatch.setattr(probing.nn.Module, "__call__", late)
    assert pair.probe().stated.length < right - 0.05


def test_another_target_s_head_is_found(pair: Pair, tmp_path: Path) -> None:
    model = tmp_path / "other"
    write_tiny_target(model, seed=9)
    other = load_target(find_checkpoint(str(model), what="target"))
    strange = Pair(model=model, target=other, answers=answers_of(other), head=pair.head)
    probe = strange.probe()
    assert probe.stated.length < ABOUT_ONE
    with pytest.raises(EagleError, match=r"drafts almost nothing that the target says .* another model's head"):
        probe.check()


@pytest.mark.parametrize("name", ["midlayer.self_attn.o_proj.weight", "lm_head.weight"])
def test_weights_whose_shape_hides_a_fault_are_found(pair: Pair, tmp_path: Path, name: str) -> None:
    """A square matrix transposed; rows of the LM head in another order."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        weight = tensors[name]
        tensors[name] = weight.T if weight.shape[0] == weight.shape[1] else weight.roll(1, dims=0)

    probe = pair.probe(edited(pair, tmp_path / "head", spoil))
    right = pair.probe().stated.length
    assert probe.stated.length < right - 0.3
    if name == "lm_head.weight":
        with pytest.raises(EagleError, match="drafts almost nothing"):
            probe.check()


def test_an_export_stops_and_can_be_told_not_to(pair: Pair, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sizes = ["--profiles", 4, "--capacity", 300, "--out", out]
    arguments = ["--model", pair.model, "--draft", pair.head, *sizes]
    stopped = eagle_export(*arguments, "--taps", "3,4,4")
    assert stopped.status == 2
    assert "set --taps 2,3,3" in " ".join(stopped.err.split())
    assert not out.exists()
    accepted = eagle_export(*arguments, "--taps", "3,4,4", "--accept-probe", "--json")
    assert accepted.status == 0, accepted.err
    report = json.loads((out / "export-report.json").read_text())
    assert report["taps"] == [3, 4, 4] == json.loads((out / "manifest.json").read_text())["head"]["taps"]
    assert report["probe"] == json.loads(accepted.out)["probe"]
    assert "set --taps 2,3,3" in report["probe"]["problem"]
    assert len(report["probe"]["conventions"]) >= 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--taps", "2,3"], "--taps names 2 hidden states; this head takes 3"),
        (["--taps", "2,3,7"], "expected indices of 0 to 6"),
        (["--taps", "a"], "--taps are layer numbers separated by commas"),
        (["--rope-theta", "0"], "--rope-theta is 0; expected a positive number"),
    ],
    ids=" ".join,
)
def test_conventions_that_cannot_be(
    tiny_target: Path, tiny_head: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    outcome = eagle_export("--model", tiny_target, "--draft", tiny_head, "--out", tmp_path / "out", *options)
    assert_refused(outcome, words)


# The rule


def convention(name: str, *expected: float, accepted: float = 0.0) -> ProbedConvention:
    """Expected lengths as given; accepted ones are those and `accepted`."""
    return ProbedConvention(
        name=name, option="--taps 1", accepted=tuple(length + accepted for length in expected), expected=expected
    )


def test_noise_does_not_stop_an_export_and_a_clear_gain_does() -> None:
    stated = convention("stated", 2.0, 2.2, 1.8, 2.1)
    noisy = convention("noisy", 2.6, 1.9, 2.3, 2.0)  # better on average, worse on half of the blocks
    small = convention("small", 2.02, 2.22, 1.82, 2.12)  # always better, by 2% of what is drafted
    wiser = convention("wiser", 2.2, 2.45, 1.98, 2.3, accepted=-0.3)  # likelier, but fewer guesses are right
    clear = convention("clear", 2.2, 2.45, 1.98, 2.3)
    assert not noisy.clearly_beats(stated)
    assert not small.clearly_beats(stated)
    assert not wiser.clearly_beats(stated)
    assert clear.clearly_beats(stated)
    assert Probe(conventions=(stated, noisy, small, wiser), places=100).problem() is None
    problem = Probe(conventions=(stated, noisy, clear), places=100).problem()
    assert problem is not None
    assert "with clear 2.23 tokens a round are accepted for 2.02: set --taps 1" in problem


def test_one_block_is_no_evidence_between_conventions() -> None:
    stated, other = convention("stated", 2.0), convention("other", 3.0)
    assert not other.clearly_beats(stated)
    probe = Probe(conventions=(stated, other), places=8)
    assert probe.problem() is None
    assert probe.to_dict()["conventions"][1]["standard_error"] is None


def test_without_an_answer_long_enough_nothing_is_said(pair: Pair) -> None:
    probe = replace(pair, answers=[]).probe()
    assert probe.places == 0
    probe.check()
    Console(quiet=True).print(probe_table(probe))
    assert probe.to_dict()["conventions"][0]["accepted_length"] == 0


@pytest.mark.real_model
def test_the_demo_s_head() -> None:
    target = load_target(find_checkpoint(str(demo_model()), what="target"))
    pair = Pair(model=demo_model(), target=target, answers=answers_of(target), head=DEMO_HEAD)
    right = pair.probe()
    assert right.problem() is None, right.to_dict()
    for wrong, option in (
        ({"taps": (3, 16, 28)}, "--taps 2,15,27"),
        ({"taps": (1, 14, 26)}, "--taps 2,15,27"),
    ):
        with pytest.raises(EagleError, match=f"set {option}"):
            pair.probe(**wrong).check()
