"""The loop on a tiny target: the tokens of plain decoding whatever is drafted, and in the rounds foreseen by hand.

Most tests draft with `Scripted`, which knows the target's continuation and is right as often as it is told.
With drafts of 4 levels, all right, the first token comes from prefill and the rounds give tokens 1-5, 6-10, ...
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_graphs import EagleError, Tree, tree_from_parents
from eagle_runtime import Session, SessionBusyError
from eagle_runtime.generate import Progress, Round, SlotState
from eagle_runtime.text import TextStream
from tests.drafters import (
    Answer,
    Known,
    Scripted,
    Shape,
    bush,
    chain,
    random_prompt,
    run,
    run_plain,
    state_with,
    stream,
    wrong,
)

CAPACITY, CHUNK = 160, 16  # of tiny_bundle
ALL_RIGHT = chain(4, 4)
SOON = 10.0
"""Seconds within which another thread must have acted."""


@pytest.fixture(scope="module")
def session(tiny_bundle: Path) -> Iterator[Session]:
    """For the loop's tests, which put their own drafter beside its target."""
    with Session.open(tiny_bundle, profile="8", threads=1) as opened:
        yield opened


@pytest.fixture
def fresh(tiny_bundle: Path) -> Iterator[Session]:
    """A session that nobody has used."""
    with Session.open(tiny_bundle, profile="8", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def known(session: Session) -> Known:
    """A continuation whose first 11 tokens differ, the 8th and 9th of them readable and new text."""
    for seed in range(200):
        prompt = random_prompt(20, seed)
        tokens = run_plain(session, prompt, 48)
        before, seam = session.tokenizer.decode(tokens[:8]), stop_string(session, tokens)
        if len(set(tokens[:11])) == 11 and len(seam) == 2 and seam.isascii() and seam.isprintable():
            assert seam not in before
            return Known(prompt=prompt, tokens=tokens)
    raise AssertionError("no prompt has such a continuation")


def stop_string(session: Session, tokens: Sequence[int]) -> str:
    """The last character of token 7 and the first of token 8: complete with token 8, in the middle of round 2."""
    last, first = session.tokenizer.decode([tokens[7]]), session.tokenizer.decode([tokens[8]])
    return last[-1:] + first[:1]


def scripted(session: Session, known: Known, shape: Shape) -> SlotState:
    return state_with(session, Scripted(known.script, shape))


@pytest.mark.parametrize(
    ("shape", "rounds", "accepted", "checked"),
    [
        # 20 tokens after the first: each round gives the accepted ones and the bonus, the last what is left.
        pytest.param(chain(4, 4), 4, 16, 16, id="always right"),
        pytest.param(chain(0, 4), 20, 0, 20, id="never right"),
        pytest.param(chain(1, 4), 10, 10, 20, id="wrong at level 2"),
        pytest.param(chain(2, 4), 7, 14, 21, id="wrong at level 3"),
        pytest.param(chain(3, 4), 5, 15, 20, id="wrong at the last level"),
        pytest.param(chain(1, 1), 10, 10, 10, id="one level, right"),
        pytest.param(bush, 5, 15, 35, id="right among siblings"),  # checks 3 + 2 + 2 children a round
    ],
)
def test_tokens_are_plain_decodings_and_rounds_as_foreseen(
    session: Session, known: Known, shape: Shape, rounds: int, accepted: int, checked: int
) -> None:
    answer = run(session, scripted(session, known, shape), known.prompt, max_new_tokens=21)
    stats = answer.progress.stats
    assert answer.tokens == known.tokens[:21]
    assert answer.progress.finish_reason == "length"
    assert "".join(answer.pieces) == session.tokenizer.decode(answer.tokens)
    assert (stats.rounds, stats.accepted_nodes, stats.checked_nodes) == (rounds, accepted, checked)
    assert (stats.tokens, stats.round_tokens) == (21, 20)
    assert stats.accepted_length == 20 / rounds
    assert stats.acceptance_rate == accepted / checked
    assert [token for done in answer.rounds for token in done.kept] == known.tokens[1:21]


def test_plain_decoding_is_a_round_a_token_and_checks_nothing(session: Session, known: Known) -> None:
    answer = run(session, scripted(session, known, ALL_RIGHT), known.prompt, plain=True, max_new_tokens=21)
    stats = answer.progress.stats
    assert answer.tokens == known.tokens[:21]
    assert (stats.rounds, stats.accepted_nodes, stats.checked_nodes, stats.accepted_length) == (20, 0, 0, 1.0)


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_tree_gives_plain_decodings_tokens(session: Session, known: Known, random) -> None:
    """Each node is right for its depth or wrong, whatever its ancestors are."""

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

    answer = run(session, scripted(session, known, shape), known.prompt, max_new_tokens=21)
    assert answer.tokens == known.tokens[:21]


@pytest.mark.parametrize("kept", range(1, 12))
def test_max_new_tokens_cuts_a_draft(session: Session, known: Known, kept: int) -> None:
    answer = run(session, scripted(session, known, ALL_RIGHT), known.prompt, max_new_tokens=kept)
    assert answer.tokens == known.tokens[:kept]
    assert answer.progress.finish_reason == "length"
    assert answer.progress.stats.rounds == -(-(kept - 1) // 5)


@pytest.mark.parametrize("end", range(11))  # 0: from prefill; 1, 6: first level; 4, 9: last level; 5, 10: bonus
def test_eos_cuts_a_draft(session: Session, known: Known, end: int) -> None:
    answer = run(session, scripted(session, known, ALL_RIGHT), known.prompt, eos=[known.tokens[end]])
    stats = answer.progress.stats
    assert answer.tokens == known.tokens[: end + 1]
    assert answer.progress.finish_reason == "stop"
    assert (stats.rounds, stats.tokens, stats.round_tokens) == (-(-end // 5), end + 1, end)
    assert stats.accepted_nodes == stats.checked_nodes == 4 * stats.rounds  # the walk went on where the answer was cut


def test_a_stop_string_cuts_a_draft(session: Session, known: Known) -> None:
    stop = stop_string(session, known.tokens)
    answer = run(session, scripted(session, known, ALL_RIGHT), known.prompt, stop=[stop])
    assert answer.tokens == known.tokens[:9]
    assert answer.progress.finish_reason == "stop"
    assert answer.progress.stats.rounds == 2
    assert answer.rounds[-1].kept == known.tokens[6:9]
    assert "".join(answer.pieces) == session.tokenizer.decode(known.tokens[:9]).split(stop)[0]


@pytest.mark.parametrize(
    ("eos", "limit", "kept", "reason"),
    [(7, 10, 8, "stop"), (9, 10, 9, "stop"), (9, 8, 8, "length"), (7, 8, 8, "stop"), (8, 9, 9, "stop")],
)
def test_of_several_ends_in_one_draft_the_first_counts(
    session: Session, known: Known, eos: int, limit: int, kept: int, reason: str
) -> None:
    """The stop string is complete with token 8."""
    answer = run(
        session,
        scripted(session, known, ALL_RIGHT),
        known.prompt,
        stop=[stop_string(session, known.tokens)],
        eos=[known.tokens[eos]],
        max_new_tokens=limit,
    )
    assert answer.tokens == known.tokens[:kept]
    assert answer.progress.finish_reason == reason


@pytest.mark.parametrize("length", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 9])
def test_a_prompt_of_any_length_is_read_as_in_one_pass(session: Session, length: int) -> None:
    prompt = random_prompt(length, seed=1)
    whole = run(session, state_with(session, None), prompt, chunk=length, max_new_tokens=12).tokens
    answer = run(session, state_with(session, Scripted([*prompt, *whole], ALL_RIGHT)), prompt, max_new_tokens=12)
    assert answer.tokens == whole
    assert (answer.progress.stats.prompt_tokens, answer.progress.stats.reused_tokens) == (length, 0)


@pytest.mark.parametrize("length", [CHUNK, 3 * CHUNK + 1])
def test_the_head_drafts_the_same_however_the_prompt_was_cut(tiny_bundle: Path, fresh: Session, length: int) -> None:
    prompt = random_prompt(length, seed=2)
    with Session.open(tiny_bundle, profile="8", threads=1) as other:
        expected = run(other, other._state, prompt, max_new_tokens=8)
    assert_same_rounds(run(fresh, fresh._state, prompt, chunk=7, max_new_tokens=8).rounds, expected.rounds)


@pytest.mark.parametrize("length", [CAPACITY - 10, CAPACITY - 8, CAPACITY - 3, CAPACITY])
@pytest.mark.parametrize("shape", [None, ALL_RIGHT, bush], ids=["plain", "always right", "siblings"])
def test_the_end_of_the_cache_ends_the_answer(session: Session, length: int, shape: Shape | None) -> None:
    prompt = random_prompt(length, seed=3)
    tokens = run_plain(session, prompt, 64)
    assert len(tokens) == CAPACITY + 1 - length
    state = state_with(session, Scripted([*prompt, *tokens], shape) if shape else None)
    answer = run(session, state, prompt, max_new_tokens=64)
    assert answer.tokens == tokens
    assert answer.progress.finish_reason == "length"
    assert state.verifier.rows == CAPACITY


@pytest.mark.parametrize("profile", ["plain", "4", "8", "16"])
def test_the_head_drafts_up_to_the_end_of_the_cache(fresh: Session, profile: str) -> None:
    prompt = random_prompt(CAPACITY - 6, seed=4)
    answer = fresh.generate(token_ids=prompt, profile=profile, ignore_eos=True)
    assert (len(answer.token_ids), answer.finish_reason) == (7, "length")
    fresh.reset()
    assert fresh.generate(token_ids=prompt, profile="plain", ignore_eos=True).token_ids == answer.token_ids


@pytest.mark.parametrize("profile", ["4", "8", "16"])
def test_the_head_changes_no_token(fresh: Session, known: Known, profile: str) -> None:
    answer = fresh.generate(token_ids=known.prompt, profile=profile, max_new_tokens=48, ignore_eos=True)
    assert answer.token_ids == known.tokens


# Two turns


def assert_same_rounds(rounds: Sequence[Round], expected: Sequence[Round]) -> None:
    assert len(rounds) == len(expected)
    for found, wanted in zip(rounds, expected, strict=True):
        np.testing.assert_array_equal(found.tree.tokens, wanted.tree.tokens)
        np.testing.assert_array_equal(found.tree.parents, wanted.tree.parents)
        np.testing.assert_allclose(found.tree.values, wanted.tree.values, atol=1e-4)
        assert (found.walk, found.kept) == (wanted.walk, wanted.kept)


FirstTurn = Callable[[Session, SlotState, Known], None]


def with_options(**options: object) -> FirstTurn:
    def turn(session: Session, state: SlotState, known: Known) -> None:
        run(session, state, known.prompt, **options)

    return turn


def with_the_heads_own_trees(session: Session, state: SlotState, known: Known) -> None:
    state.drafter.shape = None
    run(session, state, known.prompt, max_new_tokens=12)


def accepted_among_siblings(session: Session, state: SlotState, known: Known) -> None:
    state.drafter.shape = bush
    run(session, state, known.prompt, max_new_tokens=15)


def cut_by_eos(session: Session, state: SlotState, known: Known) -> None:
    run(session, state, known.prompt, eos=[known.tokens[7]])


def cut_by_stop_string(session: Session, state: SlotState, known: Known) -> None:
    run(session, state, known.prompt, stop=[stop_string(session, known.tokens)])


def cancelled_in_prefill(session: Session, state: SlotState, known: Known) -> None:
    cancelled, observe = threading.Event(), state.drafter.observe
    state.drafter.observe = lambda features: (observe(features), cancelled.set())
    answer = run(session, state, known.prompt, cancelled=cancelled)
    state.drafter.observe = observe
    assert (answer.tokens, answer.progress.finish_reason) == ([], "cancelled")
    assert state.tokens == known.prompt[:CHUNK]
    assert state.verifier.rows == CHUNK


def cancelled_in_round_2(session: Session, state: SlotState, known: Known) -> None:
    cancelled, seen = threading.Event(), []
    on_round = lambda done: seen.append(done) or (len(seen) == 2 and cancelled.set())  # noqa: E731
    answer = run(session, state, known.prompt, cancelled=cancelled, on_round=on_round)
    assert (answer.tokens, answer.progress.finish_reason) == (known.tokens[:11], "cancelled")


def abandoned(session: Session, state: SlotState, known: Known) -> None:
    answer = Answer(progress=Progress(text=TextStream(session.tokenizer)))
    suspended = stream(session, state, known.prompt, answer)
    while len(answer.rounds) < 2:
        next(suspended)
    suspended.close()
    assert state.verifier.rows == len(state.tokens) - 1


FIRST_TURNS: dict[str, FirstTurn] = {
    "plain": with_options(plain=True, max_new_tokens=40),
    "plain, one token": with_options(plain=True, max_new_tokens=1),
    "the head's own trees": with_the_heads_own_trees,
    "accepted among siblings": accepted_among_siblings,
    "ended with a round": with_options(max_new_tokens=11),
    "cut by max_new_tokens": with_options(max_new_tokens=9),
    "cut by EOS": cut_by_eos,
    "cut by a stop string": cut_by_stop_string,
    "cancelled in prefill": cancelled_in_prefill,
    "cancelled in round 2": cancelled_in_round_2,
    "abandoned": abandoned,
}

NEW = [5, 6, 7]


def goes_on(state: SlotState, known: Known) -> tuple[list[int], int]:
    """Every committed row fits, and all but one of them are kept."""
    return [*state.tokens, *NEW], state.verifier.rows - 1


SECOND_PROMPTS: dict[str, Callable[[SlotState, Known], tuple[list[int], int]]] = {
    "goes on": goes_on,
    "other answer": lambda state, known: ([*known.script[:23], wrong(known.script[23]), *NEW], 22),
    "other prompt": lambda state, known: ([*known.prompt[:10], wrong(known.prompt[10]), *NEW], 9),
    "shorter": lambda state, known: (known.prompt[:13], 12),
    "the same": lambda state, known: (known.prompt, 19),
    "one token": lambda state, known: (known.prompt[:1], 0),
    "all other": lambda state, known: ([wrong(known.prompt[0]), *known.prompt[1:]], 0),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [(first, "goes on") for first in FIRST_TURNS]
    + [(first, "other prompt") for first in FIRST_TURNS]
    + [(first, second) for first in ("plain", "cut by max_new_tokens") for second in SECOND_PROMPTS],
)
def test_a_second_turn_equals_a_fresh_sessions(
    tiny_bundle: Path, fresh: Session, known: Known, first: str, second: str
) -> None:
    """Its tokens and, with the real head, every tree: whatever the first turn left behind is as if read anew."""
    state = state_with(fresh, Scripted(known.script, ALL_RIGHT, head=fresh._state.drafter))
    FIRST_TURNS[first](fresh, state, known)
    state.drafter.shape = None
    prompt, reused = SECOND_PROMPTS[second](state, known)
    answer = run(fresh, state, prompt, max_new_tokens=10)
    assert answer.progress.stats.reused_tokens == reused

    with Session.open(tiny_bundle, profile="8", threads=1) as other:
        rounds: list[Round] = []
        expected = other.generate(token_ids=prompt, max_new_tokens=10, ignore_eos=True, on_round=rounds.append)
        assert answer.tokens == expected.token_ids
        assert_same_rounds(answer.rounds, rounds)
        other.reset()
        plain = other.generate(token_ids=prompt, profile="plain", max_new_tokens=10, ignore_eos=True)
        assert answer.tokens == plain.token_ids


def test_turns_of_a_session_with_changing_profiles(tiny_bundle: Path, fresh: Session) -> None:
    prompt, turns = random_prompt(20, seed=5), ["16", "plain", "4", "8"]
    for number, profile in enumerate(turns):
        found: list[Round] = []
        answer = fresh.generate(
            token_ids=prompt, profile=profile, max_new_tokens=9, ignore_eos=True, on_round=found.append
        )
        assert answer.stats.reused_tokens == (len(prompt) - len(NEW) - 2 if number else 0)
        with Session.open(tiny_bundle, profile="8", threads=1) as other:
            rounds: list[Round] = []
            expected = other.generate(
                token_ids=prompt, profile=profile, max_new_tokens=9, ignore_eos=True, on_round=rounds.append
            )
        assert answer.token_ids == expected.token_ids
        assert_same_rounds(found, rounds)
        prompt = [*prompt, *answer.token_ids, *NEW]


def test_a_failed_round_leaves_nothing_behind(fresh: Session, known: Known) -> None:
    def fail(_done: Round) -> None:
        raise RuntimeError("looking on failed")

    with pytest.raises(RuntimeError, match="looking on failed"):
        fresh.generate(token_ids=known.prompt, on_round=fail)
    answer = fresh.generate(token_ids=known.prompt, max_new_tokens=12, ignore_eos=True)
    assert answer.token_ids == known.tokens[:12]
    assert answer.stats.reused_tokens == 0


def test_logits_between_two_turns_do_not_disturb_them(fresh: Session, known: Known) -> None:
    fresh.generate(token_ids=known.prompt, max_new_tokens=5, ignore_eos=True)
    assert int(fresh.logits(known.script[:30]).argmax()) == known.script[30]
    answer = fresh.generate(token_ids=known.prompt, max_new_tokens=12, ignore_eos=True)
    assert answer.token_ids == known.tokens[:12]


# Cancelling, one answer at a time, closing


def test_cancelled_by_another_thread(fresh: Session, known: Known) -> None:
    asked, done, rounds = threading.Event(), threading.Event(), []

    def cancel() -> None:
        asked.wait(SOON)
        fresh.cancel()
        done.set()

    def on_round(round_: Round) -> None:
        rounds.append(round_)
        if len(rounds) == 3:
            asked.set()
            assert done.wait(SOON)

    thread = threading.Thread(target=cancel)
    thread.start()
    answer = fresh.generate(token_ids=known.prompt, profile="plain", max_new_tokens=40, on_round=on_round)
    thread.join()
    assert (answer.token_ids, answer.finish_reason) == (known.tokens[:4], "cancelled")
    assert fresh.generate(token_ids=known.prompt, max_new_tokens=9, ignore_eos=True).token_ids == known.tokens[:9]


def test_cancelled_by_on_round(fresh: Session, known: Known) -> None:
    answer = fresh.generate(token_ids=known.prompt, profile="plain", on_round=lambda _: fresh.cancel())
    assert (answer.token_ids, answer.finish_reason) == (known.tokens[:2], "cancelled")


def test_cancelling_the_round_that_ends_the_answer_changes_nothing(fresh: Session, known: Known) -> None:
    answer = fresh.generate(
        token_ids=known.prompt, profile="plain", max_new_tokens=2, on_round=lambda _: fresh.cancel()
    )
    assert (answer.token_ids, answer.finish_reason) == (known.tokens[:2], "length")


def test_cancelling_between_two_answers_does_not_reach_the_next(fresh: Session, known: Known) -> None:
    fresh.cancel()
    answer = fresh.generate(token_ids=known.prompt, max_new_tokens=9, ignore_eos=True)
    assert (answer.token_ids, answer.finish_reason) == (known.tokens[:9], "length")


def test_one_answer_at_a_time(fresh: Session, known: Known) -> None:
    suspended = fresh.stream(token_ids=known.prompt, max_new_tokens=21, ignore_eos=True)
    next(suspended)
    for attempt in (
        lambda: fresh.generate(token_ids=known.prompt),
        lambda: fresh.logits(known.prompt),
        fresh.reset,
    ):
        with pytest.raises(SessionBusyError, match="answering already"):
            attempt()
    for _ in suspended:
        pass
    assert fresh.last.token_ids == known.tokens[:21]
    assert fresh.generate(token_ids=known.prompt, max_new_tokens=3, ignore_eos=True).token_ids == known.tokens[:3]


def test_another_thread_is_refused_while_an_answer_is_under_way(fresh: Session, known: Known) -> None:
    refused: list[SessionBusyError] = []

    def attempt() -> None:
        try:
            fresh.generate(token_ids=known.prompt)
        except SessionBusyError as error:
            refused.append(error)

    def on_round(_done: Round) -> None:
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(SOON)

    answer = fresh.generate(token_ids=known.prompt, max_new_tokens=9, ignore_eos=True, on_round=on_round)
    assert len(refused) == answer.stats.rounds
    assert answer.token_ids == known.tokens[:9]


def test_closing_ends_a_suspended_answer(fresh: Session, known: Known) -> None:
    suspended = fresh.stream(token_ids=known.prompt, profile="plain", max_new_tokens=21, ignore_eos=True)
    next(suspended)
    fresh.close()
    assert list(suspended) == []
    assert fresh.last.finish_reason == "cancelled"
    count = len(fresh.last.token_ids)
    assert 1 <= count < 21
    assert fresh.last.token_ids == known.tokens[:count]
    fresh.close()


def test_closing_in_another_thread_ends_an_answer_under_way(fresh: Session, known: Known) -> None:
    closing = threading.Thread(target=fresh.close)

    def on_round(_done: Round) -> None:
        if not closing.ident:
            closing.start()
            assert fresh._cancelled.wait(SOON)

    answer = fresh.generate(token_ids=known.prompt, profile="plain", max_new_tokens=40, on_round=on_round)
    closing.join(SOON)
    assert not closing.is_alive()
    assert (answer.token_ids, answer.finish_reason) == (known.tokens[:2], "cancelled")


def test_closing_from_on_round_does_not_hang(fresh: Session, known: Known) -> None:
    def answer() -> None:
        with suppress(EagleError, RuntimeError):  # the second where the test itself has freed the lock
            fresh.generate(token_ids=known.prompt, on_round=lambda _: fresh.close())

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(2)
    hung = thread.is_alive()
    if hung:  # let the thread go, so that it does not outlive the test
        fresh._lock.release()
        thread.join(SOON)
    assert not hung


@pytest.mark.parametrize(
    "use", [lambda session: session.generate("Hello"), lambda session: session.logits([3])], ids=["generate", "logits"]
)
def test_a_closed_session_is_refused(fresh: Session, use: Callable[[Session], object]) -> None:
    fresh.close()
    with pytest.raises(EagleError, match="closed"):
        use(fresh)


def test_a_stream_begun_after_closing_is_refused(fresh: Session) -> None:
    late = fresh.stream("Hello")
    fresh.close()
    with pytest.raises(EagleError, match="closed"):
        next(late)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ""}, "no tokens"),
        ({"token_ids": []}, "no tokens"),
        ({}, "found 0 of them"),
        ({"prompt": "Hello", "token_ids": [3]}, "found 2 of them"),
        ({"token_ids": [3, 320]}, "320 is not in the vocabulary"),
        ({"token_ids": [-1]}, "-1 is not in the vocabulary"),
        ({"token_ids": [3] * (CAPACITY + 1)}, f"{CAPACITY + 1} tokens, the bundle's capacity is {CAPACITY}"),
        ({"prompt": "Hello", "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompt": "Hello", "profile": "7"}, "profile '7' is not in the bundle"),
        ({"prompt": "Hello", "stop_strings": "end"}, "expected a list"),
        ({"prompt": "Hello", "stop_strings": [""]}, "non-empty"),
        ({"messages": [{"role": "user", "content": "x" * 1000}]}, "capacity"),
    ],
)
def test_a_bad_option_is_refused_at_once(session: Session, options: dict[str, object], message: str) -> None:
    with pytest.raises(EagleError, match=message):
        session.stream(**options)


def test_an_unknown_option_is_refused(session: Session) -> None:
    with pytest.raises(TypeError, match="heat"):
        session.stream("Hello", heat=1.0)


@pytest.mark.parametrize(("options", "message"), [({"profile": "7"}, "profile '7'"), ({"threads": 0}, "threads is 0")])
def test_a_session_with_a_bad_option_is_not_opened(tiny_bundle: Path, options: dict, message: str) -> None:
    with pytest.raises(EagleError, match=message):
        Session.open(tiny_bundle, **options)


def test_a_session_opened_without_the_head_only_decodes_plainly(tiny_bundle: Path, known: Known) -> None:
    with Session.open(tiny_bundle, profile="plain", threads=1) as plain:
        assert plain.generate(token_ids=known.prompt, max_new_tokens=9, ignore_eos=True).token_ids == known.tokens[:9]
        with pytest.raises(EagleError, match="without the draft head"):
            plain.stream("Hello", profile="8")
