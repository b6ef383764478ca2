"""What the export takes for the same tree of a round, and what not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from eagle_exporter.parity import TOLERANCE
from eagle_exporter.validate_rounds import is_consistent, same_up_to_rounding
from eagle_graphs import Tree, tree_from_parents

PARENTS = np.array([-1, 0, 1, 1, 0])
VALUES = np.array([0.0, -0.5, -1.0, -2.0, -1.5], np.float32)
TREE = tree_from_parents(np.array([9, 5, 6, 7, 8]), PARENTS, VALUES)


def with_token(row: int, token: int) -> Tree:
    tokens = TREE.tokens.copy()
    tokens[row] = token
    return replace(TREE, tokens=tokens)


def test_a_tree_is_itself_in_any_order_of_its_rows() -> None:
    reordered = tree_from_parents(np.array([9, 8, 5, 7, 6]), np.array([-1, 0, 0, 2, 2]), VALUES[[0, 4, 1, 3, 2]])
    assert same_up_to_rounding(TREE, TREE)
    assert same_up_to_rounding(reordered, TREE)


def test_a_node_of_the_least_value_may_be_another_one() -> None:
    assert same_up_to_rounding(with_token(3, 70), TREE)
    close = VALUES + np.float32([0, 0, 0, TOLERANCE / 2, 0])
    assert same_up_to_rounding(replace(with_token(3, 70), values=close), TREE)


def test_a_likelier_node_may_not() -> None:
    assert not same_up_to_rounding(with_token(4, 80), TREE)
    assert not same_up_to_rounding(with_token(1, 50), TREE)
    assert not same_up_to_rounding(tree_from_parents(TREE.tokens, np.array([-1, 0, 1, 1, 1]), VALUES), TREE)


def test_depths_and_mask_must_be_the_parents() -> None:
    assert is_consistent(TREE)
    assert not is_consistent(replace(TREE, depths=TREE.depths + 1))
    mask = TREE.mask.copy()
    mask[4, 1] = True
    assert not is_consistent(replace(TREE, mask=mask))
