"""The law of an answer, by sampling: chi-square tests with fixed seeds, on the product's keyed noise.

A million answers are made at once: all that stand at the same node after the same tokens draw their children and coins
together, and `accept_child` is asked once for each sequence of children. The sampler itself, which makes one answer at
a time, is tested with fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from eagle_graphs import Profile, Tree, root_only
from eagle_runtime import Sampling
from eagle_runtime.noise import bits_from, gumbels_from, key_from, noise, uniforms_from
from eagle_runtime.sampled_tree import BONUS, CHILDREN, COIN, grow_sampled
from eagle_runtime.sampler import Sampler
from eagle_runtime.verify import Verified
from tests.worlds import (
    ANSWER,
    RIGHT,
    SHAPES,
    WRONG,
    WRONG_SHAPES,
    Context,
    Rules,
    World,
    chi_square_p,
    prune,
)

DRAWS = 1_000_000
LEAST_P = 1e-3

WORLDS = [World(vocab=2, support=2, seed=10), World(4, 3, 11), World(8, 8, 12), World(8, 4, 13)]


Place = tuple[Context, int, tuple[float, ...] | None]
"""Tokens so far, row of the tree, and what the row's siblings left of p, which only a wrong rule looks at."""


@dataclass
class Answers:
    """A million answers of one world, shape and rules."""

    world: World
    parents: list[int]
    rules: Rules
    seed: int
    waiting: dict[Place, list[np.ndarray]] = field(default_factory=dict)
    """Numbers of the answers that stand at each place. Each step adds one token to all of them."""

    def __post_init__(self) -> None:
        self._move((), 0, np.arange(DRAWS))
        for _ in range(ANSWER):
            here, self.waiting = self.waiting, {}
            for (context, row, stale), walkers in here.items():
                self._step(context, row, stale, np.concatenate(walkers))

    def p_value(self) -> float:
        counts = dict.fromkeys(self.world.joint, 0)
        for (context, _, _), walkers in self.waiting.items():
            counts[context] += sum(map(len, walkers))
        assert sum(counts.values()) == DRAWS
        expected = np.array([float(probability) for probability in self.world.joint.values()]) * DRAWS
        return chi_square_p(np.array(list(counts.values())), expected)

    def _move(self, context: Context, row: int, walkers: np.ndarray, left: np.ndarray | None = None) -> None:
        if len(walkers):
            stale = tuple(left.tolist()) if self.rules.stale and left is not None else None
            self.waiting.setdefault((context, row, stale), []).append(walkers)

    def _step(self, context: Context, row: int, stale: tuple[float, ...] | None, walkers: np.ndarray) -> None:
        p, q = self.world.p(context).astype(np.float64), self.world.q(context).astype(np.float64)
        rows = [child for child, parent in enumerate(self.parents) if parent == row]
        if not rows:
            self._bonus(context, walkers, p if stale is None else np.array(stale))
            return
        drawn = self._children(context, walkers, q, len(rows) + self.rules.pruned)
        codes = drawn @ self.world.vocab ** np.arange(drawn.shape[1])
        order = np.argsort(codes, kind="stable")
        for here in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            children = drawn[here[0]].tolist()
            kept = prune(children, q) if self.rules.pruned else children
            self._accept(context, walkers[here], p, q, dict(zip(kept, rows, strict=True)))

    def _accept(
        self, context: Context, walkers: np.ndarray, p: np.ndarray, q: np.ndarray, row_of: dict[int, int]
    ) -> None:
        """Of answers with the same children: those that accept each, and those that accept none."""
        chances: dict[int, float] = {}
        _, rejected = self.rules.accept(p, q, list(row_of), lambda child, chance: chances.setdefault(child, chance) < 0)
        for child, row in row_of.items():
            left = self.rules.accept(p, q, list(row_of), lambda asked, _, child=child: asked == child)[1]
            heads = self._uniforms(COIN, context, walkers, child) < chances[child]
            self._move((*context, child), row, walkers[heads], left)
            walkers = walkers[~heads]
        self._bonus(context, walkers, rejected)

    def _bonus(self, context: Context, walkers: np.ndarray, p: np.ndarray) -> None:
        with np.errstate(divide="ignore"):
            sums = np.log(p) + gumbels_from(self._bits(BONUS, context, walkers, np.arange(self.world.vocab)))
        tokens = sums.argmax(axis=1) if len(walkers) else np.zeros(0, int)
        for token in range(self.world.vocab):
            self._move((*context, token), 0, walkers[tokens == token])

    def _children(self, context: Context, walkers: np.ndarray, q: np.ndarray, count: int) -> np.ndarray:
        with np.errstate(divide="ignore"):
            sums = np.log(q) + gumbels_from(self._bits(CHILDREN, context, walkers, np.arange(self.world.vocab)))
        return np.argsort(-sums, axis=1)[:, :count]

    def _uniforms(self, stream: int, context: Context, walkers: np.ndarray, token: int) -> np.ndarray:
        return uniforms_from(self._bits(stream, context, walkers, np.array([token])))[:, 0]

    def _bits(self, stream: int, context: Context, walkers: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """As the sampler has them, with an answer's number as one more part of the key."""
        keys = bits_from(key_from(self.seed, stream, len(context)), walkers)
        return bits_from(keys[:, None], tokens)


def cases() -> list[tuple[World, str]]:
    most = {name: max(map(parents.count, range(len(parents)))) for name, parents in SHAPES.items()}
    shapes = ("chain", "siblings on two levels", "three siblings")
    return [(world, shape) for world in WORLDS for shape in shapes if most[shape] <= world.support]


@pytest.mark.parametrize(("world", "shape"), cases(), ids=str)
def test_the_law_of_a_sampled_tree_is_the_target_s(world: World, shape: str) -> None:
    assert Answers(world, SHAPES[shape], RIGHT, seed=1).p_value() > LEAST_P


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rule_gives_another_law(name: str) -> None:
    assert Answers(World(8, 8, 12), SHAPES[WRONG_SHAPES[name]], WRONG[name], seed=1).p_value() < LEAST_P**3


def test_a_million_deterministic_draws_have_the_target_s_law() -> None:
    p = World(8, 8, 12).p(()).astype(np.float64)
    counts = np.zeros(8, np.int64)
    for start in range(0, DRAWS, 10_000):  # each block of noise serves as one draw
        values = noise(key_from(5), np.arange(start, start + 10_000))[:, 40:48]
        counts += np.bincount((np.log(p) + values).argmax(axis=1), minlength=8)
    assert chi_square_p(counts, p * DRAWS) > LEAST_P


# The sampler itself


class Head:
    """A pass of a head whose distribution after a context is the world's."""

    def __init__(self, world: World, contexts: list[Context]) -> None:
        q = np.array([world.q(context).astype(np.float64) for context in contexts])
        ids = np.argsort(-q, axis=1)[:, : world.support]
        self.outputs: dict[str, Any] = {
            "topk_ids": ids,
            "topk_logprobs": np.log(np.take_along_axis(q, ids, axis=1)).astype(np.float32),
            "hidden_out": np.array([[*context, *[-1] * (8 - len(context))] for context in contexts], np.float32),
        }


def draft(world: World, context: Context, profile: Profile, sampling: Sampling) -> Tree:
    """A sampled tree after `context`, whose last token is the root; `hidden` carries each node's context."""

    def expand(tokens: np.ndarray, hidden: np.ndarray, mask: np.ndarray, level: int) -> Head:
        contexts = []
        for token, before in zip(tokens.tolist(), hidden.astype(int).tolist(), strict=True):
            contexts.append((*(known for known in before if known >= 0), token))
        return Head(world, contexts)

    assert sampling.proposal is not None
    root = context[-1] if context else -1
    extension = Head(world, [context])
    return grow_sampled(root, extension, profile, sampling.proposal, position=1 + len(context), expand=expand)


def answer(world: World, sampling: Sampling, plant: Callable[[Context], Tree]) -> Context:
    """ANSWER tokens from rounds of the real sampler; the prompt is one token that the world does not know."""
    sampler = Sampler(sampling, prompt=[0], eos_token_ids=[], capacity=16)
    context: Context = ()
    while len(context) < ANSWER:
        tree = plant(context)
        logits = np.zeros((len(tree), world.vocab), np.float32)
        for row in range(len(tree)):
            before = context + tuple(tree.tokens[tree.path_to(row)[1:]].tolist())
            logits[row] = np.log(world.p(before).astype(np.float64))
        done = sampler.walk(tree, Verified(argmax_ids=np.zeros(0, int), features=np.zeros(0), logits=logits))
        tokens = [*tree.tokens[done.path[1:]].tolist(), done.bonus]
        sampler.commit(tokens)
        context += tuple(tokens)
    return context[:ANSWER]


@pytest.mark.parametrize("mode", ["plain", "sampled"])
def test_the_sampler_s_law_is_the_target_s(mode: str) -> None:
    draws, world, profile = 4000, CachedWorld(4, 3, 11), Profile(nodes=6, top_k=3, depth=2)
    counts: dict[Context, int] = {}
    for seed in range(draws):
        if mode == "plain":
            found = answer(world, Sampling(temperature=1.0, seed=seed), lambda context: root_only(0))
        else:
            sampling = Sampling(temperature=1.0, seed=seed, verify_mode="sampled")
            found = answer(world, sampling, lambda context, use=sampling: draft(world, context, profile, use))
        counts[found] = counts.get(found, 0) + 1
    law = world.joint
    observed = np.array([counts.get(one, 0) for one in law])
    assert chi_square_p(observed, np.array([float(value) for value in law.values()]) * draws) > LEAST_P


class CachedWorld(World):
    """Makes each law once."""

    def _law(self, context: Context, positive: int, which: int) -> np.ndarray:
        known = self.__dict__.setdefault("known", {})
        if (context, which) not in known:
            known[context, which] = super()._law(context, positive, which)
        return known[context, which]
