"""Greedy acceptance against a reference that tries every path of the tree."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_graphs import Tree, root_only, tree_from_parents
from eagle_runtime.accept import Walk, walk_greedy

VOCAB = 6


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """A random tree whose siblings differ, over so few tokens that paths are often accepted."""
    parents, tokens = [-1], [draw(st.integers(0, VOCAB - 1))]
    for row in range(1, draw(st.integers(1, 24))):
        parent = draw(st.integers(0, row - 1))
        taken = {tokens[i] for i in range(1, row) if parents[i] == parent}
        if free := sorted(set(range(VOCAB)) - taken):
            parents.append(parent)
            tokens.append(draw(st.sampled_from(free)))
        else:
            break
    return tree_from_parents(np.array(tokens), np.array(parents))


def every_path_tried(tree: Tree, argmax_ids: np.ndarray) -> Walk:
    """The longest path on which each token is the target's choice at the node before it."""
    paths = [tree.path_to(node) for node in range(len(tree))]
    accepted = [path for path in paths if all(tree.tokens[b] == argmax_ids[a] for a, b in pairwise(path))]
    best = max(accepted, key=len)
    checked = sum(int(parent) in best for parent in tree.parents)
    return Walk(path=best, bonus=int(argmax_ids[best[-1]]), checked=checked)


@settings(max_examples=200, deadline=None)
@given(trees(), st.data())
def test_equals_the_reference(tree: Tree, data: st.DataObject) -> None:
    argmax_ids = np.array(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(tree), max_size=len(tree))))
    assert walk_greedy(tree, argmax_ids) == every_path_tried(tree, argmax_ids)


@settings(max_examples=100, deadline=None)
@given(trees(), st.data())
def test_finds_any_path_that_the_target_takes(tree: Tree, data: st.DataObject) -> None:
    """The target's choices lead to a node and, there, to a token that is not drafted."""
    path = tree.path_to(data.draw(st.integers(0, len(tree) - 1)))
    argmax_ids = np.full(len(tree), VOCAB)
    argmax_ids[path[:-1]] = tree.tokens[path[1:]]
    walk = walk_greedy(tree, argmax_ids)
    assert (walk.path, walk.bonus) == (path, VOCAB)


def test_counts_the_children_of_every_node_stood_on() -> None:
    # 0 -> (1, 2, 3), 2 -> (4, 5), 5 -> (6,), 1 -> (7,)
    tree = tree_from_parents(np.array([9, 1, 2, 3, 4, 5, 6, 7]), np.array([-1, 0, 0, 0, 2, 2, 5, 1]))
    argmax_ids = np.array([2, 7, 5, 0, 0, 8, 0, 0])
    assert walk_greedy(tree, argmax_ids) == Walk(path=[0, 2, 5], bonus=8, checked=6)
    argmax_ids[5] = 6
    assert walk_greedy(tree, argmax_ids) == Walk(path=[0, 2, 5, 6], bonus=0, checked=6)
    argmax_ids[0] = 8
    assert walk_greedy(tree, argmax_ids) == Walk(path=[0], bonus=8, checked=3)


def test_a_root_alone_gives_its_bonus_and_checks_nothing() -> None:
    assert walk_greedy(root_only(3), np.array([5])) == Walk(path=[0], bonus=5, checked=0)
