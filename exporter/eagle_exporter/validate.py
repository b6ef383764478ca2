"""The export's proof: the compiled graphs are torch's, and a tree's logits are plain decoding's.

Each prompt is prefilled in torch and in the graph; then trees of several shapes are hung below it, whose
tokens are the target's own likeliest ones and random others. The head is fed the features that the
target gave, extended, and run over two levels. A whole round of drafting in one graph is compared with the
numpy reference over the head's graph, level by level.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from torch import nn

from eagle_exporter.parity import Feeds, GraphUnderTest, OutputParity, chain, placement, tree_shapes
from eagle_graphs import EagleError, GraphPorts, Tree, tree_from_parents
from eagle_graphs.manifest import Exactness

_ROOM = 64  # cache rows beyond the prompt
NEAR_TIE_GAP = 1e-2
"""Logit gap up to which an export still counts as near-tie exact; beyond it greedy output may really differ."""


def compare_target(
    path: Path,
    module: nn.Module,
    ports: GraphPorts,
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    native: bool = False,
) -> tuple[list[OutputParity], Exactness, list[np.ndarray]]:
    """Compares the target graph; also returns its exactness class and the prompts' features [rows, h]."""
    graph = GraphUnderTest("target", path, module, ports, native=native)
    random = np.random.default_rng(0)
    features, differences = [], []
    for number, prompt in enumerate(prompts):
        tree = chain(prompt)
        feeds = _target_feeds(tree, 0, logit_rows=np.array([len(prompt) - 1])) | graph.empty_caches(len(prompt) + _ROOM)
        prefilled, _ = graph.compare(f"prompt {number}", feeds)
        features.append(prefilled["features"][0])
        caches = _carried(prefilled)
        for name, shape in tree_shapes().items():
            tokens = _plausible_tokens(prefilled["logits"][-1], len(shape), random, vocab_size)
            tree = tree_from_parents(tokens, shape.parents)
            verified, _ = graph.compare(f"prompt {number}, {name}", _target_feeds(tree, len(prompt)) | caches)
            if len(tree) > 1:
                differences.append(_difference_from_plain(graph, tree, len(prompt), caches, verified))
    return list(graph.parity.values()), exactness_from_differences(differences), features


def compare_draft(
    path: Path,
    module: nn.Module,
    ports: GraphPorts,
    prompts: Sequence[Sequence[int]],
    features: Sequence[np.ndarray],
    *,
    position_offset: int,
    native: bool = False,
) -> list[OutputParity]:
    """Compares the draft graph: extension over a prompt, then two levels of a tree below it."""
    graph = GraphUnderTest("draft", path, module, ports, native=native)
    for number, (prompt, prompt_features) in enumerate(zip(prompts, features, strict=True)):
        rows = len(prompt) - 1  # a row pairs the feature of token i with token i + 1
        feeds = placement(chain(prompt[1:]), 0, logit_rows=np.array([rows - 1]))
        feeds |= {"token_ids": np.array([prompt[1:]]), "hidden": prompt_features[None, :rows]}
        feeds["position_ids"] = feeds["position_ids"] + position_offset
        extended, _ = graph.compare(f"prompt {number}, extension", feeds | graph.empty_caches(rows + _ROOM))

        result, seen = extended, np.zeros((1, 0), np.bool_)
        best = np.zeros(result["topk_ids"].shape[1], np.int64)  # row of the last pass that each token hangs below
        for level in (1, 2):
            width = len(best)
            tokens = result["topk_ids"][best, np.arange(width) if level == 1 else 0]
            seen = np.concatenate((seen[best], np.eye(width, dtype=np.bool_)), axis=1)
            feeds = {
                "token_ids": tokens[None],
                "hidden": result["hidden_out"][best][None],
                "position_ids": np.full((1, width), rows - 1 + level + position_offset),
                "tree_mask": seen[None],
                "kv_length": np.array([rows]),
                "logit_rows": np.arange(width),
            }
            result, _ = graph.compare(f"prompt {number}, level {level}", feeds | _carried(result))
            best = np.arange(width)[::-1].copy()
    return list(graph.parity.values())


def exactness_from_differences(differences: Sequence[np.ndarray]) -> Exactness:
    """The class that the largest logit difference of a path, in a tree and alone, allows.

    Two logits that each move by at most d can change order only where they are closer than 2 d.
    """
    worst = float(np.concatenate(differences).max())  # NaN if any is
    if not np.isfinite(worst):
        raise EagleError(
            "the compiled target graph gives NaN or infinite logits in plain decoding: no bundle was written"
        )
    gap = 2 * worst
    kind: Literal["bitwise", "near-tie", "statistical"]
    kind = "bitwise" if worst == 0 else "near-tie" if gap <= NEAR_TIE_GAP else "statistical"
    return Exactness(kind=kind, logit_gap=gap, max_logit_difference=worst, rows=sum(map(len, differences)))


def _difference_from_plain(
    graph: GraphUnderTest, tree: Tree, length: int, caches: Feeds, verified: Feeds
) -> np.ndarray:
    """[rows] largest logit difference of each row of the tree's deepest path from plain decoding of that path."""
    path = tree.path_to(int(tree.depths.argmax()))
    worst = []
    for step, row in enumerate(path):
        single = tree_from_parents(tree.tokens[row : row + 1], np.array([-1]))
        plain = graph.run(_target_feeds(single, length + step) | caches)
        caches = _carried(plain)
        worst.append(np.abs(plain["logits"][0] - verified["logits"][row]).max())
    return np.array(worst)


def _target_feeds(tree: Tree, length: int, *, logit_rows: np.ndarray | None = None) -> Feeds:
    return {"input_ids": tree.tokens[None], **placement(tree, length, logit_rows=logit_rows)}


def _carried(outputs: Feeds) -> Feeds:
    """The caches that a pass gave, as the next pass takes them."""
    return {name.replace("present_", "past_"): v for name, v in outputs.items() if name.startswith("present_")}


def _plausible_tokens(logits: np.ndarray, count: int, random: np.random.Generator, vocab_size: int) -> np.ndarray:
    likely = np.argsort(-logits)[:count]
    return np.where(np.arange(count) % 3 == 2, random.integers(0, vocab_size, count), likely).astype(np.int64)
