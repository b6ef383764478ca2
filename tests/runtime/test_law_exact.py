"""The law of an answer, exactly: every draw of a round is enumerated with rational numbers.

What is enumerated is the product's own `walk` and `accept_child`. Rounds depend on one another only through the tokens
so far, so the law of three tokens follows from the laws of the rounds after each context.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache

import numpy as np
import pytest

from eagle_graphs import tree_from_parents
from eagle_runtime.accept import accept_child, walk
from tests.worlds import (
    ANSWER,
    RIGHT,
    SHAPES,
    WRONG,
    WRONG_SHAPES,
    Context,
    Rules,
    World,
    most_children,
    prune,
    shaped,
)


@dataclass
class Chances:
    """Makes the choices of one course of events: those given, then always the first one that is possible."""

    given: list[int]
    probability: Fraction = Fraction(1)
    made: int = 0
    others: list[list[int]] = field(default_factory=list)
    """Courses that this one leaves to others."""

    def pick(self, weights: Sequence[Fraction]) -> int:
        """An index, with probability proportional to its weight."""
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        if self.made == len(self.given):
            self.others += [[*self.given, other] for other in possible[1:]]
            self.given.append(possible[0])
        picked = self.given[self.made]
        self.made += 1
        self.probability *= Fraction(weights[picked]) / sum(weights, Fraction(0))
        return picked

    def coin(self, probability: Fraction) -> bool:
        return self.pick([1 - Fraction(probability), Fraction(probability)]) == 1


def enumerate_all(event: Callable[[Chances], Context]) -> dict[Context, Fraction]:
    """Probability of each outcome."""
    law: dict[Context, Fraction] = defaultdict(Fraction)
    waiting: list[list[int]] = [[]]
    while waiting:
        chances = Chances(waiting.pop())
        law[event(chances)] += chances.probability
        waiting += chances.others
    assert sum(law.values()) == 1
    return law


def deterministic_round(world: World, parents: list[int], context: Context, chances: Chances) -> Context:
    """A tree of any tokens, some of them unlikely; the draws do not look at it."""
    tokens = [-1]
    for row, parent in enumerate(parents[1:], start=1):
        tokens.append((parents[:row].count(parent) + parent + 2) % world.vocab)
    tree = tree_from_parents(np.array(tokens), np.array(parents))

    def decide(row: int) -> int:
        before = tuple(tokens[node] for node in tree.path_to(row)[1:])
        return chances.pick(world.p(context + before))

    done = walk(tree, decide)
    return (*context, *(tokens[row] for row in done.path[1:]), done.bonus)


def sampled_round(world: World, parents: list[int], context: Context, chances: Chances, rules: Rules) -> Context:
    """Children drawn one by one from q without those drawn before; recursive rejection."""
    shape = shaped(parents)
    tokens = [-1] * len(parents)

    def before(row: int) -> Context:
        return context + tuple(tokens[node] for node in shape.path_to(row)[1:])

    for row in range(len(parents)):
        children = [child for child, parent in enumerate(parents) if parent == row]
        q = world.q(before(row)).copy()
        drawn: list[int] = []
        for _ in range(len(children) + rules.pruned * bool(children)):
            drawn.append(chances.pick(q))
            q[drawn[-1]] = Fraction(0)
        drawn = prune(drawn, world.q(before(row))) if rules.pruned and drawn else drawn
        for child, token in zip(children, drawn, strict=True):
            tokens[child] = token
    tree = tree_from_parents(np.array(tokens), np.array(parents))
    left: list[np.ndarray] = []

    def decide(row: int) -> int:
        drawn = tree.tokens[tree.parents == row].tolist()
        p = world.p(before(row))
        if not drawn:
            return chances.pick(left[-1] if rules.stale and left else p)
        taken, residual = rules.accept(p, world.q(before(row)), drawn, lambda _, chance: chances.coin(chance))
        left.append(residual)
        return chances.pick(residual) if taken is None else taken

    done = walk(tree, decide)
    return (*context, *(tokens[row] for row in done.path[1:]), done.bonus)


def answer_law(world: World, one_round: Callable[[Context, Chances], Context]) -> dict[Context, Fraction]:
    """Joint law of the first ANSWER tokens of an answer."""

    @cache
    def law_after(context: Context) -> dict[Context, Fraction]:
        if len(context) >= ANSWER:
            return {context[:ANSWER]: Fraction(1)}
        law: dict[Context, Fraction] = defaultdict(Fraction)
        for longer, probability in enumerate_all(lambda chances: one_round(context, chances)).items():
            for answer, further in law_after(longer).items():
                law[answer] += probability * further
        return law

    return law_after(())


def nonzero(law: dict[Context, Fraction]) -> dict[Context, Fraction]:
    return {answer: probability for answer, probability in law.items() if probability}


WORLDS = [World(vocab=2, support=2, seed=0), World(3, 3, 1), World(3, 2, 2), World(4, 4, 3), World(4, 3, 4)]


def cases() -> list[tuple[World, str]]:
    """Worlds and the shapes that their heads can fill, those left out whose draws are too many to enumerate."""
    found = []
    for world in WORLDS:
        for name, parents in SHAPES.items():
            draws = np.prod([float(world.support) ** parents.count(row) for row in range(len(parents))])
            if most_children(parents) <= world.support and draws <= 100:
                found.append((world, name))
    return found


@pytest.mark.parametrize(("world", "shape"), cases(), ids=str)
def test_the_law_of_a_sampled_tree_is_the_target_s(world: World, shape: str) -> None:
    law = answer_law(world, lambda context, chances: sampled_round(world, SHAPES[shape], context, chances, RIGHT))
    assert nonzero(law) == nonzero(world.joint)


@pytest.mark.parametrize(
    ("world", "shape"),
    [(w, name) for w in WORLDS for name, parents in SHAPES.items() if most_children(parents) <= w.vocab],
    ids=str,
)
def test_the_law_of_a_deterministic_tree_is_the_target_s(world: World, shape: str) -> None:
    law = answer_law(world, lambda context, chances: deterministic_round(world, SHAPES[shape], context, chances))
    assert nonzero(law) == nonzero(world.joint)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_gives_another_law(name: str) -> None:
    world = World(4, 4, 5)
    parents = (
        SHAPES[WRONG_SHAPES[name]] if name != "stale residual at the last level" else SHAPES["siblings, one child"]
    )
    law = answer_law(world, lambda context, chances: sampled_round(world, parents, context, chances, WRONG[name]))
    assert nonzero(law) != nonzero(world.joint)


def test_a_tree_whose_expansion_depends_on_earlier_draws_keeps_the_law() -> None:
    """A node gets children or not by its own token, which was drawn before; its children are not looked at."""
    world = World(3, 3, 6)

    def one_round(context: Context, chances: Chances) -> Context:
        first = chances.pick(world.q(context))
        return sampled_round_below(world, context, first, expand=first != 1, chances=chances)

    assert nonzero(answer_law(world, one_round)) == nonzero(world.joint)


def sampled_round_below(world: World, context: Context, first: int, *, expand: bool, chances: Chances) -> Context:
    tokens, parents = [-1, first], [-1, 0]
    if expand:
        tokens.append(chances.pick(world.q((*context, first))))
        parents.append(1)
    tree = tree_from_parents(np.array(tokens), np.array(parents))

    def decide(row: int) -> int:
        before = context + tuple(tokens[1 : row + 1])
        drawn = tree.tokens[tree.parents == row].tolist()
        taken, left = accept_child(world.p(before), world.q(before), drawn, lambda _, chance: chances.coin(chance))
        return chances.pick(left) if taken is None else taken

    done = walk(tree, decide)
    return (*context, *(tokens[row] for row in done.path[1:]), done.bonus)


def test_pruning_after_drawing_biases_as_computed_by_hand() -> None:
    """p = (1/2, 1/2), q = (3/5, 2/5), one draw, the second token pruned: P(first token) becomes 7/10."""
    p, q = np.array([Fraction(1, 2)] * 2, dtype=object), np.array([Fraction(3, 5), Fraction(2, 5)], dtype=object)

    def event(chances: Chances) -> Context:
        drawn = [token for token in [chances.pick(q)] if token == 0]
        taken, left = accept_child(p, q, drawn, lambda _, chance: chances.coin(chance))
        return (chances.pick(left) if taken is None else taken,)

    assert enumerate_all(event)[(0,)] == Fraction(7, 10)


def test_equal_laws_are_always_accepted_and_leave_no_residual() -> None:
    p = np.array([Fraction(1, 4), Fraction(3, 4)], dtype=object)
    asked = []
    assert accept_child(p, p, [1], lambda _, chance: asked.append(chance) or True)[0] == 1
    assert asked == [1]
    taken, left = accept_child(p, p, [1], lambda *_: False)  # as rounding may have it
    assert taken is None
    assert left.tolist() == p.tolist()
