"""The export's proof that a round of drafting in one graph gives the tree of the head's graph, run level by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from eagle_exporter.parity import TOLERANCE, Feeds, LoweredGraph, OutputParity, chain, placement
from eagle_graphs import Profile, Tree, rerank, tree_from_parents
from eagle_graphs.dynamic_tree import Outputs, grow
from eagle_graphs.tree import Floats, Ids, Mask

_EXTENSION = 3
"""Rows of a round's extension; what precedes them is committed beforehand."""


def compare_rounds(
    draft: LoweredGraph,
    rounds: Mapping[Profile, LoweredGraph],
    prompts: Sequence[Sequence[int]],
    features: Sequence[np.ndarray],
    *,
    position_offset: int,
) -> list[OutputParity]:
    """Compares the trees below every prompt, of each profile."""
    parity = []
    for profile, compiled in rounds.items():
        values = OutputParity(graph=f"draft round {profile.nodes}", output="values")
        trees = OutputParity(graph=values.graph, output="trees")
        for number, (prompt, prompt_features) in enumerate(zip(prompts, features, strict=True)):
            committed = max(len(prompt) - 1 - _EXTENSION, 0)
            caches = draft.empty_caches(len(prompt) + profile.draft_rows)
            if committed:
                draft.run_in_place(_extension(prompt[: committed + 1], prompt_features, 0, position_offset) | caches)
            feeds = _extension(prompt, prompt_features, committed, position_offset) | caches
            result = compiled.run_in_place(feeds)
            found = Tree(**{name: array[0] for name, array in result.items()})
            expected = _level_by_level(draft, feeds, profile)
            values.add(f"prompt {number}", -np.sort(-found.values), -np.sort(-expected.values))
            differs = not (is_consistent(found) and same_up_to_rounding(found, expected))
            trees.add(f"prompt {number}", np.array([differs]), np.array([False]))
        parity += [values, trees]
    return parity


def is_consistent(tree: Tree) -> bool:
    """Whether depths and mask are those of the parents."""
    rebuilt = tree_from_parents(tree.tokens, tree.parents)
    return np.array_equal(tree.depths, rebuilt.depths) and np.array_equal(tree.mask, rebuilt.mask)


def same_up_to_rounding(found: Tree, expected: Tree) -> bool:
    """Whether both hold the same paths, but for some of the least value, whose places rounding may have given away."""
    ours, theirs = _values_by_path(found), _values_by_path(expected)
    least = min(theirs.values())
    return all((ours | theirs)[path] - least <= TOLERANCE for path in ours.keys() ^ theirs.keys())


def _values_by_path(tree: Tree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.tokens[tree.path_to(row)].tolist()): float(tree.values[row]) for row in range(len(tree))}


def _extension(prompt: Sequence[int], features: np.ndarray, start: int, position_offset: int) -> Feeds:
    """Feeds of the draft rows from `start` on, each pairing a feature with the token that follows it."""
    rows = len(prompt) - 1 - start
    feeds = placement(chain(prompt[start + 1 :]), start, logit_rows=np.array([rows - 1]))
    feeds |= {"token_ids": np.array([prompt[start + 1 :]]), "hidden": features[None, start : start + rows].copy()}
    feeds["position_ids"] = feeds["position_ids"] + position_offset
    return feeds


def _level_by_level(draft: LoweredGraph, feeds: Feeds, profile: Profile) -> Tree:
    """The numpy reference's tree below the extension `feeds`."""
    caches = {name: array for name, array in feeds.items() if name.startswith("past_")}
    committed = feeds["kv_length"] + feeds["token_ids"].shape[1]

    def expand(tokens: Ids, hidden: Floats, mask: Mask, level: int) -> Outputs:
        return draft.run_in_place(
            {
                "token_ids": tokens[None].copy(),
                "hidden": hidden[None].copy(),
                "position_ids": np.full((1, len(tokens)), feeds["position_ids"][0, -1] + level),
                "tree_mask": mask[None].copy(),
                "kv_length": committed,
                "logit_rows": np.arange(len(tokens)),
                **caches,
            }
        )

    candidates = grow(draft.run_in_place(feeds), profile, expand)
    return rerank(candidates, int(feeds["token_ids"][0, -1]), profile.nodes)
