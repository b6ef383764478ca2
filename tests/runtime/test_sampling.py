"""Sampling on a tiny target: with the same seed EAGLE's tokens are plain decoding's, whatever is drafted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_graphs import EagleError, Tree, tree_from_parents
from eagle_runtime import Sampling, Session
from eagle_runtime.compare import Difference, first_difference
from tests.drafters import Scripted, Shape, bush, chain, random_prompt, run, run_plain, state_with, wrong

TOKENS = 32

OPTIONS: dict[str, dict[str, Any]] = {
    "0.3": {"temperature": 0.3},
    "0.7": {"temperature": 0.7},
    "1.0": {"temperature": 1.0},
    "top-k": {"temperature": 0.7, "top_k": 20},
    "top-p": {"temperature": 0.7, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "repetition penalty": {"temperature": 0.7, "repetition_penalty": 1.5},
    "counts": {"temperature": 0.7, "frequency_penalty": 1.0, "presence_penalty": 1.0},
    "n-grams": {"temperature": 0.3, "no_repeat_ngram_size": 2},
    "greedy with penalties": {"repetition_penalty": 2.0, "presence_penalty": 1.0},
    "greedy with n-grams": {"no_repeat_ngram_size": 1},
    "bans": {"temperature": 0.7, "suppress_tokens": [5, 6], "bad_words_ids": [[7], [8, 9]], "logit_bias": {11: 3.0}},
    "all": {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 8,
    },
}


@pytest.fixture(scope="module")
def session(tiny_bundle: Path) -> Iterator[Session]:
    with Session.open(tiny_bundle, profile="8", threads=1) as opened:
        yield opened


@pytest.mark.parametrize("profile", ["4", "8", "16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_head_changes_no_token(session: Session, options: dict[str, Any], profile: str) -> None:
    for seed in range(2):
        prompt = random_prompt(20, seed)
        answers = []
        for name in ("plain", profile):
            session.reset()
            answers.append(
                session.generate(token_ids=prompt, profile=name, max_new_tokens=TOKENS, seed=seed, **options).token_ids
            )
        assert answers[0] == answers[1]


@pytest.mark.parametrize("shape", [chain(4, 4), chain(2, 4), bush], ids=["right", "half right", "among siblings"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_accepted_drafts_change_no_token(session: Session, options: dict[str, Any], shape: Shape) -> None:
    prompt, sampling = random_prompt(20, 3), Sampling(**options, seed=11)
    plain = run_plain(session, prompt, TOKENS, sampling=sampling)
    state = state_with(session, Scripted([*prompt, *plain], shape))
    answer = run(session, state, prompt, max_new_tokens=TOKENS, sampling=sampling)
    assert answer.tokens == plain
    assert answer.progress.stats.rounds < 0.6 * TOKENS


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(list(OPTIONS)))
def test_any_tree_gives_plain_decodings_tokens(session: Session, random: Any, name: str) -> None:
    """Also trees that hold the next token several times, below wrong ones."""
    prompt, sampling = random_prompt(12, 1), Sampling(**OPTIONS[name], seed=5)
    plain = run_plain(session, prompt, 16, sampling=sampling)

    def shape(coming: Sequence[int]) -> Tree:
        parents, depths, tokens = [-1], [0], [coming[0]]
        for row in range(1, random.randint(2, 20)):
            parent = random.choice([row for row, depth in enumerate(depths) if depth < 8])
            siblings = {tokens[i] for i in range(1, row) if parents[i] == parent}
            right = coming[depths[parent] + 1]
            tokens.append(wrong(right, row) if right in siblings or random.random() < 0.3 else right)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        return tree_from_parents(np.array(tokens), np.array(parents))

    state = state_with(session, Scripted([*prompt, *plain], shape))
    assert run(session, state, prompt, max_new_tokens=16, sampling=sampling).tokens == plain


def test_seeds_and_temperatures_differ(session: Session) -> None:
    prompt = random_prompt(20)

    def tokens(**options: Any) -> tuple[int, ...]:
        return tuple(session.generate(token_ids=prompt, max_new_tokens=8, ignore_eos=True, **options).token_ids)

    assert len({tokens(temperature=1.0, seed=seed) for seed in range(8)}) == 8
    assert tokens(temperature=1.0, seed=3) == tokens(temperature=1.0, seed=3)
    assert tokens(temperature=0.0) == tokens(temperature=None) == tokens() == tokens(temperature=1e-6, seed=4)
    assert tokens(temperature=1.0, top_k=1) == tokens() == tokens(temperature=1.0, top_p=0.0)


def test_a_seed_that_was_made_up_is_told(session: Session) -> None:
    prompt = random_prompt(20)
    first = session.generate(token_ids=prompt, max_new_tokens=12, temperature=1.0)
    second = session.generate(token_ids=prompt, max_new_tokens=12, temperature=1.0)
    assert first.token_ids != second.token_ids
    again = session.generate(token_ids=prompt, max_new_tokens=12, temperature=1.0, seed=first.sampling.seed)
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_difference_is_told_by_what_was_drawn_by(session: Session, options: dict[str, Any]) -> None:
    """The plain token's score is the largest, by how much is the gap that a tie would have to be under."""
    prompt = random_prompt(20)
    session.reset()
    plain = session.generate(token_ids=prompt, profile="plain", max_new_tokens=8, seed=3, **options)
    for step in (0, 5):
        other = next(token for token in range(200, 300) if token not in plain.token_ids)
        eagle = [*plain.token_ids[:step], other, *plain.token_ids[step + 1 :]]
        difference = first_difference(session, prompt, eagle, plain.token_ids, plain.sampling)
        assert difference is not None
        assert (difference.step, difference.eagle, difference.plain) == (step, other, plain.token_ids[step])
        assert difference.plain_logit > max(difference.eagle_logit, difference.third_logit)
        assert not difference.is_tie(gap=1e-3)
    assert first_difference(session, prompt, plain.token_ids, plain.token_ids, plain.sampling) is None


