"""The roofline: the least time that a pass can take, from the bytes it moves and the operations it does.

A pass over few rows waits for the weights to be read, one over many for the arithmetic (Williams et al., "Roofline",
CACM 2009). Speculative decoding pays as long as a tree's rows ride along with weights that are read anyway; this
module says, from sizes alone, up to which tree that is so. What it leaves out (launches, synchronisation, kernels below
their peak, caches that hold a part of the weights) is one factor, `Machine.reaching`, and a time per pass.

    Q  rows of a pass     R  rows whose logits are asked for     S  rows of this round that the cache holds (>= Q)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from eagle_graphs.draft_steps import draft_levels
from eagle_graphs.errors import EagleError
from eagle_graphs.machines import Machine
from eagle_graphs.ports import KVGeometry
from eagle_graphs.profiles import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """How weights are kept and multiplied."""

    weight_bytes: float
    """Of an element, its share of the scales included."""
    arithmetic: str | None
    """What the products run in, a key of `Machine.rates`; None where only weights are quantized: as attention does."""


PRECISIONS = {
    "fp32": Precision(weight_bytes=4, arithmetic="fp32"),
    "fp16": Precision(weight_bytes=2, arithmetic="fp16"),
    "bf16": Precision(weight_bytes=2, arithmetic="fp16"),  # as fast as fp16 wherever there is one
    "fp8": Precision(weight_bytes=1, arithmetic="fp8"),
    "int8": Precision(weight_bytes=1, arithmetic="int8"),
    "int8-weights": Precision(weight_bytes=1, arithmetic=None),
    "int4": Precision(weight_bytes=0.5 + 2 / 32, arithmetic=None),  # one 16-bit scale for 32
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSize:
    """A graph's sizes, in elements."""

    linear: int
    """Weights that every row is multiplied by, experts included, since all of them are computed."""
    lm_head: int
    """Weights that the rows asked for are multiplied by."""
    embedding: int
    """Tables that are looked up and not multiplied; 0 where the LM head is the table."""
    attention_heads: int
    kv: KVGeometry


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """The least time of one pass, in seconds."""

    moving: float
    """Reading weights and cache."""
    computing: float
    overhead: float

    @property
    def seconds(self) -> float:
        """Moving and computing overlap; the overhead does not."""
        return max(self.moving, self.computing) + self.overhead

    @property
    def bound(self) -> str:
        """What the pass waits for."""
        return "memory" if self.moving >= self.computing else "arithmetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A graph in a precision on a machine. Raises EagleError where the machine lacks the arithmetic."""

    size: GraphSize
    precision: str
    machine: Machine
    overhead: float = 0.0
    """Seconds a pass that neither bytes nor operations explain."""

    def __post_init__(self) -> None:
        self.machine.rate(self._products)
        self.machine.rate(self._attention)

    @property
    def _products(self) -> str:
        return PRECISIONS[self.precision].arithmetic or self._attention

    @property
    def _attention(self) -> str:
        """Attention stays in 16 bits, or in 32 where weights are or the machine has no other."""
        return "fp32" if self.precision == "fp32" or "fp16" not in self.machine.rates else "fp16"

    @property
    def weight_bytes(self) -> float:
        """Bytes of memory that its weights take; a table that is only looked up is not quantized."""
        kept = PRECISIONS[self.precision].weight_bytes
        return (self.size.linear + self.size.lm_head) * kept + self.size.embedding * (4 if kept == 4 else 2)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of its cache, all layers."""
        kv = self.size.kv
        return 2 * kv.layers * kv.kv_heads * kv.head_dim * (4 if self._attention == "fp32" else 2)

    def time(self, rows: float, *, logit_rows: float, context: int, seen: float | None = None) -> PassTime:
        """A pass over Q rows, R of them with logits, behind `context` committed rows. seen: S, Q where it is None."""
        size, kv = self.size, self.size.kv
        precision, cached = PRECISIONS[self.precision], context + (rows if seen is None else seen)
        moved = (size.linear + size.lm_head) * precision.weight_bytes + cached * self.row_bytes
        products = 2 * (size.linear * rows + size.lm_head * logit_rows)
        scores = 4 * rows * cached * size.attention_heads * kv.head_dim * kv.layers  # q k^T, and p v
        rate = self.machine.rate
        computing = products / rate(self._products) + scores / rate(self._attention)
        return PassTime(moving=moved / self.machine.bandwidth, computing=computing, overhead=self.overhead)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTime:
    """One profile's round and what it gains."""

    profile: Profile
    accepted_length: float | None
    """Tokens committed a round, the bonus token included; None where nothing is known of it."""
    verify: PassTime
    draft: tuple[PassTime, ...]
    """The extension over the accepted rows, then one pass a level."""
    plain: PassTime
    """One token without speculation."""

    @property
    def seconds(self) -> float:
        """Of the round."""
        return self.verify.seconds + sum(each.seconds for each in self.draft)

    @property
    def break_even(self) -> float:
        """The accepted length above which the round is faster than plain decoding."""
        return self.seconds / self.plain.seconds

    @property
    def speedup(self) -> float | None:
        """Over plain decoding."""
        return None if self.accepted_length is None else self.accepted_length / self.break_even


