"""New heads: vocabulary, first weights, what is written, and what the command refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads import load_head
from eagle_exporter.pipeline import head_module
from eagle_exporter.target import load_target
from eagle_graphs import EagleError
from tests.commands import assert_refused, train_tool
from tests.models import HIDDEN, LAYERS, VOCAB, write_tiny_model
from tests.tools.training import TAPS, answers_of, batch_of, cached, head_for, write_data
from tools.train.ablations import VARIANTS
from tools.train.answers import HELD_OUT, Answer
from tools.train.features import FeatureCache, FreshFeatures
from tools.train.known import load_weights, shape_from_spec
from tools.train.model import Eagle1, Eagle3, Kind
from tools.train.objective import tapped_for
from tools.train.plots import plot_calibration, plot_training
from tools.train.start import covered, most_frequent, new_head, shape_from_target, tap_scale, write_head
from tools.train.unroll import unroll


def test_the_draft_vocabulary_is_the_most_frequent_answer_tokens() -> None:
    trained = Answer(index=1, tokens=(9, 9, 9, 5, 5, 5, 3, 3, 2), start=3, greedy=True)  # the prompt does not count
    held_out = Answer(index=HELD_OUT, tokens=(9, 2, 5, 5, 7), start=1, greedy=True)
    ids = most_frequent([trained, held_out], size=2, vocab=10)
    assert ids.tolist() == [3, 5]
    assert covered([trained, held_out], ids) == (5 / 6, 2 / 4)
    assert most_frequent([trained], size=5, vocab=10).tolist() == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_the_exporter_reads_the_head_that_was_trained(
    model: LlamaForCausalLM, tiny_target: Path, tmp_path: Path, kind: Kind
) -> None:
    """Its module gives the features that training saw, up to the half precision of the checkpoint."""
    answers = answers_of(model, 1)
    batch = batch_of(answers, cached(tmp_path, model, answers, kind), steps=1)
    head = head_for(model, answers, kind)
    write_head(head, tmp_path / "head")

    target = load_target(find_checkpoint(str(tiny_target), what="target"))
    read = load_head(find_checkpoint(str(tmp_path / "head"), what="head"), target.config)
    assert read.spec.taps == (TAPS if kind == "eagle3" else (LAYERS,))
    module: Any = head_module(read, target, top_k=3)
    tokens = torch.tensor(answers[0].tokens)
    tapped = tapped_for(head, batch)
    rows = tapped.shape[1]
    with torch.no_grad():
        features, ids, *_ = module(
            tokens[None, 1 : rows + 1],
            module.fuse_features(tapped.flatten(2)),
            torch.arange(rows)[None],
            torch.ones(1, rows, rows, dtype=torch.bool).tril(),
            torch.zeros(1, dtype=torch.int64),
            torch.arange(batch.prompt_rows, rows),
            *torch.zeros(2, 1, read.spec.kv_heads, rows, read.spec.head_dim),
        )
        step = next(iter(unroll(head, batch, tapped, steps=1)))
        logits = head.output_norm(step.hidden[0]) @ head.output_weight.t()
    torch.testing.assert_close(features, step.hidden[0], atol=0.02, rtol=0.02)
    assert (ids[:, 0] == head.draft_ids[logits.argmax(-1)]).float().mean() > 0.9


def test_a_head_can_begin_with_the_target_s_last_layer(model: LlamaForCausalLM, tmp_path: Path) -> None:
    answers = answers_of(model, 1)
    last = model.model.layers[-1]
    for kind in ("eagle1", "eagle3"):
        head = head_for(model, answers, kind, from_target_layer=True)
        assert torch.equal(head.layer.mlp.up_proj.weight, last.mlp.up_proj.weight)
        assert torch.equal(head.layer.self_attn.q_proj.weight[:, -HIDDEN:], last.self_attn.q_proj.weight)
        tapped = torch.randn(1, 3, len(head.shape.taps), HIDDEN)
        if isinstance(head, Eagle3):
            assert torch.equal(head.norm.weight, model.model.norm.weight)
            near = head.fuse(tapped)
        else:
            near, _ = head.attention_input(torch.zeros(1, 3, dtype=torch.int64), head.fuse(tapped))
        assert torch.corrcoef(torch.stack((near.flatten(), tapped[:, :, -1].flatten())))[0, 1] > 0.9
    other = write_tiny_model(tmp_path, "phi3", layers=4)
    shape = shape_from_target("eagle1", other.config, 16, draft_vocab=VOCAB, taps=None)
    with pytest.raises(EagleError, match=r"have no self_attn\.q_proj\.weight"):
        new_head(shape, other, torch.arange(VOCAB), tap_scale=torch.ones(1), seed=0, from_target_layer=True)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_training_goes_on_from_a_head_that_is_there(
    model: LlamaForCausalLM, tiny_target: Path, tmp_path: Path, kind: Kind
) -> None:
    """Sizes, vocabulary and weights are the head's, up to the half precision of the checkpoint."""
    head = head_for(model, answers_of(model, 1), kind)
    write_head(head, tmp_path)
    config = load_target(find_checkpoint(str(tiny_target), what="target")).config
    known = load_head(find_checkpoint(str(tmp_path), what="head"), config)
    shape = shape_from_spec(known.spec, VOCAB)
    assert shape == head.shape
    scale = torch.full((len(shape.taps) * HIDDEN,), 3.0)
    other = new_head(shape, model, known.draft_to_target, tap_scale=scale, seed=5)
    load_weights(other, known)
    assert torch.equal(other.draft_ids, head.draft_ids)
    tapped, tokens = torch.randn(1, 3, len(shape.taps), HIDDEN), torch.arange(3)[None]
    for one, two in zip(*(each.attention_input(tokens, each.fuse(tapped)) for each in (other, head)), strict=True):
        torch.testing.assert_close(one, two, atol=5e-3, rtol=5e-3)
    torch.testing.assert_close(other.output_weight, head.output_weight, atol=1e-3, rtol=1e-3)
    with pytest.raises(EagleError, match="--from: the head has fc_norm, 2 layers"):
        shape_from_spec(replace(known.spec, fc_norm=True, layers=2), VOCAB)
    known.tensors["extra"] = torch.ones(1)
    with pytest.raises(EagleError, match="--from: the head has extra"):
        load_weights(other, known)


