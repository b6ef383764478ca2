"""Profiles: every size in range can be filled, and what cannot be is refused with a message that helps."""

from dataclasses import FrozenInstanceError

import pytest

from eagle_graphs.errors import EagleError
from eagle_graphs.profiles import (
    MAX_DEPTH,
    MAX_NODES,
    MIN_NODES,
    TOP_K,
    Profile,
    profile_from_nodes,
    profiles_from_text,
)


@pytest.mark.parametrize("nodes", range(MIN_NODES, MAX_NODES + 1))
def test_every_size_in_range_can_be_filled(nodes: int) -> None:
    profile = profile_from_nodes(nodes)
    assert profile.nodes == nodes
    assert 1 <= profile.top_k <= TOP_K
    assert 1 <= profile.depth <= MAX_DEPTH
    assert nodes - 1 <= profile.top_k + (profile.depth - 1) * profile.top_k**2
    assert profile.depth < nodes, "a level that can never be part of the tree"


@pytest.mark.parametrize(
    ("nodes", "top_k", "depth"),
    [(2, 1, 1), (3, 2, 2), (4, 3, 2), (5, 3, 3), (8, 4, 3), (9, 4, 4), (16, 8, 4), (17, 8, 5), (60, 8, 6), (128, 8, 7)],
)
def test_width_and_depth_follow_from_the_size(nodes: int, top_k: int, depth: int) -> None:
    assert profile_from_nodes(nodes) == Profile(nodes=nodes, top_k=top_k, depth=depth)


@pytest.mark.parametrize("nodes", [-4, 0, 1, MAX_NODES + 1, 10**9])
def test_sizes_out_of_range_are_refused(nodes: int) -> None:
    with pytest.raises(EagleError, match=rf"{nodes} nodes is out of range: use {MIN_NODES} to {MAX_NODES} "):
        profile_from_nodes(nodes)


@pytest.mark.parametrize(("top_k", "depth", "most"), [(2, 3, 10), (10, 1, 10), (3, 2, 12), (1, 7, 7)])
def test_a_tree_holds_what_is_drafted_and_no_more(top_k: int, depth: int, most: int) -> None:
    assert Profile(nodes=most + 1, top_k=top_k, depth=depth).nodes == most + 1
    with pytest.raises(
        EagleError, match=rf"needs {most + 1} candidates, but {top_k} children over {depth} levels give"
    ):
        Profile(nodes=most + 2, top_k=top_k, depth=depth)


@pytest.mark.parametrize(("top_k", "depth"), [(0, 4), (8, 0), (-8, 4), (8, -1)])
def test_nothing_drafted_is_refused(top_k: int, depth: int) -> None:
    with pytest.raises(EagleError, match="needs 1 candidates"):
        Profile(nodes=2, top_k=top_k, depth=depth)


def test_a_profile_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        profile_from_nodes(8).nodes = 9  # type: ignore[misc]


@pytest.mark.parametrize(("text", "sizes"), [("4,8,16", [4, 8, 16]), ("2", [2]), (" 4, 128 ", [4, 128])])
def test_profiles_from_text(text: str, sizes: list[int]) -> None:
    assert profiles_from_text(text) == tuple(profile_from_nodes(size) for size in sizes)


def test_levels_of_one_s_own_choice() -> None:
    shapes = [(profile.nodes, profile.top_k, profile.depth) for profile in profiles_from_text("4:3,8,17:8,60:8")]
    assert shapes == [(4, 3, 3), (8, 4, 3), (17, 8, 8), (60, 8, 8)]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("4:4", "a tree of 4 nodes has 1 to 3 levels below its root; found 4"),
        ("60:9", "a tree of 60 nodes has 2 to 8 levels below its root; found 9"),
        ("60:1", "a tree of 60 nodes has 2 to 8 levels below its root; found 1"),
        ("8:0", "a tree of 8 nodes has 2 to 7 levels below its root; found 0"),
        ("8:-1", "a tree of 8 nodes has 2 to 7 levels below its root; found -1"),
        ("60:9,8", "a tree of 60 nodes has 2 to 8 levels below its root; found 9"),
        (
            "16:8,60",
            "the tree of 60 nodes has 6 levels, fewer than the 8 of the one of 16: write 60:8, or take levels from the "
            "smaller one",
        ),
    ],
)
def test_levels_that_a_tree_cannot_have_are_refused(text: str, why: str) -> None:
    with pytest.raises(EagleError) as caught:
        profiles_from_text(text)
    assert str(caught.value) == why


@pytest.mark.parametrize(
    "text",
    ["", "a", "4,", "4;8", "4.0", "4,,8", "4 8", "0x10", "4:", ":4", "4:2:2", "4,8:a", "4_0", "+4", "8" * 5000],
)
def test_what_is_not_a_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(EagleError, match="separated by commas, as in 4,8,16; found") as caught:
        profiles_from_text(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "instead"),
    [("8,4", "4,8"), ("4,4,8", "4,8"), ("16,4,8,4", "4,8,16"), ("8:3,8:4", "8:4"), ("16:5, 8", "8,16:5")],
)
def test_sizes_that_do_not_rise_are_refused_and_put_right(text: str, instead: str) -> None:
    with pytest.raises(EagleError, match=f"found '{text}': write {instead}$"):
        profiles_from_text(text)


@pytest.mark.parametrize("text", ["1,4", "4,129", "-8,4"])
def test_a_size_out_of_range_in_a_list_is_refused(text: str) -> None:
    with pytest.raises(EagleError, match="out of range"):
        profiles_from_text(text)
