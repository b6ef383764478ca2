"""The passes of a bundle: every shape that a graph is ever run at, where shapes are frozen when an engine is built.

    graph    pass           Q              S          R     when
    target   plain          1              1          1     plain decoding
             tree N         N              N          N     verifying the tree of a profile
             chunk          chunk          chunk      1     prefill
    draft    extension E    E              E          1     what a round committed: the root and at most `depth` nodes
             level Q/S      Q              S          Q     a level of a tree, dynamic, static or sampled
             chunk          chunk          chunk      1     prefill, and what plain decoding left behind

Q, S and R as in `ports`. Fewer rows than a pass has are padded: a row of padding sees only itself, `logit_rows` names
real rows, and what padding writes to the cache lies beyond the rows that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eagle_graphs.draft_steps import draft_levels
from eagle_graphs.manifest import Limits
from eagle_graphs.profiles import Profile
from eagle_graphs.sampled_shape import sampled_levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One shape."""

    name: str
    rows: int
    """Q"""
    after: int
    """S"""
    asked: int
    """R"""

    @property
    def sizes(self) -> dict[str, int]:
        """The axes of the ports that a pass fixes."""
        return {"Q": self.rows, "S": self.after, "R": self.asked}


STEP = Pass(name="step", rows=1, after=1, asked=1)
"""Of the graphs between the head's passes, whose ports have no open sizes."""


def target_passes(profiles: Sequence[Profile], limits: Limits) -> tuple[Pass, ...]:
    """The target's passes, each shape once."""
    trees = (Pass(name=f"tree {p.nodes}", rows=p.nodes, after=p.nodes, asked=p.nodes) for p in profiles)
    return _distinct([Pass(name="plain", rows=1, after=1, asked=1), *trees, _chunk(limits)])


def draft_passes(profiles: Sequence[Profile], limits: Limits) -> tuple[Pass, ...]:
    """The head's passes, each shape once."""
    passes = []
    for profile in profiles:
        rows = profile.depth + 1
        passes.append(Pass(name=f"extension {rows}", rows=rows, after=rows, asked=1))
    for profile in profiles:
        passes += [Pass(name=f"level {q}/{s}", rows=q, after=s, asked=q) for q, s in _levels(profile)]
    return _distinct([*passes, _chunk(limits)])


def _levels(profile: Profile) -> list[tuple[int, int]]:
    """Q and S of each level below the root's children."""
    drafted = [(level.rows, level.after) for level in draft_levels(profile)]
    return drafted if profile.paths else drafted + sampled_levels(profile)


def _chunk(limits: Limits) -> Pass:
    rows = limits.prefill_chunk
    return Pass(name="chunk", rows=rows, after=rows, asked=1)


def _distinct(passes: Iterable[Pass]) -> tuple[Pass, ...]:
    distinct: dict[tuple[int, int, int], Pass] = {}
    for each in passes:
        distinct.setdefault((each.rows, each.after, each.asked), each)
    return tuple(distinct.values())