def test_a_head_that_is_there_learns_another_vocabulary(
    model: LlamaForCausalLM, tiny_target: Path, tmp_path: Path
) -> None:
    """Tokens that both have keep their rows, the others begin as the target's."""
    head = head_for(model, answers_of(model, 1), "eagle3")
    assert isinstance(head, Eagle3)
    with torch.no_grad():
        head.lm_head.weight.normal_()
    write_head(head, tmp_path)
    config = load_target(find_checkpoint(str(tiny_target), what="target")).config
    known = load_head(find_checkpoint(str(tmp_path), what="head"), config)
    ids = torch.arange(40, VOCAB)
    shape = replace(shape_from_spec(known.spec, VOCAB), draft_vocab=len(ids))
    other = new_head(shape, model, ids, tap_scale=torch.ones(len(shape.taps) * HIDDEN), seed=5)
    load_weights(other, known)
    assert torch.equal(other.draft_ids, ids)
    old = dict(zip(head.draft_ids.tolist(), head.output_weight, strict=True))
    assert 0 < len(old.keys() & set(ids.tolist())) < len(old)
    for token, row in zip(ids.tolist(), other.output_weight, strict=True):
        expected = old[token] if token in old else model.get_output_embeddings().weight[token]
        torch.testing.assert_close(row, expected, atol=4e-3, rtol=1e-3)


def test_a_head_without_an_input_never_gets_to_know_it(model: LlamaForCausalLM) -> None:
    for missing, half in (("token", slice(0, HIDDEN)), ("feature", slice(HIDDEN, None))):
        head = head_for(model, answers_of(model, 1), "eagle1", **{missing: False})
        assert isinstance(head, Eagle1)
        x, _ = head.attention_input(torch.randint(VOCAB, (2, 5)), torch.randn(2, 5, HIDDEN))
        x.square().sum().backward()
        assert head.fc.weight.grad is not None
        assert not head.fc.weight[:, half].any()
        assert not head.fc.weight.grad[:, half].any()
        assert head.fc.weight.grad.any()


