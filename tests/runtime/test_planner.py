"""Planned rounds: trees with look-up's branches are trees, and the text stays plain decoding's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_graphs import Candidates, Profile, Tree, profile_from_nodes, rerank
from eagle_runtime import Sampling, Session
from eagle_runtime.acceptance import HeadAcceptance, drafted_from_tree, values_from
from eagle_runtime.controller import NOTHING, Controller, Expected, Options, Prices
from eagle_runtime.costs import Costs
from eagle_runtime.generate import Round
from eagle_runtime.lookup import Match
from eagle_runtime.planner import Experience, Planner
from eagle_runtime.sampled_tree import Proposal
from eagle_runtime.stats import PhaseClock, Stats
from tests.drafters import random_prompt, run, run_plain, state_with

PROFILES = [profile_from_nodes(nodes) for nodes in (4, 8, 16)]
EVERYTHING = Options(drafts=(NOTHING, 4, 8, 16), sizes=(1, 4, 8, 16))
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=3)


class Wavering(Controller):
    """Chooses at random, another way every round."""

    def __init__(self, options: Options, seed: int) -> None:
        super().__init__(options, Costs(PROFILES), preferred=8)
        self.random = np.random.default_rng(seed)

    def choose_draft(self, lookup: Expected, prices: Prices, *, waiting: int = 1) -> int:
        return int(self.random.choice(self.options.drafts))

    def choose_size(self, expected: Expected, prices: Prices) -> int:
        return int(self.random.choice([size for size in self.options.sizes if size <= len(expected)]))


class Told(Controller):
    """Keeps what it is told of trees with drafted nodes."""

    def __init__(self) -> None:
        super().__init__(EVERYTHING, Costs(PROFILES), preferred=4)
        self.told = list[Expected]()

    def learn_gain(self, expected: Expected, lookup: Expected, informed: Expected, prices: Prices) -> None:
        self.told.append(expected)
        super().learn_gain(expected, lookup, informed, prices)


class RandomHead:
    """Drafts random trees of few words, among which each node's children differ."""

    def __init__(self, seed: int, words: int) -> None:
        self.random, self.words = np.random.default_rng(seed), words
        self.latest: Tree | None = None

    def observe(self, features: object, path: Sequence[int], tokens: Sequence[int]) -> None: ...

    def catch_up(self, tokens: Sequence[int]) -> None: ...

    def truncate(self, rows: int) -> None: ...

    def clear(self) -> None: ...

    def draft(
        self, tokens: Sequence[int], profile: Profile, clock: PhaseClock, proposal: Proposal | None = None
    ) -> Tree:
        width = min(profile.top_k, self.words)
        children, parents, values = list[int](), list[int](), list[float]()
        for parent in range(-1, profile.nodes):
            top = values[parent] if parent >= 0 else 0.0
            children += self.random.choice(self.words, width, replace=False).tolist()
            parents += [parent] * width
            values += (top + np.log(self.random.uniform(1e-4, 1, width))).tolist()
        grown = Candidates(tokens=np.array(children), parents=np.array(parents), values=np.array(values, np.float32))
        self.latest = rerank(grown, tokens[-1], profile.nodes)
        return self.latest


def paths(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[tree.path_to(row)[1:]].tolist()) for row in range(len(tree))}


def check(tree: Tree, root: int) -> None:
    assert tree.tokens[0] == root
    assert tree.parents[0] == -1
    assert (tree.parents[1:] >= 0).all()
    assert (tree.parents < np.arange(len(tree))).all()
    assert len(set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))) == len(tree), "duplicate siblings"
    for row in range(1, len(tree)):
        parent = int(tree.parents[row])
        assert tree.mask[row].tolist() == (tree.mask[parent] | (np.arange(len(tree)) == row)).tolist()
        assert tree.depths[row] == tree.depths[parent] + 1
        assert tree.values[row] <= tree.values[parent]
        assert tree.mask[row - 1, parent], "not in depth-first order"


