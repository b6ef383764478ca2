"""Sampling from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle_runtime import Session
from tests.commands import assert_refused, eagle_run

ASK = ("--prompt", "the quick brown fox", "--max-new-tokens", 10, "--ignore-eos")


def answer(bundle: Path, *options: object) -> dict:
    outcome = eagle_run(bundle, *ASK, "--json", *options)
    assert (outcome.status, outcome.err) == (0, "")
    return json.loads(outcome.out)


def test_a_seed_gives_the_same_answer_again(tiny_bundle: Path) -> None:
    first = answer(tiny_bundle, "--temperature", 0.9, "--seed", 7)
    assert first["seed"] == 7
    assert answer(tiny_bundle, "--temperature", 0.9, "--seed", 7)["token_ids"] == first["token_ids"]
    assert answer(tiny_bundle, "--temperature", 0.9, "--seed", 8)["token_ids"] != first["token_ids"]
    new = answer(tiny_bundle, "--temperature", 0.9)
    assert answer(tiny_bundle, "--temperature", 0.9, "--seed", new["seed"])["token_ids"] == new["token_ids"]


@pytest.mark.parametrize(
    "change",
    [
        ("--top-k", 1),
        ("--top-p", 0.05),
        ("--min-p", 1),
        ("--repetition-penalty", 0.01),
        ("--frequency-penalty", -50),
        ("--presence-penalty", -50),
        ("--verify-mode", "sampled", "--profile", "8"),
    ],
    ids=lambda change: change[0],
)
def test_every_option_changes_the_answer(tiny_bundle: Path, change: tuple[object, ...]) -> None:
    sampled = ("--temperature", 2, "--seed", 1)
    assert answer(tiny_bundle, *sampled, *change)["token_ids"] != answer(tiny_bundle, *sampled)["token_ids"]


def test_ngrams_and_ends_are_kept_off(tiny_bundle: Path) -> None:
    repeating = ("--presence-penalty", -50)
    assert len(set(answer(tiny_bundle, *repeating)["token_ids"])) < 10
    assert len(set(answer(tiny_bundle, *repeating, "--no-repeat-ngram-size", 1)["token_ids"])) == 10
    assert eagle_run(tiny_bundle, *ASK, "--min-new-tokens", 10).status == 0
    assert_refused(eagle_run(tiny_bundle, *ASK, "--min-new-tokens", 11), "min_new_tokens is 11", "max_new_tokens, 10")


@pytest.mark.parametrize("profile", ["plain", "8"])
def test_tokens_are_drawn_and_kept_off(tiny_bundle: Path, profile: str) -> None:
    def pieces(*options: object) -> list[str]:
        found = answer(tiny_bundle, "--profile", profile, "--logit-bias", " the=1000", "--logit-bias", "5=-2", *options)
        return [session.piece(token) for token in found["token_ids"]]

    with Session.open(tiny_bundle) as session:
        assert pieces() == [" the"] * 10
        (other,) = set(pieces("--logit-bias", "x=900", "--suppress-token", " the"))
        assert other == "x"
        assert " the" not in pieces("--suppress-token", '" the"')
        assert pieces("--bad-word", " the the", "--logit-bias", "x=900") == [" the", "x"] * 5
        assert " the" not in pieces("--bad-word", "the")


def test_sampled_answers_are_compared_with_plain_ones_of_the_same_seed(tiny_bundle: Path) -> None:
    compared = answer(tiny_bundle, "--temperature", 0.9, "--top-p", 0.9, "--profile", "8", "--compare")
    assert compared["identical"] is True
    assert compared["seed"] == compared["plain"]["seed"]
    outcome = eagle_run(tiny_bundle, *ASK, "--temperature", 0.9, "--profile", "8", "--compare")
    assert "identical: yes" in outcome.out


def test_logprobs_are_in_the_json(tiny_bundle: Path) -> None:
    found = answer(tiny_bundle, "--logprobs", 2)
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    for entry in found["logprobs"]:
        (token, logprob), (_, second) = entry["top"]
        assert (token, logprob) == (entry["token_id"], entry["logprob"])
        assert second <= logprob <= 0


def test_trees_that_were_sampled_are_drawn(tiny_bundle: Path) -> None:
    outcome = eagle_run(
        tiny_bundle, *ASK, "--profile", "8", "--temperature", 1, "--verify-mode", "sampled", "--show-tree"
    )
    assert outcome.status == 0
    assert "round 1:" in outcome.out


def test_a_chat_is_sampled_too(tiny_bundle: Path) -> None:
    options = ("--temperature", 1, "--max-new-tokens", 8, "--ignore-eos")
    answers = {eagle_run(tiny_bundle, *options, "--seed", seed, stdin="hello").out for seed in (1, 2, 1)}
    assert len({text.split("length; ")[0] for text in answers}) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--temperature", "-1"], ["temperature is -1"]),
        (["--top-p", "0.9"], ["top_p is 0.9", "temperature"]),
        (["--temperature", "1", "--verify-mode", "other"], ["verify_mode is 'other'", "deterministic or sampled"]),
        (["--temperature", "1", "--verify-mode", "sampled", "--compare"], ["--compare", "sampled"]),
        (["--logprobs", "3"], ["--logprobs", "--json"]),
        (["--seed", "-5"], ["seed is -5"]),
        (["--logit-bias", "7"], ["--logit-bias is '7'", "expected TOKEN=BIAS"]),
        (["--logit-bias", "7=inf"], ["logit_bias of token 7 is inf", "expected a number"]),
        (["--suppress-token", "320"], ["suppress_tokens names token 320", "0 to 319"]),
        (["--suppress-token", "quick brown"], ["'quick brown' is", "tokens", "--bad-word bans longer texts"]),
        (["--bad-word", ""], ["--bad-word is empty"]),
    ],
)
def test_mistakes_are_refused(tiny_bundle: Path, options: list[str], words: list[str]) -> None:
    assert_refused(eagle_run(tiny_bundle, *ASK, *options), *words)
