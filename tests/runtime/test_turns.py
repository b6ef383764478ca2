"""What a turn leaves to the next one: whatever happened, it answers as a session that nobody has used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_runtime import Session
from eagle_runtime.generate import Progress, Round, SlotState
from eagle_runtime.text import TextStream
from tests.drafters import (
    Answer,
    Known,
    Scripted,
    assert_same_rounds,
    bush,
    chain,
    random_prompt,
    run,
    state_with,
    stop_string,
    stream,
    wrong,
)

CHUNK = 16  # of tiny_bundle
ALL_RIGHT = chain(4, 4)


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
    state.drafter.observe = lambda *rows: (observe(*rows), cancelled.set())
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
