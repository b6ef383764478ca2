"""The whole EAGLE-3 loop in plain torch, one stage a function: what the product's rounds are compared with.

Greedy, one sequence, trees grown as in EAGLE-2 (https://arxiv.org/abs/2406.16858, section 4). It is
written for reading: lists and loops where the product has arrays, so the two share no reasoning.

After a verification the accepted rows of the target's cache are picked out and the others dropped.
A tree row has seen the committed rows and its own ancestors at their own positions, which is what it
would have seen alone; so its keys and values are right as they stand, and feeding it again would be
a second pass for nothing. The same holds for its feature.

    N  rows of a tree, root included      P  committed rows      F  width of the target's features
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.reference.head import Cache, ReferenceHead

ROOT = -1  # parent of the candidates directly below the root; in a tree, parent of the root


class Candidate(NamedTuple):
    """A drafted node. Candidates are numbered in the order in which they are drafted."""

    token: int
    parent: int
    """Number of the parent among the candidates, or ROOT."""
    value: float
    """Cumulative log-probability, a float32 number."""


class ReferenceTree(NamedTuple):
    """Rows to verify, depth-first, the better sibling first."""

    tokens: list[int]
    parents: list[int]

    def path_to(self, row: int) -> list[int]:
        """Rows from the root to `row`, both included."""
        return [] if row == ROOT else [*self.path_to(self.parents[row]), row]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRound:
    """One round: the tree that was verified and what came of it."""

    tree_tokens: list[int]
    parents: list[int]
    path: list[int]
    """Accepted rows, root included, before any cut by max_new_tokens or an EOS."""
    bonus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceRun:
    """A generation: the new tokens (an EOS included) and the rounds that gave them."""

    tokens: list[int]
    rounds: list[ReferenceRound]


class ReferenceEagle:
    """EAGLE-3 with greedy acceptance over a Hugging Face target in float32."""

    def __init__(self, target: PreTrainedModel, head: ReferenceHead, taps: tuple[int, ...] = (2, 15, 27)) -> None:
        self.target = target
        self.head = head
        self.taps = taps

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: list[int],
        *,
        nodes: int,
        top_k: int,
        depth: int,
        max_new_tokens: int,
        eos_token_ids: Collection[int] = (),
    ) -> ReferenceRun:
        """Generates with trees of `nodes` rows, drafted `depth` levels deep with `top_k` children a node."""
        cache, draft_cache = DynamicCache(), self.head.empty_cache()
        root, features = self.prefill(prompt_ids, cache)
        tokens, rounds = [root], []
        advanced = [*prompt_ids[1:], root]  # the token after each feature
        while len(tokens) < max_new_tokens and not any(token in eos_token_ids for token in tokens):
            hidden, draft_cache = self.extend(features, advanced, draft_cache)
            candidates = self.levels(hidden, draft_cache, top_k, depth)
            tree = rerank(candidates, tokens[-1], nodes)
            choices, features = self.verify(tree, cache)
            path, bonus = accept(tree, choices)
            keep_accepted(cache, path, nodes)
            features = features[path]
            advanced = [*(tree.tokens[row] for row in path[1:]), bonus]
            tokens += advanced
            rounds.append(ReferenceRound(tree_tokens=tree.tokens, parents=tree.parents, path=path, bonus=bonus))
        return ReferenceRun(tokens=cut(tokens, max_new_tokens, eos_token_ids), rounds=rounds)

    def prefill(self, prompt_ids: list[int], cache: DynamicCache) -> tuple[int, Tensor]:
        """The first new token, and the features [P, F] of the prompt."""
        length = len(prompt_ids)
        choices, features = self._target(prompt_ids, list(range(length)), causal(0, length), cache)
        return choices[-1], features

    def extend(self, features: Tensor, advanced: list[int], past: Cache) -> tuple[Tensor, Cache]:
        """The head over true features [Q, F], each beside the token after its own (`advanced` [Q]).

        Returns the root's recurrent feature [1, h], the last row's, and the head's cache.
        """
        committed, new = past[0].shape[1], len(advanced)
        positions = torch.arange(committed, committed + new)
        hidden = self.head.fuse(features)
        hidden, past = self.head.forward(torch.tensor(advanced), hidden, positions, causal(committed, new), past)
        return hidden[-1:], past

    def levels(self, hidden: Tensor, past: Cache, top_k: int, depth: int) -> list[Candidate]:
        """All candidates of `depth` levels below the root, whose recurrent feature is `hidden` [1, h].

        The head's cache is not changed: what the levels append to it is dropped with them.
        """
        committed = past[0].shape[1]
        candidates: list[Candidate] = []
        features = {ROOT: hidden[0]}  # recurrent feature of each expanded node
        rows: dict[int, int] = {}  # its row of the head's cache
        level = self._expand([ROOT], hidden, candidates, top_k)
        for below_root in range(1, depth):
            kept = best(candidates, level, top_k)
            parents = [candidates[node].parent for node in kept]
            start = past[0].shape[1]
            rows |= {node: start + i for i, node in enumerate(kept)}
            visible = torch.zeros(len(kept), start + len(kept), dtype=torch.bool)
            visible[:, :committed] = True
            for i, node in enumerate(kept):
                while node != ROOT:
                    visible[i, rows[node]] = True
                    node = candidates[node].parent
            hidden, past = self.head.forward(
                torch.tensor([candidates[node].token for node in kept]),
                torch.stack([features[parent] for parent in parents]),
                torch.full((len(kept),), committed - 1 + below_root),  # the root's row stands at committed - 1
                visible,
                past,
            )
            features |= dict(zip(kept, hidden, strict=True))
            level = self._expand(kept, hidden, candidates, top_k)
        return candidates

    def verify(self, tree: ReferenceTree, cache: DynamicCache) -> tuple[list[int], Tensor]:
        """The target's choice after each row of the tree [N], and the features [N, F]. The cache grows by N rows."""
        committed, nodes = cache.get_seq_length(), len(tree.tokens)
        paths = [tree.path_to(row) for row in range(nodes)]
        visible = torch.zeros(nodes, committed + nodes, dtype=torch.bool)
        visible[:, :committed] = True
        for row, path in enumerate(paths):
            visible[row, [committed + ancestor for ancestor in path]] = True
        positions = [committed + len(path) - 1 for path in paths]
        return self._target(tree.tokens, positions, visible, cache)

    def _expand(self, kept: list[int], hidden: Tensor, candidates: list[Candidate], top_k: int) -> range:
        """Appends the `top_k` likeliest children of each kept node, whose features are `hidden` [K, h]."""
        log_probs, ids = self.head.log_probs(hidden).sort(dim=-1, descending=True, stable=True)
        ids = self.head.target_ids(ids[:, :top_k])
        values = torch.tensor([0.0 if node == ROOT else candidates[node].value for node in kept])
        values = values[:, None] + log_probs[:, :top_k]
        first = len(candidates)
        for node, children, child_values in zip(kept, ids.tolist(), values.tolist(), strict=True):
            candidates += [Candidate(child, node, value) for child, value in zip(children, child_values, strict=True)]
        return range(first, len(candidates))

    def _target(
        self, tokens: list[int], positions: list[int], visible: Tensor, cache: DynamicCache
    ) -> tuple[list[int], Tensor]:
        """Argmax [Q] and features [Q, F] of new rows that see the rows `visible` [Q, P + Q] bool."""
        mask = torch.zeros(visible.shape).masked_fill(~visible, float("-inf"))
        # By place: the cache's name is past_key_values in some releases of transformers 5 and cache in others.
        out = self.target(
            torch.tensor([tokens]), mask[None, None], torch.tensor([positions]), cache, output_hidden_states=True
        )
        features = torch.cat([out.hidden_states[tap][0] for tap in self.taps], dim=-1)
        return out.logits[0].argmax(dim=-1).tolist(), features


