"""The sampled tree: children drawn from the head's own distribution, in a shape fixed before anything is drawn.

N  nodes        K  tokens that the head returns for a row        Q  rows of a level that have children
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_graphs import Profile, Tree
from eagle_graphs.sampled_shape import inner_rows, shape_from_profile
from eagle_graphs.tree import Floats, Ids, Mask
from eagle_runtime.engines import Call
from eagle_runtime.noise import Floats64, draw_distinct, key_from

CHILDREN, COIN, BONUS, TOKEN = range(4)
"""Streams of noise: what is drawn with it."""

_LEAST = -50.0  # of a logit below the best one, so that every child has a probability that can be divided by


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTree(Tree):
    """A tree and what its children were drawn from. Siblings stand in the order in which they were drawn."""

    ids: Ids
    """[N, K] tokens that a child of each node could be; of nodes without children nothing is defined."""
    q: Floats64
    """[N, K] their probabilities, which sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """How the head's distribution is tempered, and the seed of the draws."""

    seed: int
    temperature: float

    def logits_from(self, logprobs: Floats) -> Floats64:
        """[K] logits of q from the head's log-probabilities [K]."""
        logits: Floats64 = logprobs.astype(np.float64) / self.temperature
        logits -= logits.max()
        return np.maximum(logits, _LEAST, out=logits)

    def draw(self, logits: Floats64, ids: Ids, count: int, position: int) -> Ids:
        """Indices [count] of a node's children, whose tokens will be the sequence's number `position`."""
        return draw_distinct(logits, ids, count, key_from(self.seed, CHILDREN, position))


Expand = Callable[[Ids, Floats, Mask, int], Call]
"""(tokens [Q], hidden [Q, h], mask [Q, S], level) -> a pass of the head over nodes of a level."""


def grow_sampled(
    root: int, extension: Call, profile: Profile, proposal: Proposal, *, position: int, expand: Expand
) -> SampledTree:
    """Draws a tree below `root`.

    Args:
        root: the last token.
        extension: the head's pass that ended with the root; its last row is the root's.
        profile: gives the shape.
        proposal: how children are drawn.
        position: number of the token after the root, counted from the sequence's beginning.
        expand: runs the head over the nodes of the next level that have children.
    """
    shape = shape_from_profile(profile)
    width = extension.outputs["topk_ids"].shape[1]
    tokens, values = np.full(len(shape), root), np.zeros(len(shape))
    ids, q = np.zeros((len(shape), width), np.int64), np.zeros((len(shape), width))
    hidden: npt.NDArray[np.float32] = np.zeros((len(shape), extension.outputs["hidden_out"].shape[1]), np.float32)
    """[N, h] what the head gave for each node."""
    seen = np.zeros(0, np.int64)  # nodes that the head has read, in its order
    for level, rows in enumerate(inner_rows(shape)):
        if level == 0:
            call = extension
        else:
            seen = np.concatenate((seen, rows))
            call = expand(tokens[rows], hidden[shape.parents[rows]], shape.mask[np.ix_(rows, seen)], level)
        hidden[rows] = call.outputs["hidden_out"]
        for index, row in enumerate(rows):
            children = np.flatnonzero(shape.parents == row)
            ids[row] = call.outputs["topk_ids"][index]
            logits = proposal.logits_from(call.outputs["topk_logprobs"][index])
            weights = np.exp(logits)
            q[row] = weights / weights.sum()
            drawn = proposal.draw(logits, ids[row], len(children), position + level)
            tokens[children] = ids[row, drawn]
            values[children] = values[row] + np.log(q[row, drawn])
    return SampledTree(
        tokens=tokens,
        parents=shape.parents,
        values=values.astype(np.float32),
        depths=shape.depths,
        mask=shape.mask,
        ids=ids,
        q=q,
    )