@pytest.mark.parametrize(
    ("eagle", "plain", "third", "tie"),
    [
        (1.0, 1.0005, 0.9, True),
        (1.0005, 1.0, 1.0, True),
        (1.0, 1.002, 0.9, False),  # too far apart
        (1.0, 1.0005, 1.0002, False),  # another was better than one of them
        (-math.inf, 1.0, 0.9, False),  # a banned one
        (-math.inf, -math.inf, 0.9, False),
    ],
)
def test_only_the_two_best_can_be_a_tie(eagle: float, plain: float, third: float, tie: bool) -> None:
    difference = Difference(step=0, eagle=1, plain=2, eagle_logit=eagle, plain_logit=plain, third_logit=third)
    assert difference.is_tie(gap=1e-3) == tie


def test_a_second_turn_draws_as_a_fresh_session_does(session: Session) -> None:
    """Positions are counted from the conversation's beginning, so a reused cache does not show."""
    prompt, options = random_prompt(20), {"temperature": 0.8, "seed": 2, "repetition_penalty": 1.2}
    first = session.generate(token_ids=prompt, max_new_tokens=9, ignore_eos=True, **options)
    longer = [*prompt, *first.token_ids, 5, 6]
    second = session.generate(token_ids=longer, max_new_tokens=9, ignore_eos=True, **options)
    assert second.stats.reused_tokens > 20
    session.reset()
    assert (
        session.generate(token_ids=longer, max_new_tokens=9, ignore_eos=True, **options).token_ids == second.token_ids
    )


# What the options do to the answer


def test_no_ngram_is_repeated(session: Session) -> None:
    prompt = random_prompt(20)
    tokens = prompt + session.generate(token_ids=prompt, no_repeat_ngram_size=1, max_new_tokens=TOKENS).token_ids
    assert len(set(tokens[19:])) == len(tokens[19:])