def test_a_first_round_says_what_the_preferred_profile_would_have_added() -> None:
    controller, head = Told(), RandomHead(0, 6)
    Planner(Experience(controller=controller), PROFILES, lookup=False).propose([1, 2], head, PhaseClock(Stats()))
    tree = head.latest
    assert tree is not None
    assert len(tree) == 16
    within = np.sort(tree.values[(tree.depths >= 1) & (tree.depths <= PROFILES[0].depth)])[::-1]
    (told,) = controller.told
    assert list(told) == pytest.approx([1, *(1 + np.exp(within[:3]).cumsum())], rel=1e-3)


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 5), min_size=2, max_size=40), st.integers(4, 6))
def test_trees_with_branches_are_trees_of_a_size_that_is_compiled(seed: int, text: list[int], words: int) -> None:
    controller, head, clock = Wavering(EVERYTHING, seed), RandomHead(seed, words), PhaseClock(Stats())
    planner = Planner(Experience(controller=controller), PROFILES, lookup=True)
    random = np.random.default_rng(seed)
    for _ in range(4):
        head.latest = None
        tree = planner.propose(text, head, clock)
        check(tree, text[-1])
        assert len(tree) in EVERYTHING.sizes
        match = planner._proposed.match if planner._proposed else None
        branch = {tuple(match.tokens[:length]) for length in range(16)} if match else set()
        assert paths(tree) <= branch | (paths(head.latest) if head.latest else set()) | {()}
        kept = [int(token) for token in random.integers(0, words, int(random.integers(1, 4)))]
        clock.lap("verify")
        planner.learn(kept, accepted=0, clock=clock)
        text = text + kept


def planned(options: Options, *, lookup: bool = True) -> tuple[Planner, Experience]:
    experience = Experience(controller=Controller(options, Costs(PROFILES), preferred=8))
    return Planner(experience, PROFILES, lookup=lookup), experience


def test_a_fixed_size_stays_and_the_least_valuable_nodes_make_room() -> None:
    planner, _ = planned(Options(drafts=(8,), sizes=(8,)))
    head, text = RandomHead(0, 300), [*range(100, 130), *range(100, 110)]
    tree = planner.propose(text, head, PhaseClock(Stats()))
    assert len(tree) == 8
    assert (110, 111) in paths(tree)
    assert head.latest is not None
    kept = paths(tree) & paths(head.latest)
    by_head = [head.latest.values[row] for row in range(8) if tuple(_path(head.latest, row)) in kept]
    dropped = [head.latest.values[row] for row in range(8) if tuple(_path(head.latest, row)) not in kept]
    assert min(by_head) >= max(dropped)


def _path(tree: Tree, row: int) -> list[int]:
    return tree.tokens[tree.path_to(row)[1:]].tolist()


def test_without_look_up_a_whole_draft_is_verified_as_it_came() -> None:
    planner, _ = planned(Options(drafts=(8,), sizes=(8,)), lookup=False)
    head = RandomHead(0, 300)
    assert planner.propose([1, 2, 1, 2], head, PhaseClock(Stats())) is head.latest


def test_nodes_that_the_head_proposed_too_are_not_look_up_s() -> None:
    planner, _ = planned(Options(drafts=(NOTHING,), sizes=(4,)))
    clock = PhaseClock(Stats())
    text = [*range(100, 130), *range(100, 110)]
    planner.propose(text, None, clock)
    clock.lap("verify")
    assert planner.learn([110, 111, 5], accepted=2, clock=clock) == 2
    planner, _ = planned(Options(drafts=(8,), sizes=(8,)))
    head = RandomHead(0, 300)
    planner.propose(text, head, clock)
    assert head.latest is not None
    best = int(head.latest.tokens[1])
    clock.lap("verify")
    assert planner.learn([best, 299], accepted=1, clock=clock) == 0


def test_what_is_looked_up_is_learned_from_the_answer_whether_verified_or_not() -> None:
    planner, experience = planned(Options(drafts=(NOTHING,), sizes=(1, 4)))
    clock, text = PhaseClock(Stats()), [1, 2, 3] * 20
    match = Match(length=16, tokens=[1])
    before = experience.lookup.alone(match)
    for token in [7, 1, 2, 3] * 20:
        planner.propose(text, None, clock)
        clock.lap("verify")
        planner.learn([token], accepted=0, clock=clock)
        text = [*text, token]
    assert experience.lookup.alone(match) != before


# On a target: the same text


@pytest.fixture(scope="module")
def session(tiny_bundle: Path) -> Iterator[Session]:
    with Session.open(tiny_bundle, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("sampling", [None, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(3))
def test_the_text_is_plain_decoding_s_whatever_changes_in_mid_answer(
    session: Session, sampling: Sampling | None, seed: int
) -> None:
    prompt, tokens = random_prompt(30, seed), 60
    expected = run_plain(session, prompt, tokens, sampling=sampling)
    drafter = session._state.drafter
    assert drafter is not None
    drafter.truncate(0)
    planner = Planner(Experience(controller=Wavering(EVERYTHING, seed)), PROFILES, lookup=True)
    state = state_with(session, drafter)
    answer = run(session, state, prompt, max_new_tokens=tokens, sampling=sampling, planner=planner)
    session.reset()
    assert answer.tokens == expected
    assert len(answer.progress.stats.rounds_by_size) > 2


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "sampled"])
def test_every_profile_says_what_plain_decoding_says(session: Session, options: dict) -> None:
    asked = {"token_ids": random_prompt(40, 9), "max_new_tokens": 80, "ignore_eos": True, **options}
    plain = session.generate(**asked, profile="plain")
    for profile, lookup in (("auto", None), ("auto", False), ("lookup", None), ("4", True), ("16", True), ("8", None)):
        session.reset()
        rounds = list[Round]()
        answer = session.generate(**asked, profile=profile, lookup=lookup, on_round=rounds.append)
        assert answer.token_ids == plain.token_ids
        sizes = {len(done.tree) for done in rounds}
        assert sizes <= {1, 4, 8, 16} if profile in ("auto", "lookup") else sizes == {int(profile)}
        assert answer.stats.rounds == sum(answer.stats.rounds_by_size.values())


