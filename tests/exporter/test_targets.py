"""Every architecture that the README names, as a tiny random model: its compiled graph, and text from its bundle,
are those of transformers' own code."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle_exporter import pipeline
from eagle_exporter.parity import chain, placement
from eagle_exporter.report import Report, Steps
from eagle_exporter.target import TargetGraph
from eagle_exporter.trace import trace
from eagle_graphs import GraphPorts, Tree, profiles_from_text, tree_from_parents
from eagle_graphs.native_ops import KEY_BLOCK
from eagle_runtime import Session
from tests.graphs.native import session_options
from tests.models import VOCAB, write_tiny_head, write_tiny_model

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
ROPE = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
}
ROPE = {kind: {"rope_type": kind, "rope_theta": 10000.0, **more} for kind, more in ROPE.items()}
WINDOW = 8
ALTERNATING = ["sliding_attention", "full_attention"] * 2
GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ALTERNATING, "tie_word_embeddings": False}
"""Tied to its scaled embeddings, so small a model would repeat its last token."""
EXPERTS = {"num_experts_per_tok": 2, "tie_word_embeddings": False}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": ROPE["llama3"]},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": {"head_dim": 24, "rope_parameters": ROPE["yarn"]},
    "mistral": {"sliding_window": WINDOW, "tie_word_embeddings": False, "rope_parameters": ROPE["dynamic"]},
    "gemma2": {"query_pre_attn_scalar": 24, **GEMMA},
    "gemma3_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": ROPE["linear"],
        },
        **GEMMA,
    },
    "phi3": {
        "sliding_window": 32,
        "partial_rotary_factor": 0.5,
        "rope_parameters": LONGROPE,
        "original_max_position_embeddings": 24,
        "tie_word_embeddings": False,
    },
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "olmo2": {"tie_word_embeddings": False},
    "granite": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
    },
    "mixtral": {"num_local_experts": 4, "sliding_window": 12, **EXPERTS},
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 40, "head_dim": 16, "mlp_only_layers": [1], **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 16, "sliding_window": WINDOW, **EXPERTS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A target as transformers runs it, and what the export made of it."""

    name: str
    model: PreTrainedModel
    bundle: Path
    report: Report


