"""Tree profiles: the sizes a bundle verifies, and how each is drafted.

A profile's size freezes every shape of its round, so that each can be compiled, captured and timed
once. How wide and deep to draft follows from the size: small trees gain nothing from levels that
they will not keep, and each level is one more pass of the head.

A static profile (EAGLE-1) fixes the tree as well: it names its nodes by their paths, each a list of
ranks from the root down. (0, 2) is the third-best child of the root's best child.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise

from eagle_graphs.errors import EagleError

MIN_NODES = 2
MAX_NODES = 128
TOP_K = 8
MAX_DEPTH = 8

_SHAPE = re.compile(r"-?[0-9]{1,6}(:-?[0-9]{1,6})?")

Path = tuple[int, ...]

STATIC_PATHS: tuple[Path, ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""The 25 nodes of EAGLE-1's own tree (https://github.com/SafeAILab/EAGLE), 4, 8, 8, 3 and 2 by depth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One tree size. Raises EagleError where `nodes` cannot be filled or are out of range."""

    nodes: int
    """Rows of a verification, the root included."""
    top_k: int
    """Children drafted for a node, and nodes expanded a level."""
    depth: int
    """Levels below the root; also the draft passes of a round."""
    paths: tuple[Path, ...] = ()
    """Nodes of a static tree, in depth-first order, the better sibling first; none where the tree is dynamic."""

    @property
    def draft_rows(self) -> int:
        """Rows that a round's levels take in the head's cache, beyond those it commits."""
        if self.paths:
            return len({path[:-1] for path in self.paths if len(path) > 1})
        return self.top_k * (self.depth - 1)

    def __post_init__(self) -> None:
        if not MIN_NODES <= self.nodes <= MAX_NODES:
            raise EagleError(
                f"a profile of {self.nodes} nodes is out of range: use {MIN_NODES} to {MAX_NODES} "
                "(the root counts; plain decoding is always part of a bundle)"
            )
        if self.paths:
            self._check_paths()
            return
        drafted = self.top_k + (self.depth - 1) * self.top_k**2
        if self.top_k < 1 or self.depth < 1 or self.nodes - 1 > drafted:
            raise EagleError(
                f"a tree of {self.nodes} nodes needs {self.nodes - 1} candidates, but {self.top_k} "
                f"children over {self.depth} levels give {max(drafted, 0)}"
            )

    def _check_paths(self) -> None:
        _check_tree(self.paths)
        if self.paths != tuple(sorted(self.paths)):
            raise EagleError(f"the static tree of {self.nodes} nodes is not in depth-first order: export again")
        sizes = (len(self.paths) + 1, 1 + max(map(max, self.paths)), max(map(len, self.paths)))
        if sizes != (self.nodes, self.top_k, self.depth):
            raise EagleError(
                f"a static tree with {sizes[0]} nodes, {sizes[1]} children and {sizes[2]} levels is described as "
                f"one with {self.nodes}, {self.top_k} and {self.depth}: export again"
            )


def _check_tree(paths: tuple[Path, ...]) -> None:
    """Raises EagleError unless the paths are those of a tree: each once, each with its parent."""
    if not paths or any(not path or min(path) < 0 for path in paths):
        raise EagleError("a static tree is a list of paths, each a list of ranks from 0 on, as in [[0], [1], [0, 0]]")
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise EagleError(f"a static tree names the path {list(twice[0])} twice")
    if orphans := [path for path in paths if len(path) > 1 and path[:-1] not in paths]:
        raise EagleError(f"a static tree names the path {list(orphans[0])} without its parent {list(orphans[0][:-1])}")


def static_profile(paths: tuple[Path, ...] = STATIC_PATHS) -> Profile:
    """The profile of a static tree, its paths in any order. Raises EagleError unless they are those of a tree."""
    _check_tree(paths)
    return Profile(
        nodes=len(paths) + 1, top_k=1 + max(map(max, paths)), depth=max(map(len, paths)), paths=tuple(sorted(paths))
    )


def paths_from_json(text: str, where: str) -> tuple[Path, ...]:
    """The paths of a static tree, a JSON list of lists of ranks. Raises EagleError where it is none."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EagleError(f"{where} is not JSON ({error})") from None
    if not isinstance(data, list) or not all(isinstance(path, list) for path in data):
        raise EagleError(f"{where} does not hold a list of paths, as in [[0], [1], [0, 0]]")
    if not all(type(rank) is int for path in data for rank in path):
        raise EagleError(f"{where} holds a path with something other than whole numbers")
    return tuple(map(tuple, data))


def profile_from_nodes(nodes: int, depth: int | None = None) -> Profile:
    """The profile of a tree of `nodes` rows, of as many levels as given.

    Each doubling of the tree earns one level, and half its rows as width, up to eight. With a head of accepted length
    3 one level more costs about what it brings, and more width brings less; a better head pays for more levels.
    Raises EagleError where a tree of so many rows or levels cannot be.
    """
    top_k = max(1, min(TOP_K, nodes - 1, max(3, nodes // 2)))
    profile = Profile(nodes=nodes, top_k=top_k, depth=max(1, (nodes - 1).bit_length()))
    if depth is None:
        return profile
    least, most = 1 + max(0, -(-(nodes - 1 - top_k) // top_k**2)), min(nodes - 1, MAX_DEPTH)
    if not least <= depth <= most:
        raise EagleError(f"a tree of {nodes} nodes has {least} to {most} levels below its root; found {depth}")
    return replace(profile, depth=depth)


def profiles_from_text(text: str) -> tuple[Profile, ...]:
    """Profiles from a list such as "4,8,16" or "8,16:6,60:8", the number of levels behind the colon.

    Raises EagleError unless they are numbers, the sizes rise, and no tree has fewer levels than a smaller one.
    """
    items = [item.strip() for item in text.split(",")]
    if not all(map(_SHAPE.fullmatch, items)):
        raise EagleError(
            f"profiles are tree sizes separated by commas, as in 4,8,16; found {text!r} (16:6 is a tree of six levels)"
        )
    profiles = [profile_from_nodes(*map(int, item.split(":"))) for item in items]
    by_size = {profile.nodes: item for profile, item in zip(profiles, items, strict=True)}
    if [profile.nodes for profile in profiles] != sorted(by_size):
        rising = ",".join(by_size[size] for size in sorted(by_size))
        raise EagleError(f"profiles must rise and differ; found {text!r}: write {rising}")
    for smaller, larger in pairwise(profiles):
        if larger.depth < smaller.depth:
            raise EagleError(
                f"the tree of {larger.nodes} nodes has {larger.depth} levels, fewer than the {smaller.depth} of the "
                f"one of {smaller.nodes}: write {larger.nodes}:{smaller.depth}, or take levels from the smaller one"
            )
    return tuple(profiles)
