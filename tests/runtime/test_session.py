"""A session's life: cancelled, busy, closed, asked for what it cannot do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from eagle_graphs import EagleError
from eagle_runtime import Session, SessionBusyError
from eagle_runtime.generate import Round
from tests.drafters import (
    Known,
)

CAPACITY = 160  # of tiny_bundle
SOON = 10.0
"""Seconds within which another thread must have acted."""


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
