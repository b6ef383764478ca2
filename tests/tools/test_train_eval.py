"""A head from data to text: what is replayed in torch is what the exported bundle accepts."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from eagle_calibration.prompts import load_prompts
from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads import load_head
from eagle_exporter.pipeline import head_module
from eagle_exporter.target import load_target
from eagle_graphs import EagleError, Profile, static_profile
from eagle_runtime import Session
from tests.commands import eagle_export
from tests.models import VOCAB
from tests.overfit import calibration_answers
from tests.tools.training import FAST, TAPS, head_for, write_data
from tools.train.answers import read_answers
from tools.train.evaluate import CHAIN, EvalOptions, evaluate
from tools.train.features import hidden_states
from tools.train.head import HISTORY, HeadOptions, train_head
from tools.train.held_out import DEPTH
from tools.train.replay import Replay, Text
from tools.train.start import most_frequent, write_head

TOKENS = 40
WIDE = 256  # tokens of a draft vocabulary that covers the answers


def quiet() -> Console:
    return Console(file=io.StringIO())


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A head that knows the target's answers to an export's prompts."""

    target: Path
    options: HeadOptions
    history: list[dict[str, Any]]
    texts: list[list[int]]


@pytest.fixture(scope="module")
def trained(model: LlamaForCausalLM, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place = tmp_path_factory.mktemp("trained")
    texts = [text.tolist() for text in calibration_answers(model)]
    options = HeadOptions(
        kind="eagle3",
        data=(
            write_data(place / "data", tiny_target, texts[:3], first=1, answer=48),
            write_data(place / "more", tiny_target, texts[3:], first=4, answer=48),
        ),
        out=place / "head",
        model=None,
        draft_vocab=WIDE,
        taps=TAPS,
        init_from_target_layer=False,
        known=None,
        cache=True,
        device="cpu",
        training=replace(FAST, tokens=15000),
    )
    return Trained(target=tiny_target, options=options, history=train_head(options, quiet()), texts=texts)


def test_a_finished_run_stays_as_it_is(trained: Trained) -> None:
    options = trained.options
    assert trained.history[-1]["acceptance"][0] > 0.9
    written = load_file(options.out / "model.safetensors")
    assert torch.equal(written["t2d"].nonzero()[:, 0], torch.arange(WIDE) + written["d2t"])
    assert train_head(options, quiet()) == trained.history
    assert json.loads((options.out / "training" / HISTORY).read_text()) == trained.history
    with pytest.raises(EagleError, match="was begun with lr"):
        train_head(replace(options, training=replace(options.training, lr=1e-3)), quiet())


def test_a_known_head_keeps_its_vocabulary_or_takes_the_data_s(trained: Trained, tmp_path: Path) -> None:
    options = trained.options
    again = replace(
        options, out=tmp_path / "again", known=str(options.out), draft_vocab=None, training=replace(FAST, tokens=50)
    )
    train_head(again, quiet())
    written, other = (load_file(each / "model.safetensors") for each in (options.out, again.out))
    assert torch.equal(written["d2t"], other["d2t"])
    with pytest.raises(EagleError, match="was begun with vocabulary"):  # as many tokens, but others
        train_head(replace(again, data=options.data[1:], draft_vocab=WIDE), quiet())
    train_head(replace(again, out=tmp_path / "new", draft_vocab=40), quiet())
    new = load_file(tmp_path / "new" / "model.safetensors")
    ids = most_frequent([answer for each in options.data for answer in read_answers(each)], size=40, vocab=VOCAB)
    assert torch.equal(new["d2t"], ids - torch.arange(40))


def test_an_eagle1_head_takes_no_other_vocabulary(trained: Trained, model: LlamaForCausalLM, tmp_path: Path) -> None:
    write_head(head_for(model, read_answers(trained.options.data[0]), "eagle1"), tmp_path / "one")
    with pytest.raises(EagleError, match="--draft-vocab: an EAGLE-1 head says every token"):
        train_head(replace(trained.options, known=str(tmp_path / "one"), draft_vocab=40, out=tmp_path / "o"), quiet())


def test_targets_of_data_sets_that_differ_are_told(trained: Trained, tmp_path: Path) -> None:
    other = write_data(tmp_path / "other", tmp_path / "elsewhere", trained.texts[:1], first=1, answer=48)
    with pytest.raises(EagleError, match=r"name .* and .*elsewhere as their target: say with --model which"):
        train_head(replace(trained.options, data=(*trained.options.data, other)), quiet())


def test_replayed_trees_agree_with_each_other_and_need_the_right_features(
    trained: Trained, model: LlamaForCausalLM
) -> None:
    target = load_target(find_checkpoint(str(trained.target), what="target"))
    head = load_head(find_checkpoint(str(trained.options.out), what="head"), target.config)
    module = head_module(head, target, top_k=4)
    wide = Profile(nodes=7, top_k=2, depth=2)
    pairs = {
        CHAIN: ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)),
        wide: ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)),  # all that is drafted: nothing is left to choose
    }
    right, wrong = [], []
    with torch.inference_mode():
        for tokens in trained.texts[:3]:
            states = hidden_states(model, [tokens], TAPS, torch.float32)[0]
            text = Text(tokens=torch.tensor(tokens), start=len(tokens) - 48, tapped=states[:, :-1])
            replay = Replay(module, head.spec, text)
            for dynamic, paths in pairs.items():
                assert replay.accepted(dynamic) == replay.accepted(static_profile(paths))
            right += replay.accepted(CHAIN)
            wrong += Replay(module, head.spec, replace(text, tapped=text.tapped.roll(1, dims=0))).accepted(CHAIN)
    assert sum(right) > 0.8 * DEPTH * len(right)
    assert sum(wrong) < 0.2 * sum(right)


