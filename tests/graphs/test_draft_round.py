"""A round of drafting in one graph gives the trees of the numpy reference, with many ties and every kind of profile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from eagle_graphs import Profile, draft_round_ports, profile_from_nodes, rerank, tree_from_parents
from eagle_graphs.dynamic_tree import Outputs, grow
from eagle_graphs.lowering import unroll_draft
from tests.graphs.fake_head import CHOICES, KV, PROFILES, extension, fake_head, level_feeds, session


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: f"{p.nodes}-{p.top_k}-{p.depth}")
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_the_compiled_round_is_the_reference_s(profile: Profile, choices: tuple[float, ...], tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    head = fake_head(random, choices)
    run_round, run_head = session(unroll_draft(head, profile), tmp_path / "r"), session(head, tmp_path / "h")
    for rows in (1, 2, 5, 1, 3, 4, 1, 2):
        feeds = extension(random, rows)
        root = int(feeds["token_ids"][0, -1])

        def expand(tokens, hidden, mask, level, feeds=feeds) -> Outputs:
            return run_head(level_feeds(feeds, tokens, hidden, mask, level))

        expected = rerank(grow(run_head(feeds), profile, expand), root, profile.nodes)
        found = run_round(feeds)
        for name in ("tokens", "parents", "values", "depths", "mask"):
            np.testing.assert_array_equal(found[name][0], getattr(expected, name), err_msg=name)
        again = tree_from_parents(found["tokens"][0], found["parents"][0])
        np.testing.assert_array_equal(found["mask"][0], again.mask)


@pytest.mark.parametrize("choices", [(0.0, -1.0, -2.0, np.nan), (np.nan,)], ids=["some", "all"])
def test_it_is_a_tree_even_where_values_are_nan(choices: tuple[float, ...], tmp_path: Path) -> None:
    random, profile = np.random.default_rng(1), profile_from_nodes(16)
    run_round = session(unroll_draft(fake_head(random, choices), profile), tmp_path / "r")
    for rows in (1, 2, 3, 4):
        found = run_round(extension(random, rows))
        again = tree_from_parents(found["tokens"][0], found["parents"][0])
        assert (found["parents"][0, 1:] < np.arange(1, profile.nodes)).all()
        np.testing.assert_array_equal(found["mask"][0], again.mask)
        np.testing.assert_array_equal(found["depths"][0], again.depths)


def test_its_ports_are_the_ones_declared_and_the_head_stays_as_it_was() -> None:
    head, profile = fake_head(np.random.default_rng(0), (-1.0,)), profile_from_nodes(8)
    before = ir.to_proto(head).SerializeToString()
    ports = draft_round_ports(KV, profile, hidden_width=2)
    model = unroll_draft(head, profile)
    assert ir.to_proto(head).SerializeToString() == before
    for values, declared in ((model.graph.inputs, ports.inputs), (model.graph.outputs, ports.outputs)):
        assert [value.name for value in values] == [port.name for port in declared]
        for value, port in zip(values, declared, strict=True):
            assert [axis if isinstance(axis, int) else axis.value for axis in value.shape] == list(port.axes)
            assert value.dtype == ir.DataType.from_numpy(np.dtype(port.dtype))


def test_weights_stand_in_it_once() -> None:
    head = fake_head(np.random.default_rng(0), (-1.0,))
    model = unroll_draft(head, profile_from_nodes(16))
    for name in ("logprobs", "ids", "states"):
        assert model.graph.initializers[name].const_value is head.graph.initializers[name].const_value
