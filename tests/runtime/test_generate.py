"""The loop on a tiny target: the tokens of plain decoding whatever is drafted, and in the rounds foreseen by hand.

Most tests draft with `Scripted`, which knows the target's continuation and is right as often as it is told.
With drafts of 4 levels, all right, the first token comes from prefill and the rounds give tokens 1-5, 6-10, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_graphs import Tree, tree_from_parents
from eagle_runtime import Session
from tests.drafters import (
    Known,
    Scripted,
    Shape,
    assert_same_rounds,
    bush,
    chain,
    random_prompt,
    run,
    run_plain,
    scripted,
    state_with,
    stop_string,
    wrong,
)

CAPACITY, CHUNK = 160, 16  # of tiny_bundle
ALL_RIGHT = chain(4, 4)


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