def test_the_bundle_accepts_what_was_replayed(trained: Trained, tmp_path: Path) -> None:
    """Evaluation, export, run: the same accepted lengths, to the round."""
    arguments = ("--model", trained.target, "--draft", trained.options.out, "--out", tmp_path / "bundle")
    outcome = eagle_export(*arguments, "--capacity", 400, "--prefill-chunk", 32, "--profiles", 12)
    assert outcome.status == 0, outcome.err
    prompts = _prompts_file(tmp_path / "prompts.jsonl")
    options = EvalOptions(
        head=str(trained.options.out),
        model=str(trained.target),
        prompts=prompts,
        profiles="12",
        static=True,
        limit=None,
        new_tokens=TOKENS,
        out=tmp_path / "report",
    )
    report = evaluate(options, quiet())
    lengths = report.lengths()
    assert lengths.keys() == {"c0", "c1", "all"}
    rounds = tokens = 0
    with Session.open(tmp_path / "bundle", profile="12", threads=1) as session:
        for line in prompts.read_text().splitlines():
            messages = [{"role": "user", "content": json.loads(line)["text"]}]
            answer = session.generate(messages=messages, max_new_tokens=TOKENS)
            rounds += answer.stats.rounds
            tokens += answer.stats.round_tokens
    assert lengths["all"]["12"] == tokens / rounds
    assert lengths["all"]["12"] > 2
    assert lengths["all"]["static"] > lengths["all"]["chain"] - 0.5
    saved = json.loads((tmp_path / "report" / "report.json").read_text())
    assert saved["accepted_length"] == lengths
    assert sum(count for _, _, count in report.calibration()) == 8 * sum(
        t["chain"].tokens for t in report.tallies.values()
    )


def _prompts_file(path: Path) -> Path:
    talks = [talk for talk in load_prompts() if len(talk) == 1]
    lines = [{"category": f"c{number % 2}", "text": talk[0]["content"]} for number, talk in enumerate(talks)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path
