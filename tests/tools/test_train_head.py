"""Training: a head learns by heart, an interrupted run ends with the same bits, the objective is what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from eagle_graphs import EagleError
from tests.models import VOCAB
from tests.tools.training import FAST, answers_of, batch_of, cached, head_for, reference_of
from tools.train.answers import Answer
from tools.train.batches import order
from tools.train.held_out import DEPTH, held_out, rounds_of
from tools.train.loop import Point, Trainer
from tools.train.model import Kind
from tools.train.objective import Objective
from tools.train.optimizers import optimizers_for
from tools.train.options import Options
from tools.train.state import load_state, save_state


def _trainer(model: LlamaForCausalLM, directory: Path, kind: Kind, options: Options, *, first: int = 1) -> Trainer:
    answers = answers_of(model, 4, first=first)
    head = head_for(model, answers, kind)
    lm_head = model.get_output_embeddings().weight.detach()
    return Trainer(head, answers, cached(directory, model, answers, kind), lm_head, options)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_head_learns_a_few_texts_by_heart(model: LlamaForCausalLM, tmp_path: Path, kind: Kind) -> None:
    trainer = _trainer(model, tmp_path, kind, FAST)
    points: list[Point] = []
    trainer.train(lambda _tokens: None, points.append)
    answers = answers_of(model, 4)
    batch = batch_of(answers, cached(tmp_path, model, answers, kind), steps=DEPTH)
    found = held_out(trainer.head, [batch], Objective(trainer.head, torch.zeros(VOCAB, 1), FAST).draft_id_of)
    if kind == "eagle3":
        assert found.acceptance == [1.0] * DEPTH
        assert found.length == pytest.approx(_longest(answers))
    else:  # it has not been trained on its own output
        assert found.acceptance[0] == 1.0
        assert found.length > 0.85 * _longest(answers)
    assert points[-1].tokens >= FAST.tokens
    assert points[-1].loss < points[0].loss / 10
    assert points[-1].acceptance == pytest.approx([1.0] * (4 if kind == "eagle3" else 1))


def test_muon_learns_them_nearly_so(model: LlamaForCausalLM, tmp_path: Path) -> None:
    trainer = _trainer(model, tmp_path, "eagle3", replace(FAST, optimizer="muon"))
    points: list[Point] = []
    trainer.train(lambda _tokens: None, points.append)
    assert points[-1].acceptance[0] > 0.9


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_an_interrupted_run_ends_with_the_same_bits(model: LlamaForCausalLM, tmp_path: Path, kind: Kind) -> None:
    """Random rows, noise, order, schedule, optimizer: all of it is taken up; the run is cut inside an epoch."""
    options = replace(FAST, optimizer="muon", tokens=1200, batch=60, thin=0.7, noise=0.1, labels="target")
    whole = _trainer(model, tmp_path / "a", kind, options, first=38)  # of these, one is held out
    whole.train(lambda _tokens: None, lambda _point: None)

    state, settings = tmp_path / "state.pt", {"seed": 0}
    cut = _trainer(model, tmp_path / "b", kind, options, first=38)

    def save_twice_then_stop(_point: Point) -> None:
        save_state(cut, settings, state)
        if len(cut.run.history) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cut.train(lambda _tokens: None, save_twice_then_stop)
    assert cut.run.batch > 0
    resumed = _trainer(model, tmp_path / "c", kind, options, first=38)
    load_state(resumed, settings, state)
    resumed.train(lambda _tokens: None, lambda _point: None)
    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(resumed.head.state_dict()[name], tensor), name
    assert resumed.run.history == whole.run.history
    assert whole.run.history[-1]["held_out"] is not None
    with pytest.raises(EagleError, match="was begun with seed 0, and this run has 1"):
        load_state(resumed, {"seed": 1}, state)


def test_eagle1_s_objective_by_hand(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Its two parts from the features, without the trainer's losses."""
    answers = answers_of(model, 2, tokens=9)
    head = head_for(model, answers, "eagle1")
    batch = batch_of(answers, cached(tmp_path, model, answers, "eagle1"), steps=1)
    lm_head = model.get_output_embeddings().weight.detach()
    found, _, counted = Objective(head, lm_head, replace(FAST, labels="target"))(batch, 1, torch.Generator())
    regression, entropy = [], []
    for number, answer in enumerate(answers):
        columns = slice(int(batch.pad[number]), int(batch.pad[number]) + len(answer.tokens))
        features, tokens = batch.features[number, columns, -1].float(), torch.tensor(answer.tokens)
        rows, reference = len(tokens) - 1, reference_of(head)
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        inputs = (tokens[1:], features[:rows], torch.arange(rows), causal, reference.empty_cache())
        guesses, _, _ = reference.forward(*inputs)
        for row in range(answer.start - 1, len(tokens) - 2):
            difference = (guesses[row] - features[row + 1]).abs()
            regression.append(torch.where(difference < 1, difference**2 / 2, difference - 0.5).mean())
            law = (lm_head @ features[row + 1]).softmax(-1)
            entropy.append(-(law * (lm_head @ guesses[row]).log_softmax(-1)).sum())
    assert counted == [len(entropy)]
    expected = torch.stack(regression).mean() + 0.1 * torch.stack(entropy).mean()
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-4, atol=1e-4)