def test_penalties_on_the_path_are_seen_inside_a_tree(session: Session) -> None:
    """Each accepted token forbids itself further down, within one round."""
    prompt, sampling = random_prompt(20), Sampling(presence_penalty=1000.0, seed=0)
    plain = run_plain(session, prompt, 17, sampling=sampling)
    assert len(set(plain)) == 17
    state = state_with(session, Scripted([*prompt, *plain], chain(15, 15)))
    answer = run(session, state, prompt, max_new_tokens=17, sampling=sampling)
    assert (answer.tokens, answer.progress.stats.rounds) == (plain, 1)


def test_min_new_tokens_keeps_an_answer_from_ending(session: Session) -> None:
    prompt = random_prompt(20)
    bias = {1: 100.0}  # the end-of-sequence token
    answer = session.generate(token_ids=prompt, logit_bias=bias, min_new_tokens=7, max_new_tokens=TOKENS)
    assert (len(answer.token_ids), answer.token_ids[-1], answer.finish_reason) == (8, 1, "stop")


def test_bias_and_bans(session: Session) -> None:
    prompt = random_prompt(20)

    def tokens(**options: Any) -> list[int]:
        return session.generate(token_ids=prompt, max_new_tokens=6, **options).token_ids

    assert tokens(logit_bias={50: 1000.0}) == [50] * 6
    assert tokens(logit_bias={50: 1000.0, 60: 900.0}, suppress_tokens=[50]) == [60] * 6
    assert tokens(logit_bias={50: -math.inf, 60: 900.0}) == [60] * 6
    assert tokens(logit_bias={50: 1000.0, 60: 900.0}, bad_words_ids=[[50, 50]]) == [50, 60] * 3


@pytest.mark.parametrize(
    "options", [{"suppress_tokens": range(320)}, {"logit_bias": {3: 3.4e38}, "temperature": 1e-3, "top_k": 2}]
)
def test_an_answer_that_cannot_go_on_is_an_error(session: Session, options: dict[str, Any]) -> None:
    with pytest.raises(EagleError, match=r"every token is banned|processed logits hold inf"):
        session.generate(token_ids=random_prompt(20), **options)


# Log-probabilities


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.3}])
@pytest.mark.parametrize("profile", ["plain", "8"])
def test_logprobs_are_the_targets_own(session: Session, options: dict[str, Any], profile: str) -> None:
    prompt = random_prompt(20)
    answer = session.generate(token_ids=prompt, profile=profile, max_new_tokens=9, logprobs=3, **options)
    assert answer.logprobs is not None
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    for step, entry in enumerate(answer.logprobs):
        logits = session.logits([*prompt, *answer.token_ids[:step]]).astype(np.float64)
        expected = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
        best = np.argsort(-expected)[:3]
        assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-3)
        assert [token for token, _ in entry.top] == best.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[best].tolist(), abs=1e-3)


def test_logprobs_follow_accepted_drafts_and_cuts(session: Session) -> None:
    prompt = random_prompt(20)
    plain = run(session, state_with(session, None), prompt, max_new_tokens=13, logprobs=0)
    state = state_with(session, Scripted([*prompt, *plain.tokens], bush))
    drafted = run(session, state, prompt, max_new_tokens=13, logprobs=0)
    assert drafted.progress.stats.rounds == 3
    found, expected = drafted.progress.logprobs, plain.progress.logprobs
    assert [entry.token_id for entry in found] == plain.tokens
    assert [entry.logprob for entry in found] == pytest.approx([entry.logprob for entry in expected], abs=1e-3)


def test_no_logprobs_unless_asked_for(session: Session) -> None:
    assert session.generate(token_ids=[5], max_new_tokens=2).logprobs is None


# Processors of the user's own


