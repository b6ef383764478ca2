"""The data set: many conversations at once are what each is alone; a killed run goes on."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.target import load_target
from eagle_graphs import EagleError
from eagle_graphs.native_ops import KEY_BLOCK
from eagle_runtime.engines.onnxruntime import OnnxRuntimeGraph
from eagle_runtime.kv_pool import KVPool
from tests.commands import assert_refused, train_tool
from tests.conftest import ROOT
from tools.train.answers import ANSWERS, Answer, AnswerFile, Dropped, loop_start, read_answers
from tools.train.frames import own_prompt_frame
from tools.train.native_slots import NativeSlots, WritingGraph, write_graph
from tools.train.slots import TOP_K, Best, Precision, Slots
from tools.train.torch_slots import STRIDE, Int8Linear, TorchSlots
from tools.train.write import PASSES, Plan, draw, write

SETTINGS = {"own_prompts": True, "seed": 0}
EOS = (1,)


def _plan(prompts: tuple[tuple[int, ...], ...], closing: tuple[int, ...] = (), **more: float) -> Plan:
    settings = {"answer_tokens": STRIDE + 8, "greedy": 1.0, "temperature": 1.0, "top_p": 0.9, "seed": 3, **more}
    return Plan(prompts=prompts, closing=closing, eos=EOS, **settings)  # type: ignore[arg-type]


def _slots(directory: Path, slots: int, precision: Precision = "fp32") -> TorchSlots:
    target = load_target(find_checkpoint(str(directory), what="target"))
    return TorchSlots(target, slots=slots, precision=precision)


@pytest.fixture(scope="module")
def graph(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> WritingGraph:
    target = load_target(find_checkpoint(str(tiny_target), what="target"))
    return write_graph(target, tmp_path_factory.mktemp("graph"), capacity=160)


@pytest.fixture(params=["native", "torch"])
def slots_of(request: pytest.FixtureRequest, graph: WritingGraph, tiny_target: Path) -> Callable[[int], Slots]:
    if request.param == "native":
        return lambda slots: NativeSlots(graph, slots=slots, threads=1 + slots % 2)
    return lambda slots: _slots(tiny_target, slots)


@pytest.fixture(scope="module")
def prompts() -> tuple[tuple[int, ...], ...]:
    random = torch.Generator().manual_seed(0)
    return tuple((7, 8, *torch.randint(2, 320, (3 + 5 * (i % 4),), generator=random).tolist()) for i in range(23))


def test_greedy_answers_are_those_of_transformers(
    model: LlamaForCausalLM, tiny_target: Path, prompts: tuple[tuple[int, ...], ...]
) -> None:
    """With fewer slots than prompts, groups of several sizes and more steps than a layout of the caches lasts."""
    plan = _plan(prompts, cut_loops=False)
    found = {item.index: item for item in write(_slots(tiny_target, 18), plan, iter(range(len(prompts))))}
    assert sorted(found) == list(range(len(prompts)))
    for index, prompt in enumerate(prompts):
        answer = found[index]
        assert isinstance(answer, Answer)
        assert answer.tokens[: answer.start] == prompt
        with torch.inference_mode():
            logits = model(torch.tensor([answer.tokens[:-1]])).logits[0, answer.start - 1 :]
        assert answer.answer == tuple(logits.argmax(-1).tolist())
        assert len(answer.answer) == plan.answer_tokens or answer.answer[-1] in EOS
        assert not {*EOS}.intersection(answer.answer[:-1])


def test_an_answer_ends_where_it_begins_to_loop() -> None:
    plan = _plan(((5, 6),), answer_tokens=70)
    conversation, early = plan.conversation(0), plan.conversation(0)
    assert conversation is not None
    assert early is not None
    written = [*range(20, 40), *[41, 42] * 20]
    ends = [end for token in written if (end := conversation.append(token))]
    assert ends[0] == Answer(index=0, tokens=(5, 6, *range(20, 40), 41, 42), start=2, greedy=True)
    ends = [end for token in written[20:] if (end := early.append(token))]
    assert ends[0] == Dropped(index=0, why="loop")


def test_native_slots_decode_as_the_graph_does_alone(graph: WritingGraph, prompts: tuple[tuple[int, ...], ...]) -> None:
    """Prompts in one pass and then token by token, one sequence in the cache: the same text, bit for bit."""
    plan = _plan(prompts, cut_loops=False)
    written = {
        item.index: item for item in write(NativeSlots(graph, slots=7, threads=2), plan, iter(range(len(prompts))))
    }
    pool = KVPool(graph.kv, slots=1, rows=graph.capacity, key_block=KEY_BLOCK)
    alone = OnnxRuntimeGraph(graph.path, graph.ports(), pool, threads=1, native=True)
    for index, prompt in enumerate(prompts):
        answer = written[index]
        assert isinstance(answer, Answer)
        tokens, length = list(prompt), 0
        while len(tokens) < len(answer.tokens):
            rows = len(tokens) - length
            call = alone.call(0, outputs=("topk_ids",), Q=rows, S=rows, R=1)
            call.inputs["input_ids"][0], call.inputs["position_ids"][0] = tokens[length:], range(length, len(tokens))
            call.inputs["tree_mask"][0], call.inputs["kv_length"][0] = np.tri(rows, dtype=np.bool_), length
            call.inputs["logit_rows"][0] = rows - 1
            call.run()
            length = len(tokens)
            tokens.append(int(call.outputs["topk_ids"][0, 0]))
        assert tuple(tokens) == answer.tokens


def test_native_slots_are_as_exact_as_8_bits_in_torch(graph: WritingGraph, tiny_target: Path) -> None:
    """Slots of different lengths, restarted at different times, against float32."""
    exact, *rounded = _slots(tiny_target, 5), NativeSlots(graph, slots=5, threads=1), _slots(tiny_target, 5, "int8")
    random, errors = np.random.default_rng(0), np.zeros((2, STRIDE + 9, 5))
    for step in range(STRIDE + 9):
        tokens = random.integers(2, 320, 5).tolist() if step >= 4 else [step + 7] * 5
        expected = exact.step(tokens)
        for which, slots in enumerate(rounded):
            found = slots.step(tokens)
            errors[which, step] = [_error(found, expected, slot) for slot in range(5)]
        for slots in (exact, *rounded):
            if step == 3:
                slots.keep_prefix()
            elif step > 3 and step % 5 == 0:
                slots.restart(step // 5 % 5)
            assert slots.lengths.tolist() == exact.lengths.tolist()
    assert len(set(exact.lengths.tolist())) == 5
    native, torch_ = errors.mean(axis=(1, 2))
    assert native < 1.2 * torch_


def _error(found: Best, expected: Best, slot: int) -> float:
    """Mean square of the differences between the scores of the tokens that both have, which are most."""
    common, mine, theirs = np.intersect1d(found.ids[slot], expected.ids[slot], return_indices=True)
    assert len(common) > 0.5 * TOP_K
    difference = found.scores[slot, mine] - expected.scores[slot, theirs]
    return float(np.square(difference - difference.mean()).mean())


def test_a_restarted_slot_forgets_all_but_the_prefix(slots_of: Callable[[int], Slots]) -> None:
    slots, fresh = slots_of(3), slots_of(3)
    for token in (7, 8, 9):
        slots.step([token] * 3)
        fresh.step([token] * 3)
    slots.keep_prefix()
    for token in range(20, 30):
        slots.step([token, token + 1, token + 2])
    slots.restart(1)
    assert slots.lengths.tolist() == [13, 3, 13]
    for token in range(40, 45):
        found, expected = slots.step([5, token, 6]), fresh.step([token] * 3)
        np.testing.assert_array_equal(found.ids[1], expected.ids[1])
        np.testing.assert_allclose(found.scores[1], expected.scores[1], atol=1e-5)


def test_torch_writes_where_there_are_no_kernels(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.train.data.library_problem", lambda: "it was not built")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": f"question number {i}"}) for i in range(40)))
    command = ["data", "--model", str(tiny_target), "--out", str(tmp_path / "data"), "--prompts", str(prompts)]
    done = train_tool(*command, "--tokens", "200", "--answer-tokens", "16", "--slots", "8", "--workers", "1")
    assert done.status == 0, done.err
    assert "torch writes, more slowly than the native CPU kernels: it was not built" in done.err
    assert sum(len(answer.answer) for answer in read_answers(tmp_path / "data")) >= 200


def test_a_conversation_is_the_same_in_any_company(slots_of: Callable[[int], Slots], tiny_target: Path) -> None:
    """Its random numbers follow from its number: prompt and answer alike."""
    header, closing = own_prompt_frame(load_target(find_checkpoint(str(tiny_target), what="target")))
    plan = _plan((header,), closing, greedy=0.5)
    alone = {item.index: item for item in write(slots_of(1), plan, iter([4, 9]))}
    together = {item.index: item for item in write(slots_of(18), plan, iter(range(20)))}
    assert alone == {index: together[index] for index in alone}


def test_a_written_prompt_ends_where_the_template_does() -> None:
    plan = _plan(((5, 6, 7),), closing=(9, 4, 4), greedy=0.0)
    conversation = plan.conversation(0)
    assert conversation is not None
    for token in (20, 21, 22, 23):
        assert conversation.append(token) is None
        assert conversation.temperature == 1.0
    assert conversation.append(9) is None
    assert conversation.tokens == [5, 6, 7, 20, 21, 22, 23, 9, 4, 4]
    assert conversation.append(30) is None
    end = conversation.append(EOS[0])
    assert end == Answer(index=0, tokens=(5, 6, 7, 20, 21, 22, 23, 9, 4, 4, 30, 1), start=10, greedy=False)


def test_a_prompt_goes_on_from_a_given_beginning(tiny_target: Path) -> None:
    """Which one follows from the conversation's number; only what is written counts as a prompt's length."""
    target = load_target(find_checkpoint(str(tiny_target), what="target"))
    nothing, closing = own_prompt_frame(target)
    starts = [[{"role": "user", "content": text}] for text in ("the first", "and this is the second one")]
    headers = tuple(own_prompt_frame(target, start)[0] for start in starts)
    for start, header in zip(starts, headers, strict=True):
        assert target.tokenizer.decode(header) == target.tokenizer.decode(nothing) + start[0]["content"]
    plan = _plan(headers, closing, greedy=0.0)
    conversations = [plan.conversation(index) for index in range(400)]
    begun = [tuple(each.tokens) for each in conversations if each is not None]
    assert len(begun) == 400
    assert 150 < begun.count(headers[1]) < 250
    held_out = begun[::40]  # the numbers of those that training leaves out
    assert set(held_out) == set(headers)
    assert begun == [tuple(each.tokens) for index in range(400) if (each := plan.conversation(index))]
    (conversation,) = [each for each in conversations if each and tuple(each.tokens) == headers[1]][:1]
    assert all(conversation.append(token) is None for token in (60, 61, 62))
    assert conversation.append(closing[0]) == Dropped(index=conversation.index, why="short prompt")


def test_data_of_given_beginnings(tiny_target: Path, tmp_path: Path) -> None:
    starts = tmp_path / "starts.jsonl"
    starts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("Why is", "Write a")))
    command = ["data", "--model", str(tiny_target), "--out", str(tmp_path / "data"), "--tokens", "20"]
    small = ["--answer-tokens", "16", "--slots", "8", "--workers", "1", "--precision", "fp32"]
    done = train_tool(*command, *small, "--starts", str(starts))
    assert done.status == 0, done.err
    tokenizer = load_target(find_checkpoint(str(tiny_target), what="target")).tokenizer
    for answer in read_answers(tmp_path / "data"):
        prompt = tokenizer.decode(answer.tokens[: answer.start])
        assert "Why is" in prompt or "Write a" in prompt
    assert_refused(train_tool(*command, *small), "was begun with starts")
    both = train_tool(*command, *small, "--starts", str(starts), "--prompts", str(starts))
    assert_refused(both, "--prompts and --starts were both given")


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ({"messages": [{"role": "assistant", "content": "Well"}]}, "1 ends with a message of the assistant"),
        ({"text": "word " * 600}, "tokens; there is room for"),
    ],
)
def test_beginnings_that_cannot_be_gone_on_from(
    tiny_target: Path, tmp_path: Path, start: dict[str, Any], words: str
) -> None:
    (tmp_path / "starts.jsonl").write_text(json.dumps(start))
    command = ["data", "--model", str(tiny_target), "--out", str(tmp_path / "data"), "--tokens", "20"]
    given = ["--answer-tokens", "16", "--starts", str(tmp_path / "starts.jsonl")]
    assert_refused(train_tool(*command, *given), "starts.jsonl: conversation", words)


def test_given_prompts_are_greedy_once_and_end() -> None:
    plan = _plan(((5, 6), (5, 7, 8)))
    assert plan.shared == 1
    first, second, last = plan.conversation(1), plan.conversation(3), plan.conversation(2 * PASSES)
    assert first is not None
    assert second is not None
    assert (first.tokens, first.greedy) == ([5, 7, 8], True)
    assert (second.tokens, second.greedy) == ([5, 7, 8], False)
    assert last is None


def test_draws_follow_the_nucleus() -> None:
    """Probabilities .5, .3, .15, .05: a nucleus of .9 is the first three."""
    scores = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32)) + 3
    best = Best(ids=np.tile([1, 3, 2, 0], (1000, 1)), scores=np.tile(scores, (1000, 1)))
    uniforms = ((np.arange(1000) + 0.5) / 1000).tolist()
    tokens = np.bincount(draw(best, [1.0] * 1000, uniforms, 0.9), minlength=4) / 1000
    np.testing.assert_allclose(tokens, np.array([0.0, 0.5, 0.15, 0.3]) / 0.95, atol=2e-3)
    assert set(draw(best, [0.0] * 1000, uniforms, 0.9).tolist()) == {1}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (list(range(60)), None),
        ([1, 2, 3] + [4] * 24, None),
        ([1, 2, 3] + [4] * 25, 4),
        ([1, 2, 3] + [4, 5] * 13, 5),
        ([9] + list(range(20)) * 3, 21),
        (list(range(20)) * 2, None),
    ],
)
def test_a_loop_is_a_tail_that_repeats(tokens: list[int], expected: int | None) -> None:
    assert loop_start(tokens) == expected


def test_8_bit_products_are_close() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48)
    x = torch.randn(2, 5, 64) * torch.logspace(-3, 3, 5)[:, None]  # each row has its own scale
    error = (Int8Linear(linear)(x) - linear(x)).norm(dim=-1) / linear(x).norm(dim=-1)
    assert error.max() < 0.02


def test_an_unfinished_line_is_cut_and_written_again(tmp_path: Path) -> None:
    file = AnswerFile(tmp_path, SETTINGS)
    file.add(_answer(0, 5))
    file.add(Dropped(index=1, why="loop"))
    file.close()
    with (tmp_path / ANSWERS).open("a") as appended:
        appended.write('{"index":2,"start":2,"gre')
    file = AnswerFile(tmp_path, SETTINGS)
    assert (file.done, file.tokens, file.dropped["loop"]) == ({0, 1}, 3, 1)
    file.add(_answer(2, 6))
    file.add(_answer(0, 5))  # is there
    file.add(_answer(3, 6))  # says what 2 says
    file.close()
    assert [answer.index for answer in read_answers(tmp_path)] == [0, 2]
    assert file.dropped["duplicate"] == 1


def test_other_settings_are_refused(tmp_path: Path) -> None:
    AnswerFile(tmp_path, SETTINGS).close()
    with pytest.raises(EagleError, match="was begun with seed 0, and this run has 1"):
        AnswerFile(tmp_path, SETTINGS | {"seed": 1})
    with pytest.raises(EagleError, match="no answers yet"):
        read_answers(tmp_path)
    with pytest.raises(EagleError, match=r"no answers\.jsonl"):
        read_answers(tmp_path / "elsewhere")


def test_a_killed_run_goes_on(tiny_target: Path, tmp_path: Path) -> None:
    """Killed with two workers at work: the second run writes what is missing, once, and ends with enough tokens."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": f"question number {i}"}) for i in range(400)))
    command = ["data", "--model", str(tiny_target), "--out", str(tmp_path / "data"), "--prompts", str(prompts)]
    command += ["--tokens", "6000", "--answer-tokens", "24", "--slots", "8"]
    written = tmp_path / "data" / ANSWERS
    killed = [sys.executable, "-m", "tools.train", *command, "--workers", "2"]
    with subprocess.Popen(killed, cwd=ROOT, stderr=subprocess.DEVNULL) as run:
        while not (written.exists() and len(written.read_bytes()) > 4000):
            assert run.poll() is None, "it ended before it could be killed"
            time.sleep(0.02)
        run.kill()
    before = len(read_answers(tmp_path / "data"))
    done = train_tool(*command, "--workers", "1")  # with as many as one likes
    assert done.status == 0, done.err
    answers = read_answers(tmp_path / "data")
    assert len(answers) > before
    assert sum(len(answer.answer) for answer in answers) >= 6000
    numbers = [json.loads(line)["index"] for line in written.read_text().splitlines()]
    assert len(set(numbers)) == len(numbers)
    assert len({answer.answer for answer in answers}) == len(answers)
    # What is missing is at most what was at work when the second run ended: the first one's gaps are filled.
    assert len(set(range(numbers[-1])) - set(numbers)) <= 8


def _answer(index: int, token: int) -> Answer:
    return Answer(index=index, tokens=(2, index + 50, token, token, 1), start=2, greedy=True)