def test_tapped_channels_are_brought_to_one_scale(model: LlamaForCausalLM, tmp_path: Path) -> None:
    answers = answers_of(model, 3)
    features = cached(tmp_path, model, answers, "eagle3")
    scale = tap_scale(answers, features)
    parts = zip(features.of(range(3)), answers, strict=True)
    states = torch.cat([own[answer.start :, :-1] for own, answer in parts]).float()
    torch.testing.assert_close((states.flatten(1) * scale).square().mean(0), torch.ones(len(scale)))


def test_features_are_the_same_from_the_file_and_anew(model: LlamaForCausalLM, tmp_path: Path) -> None:
    answers = answers_of(model, 4)
    fresh = FreshFeatures(model, answers, TAPS, bf16=False)
    kept = cached(tmp_path, model, answers, "eagle3")
    assert fresh.row == kept.row
    for one, other, number in zip(fresh.of([3, 1]), kept.of([3, 1]), (3, 1), strict=True):
        assert len(one) == len(answers[number].tokens)
        torch.testing.assert_close(one, other, atol=0, rtol=0.01)  # other rows share its pass


def test_a_complete_file_of_features_serves_a_head_that_reads_some_of_them(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    answers = answers_of(model, 4)
    of_eagle3 = cached(tmp_path, model, answers[:3], "eagle3")
    find = partial(FeatureCache.find, tmp_path, layers=LAYERS, hidden=HIDDEN)
    assert find(answers, (LAYERS,)).done == 0, "the other file lacks an answer"
    found = find(answers[:3], (LAYERS,))
    assert (found.path, found.row, found.done) == (of_eagle3.path, (2, HIDDEN), 3)
    for own, whole in zip(found.of([2, 0]), of_eagle3.of([2, 0]), strict=True):
        assert torch.equal(own, whole[:, [-1, -1]])
    assert find(answers[:3], TAPS).path == of_eagle3.path
    (tmp_path / "features-old.bf16").touch()
    assert find(answers[:3], (*TAPS, LAYERS + 1)).done == 0, "another file of the user's is left alone"


def test_ablations_train_each_variant_on_as_many_tokens(
    model: LlamaForCausalLM, tiny_target: Path, tmp_path: Path
) -> None:
    texts = [list(answer.tokens) for answer in answers_of(model, 6, first=HELD_OUT - 3)]
    data = write_data(tmp_path / "data", tiny_target, texts, first=HELD_OUT - 3, answer=20)
    arguments = ("--data", data, "--out", tmp_path / "out", "--tokens", 150, "--batch", 60, "--draft-vocab", 64)
    outcome = train_tool("ablations", *arguments, "--unroll", 2, "--fp32")
    assert outcome.status == 0, outcome.err
    table = outcome.err[outcome.err.index("held-out chains") :]
    assert "after 150 training tokens" in table
    heads = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(heads) == len(VARIANTS) == 5
    config = load_target(find_checkpoint(str(tiny_target), what="target")).config
    kinds = [load_head(find_checkpoint(str(tmp_path / "out" / name), what="head"), config).spec.kind for name in heads]
    assert sorted(kinds) == ["eagle1"] * 3 + ["eagle3"] * 2


def test_mistakes_give_one_line(tiny_target: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    assert_refused(
        train_tool("head", "--data", nowhere, "--out", tmp_path / "h"), "no answers.jsonl", "tools.train data"
    )
    data = ("data", "--model", tiny_target, "--out", tmp_path / "d", "--tokens", 10, "--workers", 1)
    assert_refused(train_tool(*data, "--prompts", nowhere), "cannot read the prompts")
    assert_refused(train_tool(*data, "--top-p", 2), "--top-p is 2")
    head = ("head", "--data", tmp_path / "e", "--out", tmp_path / "h", "--tokens", 10)
    write_data(tmp_path / "e", tiny_target, [[3] * 9], first=1, answer=4)
    assert_refused(train_tool(*head, "--taps", "2,x"), "--taps")
    assert_refused(train_tool(*head, "--taps", "2,90"), "[2, 90]", "0 to 6")
    assert_refused(train_tool(*head, "--unroll", 0), "--unroll is 0")


def test_curves_need_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    assert not plot_training([], tmp_path / "curves.png")
    assert not plot_calibration([], tmp_path / "calibration.png")
