"""A verified tree, drawn for the terminal: the accepted path stands out."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree as Drawing

from eagle_runtime.generate import Round

_ACCEPTED, _REJECTED = "bold green", "dim"


def draw_round(number: int, done: Round, piece_of: Callable[[int], str]) -> RenderableType:
    """One round. piece_of: the text of a token id. Percentages: how likely a node is taken to be, given its parent."""
    tree, path = done.tree, set(done.walk.path)
    title = Text.assemble(
        f"round {number}: ",
        (f"{len(done.walk.path) - 1} of {len(tree) - 1} drafted accepted", _ACCEPTED),
        f", {len(done.kept)} committed, bonus ",
        (_quoted(piece_of(done.walk.bonus)), "bold yellow"),
    )
    drawing = Drawing(Text(_quoted(piece_of(int(tree.tokens[0]))), style=_ACCEPTED), guide_style="dim")
    branches = [drawing]
    for row in range(1, len(tree)):
        parent = int(tree.parents[row])
        probability = math.exp(float(tree.values[row] - tree.values[parent]))
        label = f"{_quoted(piece_of(int(tree.tokens[row])))} {probability:.0%}"
        branches.append(branches[parent].add(Text(label, style=_ACCEPTED if row in path else _REJECTED)))
    return Group(title, drawing)


def _quoted(piece: str) -> str:
    return repr(piece)[1:-1].replace(" ", "\N{OPEN BOX}") or "\N{EMPTY SET}"
