"""What proposals are worth: as stated at first, as observed later."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_graphs import tree_from_parents
from eagle_runtime.acceptance import Drafted, HeadAcceptance, LookupAcceptance, drafted_from_tree, values_from
from eagle_runtime.lookup import Match

# 0 -> 1 (60%) -> 3 (50%); 0 -> 2 (30%)
PARENTS, CHANCES = [-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.5]


def tree() -> Drafted:
    values = np.log([1.0, 0.6, 0.3, 0.6 * 0.5])
    return drafted_from_tree(tree_from_parents(np.array([9, 1, 2, 3]), np.array(PARENTS), values.astype(np.float32)))


def test_the_head_is_believed_at_first() -> None:
    assert HeadAcceptance().probabilities(tree()) == pytest.approx(CHANCES, rel=1e-5)


@pytest.mark.parametrize(("tokens", "right"), [([1, 3, 5], 2), ([1, 7], 1), ([2, 3], 1), ([8], 0), ([], 0)])
def test_it_says_how_far_the_tree_was_right(tokens: list[int], right: int) -> None:
    assert HeadAcceptance().learn(tree(), tokens) == right


def test_a_head_that_is_always_wrong_is_believed_no_more() -> None:
    head = HeadAcceptance()
    for _ in range(200):
        head.learn(tree(), [8])
    assert head.probabilities(tree())[1] < 0.05
    assert head.probabilities(tree())[3] == pytest.approx(0.5)  # a class of its own, of which nothing was seen


def test_shares_are_what_was_observed() -> None:
    """The best child is right in every second round, its child always."""
    head = HeadAcceptance()
    for _ in range(300):
        head.learn(tree(), [1, 3])
        head.learn(tree(), [8])
    assert head.probabilities(tree()) == pytest.approx([1, 0.5, 0, 0.999], abs=0.03)


def test_old_observations_fade() -> None:
    head = HeadAcceptance()
    for _ in range(1000):
        head.learn(tree(), [1])
    for _ in range(300):
        head.learn(tree(), [8])
    assert head.probabilities(tree())[1] < 0.1


def test_values_are_logarithms_of_paths_and_fall_even_where_all_is_certain() -> None:
    certain = drafted_from_tree(tree_from_parents(np.arange(4), np.array([-1, 0, 1, 2]), np.zeros(4, np.float32)))
    values = values_from(certain.parents, HeadAcceptance().probabilities(certain))
    assert (np.diff(values) < 0).all()
    assert values_from(PARENTS, CHANCES) == pytest.approx(np.log([1, 0.6, 0.3, 0.3]))


def test_impossible_values_stay_finite() -> None:
    values = np.array([0, -1e4, -2e4], np.float32)
    hopeless = drafted_from_tree(tree_from_parents(np.arange(3), np.array([-1, 0, 1]), values))
    assert np.isfinite(values_from(hopeless.parents, HeadAcceptance().probabilities(hopeless))).all()


def test_children_by_their_tokens() -> None:
    assert [tree().child(0, token) for token in (1, 2, 3, 9)] == [1, 2, None, None]
    assert [tree().has_children(row) for row in range(4)] == [True, True, False, False]


def test_longer_matches_are_believed_more() -> None:
    chances = LookupAcceptance().alone(Match(length=1, tokens=[5] * 20))
    assert chances == sorted(chances)
    assert 0 < chances[0] < 0.3 < 0.9 < chances[-1] < 1


def test_a_token_counts_as_the_first_of_a_match_that_much_longer() -> None:
    lookup = LookupAcceptance()
    for _ in range(500):
        lookup.learn(Match(length=2, tokens=[1, 2, 3]), [1, 2, 4], None)
    one, two, three = lookup.alone(Match(length=2, tokens=[1, 2, 3]))
    assert (one, two) == pytest.approx((0.99, 0.99), abs=0.02)
    assert three < 0.05
    assert lookup.alone(Match(length=4, tokens=[1])) == [three]


def test_head_and_look_up_agreeing_are_believed_more_than_either() -> None:
    lookup, match = LookupAcceptance(), Match(length=3, tokens=[1])
    (alone,) = lookup.alone(match)
    assert lookup.agreeing(match, 0, 0.4) == pytest.approx(1 - (1 - alone) * 0.6)
    assert lookup.agreeing(match, 0, 1.0) < 1


def test_what_the_head_does_not_propose_is_learned_apart() -> None:
    lookup, match = LookupAcceptance(), Match(length=3, tokens=[1, 2])
    before = lookup.beside(match, 1)
    for _ in range(300):
        lookup.learn(match, [1, 9], 1)
    assert lookup.beside(match, 1) < 0.05 < before
    assert lookup.beside(match, 0) == LookupAcceptance().beside(match, 0)
