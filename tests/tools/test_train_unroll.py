"""The training-time test against the same chains drafted one row at a time, by the tests' own head.

`VariantHead` shares no code with the trainer and knows no masks of training: it is run as at inference, with a cache
that a chain extends and that the next chain does not see.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.tools.training import answers_of, batch_of, cached, head_for, reference_of
from tools.train.answers import Answer
from tools.train.batches import Batch
from tools.train.model import DraftHead, Kind
from tools.train.objective import tapped_for
from tools.train.unroll import labels_of, unroll

STEPS = 4
Chains = dict[tuple[int, int, int], Tensor]
"""Feature [h] that each step gave, by conversation, first row and step."""


@pytest.fixture(scope="module")
def answers(model: LlamaForCausalLM) -> list[Answer]:
    return answers_of(model, 3, tokens=9)


@pytest.fixture(params=["eagle1", "eagle3"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def parts(kind: Kind, model: LlamaForCausalLM, answers: list[Answer], tmp_path: Path) -> tuple[DraftHead, Batch]:
    head = head_for(model, answers, kind)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return head, batch_of(answers, cached(tmp_path, model, answers, kind), steps=STEPS)


def test_every_row_of_every_step_is_the_plain_loop_s(parts: tuple[DraftHead, Batch], answers: list[Answer]) -> None:
    head, batch = parts
    expected = _plainly(head, batch, answers)
    found = _unrolled(head, batch)
    assert found.keys() >= expected.keys()
    for place, feature in expected.items():
        torch.testing.assert_close(found[place], feature, atol=2e-5, rtol=1e-4)


def test_rows_that_go_on_are_not_changed_by_those_that_do_not(parts: tuple[DraftHead, Batch]) -> None:
    head, batch = parts
    everything, some = _unrolled(head, batch), _unrolled(head, batch, thin=True)
    assert len(some) < len(everything)
    for place, feature in some.items():
        torch.testing.assert_close(feature, everything[place], atol=1e-5, rtol=1e-5)


def test_gradients_are_the_plain_loop_s(parts: tuple[DraftHead, Batch], answers: list[Answer]) -> None:
    head, batch = parts
    names = [name for name, parameter in head.named_parameters() if parameter.ndim == 2 and "lm_head" not in name]
    expected = _plainly(head, batch, answers)
    gradients = []
    for features in (expected, _unrolled(head, batch)):
        head.zero_grad()
        sum(features[place].square().mean() for place in expected).backward()  # type: ignore[union-attr]
        gradients.append({name: head.get_parameter(name).grad for name in names})
    for name in names:
        rounding = 1e-6 * float(gradients[0][name].abs().max())  # of the largest terms that an element may sum
        torch.testing.assert_close(gradients[1][name], gradients[0][name], atol=rounding, rtol=1e-3, msg=name)


@pytest.mark.parametrize("fault", ["feature of the next token", "token not advanced", "prompt one row longer"])
def test_an_alignment_off_by_one_would_be_seen(
    parts: tuple[DraftHead, Batch], answers: list[Answer], fault: str
) -> None:
    head, batch = parts
    wrong = {
        "feature of the next token": lambda: replace(batch, features=batch.features.roll(-1, dims=1)),
        "token not advanced": lambda: replace(batch, tokens=batch.tokens.roll(1, dims=1)),
        "prompt one row longer": lambda: replace(
            batch, prompt_rows=batch.prompt_rows + 1, answer_rows=batch.answer_rows - 1
        ),
    }[fault]()
    expected, found = _plainly(head, batch, answers), _unrolled(head, wrong)
    same = [torch.allclose(found[place], expected[place], atol=1e-3) for place in expected if place in found]
    assert sum(same) < len(same) / 10


def test_labels_are_the_tokens_after_those_that_a_row_has_read(
    parts: tuple[DraftHead, Batch], answers: list[Answer]
) -> None:
    head, batch = parts
    draft_id_of = torch.full((head.shape.vocab,), -1)
    draft_id_of[head.draft_ids] = torch.arange(len(head.draft_ids))
    law = torch.randn(len(answers), batch.answer_rows + STEPS - 1, 5)
    for step in unroll(head, batch, tapped_for(head, batch), steps=STEPS):
        expected = {}
        for number, answer in enumerate(answers):
            for row in range(batch.answer_rows):
                said = answer.start - 1 + row + 1 + step.number
                if said < len(answer.tokens):
                    place = number * batch.answer_rows + row
                    expected[place] = (int(draft_id_of[answer.tokens[said]]), law[number, row + step.number - 1])
        labels, places, total = labels_of(batch, step, draft_id_of, law)
        assert total == len(expected)
        kept = {place: value for place, value in expected.items() if value[0] >= 0}
        assert dict(zip(places.tolist(), labels.ids.tolist(), strict=True)) == {p: v[0] for p, v in kept.items()}
        assert labels.law is not None
        torch.testing.assert_close(labels.law, torch.stack([kept[place][1] for place in places.tolist()]))


def _unrolled(head: DraftHead, batch: Batch, *, thin: bool = False) -> Chains:
    random = torch.Generator().manual_seed(0)

    def choose(rows: int) -> Tensor:
        return torch.randperm(rows, generator=random)[: rows - 2 if thin else rows].sort().values

    steps = unroll(head, batch, tapped_for(head, batch), steps=STEPS, choose=choose)
    return {
        (number, int(row), step.number): step.hidden[number, place]
        for step in steps
        for number in range(len(batch.tokens))
        for place, row in enumerate(step.rows)
    }


def _plainly(head: DraftHead, batch: Batch, answers: list[Answer]) -> Chains:
    """Chains of each answer row as far as there are tokens to read; the features are those of the batch."""
    reference = reference_of(head)
    found: Chains = {}
    for number, answer in enumerate(answers):
        pad = int(batch.pad[number])
        states = batch.features[number, pad : pad + len(answer.tokens)].float()
        tapped = list((states[:, -1:] if head.shape.kind == "eagle1" else states[:, :-1]).unbind(1))
        tokens, rows = torch.tensor(answer.tokens), len(answer.tokens) - 1
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        features = reference.fuse([state[:rows] for state in tapped])
        out, _, cache = reference.forward(tokens[1:], features, torch.arange(rows), causal, reference.empty_cache())
        for row in range(answer.start - 1, rows):
            hidden = out[row : row + 1]
            past = [(keys[:, : row + 1], values[:, : row + 1]) for keys, values in cache]
            for step in range(1, STEPS + 1):
                if step > 1:
                    if row + step >= len(tokens):
                        break
                    seen = torch.ones(1, past[0][0].shape[1] + 1, dtype=torch.bool)
                    at = torch.tensor([row + step - 1])
                    hidden, _, past = reference.forward(tokens[row + step][None], hidden, at, seen, past)
                first = row - (answer.start - 1)
                if first < len(answer.answer) - 1:
                    found[number, first, step] = hidden[0]
    return found