class Alternating:
    """A grammar of two kinds of tokens in turn, even ids and odd ones; records what it is asked to do."""

    def __init__(self) -> None:
        self.advanced: list[tuple[int, int]] = []

    def start(self, prompt: np.ndarray) -> tuple[int, ...]:
        return ()

    def advance(self, state: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*state, token)

    def process(self, state: tuple[int, ...], logits: np.ndarray) -> None:
        logits[(len(state) + 1) % 2 :: 2] = -np.inf


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_processor_s_state_follows_the_path(session: Session, options: dict[str, Any]) -> None:
    prompt, sampling = random_prompt(20), Sampling(**options).seeded()
    plain = run_plain(session, prompt, 21, sampling=sampling, processors=[Alternating()])
    assert [token % 2 for token in plain] == [0, 1] * 10 + [0]
    for shape in (chain(4, 4), chain(1, 3), bush):
        state = state_with(session, Scripted([*prompt, *plain], shape))
        answer = run(session, state, prompt, max_new_tokens=21, sampling=sampling, processors=[Alternating()])
        assert answer.tokens == plain
    options = options | {"seed": sampling.seed, "processors": [Alternating()]}
    through_session = session.generate(token_ids=prompt, max_new_tokens=21, **options)
    assert through_session.token_ids == plain


def test_a_processor_state_that_was_not_committed_is_dropped(session: Session) -> None:
    """The answer is cut within a round: the state kept is that of the tokens kept."""
    processor, prompt = Alternating(), random_prompt(20)
    sampling = Sampling(seed=0)
    plain = run_plain(session, prompt, 21, sampling=sampling, processors=[processor])
    state = state_with(session, Scripted([*prompt, *plain], chain(4, 4)))
    answer = run(session, state, prompt, max_new_tokens=21, eos=[plain[7]], sampling=sampling, processors=[processor])
    assert answer.tokens == plain[:8]


# Options that are refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1; expected 0 or more"),
        ({"temperature": math.nan}, "temperature is nan; expected a number"),
        ({"temperature": 1e-9}, "temperature is 1e-09; expected 0"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": 1, "top_k": -1}, "top_k is -1"),
        ({"temperature": 1, "top_k": 1.5}, "top_k is 1.5"),
        ({"temperature": 1, "top_p": 1.1}, "top_p is 1.1; expected 0 to 1"),
        ({"temperature": 1, "min_p": -0.1}, "min_p is -0.1; expected 0 to 1"),
        ({"top_p": 0.9}, "top_p is 0.9 but nothing is sampled"),
        ({"temperature": 0, "top_k": 5}, "top_k is 5 but nothing is sampled"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; expected more"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"repetition_penalty": None}, "repetition_penalty is None"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size is -2"),
        ({"min_new_tokens": 600}, "min_new_tokens is 600, more than max_new_tokens, 512"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "expected a whole number of 0 to 2\\^64 - 1"),
        ({"seed": True}, "seed is True"),
        ({"logit_bias": {320: 1.0}}, "logit_bias names token 320; the vocabulary has 0 to 319"),
        ({"logit_bias": {3: math.nan}}, "logit_bias of token 3 is nan"),
        ({"bad_words_ids": [[3], []]}, "empty word"),
        ({"bad_words_ids": [[3, 400]]}, "bad_words_ids names token 400"),
        ({"suppress_tokens": [-1]}, "suppress_tokens names token -1"),
        ({"verify_mode": "other"}, "verify_mode is 'other'; expected deterministic or sampled"),
        ({"verify_mode": "sampled"}, "nothing is sampled: give a temperature"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 321}, "logprobs is 321"),
    ],
)
def test_a_bad_option_is_refused_at_once(session: Session, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EagleError, match=message):
        session.stream("Hello", **options)


def test_plain_greedy_decoding_asks_for_no_logits(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    verifier = session._state.verifier
    verify = verifier.verify
    monkeypatch.setattr(verifier, "verify", lambda tree, *, logits: asked.append(logits) or verify(tree, logits=logits))
    for options in ({}, {"temperature": 0.0, "seed": 3}, {"temperature": 0.5}, {"logprobs": 0}):
        asked.clear()
        session.generate(token_ids=[5, 6], max_new_tokens=3, ignore_eos=True, **options)
        assert set(asked) == {bool(options.get("temperature")) or "logprobs" in options}
