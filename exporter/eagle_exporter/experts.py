"""Mixtures of experts, computed densely: every expert runs on every row, and the router's weights choose.

`transformers` calls the experts of a layer through a registry, as it does attention. Its own loops pick rows by
data, which a compiled graph with fixed shapes cannot, or copy the chosen experts' weights for each row, which
a tree of rows makes dearer than the experts themselves. The dense form is a few batched products, and a
row's result does not depend on its neighbours' choices. It trades arithmetic: all experts' instead of the chosen.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "eagle_dense"


def _dense_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[T, h] from rows [T, h], the chosen experts [T, k] and their weights [T, k].

    `self` is transformers' module of all experts, with the flags that `use_experts_implementation` sets on it.
    """
    chosen = hidden_states.new_zeros(hidden_states.shape[0], self.num_experts)
    chosen = chosen.scatter(1, top_k_index, top_k_weights.to(hidden_states.dtype))
    up = "gate_up_proj" if self.has_gate else "up_proj"
    inner = _linear(self, up, hidden_states[None])  # [E, T, inner]
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    out = _linear(self, "down_proj", inner)  # [E, T, h]
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    return (out * chosen.t()[:, :, None]).sum(dim=0)


def _linear(experts: Any, name: str, x: torch.Tensor) -> torch.Tensor:
    weight: torch.Tensor = getattr(experts, name)  # [E, out, in], or [E, in, out] where the class says so
    out = x @ (weight if experts.is_transposed else weight.transpose(1, 2))
    if experts.has_bias:
        out = out + getattr(experts, f"{name}_bias")[:, None]
    return out


def register() -> None:
    """Makes `experts_implementation="eagle_dense"` known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _dense_experts)


def dense_experts(model: nn.Module) -> int:
    """Experts of each layer that run densely; 0 for a model without them."""
    return max((int(cast(int, m.num_experts)) for m in model.modules() if hasattr(m, "_is_expert_parallel")), default=0)
