"""`python -m tools.train ablations`: what the parts of EAGLE are worth, at the same number of training tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.train.head import HeadOptions, train_head

VARIANTS: dict[str, dict[str, Any]] = {
    "token only": {"kind": "eagle1", "feature": False},
    "feature only": {"kind": "eagle1", "token": False},
    "feature and advanced token (EAGLE-1)": {"kind": "eagle1"},
    "EAGLE-3 without training-time test": {"kind": "eagle3", "unroll": 1},
    "EAGLE-3": {"kind": "eagle3"},
}
"""Changes of the options. A head that does not see the advanced token must guess what followed the one it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationOptions:
    """All heads are trained as `head` says but for what the variant changes."""

    head: HeadOptions
    out: Path


def run_ablations(options: AblationOptions, console: Console) -> dict[str, dict[str, Any]]:
    """Trains each variant, or takes it up where it was; prints and returns the last held-out measurement of each."""
    results: dict[str, dict[str, Any]] = {}
    for name, changes in VARIANTS.items():
        console.rule(name)
        began = time.monotonic()
        training = replace(options.head.training, unroll=changes.get("unroll", options.head.training.unroll))
        others = {key: value for key, value in changes.items() if key != "unroll"}
        out = options.out / "-".join(name.split()).replace("(", "").replace(")", "")
        history = train_head(replace(options.head, training=training, out=out, **others), console)
        results[name] = {**history[-1], "minutes": (time.monotonic() - began) / 60}
    _print(results, options.head.training.tokens, console)
    return results


def _print(results: dict[str, dict[str, Any]], tokens: int, console: Console) -> None:
    table = Table(title=f"held-out chains after {tokens:,} training tokens")
    for column in ("", "accepted length", "acceptance by position", "minutes in this run"):
        table.add_column(column, justify="left" if not column else "right")
    for name, result in results.items():
        held_out = result["held_out"]
        if held_out is None:
            table.add_row(name, "no held-out conversations", "", "")
            continue
        chain = " ".join(f"{share:.3f}" for share in held_out["acceptance"])
        table.add_row(name, f"{held_out['length']:.3f}", chain, f"{result['minutes']:.1f}")
    console.print(table)
