"""The quality of a quantized bundle, measured in the export: its target beside the original one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from eagle_calibration.evaluation import Quality, compare_quality, evaluation_text
from eagle_exporter.parity import GraphUnderTest, chain, placement
from eagle_exporter.target import Target, as_transformers_runs_it
from eagle_graphs import GraphPorts

WINDOW = 512
"""Tokens that are read in one piece."""
EVALUATED_TOKENS = 8 * WINDOW


def measure_quality(
    target: Target, module: torch.nn.Module, path: Path, ports: GraphPorts, *, native: bool, longest: int
) -> Quality:
    """Compares the target graph at `path` with torch, in pieces of at most `longest` tokens."""
    text = evaluation_text()
    tokens = target.tokenizer(text[: 16 * EVALUATED_TOKENS], add_special_tokens=False)["input_ids"]
    graph = GraphUnderTest("target", path, module, ports, native=native)

    def original(window: Sequence[int]) -> torch.Tensor:
        with torch.no_grad(), as_transformers_runs_it(target.model):
            logits: torch.Tensor = target.model(torch.tensor([list(window)]), use_cache=False).logits[0]
        return logits

    def quantized(window: Sequence[int]) -> torch.Tensor:
        feeds = {"input_ids": np.array([window]), **placement(chain(window), 0)} | graph.empty_caches(len(window))
        return torch.from_numpy(graph.run(feeds)["logits"])

    tokens = [int(i) for i in tokens[:EVALUATED_TOKENS]]
    return compare_quality(tokens, original, quantized, window=min(WINDOW, longest))