@pytest.fixture(scope="module", params=ARCHITECTURES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tracer: Any) -> Exported:
    """One architecture's bundle, made by the export itself, which has compared every output with torch."""
    name = request.param
    directory = tmp_path_factory.mktemp(name)
    write_tiny_model(directory / "target", name, layers=4, **ARCHITECTURES[name])
    write_tiny_head(directory / "head", own_embedding=True)
    options = pipeline.ExportOptions(
        model=str(directory / "target"),
        draft=str(directory / "head"),
        profiles=profiles_from_text("8"),
        out=directory / "bundle",
        capacity=160,
        prefill_chunk=16,
        accept_probe=True,
    )
    started = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "trace", tracer)
        report = pipeline.export(options, Steps(Console(quiet=True)))
    print(f"{name}: exported in {time.perf_counter() - started:.1f} s, {report.steps}")
    model = AutoModelForCausalLM.from_pretrained(
        directory / "target", attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    return Exported(name=name, model=model.eval(), bundle=directory / "bundle", report=report)


@pytest.fixture(scope="module")
def tracer() -> Any:
    """Traces targets as the export does, and the head, which is the same for all of them, once."""
    traced: list[Any] = []

    def trace_head_once(module: nn.Module, ports: GraphPorts) -> ir.Model:
        if isinstance(module, TargetGraph):
            return trace(module, ports)
        if not traced:
            traced.append(ir.to_proto(trace(module, ports)))
        return ir.from_proto(traced[0])

    return trace_head_once


PROMPT = np.random.default_rng(5).integers(2, VOCAB, 45).tolist()
TREE = tree_from_parents(
    np.random.default_rng(6).integers(2, VOCAB, 14), np.array([-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 10, 3, 10])
)


class Compiled:
    """The bundle's target graph, fed pass by pass."""

    def __init__(self, bundle: Path, kernels: str) -> None:
        (path,) = bundle.glob(f"*/target-{kernels}.onnx")
        options = session_options(threads=2) if kernels == "native" else None
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.outputs = [output.name for output in self.session.get_outputs()]
        sizes = {"B": 1, "C": 80, f"C/{KEY_BLOCK}": 80 // KEY_BLOCK}
        self.caches = {
            port.name: np.zeros([sizes.get(axis, axis) for axis in port.shape], np.float32)
            for port in self.session.get_inputs()
            if port.name.startswith("past_")
        }

    def logits(self, tokens: np.ndarray, feeds: dict[str, np.ndarray]) -> np.ndarray:
        """[Q, V] of the pass, whose rows stay in the caches."""
        outputs = self.session.run(None, {"input_ids": tokens[None], **feeds, **self.caches})
        results = dict(zip(self.outputs, outputs, strict=True))
        self.caches = {name: results[name.replace("past_", "present_")] for name in self.caches}
        return results["logits"]

    def prefill(self, prompt: list[int], chunk: int) -> np.ndarray:
        """[N, V] of a prompt in passes of at most `chunk` rows."""
        parts = [np.array(prompt[first : first + chunk]) for first in range(0, len(prompt), chunk)]
        starts = range(0, len(prompt), chunk)
        return np.concatenate(
            [self.logits(part, placement(chain(part), start)) for part, start in zip(parts, starts, strict=True)]
        )


def logits_of(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """[N, V] by transformers' own forward over a whole text."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].numpy()


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def paths(tree: Tree) -> dict[int, list[int]]:
    """Tokens of the path down to each row."""
    return {row: tree.tokens[tree.path_to(row)].tolist() for row in range(len(tree))}


@pytest.mark.parametrize("kernels", ["native", "stock"])
def test_a_graph_is_transformers_own_forward(exported: Exported, kernels: str) -> None:
    """On a prompt longer than the window, and on each path of a tree below it, deeper than the window."""
    graph = Compiled(exported.bundle, kernels)
    assert_close(graph.prefill(PROMPT, chunk=16), logits_of(exported.model, PROMPT))
    expected = np.stack([logits_of(exported.model, PROMPT + path)[-1] for path in paths(TREE).values()])
    caches = graph.caches
    assert_close(graph.logits(TREE.tokens, placement(TREE, len(PROMPT))), expected)

    graph.caches, rows = caches, []  # the same tree in two passes: the second sees rows that are not committed
    for new in (slice(0, 5), slice(5, len(TREE))):
        feeds = placement(TREE, len(PROMPT), logit_rows=np.arange(new.stop - new.start))
        feeds |= {"tree_mask": feeds["tree_mask"][:, new, : new.stop], "position_ids": feeds["position_ids"][:, new]}
        rows.append(graph.logits(TREE.tokens[new], feeds))
    assert_close(np.concatenate(rows), expected)


def test_plain_eagle_and_transformers_say_the_same(exported: Exported) -> None:
    tokens = torch.tensor([PROMPT])
    expected = exported.model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=32, do_sample=False, eos_token_id=None
    )
    texts = {}
    with Session.open(exported.bundle, profile="8") as session:
        for profile in ("plain", "8"):
            session.reset()
            answer = session.generate(token_ids=PROMPT, profile=profile, max_new_tokens=32, ignore_eos=True)
            texts[profile] = answer.token_ids
    assert texts == dict.fromkeys(("plain", "8"), expected[0, len(PROMPT) :].tolist())
    assert len(set(texts["8"])) > 4


def test_the_export_says_what_is_special(exported: Exported) -> None:
    special = {"mixtral": "all 4", "qwen3_moe": "all 5", "gpt_oss": "all 4", "phi3": "longrope's long factors"}
    notes = exported.report.notes
    assert len(notes) == (exported.name in special)
    assert all(special[exported.name] in note for note in notes)
