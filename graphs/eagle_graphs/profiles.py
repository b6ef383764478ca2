"""Tree profiles: the sizes a bundle verifies, and how each is drafted.

A profile's size freezes every shape of its round, so that each can be compiled, captured and timed
once. How wide and deep to draft follows from the size: small trees gain nothing from levels that
they will not keep, and each level is one more pass of the head.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle_graphs.errors import EagleError

MIN_NODES = 2
MAX_NODES = 128
TOP_K = 8
MAX_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One tree size. Raises EagleError where `nodes` cannot be filled or are out of range."""

    nodes: int
    """Rows of a verification, the root included."""
    top_k: int
    """Children drafted for a node, and nodes expanded a level."""
    depth: int
    """Levels below the root; also the draft passes of a round."""

    def __post_init__(self) -> None:
        if not MIN_NODES <= self.nodes <= MAX_NODES:
            raise EagleError(
                f"a profile of {self.nodes} nodes is out of range: use {MIN_NODES} to {MAX_NODES} "
                "(the root counts; plain decoding is always part of a bundle)"
            )
        drafted = self.top_k + (self.depth - 1) * self.top_k**2
        if self.top_k < 1 or self.depth < 1 or self.nodes - 1 > drafted:
            raise EagleError(
                f"a tree of {self.nodes} nodes needs {self.nodes - 1} candidates, but {self.top_k} "
                f"children over {self.depth} levels give {max(drafted, 0)}"
            )


def profile_from_nodes(nodes: int) -> Profile:
    """The profile of a tree of `nodes` rows.

    Each doubling of the tree earns one level, up to four, and half its rows as width, up to eight. Measured with a
    head of accepted length 2: more of either costs passes and gains under 1%.
    """
    depth = min(MAX_DEPTH, max(1, (nodes - 1).bit_length()))
    return Profile(nodes=nodes, top_k=max(1, min(TOP_K, nodes - 1, max(3, nodes // 2))), depth=depth)


def profiles_from_text(text: str) -> tuple[Profile, ...]:
    """Profiles from a list such as "4,8,16". Raises EagleError unless they are numbers that rise."""
    try:
        sizes = [int(item) for item in text.split(",")]
    except ValueError:
        raise EagleError(f"profiles are tree sizes separated by commas, as in 4,8,16; found {text!r}") from None
    if sizes != sorted(set(sizes)):
        raise EagleError(
            f"profiles must rise and differ; found {text!r}: write {','.join(map(str, sorted(set(sizes))))}"
        )
    return tuple(profile_from_nodes(size) for size in sizes)
