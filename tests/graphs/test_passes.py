"""The shapes that graphs are run at."""

from __future__ import annotations

from eagle_graphs import profiles_from_text, static_profile
from eagle_graphs.manifest import Limits
from eagle_graphs.passes import draft_passes, target_passes

LIMITS = Limits(capacity=128, prefill_chunk=64, buffer_rows=192)


def test_the_target_s_passes() -> None:
    passes = target_passes(profiles_from_text("10,30,60"), LIMITS)
    assert [(each.name, *each.sizes.values()) for each in passes] == [
        ("plain", 1, 1, 1),
        ("tree 10", 10, 10, 10),
        ("tree 30", 30, 30, 30),
        ("tree 60", 60, 60, 60),
        ("chunk", 64, 64, 1),
    ]


def test_the_head_s_passes_extend_by_a_round_and_go_down_level_by_level() -> None:
    passes = draft_passes(profiles_from_text("10,60"), LIMITS)
    assert [(each.name, *each.sizes.values()) for each in passes] == [
        ("extension 5", 5, 5, 1),
        ("extension 7", 7, 7, 1),
        ("level 5/5", 5, 5, 5),
        ("level 5/10", 5, 10, 5),
        ("level 5/15", 5, 15, 5),
        ("level 2/2", 2, 2, 2),  # this and the next ones: of sampled trees
        ("level 1/3", 1, 3, 1),
        ("level 1/4", 1, 4, 1),
        ("level 8/8", 8, 8, 8),
        ("level 8/16", 8, 16, 8),
        ("level 8/24", 8, 24, 8),
        ("level 8/32", 8, 32, 8),
        ("level 8/40", 8, 40, 8),
        ("level 4/4", 4, 4, 4),
        ("level 8/12", 8, 12, 8),
        ("level 10/22", 10, 22, 10),
        ("level 5/27", 5, 27, 5),
        ("level 6/33", 6, 33, 6),
        ("chunk", 64, 64, 1),
    ]


def test_a_static_tree_s_levels_are_the_nodes_that_have_children() -> None:
    passes = draft_passes((static_profile(((0,), (1,), (0, 0), (1, 0), (0, 0, 0))),), LIMITS)
    assert [(each.name, *each.sizes.values()) for each in passes] == [
        ("extension 4", 4, 4, 1),
        ("level 2/2", 2, 2, 2),
        ("level 1/3", 1, 3, 1),
        ("chunk", 64, 64, 1),
    ]


def test_each_shape_is_there_once() -> None:
    small = Limits(capacity=8, prefill_chunk=1, buffer_rows=16)
    assert [each.name for each in target_passes(profiles_from_text("2,3"), small)] == ["plain", "tree 2", "tree 3"]
