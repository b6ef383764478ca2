"""Measured costs, for the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as Grid

from eagle_runtime.cost_table import Table

_CONTEXTS = (0, 1024)


def print_costs(console: Console, table: Table) -> None:
    """A row for each tree size: what drafting and verifying it take, without context and with some."""
    grid = Grid("nodes", title="milliseconds of a round, measured here")
    for kind in ("draft", "verify"):
        for rows in _CONTEXTS:
            grid.add_column(f"{kind}, {rows} rows" if rows else kind, justify="right")
    for nodes in sorted(int(step.split()[1]) for step in table if step.startswith("verify")):
        lines = [table.get(f"{kind} {nodes}") for kind in ("draft", "verify")]
        cells = [f"{1e3 * line.at(rows):.2f}" if line else "-" for line in lines for rows in _CONTEXTS]
        grid.add_row(str(nodes), *cells)
    console.print(grid)
