"""Trees against slow references in plain Python, on scores as drafting makes them and with many ties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_graphs.profiles import MAX_DEPTH, MAX_NODES, MIN_NODES, TOP_K, profile_from_nodes
from eagle_graphs.tree import (
    ROOT,
    Candidates,
    Tree,
    best_indices,
    candidates_from_tree,
    cut,
    depths_and_ancestors,
    rerank,
    root_only,
    tree_from_parents,
)

TIED = (0.0, -0.25, -0.5)  # sums of these are exact, so that paths of different length tie as well
SHAPES = [(1, 1), (1, 5), (2, 3), (3, 2), (5, 1), (TOP_K, MAX_DEPTH)]  # top_k, depth


def ranking(values, among):
    """`among`, best value first, a tie to the lower index."""
    return sorted(among, key=lambda i: (-values[i], i))


def drafted(top_k: int, depth: int, log_probs) -> Candidates:
    """Candidates grown as in EAGLE-2; `log_probs` gives the log-probability of one child a call."""
    tokens, parents, values = [], [], []
    kept = [ROOT]
    for _ in range(depth):
        level = []
        for node in kept:
            for log_prob in sorted((log_probs() for _ in range(top_k)), reverse=True):
                level.append(len(tokens))
                tokens.append(1000 + len(tokens))
                parents.append(node)
                values.append(np.float32(0 if node == ROOT else values[node]) + np.float32(log_prob))
        kept = ranking(values, level)[:top_k]
    return Candidates(
        tokens=np.array(tokens, np.int64), parents=np.array(parents, np.int64), values=np.array(values, np.float32)
    )


def drafted_at_random(seed: int, top_k: int = TOP_K, depth: int = MAX_DEPTH) -> Candidates:
    rng = np.random.default_rng(seed)
    return drafted(top_k, depth, lambda: np.log(rng.uniform(1e-6, 1)))


@st.composite
def candidates(draw: st.DrawFn) -> Candidates:
    """Drafted candidates, many of them tied."""
    top_k, depth = draw(st.sampled_from(SHAPES))
    generator = draw(st.randoms(use_true_random=False))
    choices = draw(st.sampled_from([TIED, (0.0,), (0.0, -0.5, -7.0), tuple(-i / 8 for i in range(64))]))
    return drafted(top_k, depth, lambda: generator.choice(choices))


@st.composite
def parents_before_children(draw: st.DrawFn) -> np.ndarray:
    """Parents [N] of a random tree."""
    drawn = draw(st.lists(st.integers(0, 10**6), max_size=40))
    return np.array([ROOT, *(number % (i + 1) for i, number in enumerate(drawn))], np.int64)


def slow_path(parents, node: int) -> list[int]:
    """From the top down to `node`, both included."""
    path = []
    while node >= 0:
        path.insert(0, int(node))
        node = parents[node]
    return path


def slow_rerank(drafted: Candidates, root: int, nodes: int):
    """Tokens, parents and values of the best tree, appended by a depth-first walk."""
    chosen = ranking(drafted.values, range(len(drafted.values)))[: nodes - 1]
    tokens, parents, values = [root], [ROOT], [0.0]

    def walk(node: int, row: int) -> None:
        for child in chosen:
            if drafted.parents[child] == node:
                tokens.append(drafted.tokens[child])
                parents.append(row)
                values.append(drafted.values[child])
                walk(child, len(tokens) - 1)

    walk(ROOT, 0)
    return tokens, parents, values


def check_rerank(drafted: Candidates, nodes: int) -> Tree:
    tree = rerank(drafted, root=7, nodes=nodes)
    tokens, parents, values = slow_rerank(drafted, 7, nodes)
    assert len(tree) == nodes
    assert tree.tokens.tolist() == tokens
    assert tree.parents.tolist() == parents
    assert tree.values.tolist() == values
    assert tree.depths.tolist() == [len(slow_path(parents, row)) - 1 for row in range(nodes)]
    return tree


def check_types(tree: Tree) -> None:
    found = [array.dtype for array in (tree.tokens, tree.parents, tree.values, tree.depths, tree.mask)]
    assert found == [np.int64, np.int64, np.float32, np.int64, np.bool_]
    assert tree.mask.shape == (len(tree), len(tree))


# Depths and masks


@settings(deadline=None)
@given(parents_before_children())
def test_depths_and_mask_of_any_tree(parents: np.ndarray) -> None:
    depths, mask = depths_and_ancestors(parents)
    paths = [slow_path(parents, row) for row in range(len(parents))]
    assert depths.tolist() == [len(path) - 1 for path in paths]
    assert mask.tolist() == [[j in path for j in range(len(parents))] for path in paths]


def test_depths_and_mask_of_a_forest_in_any_order() -> None:
    depths, mask = depths_and_ancestors(np.array([2, ROOT, ROOT, 0, 1], np.int64))  # 2 <- 0 <- 3 and 1 <- 4
    assert depths.tolist() == [1, 0, 0, 2, 1]
    assert [np.flatnonzero(row).tolist() for row in mask] == [[0, 2], [1], [2], [0, 2, 3], [1, 4]]


def test_depths_and_mask_of_nothing() -> None:
    depths, mask = depths_and_ancestors(np.array([], np.int64))
    assert depths.shape == (0,)
    assert mask.shape == (0, 0)


@settings(deadline=None)
@given(parents_before_children())
def test_tree_from_parents(parents: np.ndarray) -> None:
    tokens, values = np.arange(len(parents)) + 50, -np.arange(len(parents), dtype=np.float32)
    tree = tree_from_parents(tokens, parents, values)
    check_types(tree)
    assert tree.tokens is tokens
    assert tree.values is values
    assert [tree.path_to(row) for row in range(len(tree))] == [slow_path(parents, row) for row in range(len(tree))]
    assert not np.triu(tree.mask, 1).any(), "a causal pass would be too narrow"
    assert tree_from_parents(tokens, parents).values.tolist() == [0.0] * len(parents)


def test_root_only() -> None:
    tree = root_only(42)
    check_types(tree)
    assert (tree.tokens.tolist(), tree.parents.tolist(), tree.depths.tolist()) == ([42], [ROOT], [0])
    assert tree.mask.tolist() == [[True]]
    assert tree.values.tolist() == [0.0]
    assert tree.path_to(0) == [0]


# The choice


@settings(deadline=None)
@given(st.lists(st.sampled_from([*TIED, -0.0, -1e-45, -3e38]), max_size=60), st.integers(0, 70))
def test_best_indices(values: list[float], count: int) -> None:
    found = best_indices(np.array(values, np.float32), count)
    assert found.tolist() == ranking(np.array(values, np.float32), range(len(values)))[:count]


@settings(deadline=None)
@given(candidates())
def test_smaller_choices_are_prefixes_of_larger(drafted: Candidates) -> None:
    everything = best_indices(drafted.values, len(drafted.values)).tolist()
    assert sorted(everything) == list(range(len(drafted.values)))
    for count in range(len(everything)):
        assert best_indices(drafted.values, count).tolist() == everything[:count]


@settings(deadline=None)
@given(candidates())
def test_every_size_is_a_tree_within_the_next(drafted: Candidates) -> None:
    """Each size keeps all of the size below it and its order: a tie never tears a child from its parent."""
    smaller: list[int] = []
    for nodes in range(1, len(drafted.values) + 2):
        tokens = rerank(drafted, root=7, nodes=nodes).tokens.tolist()
        assert len(tokens) == nodes
        assert [token for token in tokens if token in set(smaller)] == smaller
        smaller = tokens


@settings(deadline=None)
@given(candidates(), st.data())
def test_rerank_equals_the_slow_one(drafted: Candidates, data: st.DataObject) -> None:
    tree = check_rerank(drafted, data.draw(st.integers(1, len(drafted.values) + 1), label="nodes"))
    check_types(tree)


@settings(deadline=None)
@given(candidates(), st.data())
def test_rerank_is_depth_first_and_the_better_sibling_first(drafted: Candidates, data: st.DataObject) -> None:
    tree = rerank(drafted, root=7, nodes=data.draw(st.integers(1, len(drafted.values) + 1), label="nodes"))
    index = {int(token): i for i, token in enumerate(drafted.tokens)}
    order = [index[int(token)] for token in tree.tokens[1:]]
    assert (tree.parents[1:] < np.arange(1, len(tree))).all(), "a parent stands behind its child"
    for row in range(len(tree)):
        below = np.flatnonzero(tree.mask[:, row])
        assert below.tolist() == list(range(row, row + len(below))), "a subtree is not in one piece"
        children = [order[child - 1] for child in np.flatnonzero(tree.parents == row)]
        assert children == ranking(drafted.values, children)


@pytest.mark.parametrize("nodes", range(MIN_NODES, MAX_NODES + 1))
def test_rerank_fills_every_profile(nodes: int) -> None:
    profile = profile_from_nodes(nodes)
    for seed in range(3):
        check_rerank(drafted_at_random(seed, profile.top_k, profile.depth), nodes)
    check_rerank(drafted(profile.top_k, profile.depth, lambda: 0.0), nodes)


def test_all_tied_keeps_the_shallow_and_goes_deep_first() -> None:
    """log p = 0 everywhere, K = 2, D = 3: candidates 0 1 | 2 3 below 0, 4 5 below 1 | 6 7 below 2, 8 9 below 3."""
    tied = drafted(2, 3, lambda: 0.0)
    assert tied.parents.tolist() == [ROOT, ROOT, 0, 0, 1, 1, 2, 2, 3, 3]
    assert (rerank(tied, root=7, nodes=4).tokens - 1000).tolist()[1:] == [0, 2, 1]
    tree = rerank(tied, root=7, nodes=9)
    assert (tree.tokens - 1000).tolist()[1:] == [0, 2, 6, 7, 3, 1, 4, 5]
    assert tree.parents.tolist() == [ROOT, 0, 1, 2, 2, 1, 0, 6, 6]


def test_the_likeliest_path_comes_first() -> None:
    for seed in range(20):
        tree = rerank(drafted_at_random(seed), root=7, nodes=60)
        node, path = 0, [0]
        while len(children := np.flatnonzero(tree.parents == node)):
            node = int(children[tree.values[children].argmax()])
            path.append(node)
        assert path == list(range(len(path)))


def test_an_orphan_is_noticed() -> None:
    growing = Candidates(
        tokens=np.array([1, 2]), parents=np.array([ROOT, 0]), values=np.array([-2.0, -1.0], np.float32)
    )
    with pytest.raises(AssertionError, match="lacks its parent"):
        rerank(growing, root=7, nodes=2)


@given(candidates(), st.data())
def test_a_cut_tree_is_what_its_own_candidates_give(drafted: Candidates, data: st.DataObject) -> None:
    nodes = data.draw(st.integers(2, len(drafted.values) + 1))
    tree = rerank(drafted, root=7, nodes=nodes)
    smaller = cut(tree, data.draw(st.integers(1, nodes)))
    check_types(smaller)
    assert (smaller.parents[1:] >= 0).all()
    kept = candidates_from_tree(smaller)
    tokens, parents, values = slow_rerank(candidates_from_tree(tree), 7, len(smaller))
    assert (smaller.tokens.tolist(), smaller.parents.tolist(), smaller.values.tolist()) == (tokens, parents, values)
    assert sorted(kept.values, reverse=True) == sorted(tree.values[1:], reverse=True)[: len(kept.values)]


@given(st.integers(0, 10**6), st.data())
def test_a_cut_tree_is_the_one_drafted_at_that_size(seed: int, data: st.DataObject) -> None:
    drafted = drafted_at_random(seed)
    nodes = data.draw(st.integers(2, len(drafted.values) + 1))
    smaller = data.draw(st.integers(1, nodes))
    mine, its = cut(rerank(drafted, root=7, nodes=nodes), smaller), rerank(drafted, root=7, nodes=smaller)
    assert (mine.tokens.tolist(), mine.parents.tolist()) == (its.tokens.tolist(), its.parents.tolist())
    assert mine.mask.tolist() == its.mask.tolist()


def test_a_tree_of_the_size_asked_for_is_not_touched() -> None:
    tree = rerank(drafted_at_random(0), root=7, nodes=8)
    assert cut(tree, 8) is tree
    assert cut(tree, 1).tokens.tolist() == [7]
    with pytest.raises(AssertionError, match="too few"):
        cut(tree, 9)


def test_what_is_no_number_is_worth_least() -> None:
    values = np.array([-1.0, np.nan, -0.5, -2.0], np.float32)
    tree = rerank(Candidates(tokens=np.arange(4), parents=np.full(4, -1), values=values), root=9, nodes=4)
    assert tree.tokens.tolist() == [9, 2, 0, 3]