def test_look_up_shortens_an_answer_that_repeats_itself(session: Session) -> None:
    """A token that is all but forced comes again and again."""
    asked = {"token_ids": random_prompt(20), "max_new_tokens": 60, "ignore_eos": True, "logit_bias": {77: 1000.0}}
    session.reset()
    assert session.generate(**asked, profile="lookup").stats.accepted_length > 1.5
    assert session.stats.looked_up_nodes > 20
    session.reset()
    assert session.generate(**asked, profile="plain").stats.accepted_length == 1


def test_sampled_trees_are_the_default_profile_s_and_come_again(session: Session) -> None:
    asked = {
        "token_ids": random_prompt(20),
        "max_new_tokens": 40,
        "temperature": 1.0,
        "verify_mode": "sampled",
        "seed": 3,
    }
    answers = []
    for _ in range(2):
        session.reset()
        rounds = list[Round]()
        answers.append(session.generate(**asked, on_round=rounds.append).token_ids)
        default = session.bundle.manifest.default_profile
        assert {len(done.tree) for done in rounds} == {1 if default == "plain" else int(default)}
    assert answers[0] == answers[1]


@pytest.mark.real_model
def test_the_real_model_says_the_same_in_auto_and_wavering(
    demo_int8_bundle: Path, demo_prompts: list[list[dict[str, str]]]
) -> None:
    with Session.open(demo_int8_bundle) as session:
        prompt = session.encode(messages=demo_prompts[18])  # a summary, which repeats its prompt
        for options in ({}, {"temperature": 0.7, "seed": 1}):
            plain = session.generate(token_ids=prompt, max_new_tokens=48, profile="plain", **options)
            for profile in ("auto", "lookup"):
                session.reset()
                answer = session.generate(token_ids=prompt, max_new_tokens=48, profile=profile, **options)
                assert answer.token_ids == plain.token_ids
            session.reset()
            for experience in session._learned.experience.values():
                experience.controller = Wavering(experience.controller.options, 0)
            assert session.generate(token_ids=prompt, max_new_tokens=48, **options).token_ids == plain.token_ids


class Comparing(Controller):
    """Keeps what it was told of the profiles."""

    told: list[list[Expected]]

    def learn_steps(self, curves: Sequence[Expected], prices: Prices) -> None:
        self.told.append([list(curve) for curve in curves])
        super().learn_steps(curves, prices)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (Options(drafts=(4,), sizes=(4,)), None),
        (Options(drafts=(16,), sizes=(16,)), None),
        (Options(drafts=(4, 8), sizes=(1, 4, 8)), [4, 8]),
        (Options(drafts=(4, 8, 16), sizes=(1, 4, 8, 16)), [4, 8, 16]),
    ],
    ids=["4 alone", "16 alone", "4 or 8", "any"],
)
def test_a_draft_tells_of_itself_and_of_every_smaller_one_on_offer(options: Options, sizes: list[int] | None) -> None:
    controller = Comparing(options, Costs(PROFILES), preferred=options.drafts[-1])
    controller.told = []
    planner, head = Planner(Experience(controller=controller), PROFILES, lookup=False), RandomHead(3, 300)
    planner.propose([1, 2, 3], head, PhaseClock(Stats()))
    assert head.latest is not None
    if sizes is None:
        assert controller.told == []
        return
    (curves,) = controller.told
    by_depth = {4: 2, 8: 3, 16: 4}
    assert [by_depth[size] for size in sizes] == [profile.depth for profile in PROFILES if profile.nodes in sizes]
    probabilities = HeadAcceptance().probabilities(drafted_from_tree(head.latest))
    values = values_from(head.latest.parents.tolist(), probabilities)
    for size, curve in zip(sizes, curves, strict=True):
        depths = head.latest.depths.tolist()
        within = [v for v, d in zip(values[1:], depths[1:], strict=True) if d <= by_depth[size]]
        best = sorted(map(np.exp, within), reverse=True)[: size - 1]
        assert curve == pytest.approx([1.0, *(1.0 + np.cumsum(best))])