def causal(committed: int, new: int) -> Tensor:
    """[new, committed + new] bool: each new row sees the committed ones, the new ones before it and itself."""
    return torch.ones(new, committed + new, dtype=torch.bool).tril(committed)


def best(candidates: list[Candidate], among: Iterable[int], count: int) -> list[int]:
    """The `count` most valued nodes, best first; a tie goes to the lower number."""
    return sorted(among, key=lambda node: (-candidates[node].value, node))[:count]


def rerank(candidates: list[Candidate], root: int, nodes: int) -> ReferenceTree:
    """The best `nodes` - 1 of all candidates below the token `root`."""
    chosen = best(candidates, range(len(candidates)), nodes - 1)
    tree = ReferenceTree([root], [ROOT])

    def append_children(parent: int, row: int) -> None:
        for node in chosen:
            if candidates[node].parent == parent:
                tree.tokens.append(candidates[node].token)
                tree.parents.append(row)
                append_children(node, len(tree.tokens) - 1)

    append_children(ROOT, 0)
    assert len(tree.tokens) == nodes, "too few candidates, or a chosen one without its parent"
    return tree


def accept(tree: ReferenceTree, choices: list[int]) -> tuple[list[int], int]:
    """Walks from the root to the child that the target chose, as long as there is one: accepted rows, bonus token."""
    path = [0]
    while True:
        choice = choices[path[-1]]
        for row, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            if parent == path[-1] and token == choice:
                path.append(row)
                break
        else:
            return path, choice


def keep_accepted(cache: DynamicCache, path: list[int], nodes: int) -> None:
    """Drops from the target's cache the tree's `nodes` last rows, except those of the accepted path."""
    committed = cache.get_seq_length() - nodes
    keep = [*range(committed), *(committed + row for row in path)]
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]


def cut(tokens: list[int], max_new_tokens: int, eos_token_ids: Collection[int]) -> list[int]:
    """`tokens` up to the first EOS, that one included, and no more than `max_new_tokens`."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in eos_token_ids]
    return tokens[: min([max_new_tokens, *ends])]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRun:
    """Plain greedy decoding: the new tokens (an EOS included) and how clear each choice was."""

    tokens: list[int]
    gaps: list[float]
    """Difference of the two largest logits where each token was chosen: near 0, another order of sums may differ."""


@torch.inference_mode()
def plain_greedy(
    target: PreTrainedModel, prompt_ids: list[int], max_new_tokens: int, eos_token_ids: Collection[int] = ()
) -> PlainRun:
    """The target alone, one token a pass."""
    cache, new_ids = DynamicCache(), prompt_ids
    tokens: list[int] = []
    gaps: list[float] = []
    while len(tokens) < max_new_tokens and not any(token in eos_token_ids for token in tokens):
        logits = target(torch.tensor([new_ids]), None, None, cache).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        new_ids = [int(logits.argmax())]
        tokens += new_ids
        gaps.append(first - second)
    return PlainRun(tokens=tokens, gaps=gaps)
