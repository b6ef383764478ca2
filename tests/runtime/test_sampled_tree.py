"""The sampled tree: its shapes, what its children are drawn from, and answers with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_graphs import Candidates, Profile, profile_from_nodes
from eagle_graphs.sampled_shape import shape_from_profile
from eagle_runtime import Session, draft
from eagle_runtime.generate import Round
from eagle_runtime.sampled_tree import Proposal, SampledTree
from tests.drafters import random_prompt


@pytest.fixture
def session(tiny_bundle: Path) -> Iterator[Session]:
    with Session.open(tiny_bundle, profile="16", threads=1, drafting="stepwise") as opened:
        yield opened


def depth_first(parents: np.ndarray) -> list[list[int]]:
    """Children of each row."""
    return [np.flatnonzero(parents == row).tolist() for row in range(len(parents))]


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8, 16, 33, 60, 128])
def test_a_shape_fills_its_profile(nodes: int) -> None:
    profile = profile_from_nodes(nodes)
    shape = shape_from_profile(profile)
    children = depth_first(shape.parents)
    assert len(shape) == nodes
    assert (shape.parents[1:] < np.arange(1, nodes)).all()
    assert max(map(len, children)) <= profile.top_k
    assert shape.depths.max() <= profile.depth
    # An earlier sibling is likelier to be accepted, so that it never has fewer nodes below it.
    below = shape.mask.sum(axis=0)
    assert all(list(below[rows]) == sorted(below[rows], reverse=True) for rows in children)


def test_the_shape_of_a_small_profile() -> None:
    assert shape_from_profile(profile_from_nodes(4)).parents.tolist() == [-1, 0, 1, 0]


@pytest.mark.parametrize(("top_k", "depth", "nodes"), [(1, 5, 6), (7, 1, 8), (2, 2, 7)])
def test_a_shape_that_its_profile_leaves_no_choice(top_k: int, depth: int, nodes: int) -> None:
    shape = shape_from_profile(Profile(nodes=nodes, top_k=top_k, depth=depth))
    assert shape.depths.max() == depth
    assert max(map(len, depth_first(shape.parents))) == top_k


@pytest.mark.parametrize("temperature", [1e-6, 0.01, 1.0, 100.0])
def test_every_child_has_a_probability(temperature: float) -> None:
    logits = Proposal(seed=0, temperature=temperature).logits_from(np.array([-0.01, -5.0, -90.0], np.float32))
    q = np.exp(logits) / np.exp(logits).sum()
    assert (q > 1e-23).all()
    assert q.argmax() == 0


def test_children_are_drawn_from_what_the_head_says_of_them(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """q of every node, against the candidates that a dynamic tree expands after the same tokens."""
    drafted: list[Candidates] = []
    rerank = draft.rerank
    monkeypatch.setattr(
        draft, "rerank", lambda candidates, *rest: drafted.append(candidates) or rerank(candidates, *rest)
    )
    checked = np.zeros(5, int)
    for seed in range(10):
        options: dict[str, Any] = {"temperature": 0.8, "seed": seed, "max_new_tokens": 2, "ignore_eos": True}
        rounds: list[Round] = []
        for mode in ("deterministic", "sampled"):
            session.reset()
            session.generate(token_ids=random_prompt(20, seed), verify_mode=mode, on_round=rounds.append, **options)
        dynamic, tree = rounds[0].tree, rounds[1].tree
        assert isinstance(tree, SampledTree)
        assert not isinstance(dynamic, SampledTree)
        assert tree.tokens[0] == dynamic.tokens[0]
        checked += same_distributions(tree, drafted[-1], temperature=0.8)
        siblings = depth_first(tree.parents)
        for row, children in enumerate(siblings):
            tokens = tree.tokens[children].tolist()
            assert len(set(tokens)) == len(tokens)
            for child in children:
                q = tree.q[row][tree.ids[row] == tree.tokens[child]]
                assert tree.values[child] - tree.values[row] == pytest.approx(float(np.log(q[0])), abs=1e-5)
    assert checked[0] == 10
    assert checked[1] > 20
    assert checked[2] > 2


def same_distributions(tree: SampledTree, candidates: Candidates, *, temperature: float) -> np.ndarray:
    """Compares q where both trees have expanded a node; returns how many of each depth."""
    found = np.zeros(5, int)
    candidate_of = {0: -1}
    for row in range(len(tree)):
        if row:
            parent = candidate_of.get(int(tree.parents[row]))
            if parent is None:
                continue
            same = np.flatnonzero((candidates.parents == parent) & (candidates.tokens == tree.tokens[row]))
            if not len(same):
                continue
            candidate_of[row] = int(same[0])
        children = np.flatnonzero(candidates.parents == candidate_of[row])
        if len(children) and (tree.parents == row).any():
            logits = candidates.values[children].astype(np.float64) / temperature
            expected = np.exp(logits - logits.max())
            assert tree.ids[row].tolist() == candidates.tokens[children].tolist()
            np.testing.assert_allclose(tree.q[row], expected / expected.sum(), rtol=1e-3)
            found[tree.depths[row]] += 1
    return found


@pytest.mark.parametrize("profile", ["4", "8", "16"])
def test_a_seed_gives_the_same_answer_again(session: Session, profile: str) -> None:
    def tokens(seed: int) -> list[int]:
        session.reset()
        options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "ignore_eos": True}
        return session.generate(
            token_ids=random_prompt(20), profile=profile, verify_mode="sampled", seed=seed, max_new_tokens=24, **options
        ).token_ids

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_plain_decoding_does_not_depend_on_the_mode(session: Session) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_new_tokens": 16, "profile": "plain"}
    answers = [
        session.generate(token_ids=[5, 6, 7], verify_mode=mode, **options) for mode in ("deterministic", "sampled")
    ]
    assert answers[0].token_ids == answers[1].token_ids


def test_nothing_banned_is_drawn(session: Session) -> None:
    """The head drafts banned tokens as well: p is 0 for them."""
    suppressed = [token for token in range(320) if token % 8]
    answer = session.generate(
        token_ids=random_prompt(20),
        temperature=5.0,
        seed=0,
        verify_mode="sampled",
        suppress_tokens=suppressed,
        max_new_tokens=40,
        ignore_eos=True,
    )
    assert all(token % 8 == 0 for token in answer.token_ids)
    assert len(set(answer.token_ids)) > 10


def test_a_sampled_tree_up_to_the_end_of_the_cache(session: Session) -> None:
    answer = session.generate(
        token_ids=random_prompt(154), temperature=1.0, seed=0, verify_mode="sampled", ignore_eos=True
    )
    assert (len(answer.token_ids), answer.finish_reason) == (7, "length")
