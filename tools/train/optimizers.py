"""Which optimizer has which weights."""

from __future__ import annotations

import torch

from tools.train.model import DraftHead
from tools.train.options import Options


def optimizers_for(head: DraftHead, options: Options) -> list[torch.optim.Optimizer]:
    """Muon (https://kellerjordan.github.io/posts/muon/) for the matrices that turn hidden states into hidden states.

    The LM head, whose rows are a vocabulary, and vectors have AdamW, or all do. Each group has its largest learning
    rate as `initial_lr`.
    """
    inner, matrices, vectors = list[torch.nn.Parameter](), list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for parameter in head.parameters():
        if parameter.ndim == 1:
            vectors.append(parameter)
        elif options.optimizer == "muon" and parameter is not head.output_weight:
            inner.append(parameter)
        else:
            matrices.append(parameter)
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": options.weight_decay}]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([group for group in groups if group["params"]], lr=options.lr, betas=(0.9, 0.95), fused=True)
    ]
    if inner:
        optimizers.append(torch.optim.Muon(inner, lr=options.muon_lr, weight_decay=options.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers
