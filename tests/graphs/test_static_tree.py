"""Static trees: the reference's 25 nodes, the order of drafting, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from eagle_graphs import EagleError, paths_from_json, profile_from_nodes, static_profile
from eagle_graphs.profiles import STATIC_PATHS, Path
from eagle_graphs.static_tree import static_tree

LOPSIDED: tuple[Path, ...] = ((0,), (2,), (2, 1), (2, 1, 0), (2, 1, 3), (0, 0))


def test_the_reference_s_tree_has_25_nodes_4_8_8_3_2_by_depth() -> None:
    profile = static_profile()
    assert Counter(map(len, STATIC_PATHS)) == {1: 4, 2: 8, 3: 8, 4: 3, 5: 2}
    assert (profile.nodes, profile.top_k, profile.depth) == (26, 4, 5)
    assert profile.paths[0] == (0,)
    assert set(profile.paths) == set(STATIC_PATHS)
    assert all(path[:-1] in STATIC_PATHS for path in STATIC_PATHS if len(path) > 1)


@pytest.mark.parametrize("paths", [STATIC_PATHS, LOPSIDED, ((0,),), ((1,), (0,)), ((0,), (0, 0), (0, 0, 0))])
def test_levels_draft_every_node_below_its_parent(paths: tuple[Path, ...]) -> None:
    profile = static_profile(paths)
    tree = static_tree(profile.paths)
    path_of = {0: ()} | dict(enumerate(profile.paths, start=1))
    row_of = {path: row for row, path in path_of.items()}
    assert [path_of[parent] for parent in tree.parents[1:].tolist()] == [path[:-1] for path in profile.paths]
    assert len(tree.levels) == profile.depth

    drafted: list[Path] = []
    expanded: list[Path] = []
    for depth, level in enumerate(tree.levels):
        now = [path_of[row] for row in level.expanded.tolist()]
        assert all(len(path) == depth for path in now)
        assert len(set(now)) == len(now)
        if depth:
            expanded += now
        assert level.mask.shape == (len(now), len(expanded))
        for path, seen in zip(now, level.mask, strict=True):
            ancestors = {path[:length] for length in range(1, len(path) + 1)}
            assert {p for p, s in zip(expanded, seen.tolist(), strict=True) if s} == ancestors
        for child, parent, rank in zip(level.children, level.parents, level.ranks, strict=True):
            assert path_of[int(child)] == (*now[parent], rank)
            drafted.append(path_of[int(child)])
    assert sorted(drafted) == list(profile.paths)
    assert profile.draft_rows == len(expanded) == len({path[:-1] for path in paths if len(path) > 1})
    assert row_of[profile.paths[-1]] == len(paths)


def test_the_best_path_comes_first() -> None:
    profile = static_profile()
    best = list(itertools.accumulate([(0,)] * 5))
    assert [profile.paths.index(path) for path in best] == [0, 1, 2, 3, 4]


def test_masks_are_shared_between_rounds() -> None:
    assert static_tree(STATIC_PATHS[:4]) is static_tree(STATIC_PATHS[:4])
    assert isinstance(static_tree(STATIC_PATHS).levels[1].mask, np.ndarray)


def test_paths_are_read_from_json_in_any_order() -> None:
    text = json.dumps([list(path) for path in reversed(LOPSIDED)])
    profile = static_profile(paths_from_json(text, "tree.json"))
    assert profile.paths == tuple(sorted(LOPSIDED))
    assert (profile.nodes, profile.top_k, profile.depth, profile.draft_rows) == (7, 4, 3, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "tree.json is not JSON"),
        ("{}", "does not hold a list of paths"),
        ("[0, 1]", "does not hold a list of paths"),
        ("[[0.5]]", "something other than whole numbers"),
        ("[[true]]", "something other than whole numbers"),
        ("[]", "a list of ranks from 0 on"),
        ("[[]]", "a list of ranks from 0 on"),
        ("[[-1]]", "a list of ranks from 0 on"),
        ("[[0], [0]]", r"names the path \[0\] twice"),
        ("[[0], [1, 0]]", r"names the path \[1, 0\] without its parent \[1\]"),
        (json.dumps([[i] for i in range(200)]), "201 nodes is out of range"),
    ],
)
def test_what_is_no_tree(text: str, words: str) -> None:
    with pytest.raises(EagleError, match=words):
        static_profile(paths_from_json(text, "tree.json"))


def test_a_profile_must_be_what_its_paths_say() -> None:
    profile = static_profile(LOPSIDED)
    for change in ({"nodes": 8}, {"top_k": 5}, {"depth": 4}):
        with pytest.raises(EagleError, match="a static tree with 7 nodes, 4 children and 3 levels is described as"):
            replace(profile, **change)
    with pytest.raises(EagleError, match="not in depth-first order"):
        replace(profile, paths=profile.paths[::-1])


def test_dynamic_profiles_take_the_rows_of_their_levels() -> None:
    profile = profile_from_nodes(16)
    assert profile.paths == ()
    assert profile.draft_rows == profile.top_k * (profile.depth - 1)
