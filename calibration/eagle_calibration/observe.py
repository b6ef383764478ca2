"""Rows that really enter a model's linear layers, taken while it runs in torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

KEPT_ROWS = 256
"""Rows kept of each layer's input; enough for an error, small enough to keep for every layer of a large model."""


class ObservedRows:
    """Inputs of linear layers by the layers' names, evenly drawn from all that went through."""

    def __init__(self) -> None:
        self._rows: dict[str, list[torch.Tensor]] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """Takes the rows of one call, [..., K]."""
        self._rows.setdefault(name, []).append(x.detach().flatten(0, -2).float())

    def rows(self, name: str) -> torch.Tensor | None:
        """[at most KEPT_ROWS, K]; None for a layer that never ran."""
        if (rows := self.all_rows(name)) is None:
            return None
        step = -(-len(rows) // KEPT_ROWS)
        return rows[::step]

    def all_rows(self, name: str) -> torch.Tensor | None:
        """[R, K] all that went through; None for a layer that never ran."""
        return torch.cat(self._rows[name]) if name in self._rows else None


@contextmanager
def observing(module: nn.Module, names: Collection[str]) -> Iterator[ObservedRows]:
    """Within it, `module` is observed at its submodules `names`; names that are no submodules are left out."""
    observed, hooks = ObservedRows(), []
    modules = dict(module.named_modules())
    for name in names:
        if name in modules:

            def keep(_module: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                observed.add(name, args[0])

            hooks.append(modules[name].register_forward_pre_hook(keep))
    try:
        yield observed
    finally:
        for hook in hooks:
            hook.remove()
