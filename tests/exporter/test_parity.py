"""The comparison with torch speaks up: a wrong element, a NaN, a wrong id; ties are told apart."""

from __future__ import annotations

import numpy as np
import pytest

from eagle_exporter.parity import TOLERANCE, OutputParity, check_tolerance, tree_shapes
from eagle_exporter.parity import _ids_up_to_ties as ids_up_to_ties
from eagle_exporter.parity import _topk_up_to_ties as topk_up_to_ties
from eagle_exporter.validate import NEAR_TIE_GAP, exactness_from_differences
from eagle_graphs import EagleError


def test_the_worst_element_of_all_comparisons_is_named() -> None:
    parity = OutputParity(graph="target", output="logits")
    parity.add("first", np.array([[1.0, 2.0]]), np.array([[1.0, 2.0]]))
    parity.add("second", np.array([[1.0, 7.0], [4.0, 8.0]]), np.array([[1.0, 7.5], [4.0, 8.0]]))
    parity.add("third", np.array([3.0]), np.array([3.1]))
    assert parity.compared == 7
    assert parity.worst == 0.5
    assert parity.relative == 0.5 / 8.0
    assert parity.where == "second[0,1]: 7.0 for 7.5"


def test_a_difference_within_rounding_passes_and_a_larger_one_stops_the_export() -> None:
    good, bad = (OutputParity(graph="draft", output=name) for name in ("hidden_out", "topk_logprobs"))
    good.add("case", np.array([100.0 + 50 * TOLERANCE]), np.array([100.0]))
    bad.add("case", np.array([2 * TOLERANCE]), np.array([0.0]))
    check_tolerance([good], quantized={})
    with pytest.raises(EagleError, match=r"compiled draft graph is not torch's: topk_logprobs differs by 0.002"):
        check_tolerance([good, bad], quantized={})


def test_a_quantized_graph_may_be_off_by_rounding_and_the_one_beside_it_may_not() -> None:
    rounded, exact = (OutputParity(graph=graph, output="logits") for graph in ("target", "draft"))
    rounded.add("case", np.array([1.1, 2.0]), np.array([1.0, 2.0]))
    exact.add("case", np.array([1.1, 2.0]), np.array([1.0, 2.0]))
    ids = OutputParity(graph="target", output="argmax_ids")
    ids.add("case", np.array([40000]), np.array([3]))
    assert rounded.rms == pytest.approx(0.1 / 5**0.5)
    check_tolerance([rounded, ids], quantized={"target": 0.25})
    with pytest.raises(EagleError, match=r"compiled draft graph is not torch's"):
        check_tolerance([rounded, exact], quantized={"target": 0.25})
    rounded.add("case", np.array([3.0, 2.0]), np.array([1.0, 2.0]))
    with pytest.raises(EagleError, match=r"quantized target graph is too far from torch: logits is off by 6\d%"):
        check_tolerance([rounded], quantized={"target": 0.25})


def test_nan_in_plain_decoding_is_not_exactness() -> None:
    with pytest.raises(EagleError, match="NaN or infinite logits in plain decoding"):
        exactness_from_differences([np.array([0.0]), np.array([np.nan])])


def test_nan_is_the_worst_difference() -> None:
    parity = OutputParity(graph="target", output="features")
    parity.add("case", np.array([1.0, np.nan]), np.array([1.0, 1.0]))
    with pytest.raises(EagleError, match=r"nan for 1\.0"):
        check_tolerance([parity], quantized={})


def test_another_argmax_counts_unless_the_logits_are_a_tie() -> None:
    logits = np.array([[0.0, 5.0, 5.0 - TOLERANCE / 2, 4.0]])
    expected = np.array([1])
    for found, equal in ((1, True), (2, True), (3, False)):
        ours, theirs = ids_up_to_ties(np.array([found]), expected, logits)
        assert (ours == theirs).all() == equal


def test_other_children_count_unless_their_values_are_a_tie() -> None:
    expected = {"topk_ids": np.array([[7, 8, 9]]), "topk_logprobs": np.array([[-1.0, -2.0, -2.0 - TOLERANCE / 2]])}
    for ids, equal in (([7, 8, 9], True), ([7, 9, 8], True), ([8, 7, 9], False), ([6, 8, 9], False)):
        found = {"topk_ids": np.array([ids]), "topk_logprobs": expected["topk_logprobs"]}
        ours, theirs = topk_up_to_ties(found, expected)
        assert (ours == theirs).all() == equal, ids


@pytest.mark.parametrize(
    ("worst", "kind"), [(0.0, "bitwise"), (3e-5, "near-tie"), (NEAR_TIE_GAP / 2, "near-tie"), (2.1, "statistical")]
)
def test_the_exactness_class_follows_from_the_largest_difference(worst: float, kind: str) -> None:
    exactness = exactness_from_differences([np.array([0.0, worst]), np.zeros(3)])
    assert (exactness.kind, exactness.max_logit_difference, exactness.rows) == (kind, worst, 5)
    assert exactness.logit_gap == 2 * worst


def test_the_shapes_compared_include_chains_siblings_and_both() -> None:
    shapes = tree_shapes()
    assert max(tree.depths.max() for tree in shapes.values()) == 4
    assert any((np.bincount(tree.parents + 1) > 1).any() for tree in shapes.values())
    assert len(shapes["single"]) == 1
