"""The controller on recorded costs and values: it chooses what a search through all choices finds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_graphs import profile_from_nodes
from eagle_runtime.controller import NOTHING, Controller, Expected, Options, Prices, expected_from_probabilities
from eagle_runtime.cost_table import Line
from eagle_runtime.costs import Costs

SIZES, DRAFTS = (1, 4, 8, 16), (4, 8, 16)
VERIFY, DRAFT = {1: 6.0, 4: 7.2, 8: 8.8, 16: 13.5}, {4: 0.8, 8: 1.3, 16: 2.1}
NO_LOOKUP = expected_from_probabilities(())


def costs() -> Costs:
    steps = {f"verify {size}": ms for size, ms in VERIFY.items()} | {f"draft {size}": ms for size, ms in DRAFT.items()}
    table = {step: Line(base=1e-3 * ms, slope=0.0) for step, ms in steps.items()}
    return Costs([profile_from_nodes(nodes) for nodes in DRAFTS], table)


def controller(drafts: tuple[int, ...] = (NOTHING, *DRAFTS), preferred: int = 4) -> Controller:
    return Controller(Options(drafts=drafts, sizes=SIZES), costs(), preferred=preferred)


def curve(rng: np.random.Generator, nodes: int, strength: float) -> Expected:
    """What a drafted tree may be expected to give."""
    return expected_from_probabilities(np.sort(strength * rng.uniform(0, 1, nodes - 1) ** 3)[::-1])


def best_rate(choices: Sequence[Sequence[tuple[float, float]]]) -> float:
    """The highest total of tokens over seconds of any choice of one (tokens, seconds) a round."""
    totals = ((sum(t for t, _ in chosen), sum(s for _, s in chosen)) for chosen in itertools.product(*choices))
    return max(tokens / seconds for tokens, seconds in totals)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.05, 1))
def test_sizes_are_those_of_the_best_of_all_choices(seed: int, strength: float) -> None:
    """Five drafted rounds, 1024 choices; the controller is told the rate that the best of them reaches."""
    rng, auto = np.random.default_rng(seed), controller()
    rounds = [curve(rng, 16, strength) for _ in range(5)]
    best = best_rate([[(float(e[n - 1]), 1e-3 * (VERIFY[n] + DRAFT[16])) for n in SIZES] for e in rounds])
    if best < auto.prices(0).rate:
        return  # plain decoding is faster than any of these
    auto.learn_round(tokens=10**9, seconds=10**9 / best)
    sizes = [auto.choose_size(e, auto.prices(0)) for e in rounds]
    tokens = sum(float(e[n - 1]) for e, n in zip(rounds, sizes, strict=True))
    seconds = sum(1e-3 * (VERIFY[n] + DRAFT[16]) for n in sizes)
    assert tokens / seconds == pytest.approx(best)


@pytest.mark.parametrize("have", [1, 4, 5, 8, 15])
def test_no_size_is_chosen_that_the_tree_does_not_fill(have: int) -> None:
    auto = controller()
    best = auto.choose_size(1 + np.arange(have, dtype=np.float64), auto.prices(0))
    assert best == max(n for n in SIZES if n <= have)


def test_the_smaller_size_is_chosen_where_more_nodes_give_nothing() -> None:
    auto = controller()
    assert auto.choose_size(expected_from_probabilities([0.9] * 3 + [0.0] * 12), auto.prices(0)) == 4
    assert auto.choose_size(expected_from_probabilities([0.0] * 15), auto.prices(0)) == 1


@dataclass
class Run:
    """What a run of rounds came to."""

    tokens: float = 0.0
    seconds: float = 0.0
    wasted: float = 0.0
    """Seconds of drafting."""


def play(auto: Controller, rounds: int, drafted: Callable[[int], dict[int, Expected]], lookup: Expected) -> Run:
    """Rounds whose trees give `drafted(round)[profile]`, of which each gives exactly what is expected of it."""
    run = Run()
    for number in range(rounds):
        prices = auto.prices(0)
        draft = auto.choose_draft(lookup, prices)
        expected, seconds = lookup, 0.0
        if draft != NOTHING:
            curves = drafted(number)
            expected, seconds = curves[draft], 1e-3 * DRAFT[draft]
            run.wasted += seconds
            best = auto.best_depth(prices)
            if draft == best or lookup is NO_LOOKUP:
                auto.learn_gain(curves[best], lookup, lookup, prices)
            auto.learn_steps([curves[profile] for profile in DRAFTS if profile <= draft], prices)
        size = auto.choose_size(expected, prices)
        seconds += 1e-3 * VERIFY[size]
        tokens = float(expected[size - 1])
        run.tokens += tokens
        run.seconds += seconds
        auto.learn_round(tokens=tokens, seconds=seconds)  # type: ignore[arg-type]
    return run


def world(chances: dict[int, tuple[float, float]]) -> Callable[[int], dict[int, Expected]]:
    """Rounds that take turns between two curves a profile, made from the chance of a node after another."""

    def drafted(number: int) -> dict[int, Expected]:
        return {n: expected_from_probabilities(pair[number % 2] ** np.arange(1, n)) for n, pair in chances.items()}

    return drafted


WORLDS = {
    "nothing pays": {4: (0.05, 0.1), 8: (0.05, 0.1), 16: (0.05, 0.1)},
    "the shallow draft pays": {4: (0.3, 0.5), 8: (0.3, 0.5), 16: (0.3, 0.5)},
    "the middle one pays": {4: (0.2, 0.3), 8: (0.5, 0.8), 16: (0.5, 0.8)},
    "the deep one pays": {4: (0.3, 0.4), 8: (0.3, 0.4), 16: (0.8, 0.95)},
    "every second round is worth a large tree": {4: (0.2, 0.4), 8: (0.2, 0.7), 16: (0.2, 0.98)},
}


def search(drafted: Callable[[int], dict[int, Expected]], lookup: Expected) -> float:
    """The rate of the best draft and the best size in each of two rounds; no draft is one of them."""
    options = [[(float(lookup[n - 1]), 1e-3 * VERIFY[n]) for n in SIZES if n <= len(lookup)]] * 2
    rates = [best_rate(options)]
    for draft in DRAFTS:
        sizes = [n for n in SIZES if n <= draft]
        rates.append(
            best_rate(
                [
                    [(float(drafted(i)[draft][n - 1]), 1e-3 * (VERIFY[n] + DRAFT[draft])) for n in sizes]
                    for i in range(2)
                ]
            )
        )
    return max(rates)


@pytest.mark.parametrize("name", WORLDS)
def test_the_rate_comes_to_that_of_the_best_of_all_choices(name: str) -> None:
    drafted, auto = world(WORLDS[name]), controller()
    play(auto, 600, drafted, NO_LOOKUP)
    run = play(auto, 400, drafted, NO_LOOKUP)
    assert run.tokens / run.seconds > 0.985 * search(drafted, NO_LOOKUP)


def test_a_head_that_never_helps_costs_a_hundredth() -> None:
    drafted, auto = world(dict.fromkeys(DRAFTS, (1e-09, 1e-09))), controller()
    start = play(auto, 100, drafted, NO_LOOKUP)
    assert start.tokens / start.seconds > 0.965 / 6e-3
    later = play(auto, 1000, drafted, NO_LOOKUP)
    assert 0 < later.wasted < 0.011 * later.seconds


def test_drafting_is_taken_up_again_once_it_pays() -> None:
    useless, useful = world(WORLDS["nothing pays"]), world(WORLDS["the shallow draft pays"])
    auto = controller()
    play(auto, 500, useless, NO_LOOKUP)
    play(auto, 150, useful, NO_LOOKUP)
    run = play(auto, 100, useful, NO_LOOKUP)
    assert run.tokens / run.seconds > 0.98 * search(useful, NO_LOOKUP)


def test_the_first_rounds_draft_with_the_deepest_whatever_it_costs() -> None:
    auto = controller()
    dear = replace(auto.prices(0), draft=dict.fromkeys(DRAFTS, 1.0))
    sure = expected_from_probabilities([0.95] * 15)
    assert auto.choose_draft(sure, dear) == NOTHING, "look-up knows enough: this is not one of them"
    assert [auto.choose_draft(NO_LOOKUP, dear) for _ in range(6)] == [max(DRAFTS)] * 4 + [NOTHING] * 2


def test_a_dear_draft_that_pays_is_found_out() -> None:
    """Before anything was drafted, it is worth less than it costs."""
    auto, verify = controller(drafts=(NOTHING, 16), preferred=16), {1: 6e-3, 4: 7e-3, 8: 8e-3, 16: 9e-3}
    prices = Prices(rate=1 / 6e-3, verify=verify, draft={16: 5.5e-3})
    for _ in range(4):
        assert auto.choose_draft(NO_LOOKUP, prices) == 16
        auto.learn_gain(expected_from_probabilities(0.9 ** np.arange(1, 16)), NO_LOOKUP, NO_LOOKUP, prices)
    assert auto.choose_draft(NO_LOOKUP, prices) == 16


def test_rows_that_wait_for_the_head_count() -> None:
    auto = controller()
    play(auto, 4, world(WORLDS["the shallow draft pays"]), NO_LOOKUP)
    assert auto.choose_draft(NO_LOOKUP, auto.prices(0)) != NOTHING
    assert auto.choose_draft(NO_LOOKUP, auto.prices(0), waiting=1000) == NOTHING


def test_a_sure_look_up_needs_no_draft_and_an_unsure_one_does() -> None:
    auto, drafted = controller(), world(WORLDS["the shallow draft pays"])
    sure, unsure = (expected_from_probabilities(chance ** np.arange(1, 16)) for chance in (0.98, 0.1))
    for _ in range(40):
        assert play(auto, 1, lambda number: dict.fromkeys(DRAFTS, sure), sure).wasted == 0
        play(auto, 1, drafted, unsure)
    assert play(auto, 20, drafted, unsure).wasted > 0


def test_without_a_choice_there_is_none() -> None:
    for auto, only in ((controller(drafts=(8,)), 8), (controller(drafts=(NOTHING,)), NOTHING)):
        assert auto.choose_draft(NO_LOOKUP, auto.prices(0)) == only


@pytest.mark.parametrize("preferred", DRAFTS)
@pytest.mark.parametrize(
    ("name", "best"), [("the shallow draft pays", 4), ("the middle one pays", 8), ("the deep one pays", 16)]
)
def test_the_best_depth_is_known_after_a_few_rounds(name: str, best: int, preferred: int) -> None:
    auto = controller(preferred=preferred)
    play(auto, 5, world(WORLDS[name]), NO_LOOKUP)
    assert auto.best_depth(auto.prices(0)) == best


@pytest.mark.parametrize("preferred", DRAFTS)
def test_the_preferred_profile_is_drafted_with_before_any_comparison(preferred: int) -> None:
    auto = controller(preferred=preferred)
    assert auto.best_depth(auto.prices(0)) == preferred


def test_a_smaller_profile_is_found_better_on_the_trees_of_a_larger_one() -> None:
    auto, drafted = controller(preferred=8), world({4: (0.3, 0.5), 8: (0.3, 0.5), 16: (0.3, 0.5)})
    play(auto, 6, drafted, NO_LOOKUP)
    assert auto.best_depth(auto.prices(0)) == 4


def test_the_rate_is_at_least_plain_decoding_s() -> None:
    auto = controller()
    auto.learn_round(tokens=1, seconds=1.0)
    assert auto.prices(0).rate == pytest.approx(1 / 6e-3)