def round_time(
    target: Compiled, draft: Compiled, profile: Profile, *, context: int, accepted_length: float | None
) -> RoundTime:
    """A round behind `context` committed rows."""
    accepted = 1.0 if accepted_length is None else accepted_length
    passes = [draft.time(accepted, logit_rows=1, context=context)]
    for level in draft_levels(profile):
        passes.append(draft.time(level.rows, logit_rows=level.rows, context=context, seen=level.after))
    return RoundTime(
        profile=profile,
        accepted_length=accepted_length,
        verify=target.time(profile.nodes, logit_rows=profile.nodes, context=context),
        draft=tuple(passes),
        plain=target.time(1, logit_rows=1, context=context),
    )


def expected_length(profile: Profile, acceptance: Sequence[float]) -> float:
    """Tokens that a round commits, the bonus token included, where a node's n-th best child is the target's choice
    with probability `acceptance[n]` (0 beyond), the node itself being accepted.

    Of a dynamic tree this is the best tree that is the same every round. A real one follows the head's own
    certainty and does better: taken from a head's mean acceptance, the value is a lower one.
    """
    if profile.paths:
        return 1 + sum(
            math.prod(acceptance[rank] if rank < len(acceptance) else 0.0 for rank in path) for path in profile.paths
        )
    width = min(profile.top_k, len(acceptance))
    total, kept = 1.0, 0
    # (-probability, depth, rank, probability of the parent): children enter with their parent, siblings one by one
    open_nodes = [(-acceptance[0], 1, 0, 1.0)] if width else []
    while open_nodes and kept < profile.nodes - 1:
        negative, depth, rank, parent = heapq.heappop(open_nodes)
        total, kept = total - negative, kept + 1
        if rank + 1 < width:
            heapq.heappush(open_nodes, (-parent * acceptance[rank + 1], depth, rank + 1, parent))
        if depth < profile.depth:
            heapq.heappush(open_nodes, (negative * acceptance[0], depth + 1, 0, -negative))
    return total


def verdicts(rounds: Sequence[RoundTime]) -> dict[int, str]:
    """For each profile, by its nodes and in rising order, whether it is worth building, and why not."""
    found, best = {}, None
    fastest = max(rounds, key=lambda each: each.speedup or 0.0)
    for each in rounds:
        if each.speedup is None:
            found[each.profile.nodes] = f"from an accepted length of {each.break_even:.2f} on"
        elif each.speedup <= 1:
            found[each.profile.nodes] = "no: plain is faster"
        elif best is not None and each.speedup <= (best.speedup or 0.0):
            found[each.profile.nodes] = f"no: {best.profile.nodes} is as fast"
        else:
            best = each
            found[each.profile.nodes] = "best" if each is fastest else "yes"
    return found


def capacity_rows(target: Compiled, draft: Compiled, *, reserve: float = 0.1) -> int | None:
    """Rows of cache that fit beside the weights of both graphs; None where the machine's memory is unknown.

    reserve: share of the memory for activations, workspaces and the driver. Raises EagleError where not even the
    weights fit.
    """
    machine = target.machine
    if machine.memory is None:
        return None
    weights = target.weight_bytes + draft.weight_bytes
    left = machine.memory * (1 - reserve) - weights
    if left <= 0:
        raise EagleError(
            f"{machine.name} has {machine.memory / 1e9:.0f} GB and the weights take {weights / 1e9:.1f} GB in "
            f"{target.precision}, with {reserve:.0%} kept for activations: choose another precision or machine"
        )
    return int(left // (target.row_bytes + draft.row_bytes))
