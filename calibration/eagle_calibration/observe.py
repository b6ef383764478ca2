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
        self._rows: dict[str, torch.Tensor] = {}
        self._stride: dict[str, int] = {}
        self._largest: dict[str, torch.Tensor] = {}

    def add(self, name: str, x: torch.Tensor) -> None:
        """Takes the rows of one call, [..., K]; those with NaN or infinity are left out."""
        rows = x.detach().flatten(0, -2)
        rows = rows[torch.isfinite(rows).all(dim=1)].float()
        if len(rows):
            largest = rows.abs().amax(dim=0)
            self._largest[name] = torch.maximum(self._largest.get(name, largest), largest)
        stride = self._stride.setdefault(name, 1)
        kept = torch.cat([self._rows.get(name, rows[:0]), rows[::stride]])
        while len(kept) > 2 * KEPT_ROWS:
            kept, stride = kept[::2].clone(), 2 * stride
        self._rows[name], self._stride[name] = kept, stride

    def rows(self, name: str) -> torch.Tensor | None:
        """[at most KEPT_ROWS, K]; None for a layer that never ran."""
        rows = self._rows.get(name)
        return None if rows is None or len(rows) == 0 else rows[:: -(-len(rows) // KEPT_ROWS)]

    def largest(self, name: str) -> float:
        """The largest magnitude of all that went through; 0 for a layer that never ran."""
        largest = self.largest_inputs(name)
        return 0.0 if largest is None else float(largest.max())

    def largest_inputs(self, name: str) -> torch.Tensor | None:
        """[K] the largest magnitude of each input in all rows; None for a layer that never ran."""
        return self._largest.get(name)


@contextmanager
def observing(module: nn.Module, names: Collection[str], observed: ObservedRows) -> Iterator[None]:
    """Within it, `observed` takes what enters the submodules `names`; names that are no submodules are left out."""
    hooks = []
    modules = dict(module.named_modules())
    for name in names:
        if name in modules:

            def keep(_module: nn.Module, args: tuple[torch.Tensor, ...], name: str = name) -> None:
                observed.add(name, args[0])

            hooks.append(modules[name].register_forward_pre_hook(keep))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
