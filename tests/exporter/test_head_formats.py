"""Each family's head, written as that family writes it, is what an independent reference says it is.

The exported graph runs in ONNX Runtime over a prompt, an extension and three levels of a tree.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import LlamaForCausalLM

from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads import load_head
from eagle_exporter.parity import Feeds, GraphUnderTest
from eagle_exporter.pipeline import head_module
from eagle_exporter.target import Target, load_target
from eagle_exporter.trace import trace
from eagle_graphs import KVGeometry, draft_ports
from eagle_graphs.lowering import lower_for_onnxruntime_cpu
from tests.heads import HEADS, TinyHead
from tests.models import HIDDEN, LAYERS, VOCAB
from tests.reference.variants import Cache, VariantHead

TOP_K = 6
PROMPT, EXTENSION = 9, 4
CAPACITY = 64
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> Target:
    return load_target(find_checkpoint(str(tiny_target), what="target"))


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@torch.inference_mode()
def test_the_graph_of_each_format_is_the_reference_s(head: TinyHead, target: Target, tmp_path: Path) -> None:
    loaded = load_head(find_checkpoint(str(head.write(tmp_path / "head")), what="head"), target.config)
    truth = head.truth()
    assert loaded.spec.layout == (head.layout or head.family)
    assert loaded.spec.taps == truth.taps
    assert loaded.spec.position_offset == truth.position_offset
    reference = VariantHead(
        truth=truth,
        tensors={name: t.float() if t.is_floating_point() else t for name, t in head.tensors().items()},
        target_embedding=target.model.get_input_embeddings().weight,
        target_lm_head=target.model.get_output_embeddings().weight,
    )
    module = head_module(loaded, target, top_k=TOP_K)
    tapped = [torch.randn(PROMPT + EXTENSION, HIDDEN, generator=torch.Generator().manual_seed(i)) for i in truth.taps]
    features = reference.fuse(tapped)
    np.testing.assert_allclose(module.fuse_features(torch.cat(tapped, dim=-1)), features, atol=TOLERANCE)

    spec = loaded.spec
    kv = KVGeometry(layers=spec.layers, kv_heads=spec.kv_heads, head_dim=spec.head_dim)
    ports = draft_ports(kv, hidden_width=spec.hidden_size, top_k=TOP_K)
    model = trace(module, ports)
    lower_for_onnxruntime_cpu(model)
    ir.save(model, tmp_path / "draft.onnx")
    graph = GraphUnderTest("draft", tmp_path / "draft.onnx", module, ports)
    Walk(graph, reference).compare(features)


class Walk:
    """The graph and the reference, fed alike, pass by pass."""

    def __init__(self, graph: GraphUnderTest, reference: VariantHead) -> None:
        self.graph, self.reference = graph, reference
        self.caches: Feeds = graph.empty_caches(CAPACITY)
        self.past: Cache = reference.empty_cache()

    def compare(self, features: torch.Tensor) -> None:
        """A prompt in two passes, then three levels of three nodes each; true features first, the head's own after."""
        random = np.random.default_rng(0)
        for start, rows in ((0, PROMPT), (PROMPT, EXTENSION)):
            tokens = random.integers(0, VOCAB, rows)
            visible = torch.ones(rows, start + rows, dtype=torch.bool).tril(start)
            hidden = features[start : start + rows]
            out, best = self.step(tokens, hidden, np.arange(start, start + rows), visible, committed=start)
        committed = PROMPT + EXTENSION
        seen = np.zeros((3, 0), bool)
        tokens, hidden = best[-1, :3], out[-1:].expand(3, -1)
        for level in range(3):
            seen = np.concatenate((seen, np.eye(3, dtype=bool)), axis=1)
            visible = torch.cat((torch.ones(3, committed, dtype=torch.bool), torch.from_numpy(seen)), dim=1)
            out, best = self.step(tokens, hidden, np.full(3, committed + level), visible, committed=committed)
            parents = [0, 0, 2]  # two children of the first node, one of the last
            tokens, hidden, seen = best[parents, [0, 1, 0]], out[parents], seen[parents]

    def step(
        self, tokens: np.ndarray, hidden: torch.Tensor, positions: np.ndarray, visible: torch.Tensor, *, committed: int
    ) -> tuple[torch.Tensor, np.ndarray]:
        """One pass in both; returns the reference's features and best children."""
        positions = positions + self.reference.truth.position_offset
        out, log_probs, self.past = self.reference.forward(
            torch.from_numpy(tokens), hidden, torch.from_numpy(positions), visible, self.past
        )
        found = self.graph.run(
            {
                "token_ids": tokens[None],
                "hidden": hidden[None].numpy(),
                "position_ids": positions[None],
                "tree_mask": visible[None, :, committed:].numpy(),
                "kv_length": np.array([committed]),
                "logit_rows": np.arange(len(tokens)),
                **self.caches,
            }
        )
        self.caches = {n.replace("present_", "past_"): v for n, v in found.items() if n.startswith("present_")}
        best = log_probs.topk(TOP_K, dim=-1)
        np.testing.assert_allclose(found["hidden_out"], out, atol=TOLERANCE, rtol=TOLERANCE)
        np.testing.assert_allclose(found["topk_logprobs"], best.values, atol=TOLERANCE)
        expected = self.reference.target_ids(best.indices)
        close = best.values.diff(dim=-1).abs().min() < TOLERANCE
        assert close or (found["topk_ids"] == expected.numpy()).all()
        return out, expected.numpy()


@torch.inference_mode()
def test_the_hidden_state_after_the_last_layer_is_what_the_lm_head_reads(tiny_target: Path) -> None:
    """The convention behind the feature of EAGLE-1/2."""
    model = LlamaForCausalLM.from_pretrained(tiny_target)
    tokens = torch.arange(2, 12)[None]
    result = model(tokens, output_hidden_states=True)
    assert len(result.hidden_states) == LAYERS + 1
    np.testing.assert_array_equal(model.lm_head(result.hidden_states[LAYERS]), result.logits)
