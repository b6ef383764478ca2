"""Rounds of drafting, replayed over texts that the target has written.

Under greedy decoding the verified path of a tree is the part of it that the target's own text follows. So a round
needs no pass of the target: from every place of an answer a tree is drafted with the target's true features, and how
far the text follows it is counted. Walking from place to place by what was accepted gives the rounds of a run.

The head is the product's own module (`eagle_exporter`), and trees are chosen by the contract's numpy reference.

    R  roots at once    K  children of a node, nodes expanded a level    Q  nodes of a pass for each root
    L  draft rows of the text    S  tree rows of each root so far
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from eagle_exporter.heads import HeadSpec
from eagle_graphs import Candidates, Profile, Tree, rerank, tree_from_parents
from eagle_graphs.static_tree import static_tree
from eagle_graphs.tree import ROOT, best_indices

ROOTS = 32
"""Roots whose trees grow at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A conversation and the target's hidden states over it."""

    tokens: torch.Tensor
    """[L + 1]"""
    start: int
    """Index of the answer's first token, the first root."""
    tapped: torch.Tensor
    """[L + 1, taps, h] float32"""

    @property
    def roots(self) -> int:
        """Roots: every token of the answer but the last."""
        return len(self.tokens) - 1 - self.start


class _Pass(NamedTuple):
    hidden: np.ndarray
    """[R, Q, h]"""
    tokens: np.ndarray
    """[R, Q, K] best first"""
    logprobs: np.ndarray
    """[R, Q, K]"""


