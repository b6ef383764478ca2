"""Passes of frozen shapes: which one serves a call, and what padding sees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_graphs import EagleError, KVGeometry, draft_ports, profile_from_nodes, tree_from_parents
from eagle_graphs.manifest import Limits
from eagle_graphs.passes import draft_passes, target_passes
from eagle_graphs.sampled_shape import sampled_levels
from eagle_runtime.engines.frozen import choose_pass, pad_mask, views

PROFILES = tuple(map(profile_from_nodes, (4, 16)))
LIMITS = Limits(capacity=64, prefill_chunk=32, buffer_rows=96)
TARGET, DRAFT = target_passes(PROFILES, LIMITS), draft_passes(PROFILES, LIMITS)


def chosen(passes: tuple, rows: int, after: int, asked: int) -> str:
    return passes[choose_pass(passes, {"Q": rows, "S": after, "R": asked})].name


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ((1, 1, 1), "plain"),
        ((4, 4, 4), "tree 4"),
        ((16, 16, 16), "tree 16"),
        ((32, 32, 1), "chunk"),
        ((3, 3, 1), "tree 4"),
        ((17, 17, 1), "chunk"),
    ],
)
def test_the_smallest_pass_of_the_target_that_holds_a_call_serves_it(sizes: tuple[int, int, int], name: str) -> None:
    assert chosen(TARGET, *sizes) == name


def test_levels_of_a_tree_find_their_own_pass() -> None:
    for profile in PROFILES:
        for level in range(1, profile.depth):
            width = profile.top_k
            assert chosen(DRAFT, width, width * level, width) == f"level {width}/{width * level}"
        for rows, after in sampled_levels(profile):
            assert chosen(DRAFT, rows, after, rows) == f"level {rows}/{after}"
    assert chosen(DRAFT, 1, 1, 1) == "level 1/1", "a level of one row is an extension of one"
    assert chosen(DRAFT, 3, 3, 1) == "extension 3"
    assert chosen(DRAFT, 4, 4, 1) == "extension 5"
    assert chosen(DRAFT, 30, 30, 1) == "chunk"


@pytest.mark.parametrize("sizes", [(33, 33, 1), (17, 17, 17), (4, 9, 4)], ids=str)
def test_a_call_that_no_pass_holds_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(EagleError, match=r"no pass for \d+ rows behind \d of earlier .* it has plain, tree 4"):
        chosen(TARGET, *sizes)


@given(st.integers(1, 8), st.integers(0, 5), st.integers(0, 4))
def test_padding_sees_itself_alone_and_rows_see_what_they_did(rows: int, earlier: int, padding: int) -> None:
    random = np.random.default_rng(rows)
    pass_rows = rows + padding
    mask = random.random((1, pass_rows, earlier + pass_rows)) < 0.5  # what an earlier call left behind
    sizes = {"Q": rows, "S": earlier + rows, "R": 1}
    own = random.random((rows, earlier + rows)) < 0.5
    mask[0, :rows, : earlier + rows] = own
    pad_mask(mask, sizes)
    assert (mask[0, :rows, : earlier + rows] == own).all()
    assert not mask[0, :rows, earlier + rows :].any()
    expected = np.concatenate((np.zeros((pass_rows, earlier), bool), np.eye(pass_rows, dtype=bool)), axis=1)
    assert (mask[0, rows:] == expected[rows:]).all()


def test_a_call_fills_and_reads_its_part_of_a_pass() -> None:
    ports = draft_ports(KVGeometry(layers=1, kv_heads=1, head_dim=8), hidden_width=6, top_k=3)
    arrays = {
        "token_ids": np.zeros((1, 5), np.int64),
        "hidden": np.zeros((1, 5, 6), np.float32),
        "tree_mask": np.zeros((1, 5, 7), np.bool_),
        "logit_rows": np.zeros(5, np.int64),
        "topk_ids": np.zeros((5, 3), np.int64),
    }
    parts = views(arrays, ports, {"B": 1, "Q": 2, "S": 4, "R": 1})
    shapes = {"token_ids": (1, 2), "hidden": (1, 2, 6), "tree_mask": (1, 2, 4), "logit_rows": (1,), "topk_ids": (1, 3)}
    assert {name: part.shape for name, part in parts.items()} == shapes
    parts["tree_mask"][0] = tree_from_parents(np.zeros(2, np.int64), np.array([-1, 0])).mask.repeat(2, axis=1)
    assert arrays["tree_mask"].any(), "a view, not a copy"