def test_batches_hold_every_conversation_once() -> None:
    answers = [Answer(index=i, tokens=tuple(range(6 + i % 17)), start=3, greedy=True) for i in range(200)]
    batches = order(answers, range(200), rows=64, seed=0, epoch=1)
    assert sorted(number for batch in batches for number in batch) == list(range(200))
    assert max(len(batch) * max(len(answers[n].answer) - 1 for n in batch) for batch in batches) <= 64
    assert batches == order(answers, range(200), rows=64, seed=0, epoch=1)
    assert batches != order(answers, range(200), rows=64, seed=0, epoch=2)


def test_rounds_walk_by_what_was_accepted() -> None:
    assert rounds_of([2, 9, 9, 0, 1, 9]) == 3  # places 0, 3 and 4
    assert rounds_of([0, 0, 0]) == 3
    assert rounds_of([]) == 0


def test_steps_and_learning_rate_follow_the_progress() -> None:
    options = Options(tokens=100, unroll=5, ramp=0.4, warmup=0.1)
    assert [options.steps_at(p) for p in (0, 0.09, 0.11, 0.21, 0.31, 0.41, 1)] == [1, 1, 2, 3, 4, 5, 5]
    assert options.lr_share(0) < options.lr_share(0.05) < options.lr_share(0.1) == 1.0
    assert options.lr_share(1.0) == pytest.approx(0.05)
    with pytest.raises(EagleError, match="--thin is 0"):
        replace(options, thin=0)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_muon_has_what_turns_hidden_states_into_hidden_states(model: LlamaForCausalLM, kind: Kind) -> None:
    head = head_for(model, answers_of(model, 2), kind)
    names = {id(parameter): name for name, parameter in head.named_parameters()}
    adamw, muon = optimizers_for(head, replace(FAST, optimizer="muon", lr=0.5, muon_lr=0.25))
    by_muon = {names[id(parameter)] for group in muon.param_groups for parameter in group["params"]}
    by_adamw = {names[id(parameter)] for group in adamw.param_groups for parameter in group["params"]}
    assert by_muon == {name for name in names.values() if name.endswith(("proj.weight", "fc.weight"))}
    assert by_adamw == set(names.values()) - by_muon
    assert kind == "eagle1" or "lm_head.weight" in by_adamw
    assert {group["initial_lr"] for group in adamw.param_groups} == {0.5}
    assert {group["initial_lr"] for group in muon.param_groups} == {0.25}
    (only,) = optimizers_for(head, FAST)
    assert sum(len(group["params"]) for group in only.param_groups) == len(names)
    decayed = {p.ndim for group in only.param_groups for p in group["params"] if group["weight_decay"]}
    assert decayed == {2}


def test_a_step_sets_both_optimizers_learning_rates(model: LlamaForCausalLM, tmp_path: Path) -> None:
    options = replace(FAST, tokens=100, batch=60, optimizer="muon", warmup=0.5, lr=0.1, muon_lr=0.3)
    trainer = _trainer(model, tmp_path, "eagle3", options)
    rates = list[list[float]]()

    def seen(_tokens: int) -> None:
        rates.append([group["lr"] for optimizer in trainer.run.optimizers for group in optimizer.param_groups])

    trainer.train(seen, lambda _point: None)
    assert rates[0] == pytest.approx([0.005, 0.005, 0.015])
    for vectors, matrices, inner in rates:
        assert vectors == matrices == pytest.approx(inner / 3)


def test_a_state_of_another_version_is_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    trainer = _trainer(model, tmp_path / "a", "eagle1", FAST)
    save_state(trainer, {}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    state["optimizer"] = state.pop("optimizers")[0]
    torch.save(state, tmp_path / "state.pt")
    with pytest.raises(EagleError, match="was written by another version of this tool: remove it"):
        load_state(trainer, {}, tmp_path / "state.pt")


def _longest(answers: list[Answer]) -> float:
    """Accepted length where everything is."""
    tokens = [len(answer.answer) - 1 for answer in answers]
    return sum(tokens) / sum(-(-count // (DEPTH + 1)) for count in tokens)
