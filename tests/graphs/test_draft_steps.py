"""A round of drafting in passes and steps gives the trees of the numpy reference, with many ties."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from eagle_graphs import Profile, profile_from_nodes, rerank, static_profile
from eagle_graphs.draft_steps import FROM_HEAD, TO_HEAD, TREE, draft_levels, draft_step_ports
from eagle_graphs.dynamic_tree import Outputs, grow
from eagle_graphs.lowering import draft_steps
from eagle_graphs.static_tree import grow_static
from tests.graphs.fake_head import CHOICES, PROFILES, WIDTH, extension, fake_head, level_feeds, session

STATIC = [
    static_profile(),
    static_profile(((0,),)),
    static_profile(((0,), (0, 1), (0, 1, 0), (2,), (2, 0), (2, 2), (2, 2, 1), (2, 2, 3))),  # gaps in the ranks
    static_profile(((1,), (1, 0), (1, 0, 0), (1, 0, 0, 0), (3,))),
]


@pytest.mark.parametrize("profile", [*PROFILES, *STATIC], ids=lambda p: f"{p.nodes}-{p.top_k}-{p.depth}")
@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_passes_and_steps_give_the_reference_s_tree(
    profile: Profile, choices: tuple[float, ...], tmp_path: Path
) -> None:
    random = np.random.default_rng(7)
    run_head = session(fake_head(random, choices), tmp_path / "head")
    graphs = draft_steps(profile, hidden_width=2, top_k=WIDTH)
    ports = draft_step_ports(profile, hidden_width=2, top_k=WIDTH)
    steps = [session(graph, tmp_path / f"{step}") for step, graph in enumerate(graphs)]
    for rows in (1, 2, 5, 1, 3):
        feeds = extension(random, rows)
        root, committed = int(feeds["token_ids"][0, -1]), int(feeds["kv_length"][0]) + rows

        def expand(tokens, hidden, mask, level, feeds=feeds) -> Outputs:
            return run_head(level_feeds(feeds, tokens, hidden, mask, level))

        held: dict[str, np.ndarray] = {"root": np.array([[root]]), "committed": np.array([committed])}
        levels = draft_levels(profile)
        held |= {f"tree_mask.{n}": each.mask[None] for n, each in enumerate(levels, 1) if each.mask is not None}
        outputs = run_head(feeds)
        for step, run in enumerate(steps):
            held |= {f"{name}.{step}": outputs[name] for name in FROM_HEAD}
            held |= run({port.name: held[port.name] for port in ports[step].inputs})
            if step + 1 < len(steps):
                tokens, hidden, mask = (held[f"{name}.{step + 1}"][0] for name in TO_HEAD)
                assert mask.shape == (levels[step].rows, levels[step].after)
                outputs = expand(tokens, hidden, mask, step + 1)

        if profile.paths:
            expected = grow_static(run_head(feeds), root, profile, expand)
        else:
            expected = rerank(grow(run_head(feeds), profile, expand), root, profile.nodes)
        for name in TREE:
            np.testing.assert_array_equal(held[name][0], getattr(expected, name), err_msg=name)
        np.testing.assert_array_equal(held["position_ids"][0], committed + expected.depths)


@pytest.mark.parametrize("profile", [*map(profile_from_nodes, (2, 4, 8, 60)), *STATIC], ids=lambda p: str(p.nodes))
def test_their_ports_are_the_ones_declared(profile: Profile) -> None:
    graphs = draft_steps(profile, hidden_width=6, top_k=8)
    ports = draft_step_ports(profile, hidden_width=6, top_k=8)
    assert len(graphs) == len(ports) == profile.depth
    for graph, declared in zip(graphs, ports, strict=True):
        for values, own in ((graph.graph.inputs, declared.inputs), (graph.graph.outputs, declared.outputs)):
            assert [value.name for value in values] == [port.name for port in own]
            for value, port in zip(values, own, strict=True):
                assert tuple(value.shape) == port.axes
                assert value.dtype == ir.DataType.from_numpy(np.dtype(port.dtype))
