"""Rotary embeddings whose frequencies depend on the length of the text, settled for the bundle's capacity.

A compiled graph turns a row once, when it is written to the cache, and the rows of a pass may lie on both sides
of a length at which the frequencies change. So they are fixed before the graph is traced:

- *dynamic* (NTK): the frequencies grow only beyond the model's own limit of positions, which a bundle
  never reaches.
- *longrope*: short factors up to the original context length, long ones beyond. A capacity of at most that length
  gives transformers' own text. A larger one takes the long factors from the first token, as engines with a
  cache do; transformers would begin with the short ones and turn the whole text anew when it grows past.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def settle_rope(model: nn.Module, *, capacity: int) -> str | None:
    """Fixes the frequencies of every rotary embedding of `model` for texts of up to `capacity` tokens.

    Returns a note for the report where the choice departs from what transformers does with a short text.
    """
    note = None
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for layers, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind == "longrope" and _settle_longrope(module, layers, capacity):
                note = f"rotary embedding: longrope's long factors at every position (the capacity is {capacity})"
            if kind == "longrope" or (isinstance(kind, str) and "dynamic" in kind):
                _never_update(module, layers)
    return note


def _settle_longrope(module: Any, layers: str | None, capacity: int) -> bool:
    """Puts in the factors for `capacity`; whether they are the long ones."""
    parameters = module.config.rope_parameters if layers is None else module.config.rope_parameters[layers]
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, None, seq_len=capacity, layer_type=layers)
    buffer = getattr(module, "inv_freq" if layers is None else f"{layers}_inv_freq")
    with torch.no_grad():
        buffer.copy_(frequencies)
    return capacity > int(parameters["original_max_position_embeddings"])


def _never_update(module: Any, layers: str | None) -> None:
    """transformers updates the frequencies of these kinds in each pass; with the default kind it leaves them."""
    if layers is None:
        module.rope_type = "default"
    else:
        module.rope_type = module.rope_type | {layers: "default"}