class Replay:
    """A head over one text: its rows with true features, and trees from any of them."""

    def __init__(self, module: Any, spec: HeadSpec, text: Text) -> None:
        self._module, self._spec, self._text = module, spec, text
        rows = len(text.tokens) - 1
        features = module.fuse_features(text.tapped[None, :rows].flatten(2))
        self._starts = torch.arange(text.start - 1, rows - 1)  # row of each root: (feature i, token i + 1)
        caches = [torch.zeros(1, spec.kv_heads, rows, spec.head_dim) for _ in range(2 * spec.layers)]
        hidden, ids, logprobs, *self._caches = module(
            text.tokens[None, 1:],
            features,
            torch.arange(rows)[None] + spec.position_offset,
            torch.ones(1, rows, rows, dtype=torch.bool).tril(),
            torch.zeros(1, dtype=torch.int64),
            self._starts,
            *caches,
        )
        self.first = _Pass(*(part.numpy()[:, None] for part in (hidden, ids, logprobs)))
        """Below every root of the text."""

    def accepted(self, profile: Profile) -> list[int]:
        """Tokens that the text follows each root's tree, for each root."""
        tokens = self._text.tokens.tolist()
        lengths = []
        for start in range(0, len(self._starts), ROOTS):
            roots = np.arange(start, min(start + ROOTS, len(self._starts)))
            grow = self._grow_static if profile.paths else self._grow
            for root, tree in zip(roots, grow(roots, profile), strict=True):
                place = self._text.start + int(root)
                lengths.append(followed(tree, tokens[place + 1 :]))
        return lengths

    def _grow(self, roots: np.ndarray, profile: Profile) -> list[Tree]:
        """Dynamic trees, by the rules of the runtime's drafter."""
        width, count = profile.top_k, len(roots)
        below = self.first
        tokens = [below.tokens[roots, 0, :width]]  # of each level, [R, candidates]
        values = [below.logprobs[roots, 0, :width]]
        parents = [np.full((count, width), ROOT)]
        expanded = np.tile(np.arange(width), (count, 1))  # [R, K] of the level, by index in it
        hidden = np.repeat(below.hidden[roots], width, axis=1)
        ancestors = np.zeros((count, width, 0), np.bool_)
        own = np.tile(np.eye(width, dtype=np.bool_), (count, 1, 1))
        caches, first = self._caches, 0
        for level in range(1, profile.depth):
            ancestors = np.concatenate((ancestors, own), axis=2)
            chosen = np.take_along_axis(tokens[-1], expanded, 1)
            result, caches = self._pass(roots, chosen, hidden, ancestors, [width] * level, caches)
            grown = np.take_along_axis(values[-1], expanded, 1)[..., None] + result.logprobs[..., :width]
            parents.append(np.repeat(first + expanded, width, axis=1))
            first += tokens[-1].shape[1]
            tokens.append(result.tokens[..., :width].reshape(count, -1))
            values.append(grown.reshape(count, -1))
            expanded = np.stack([best_indices(row, width) for row in values[-1]])
            place = expanded // width
            hidden = np.take_along_axis(result.hidden, place[..., None], 1)
            ancestors = np.take_along_axis(ancestors, place[..., None], 1)
        all_tokens, all_parents, all_values = (np.concatenate(part, axis=1) for part in (tokens, parents, values))
        return [
            rerank(Candidates(tokens=t, parents=p, values=v), root=0, nodes=profile.nodes)
            for t, p, v in zip(all_tokens, all_parents, all_values, strict=True)
        ]

    def _grow_static(self, roots: np.ndarray, profile: Profile) -> list[Tree]:
        """Trees whose nodes the profile names by their ranks."""
        shape, count = static_tree(profile.paths), len(roots)
        tokens = np.zeros((count, profile.nodes), np.int64)
        hidden = np.zeros((count, profile.nodes, self._spec.hidden_size), np.float32)
        caches, sizes = self._caches, list[int]()
        result = _Pass(*(part[roots] for part in self.first))
        for depth, level in enumerate(shape.levels):
            if depth > 0:
                mask = np.tile(level.mask, (count, 1, 1))
                rows = level.expanded
                sizes.append(len(rows))
                result, caches = self._pass(roots, tokens[:, rows], hidden[:, rows], mask, sizes, caches)
            tokens[:, level.children] = result.tokens[:, level.parents, level.ranks]
            hidden[:, level.children] = result.hidden[:, level.parents]
        return [tree_from_parents(row, shape.parents) for row in tokens]

    def _pass(
        self,
        roots: np.ndarray,
        tokens: np.ndarray,
        hidden: np.ndarray,
        ancestors: np.ndarray,
        sizes: list[int],
        caches: list[torch.Tensor],
    ) -> tuple[_Pass, list[torch.Tensor]]:
        """The head over tokens [R, Q] with features [R, Q, h]; ancestors [R, Q, S] among its root's tree rows.

        All roots' rows go through in one pass; the mask keeps them apart. sizes: tree rows of a root in each level so
        far, this one included, S in all. caches: of the text's rows and the tree rows before this level's, level by
        level, root by root. Returns the caches with the new rows.
        """
        count, width, _ = ancestors.shape
        rows, starts = self._caches[0].shape[2], self._starts[roots]
        text = np.arange(rows) <= starts.numpy()[:, None]  # [R, L]
        apart = np.eye(count, dtype=np.bool_)
        levels, begin = [], 0
        for size in sizes:
            part = ancestors[:, :, begin : begin + size]
            levels.append((part[:, :, None, :] & apart[:, None, :, None]).reshape(count * width, count * size))
            begin += size
        mask = np.concatenate((np.repeat(text, width, axis=0), *levels), axis=1)
        grown = [functional.pad(cache, (0, 0, 0, count * width)) for cache in caches]
        positions = (starts + len(sizes) + self._spec.position_offset).repeat_interleave(width)
        out, ids, logprobs, *caches = self._module(
            torch.from_numpy(tokens.reshape(1, -1)),
            torch.from_numpy(hidden.reshape(1, count * width, -1)),
            positions[None],
            torch.from_numpy(mask)[None],
            torch.zeros(1, dtype=torch.int64),
            torch.arange(count * width),
            *grown,
        )
        return _Pass(*(part.numpy().reshape(count, width, -1) for part in (out, ids, logprobs))), caches


def followed(tree: Tree, tokens: list[int]) -> int:
    """How many of `tokens` lie on a path below the tree's root."""
    node = 0
    for count, token in enumerate(tokens):
        below = np.flatnonzero((tree.parents == node) & (tree.tokens == token))
        if not len(below):
            return count
        node = int(below[0])
    return len(tokens)
