"""The export's own checks catch a graph that is wrong, and its report tells what was done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from rich.console import Console

from eagle_exporter import attention, engines, pipeline
from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.proof import check_greedy, fastest_profile, torch_greedy
from eagle_exporter.report import Steps
from eagle_exporter.target import load_target
from eagle_graphs import EagleError, profiles_from_text, tree_attention
from eagle_graphs.manifest import Exactness, manifest_from_json

EXACT = Exactness(kind="near-tie", logit_gap=1e-4, max_logit_difference=5e-5, rows=1)
BITWISE = Exactness(kind="bitwise", logit_gap=0.0, max_logit_difference=0.0, rows=1)
STATISTICAL = Exactness(kind="statistical", logit_gap=1.0, max_logit_difference=0.5, rows=1)


def test_the_report_and_the_manifest_tell_what_was_done(tiny_bundle: Path) -> None:
    report = json.loads((tiny_bundle / "export-report.json").read_text())
    manifest = manifest_from_json((tiny_bundle / "manifest.json").read_text())
    assert [engine.kernels for engine in manifest.engines] == ["native", "stock"] == list(report["parity"])
    for parity in report["parity"].values():
        assert {(entry["graph"], entry["output"]) for entry in parity} == {
            *(("target", name) for name in ("argmax_ids", "logits", "finite", "features", "present")),
            *(("draft", name) for name in ("hidden_out", "topk_ids", "topk_logprobs", "present")),
        }
        assert all(entry["relative"] <= report["tolerance"] for entry in parity)
    assert report["taps"] == [2, 3, 3] == list(manifest.head.taps)
    assert all(exactness["kind"] in ("bitwise", "near-tie") for exactness in report["exactness"].values())
    assert set(report["measured"]) == {"plain", "4", "8", "16"}
    assert (
        report["default_profile"]
        == manifest.default_profile
        == fastest_profile({name: {"stats": stats} for name, stats in report["measured"].items()})
    )
    assert list(report["steps"])[:3] == [
        "load and check",
        "probe the head's conventions",
        "trace target with feature taps",
    ]
    assert "drafts almost nothing" in report["probe"]["problem"]
    assert {"torch", "transformers", "onnxruntime"} <= set(report["versions"])
    assert report["peak_memory_bytes"] > 10**8


def test_a_lowering_that_is_wrong_stops_the_export(
    tiny_target: Path, tiny_head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lower_wrongly(model: ir.Model) -> ir.Model:
        for node in model.graph:
            if node.op_type == tree_attention.NAME:
                node.attributes["scale"] = ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 1.01)
        return right(model)

    right = engines.lower_for_onnxruntime_cpu
    monkeypatch.setattr(engines, "lower_for_onnxruntime_cpu", lower_wrongly)
    options = pipeline.ExportOptions(
        model=str(tiny_target),
        draft=str(tiny_head),
        profiles=profiles_from_text("4"),
        out=tmp_path / "bundle",
        capacity=None,
        prefill_chunk=None,
        accept_probe=True,
    )
    with pytest.raises(EagleError, match="the compiled target graph is not torch's"):
        pipeline.export(options, Steps(Console(quiet=True)))
    assert list(tmp_path.iterdir()) == []


def test_greedy_text_that_is_not_torch_s_stops_the_export(tiny_target: Path) -> None:
    target = load_target(find_checkpoint(str(tiny_target), what="target"))
    prompt = [0, 10, 20, 30]
    tokens, logits = torch_greedy(target, prompt, max_new_tokens=6)
    right = {"plain": run_of([*tokens, 5])}
    assert check_greedy(target, [prompt], right, EXACT, quantized=False, max_new_tokens=6).from_torch == ()

    second = int(logits[2].topk(2).indices[1])
    wrong = {**right, "8": run_of([*tokens[:2], second, *tokens[3:]])}
    with pytest.raises(EagleError, match=rf"profile 8 the bundle says token {second} where torch says {tokens[2]}"):
        check_greedy(target, [prompt], wrong, EXACT, quantized=False, max_new_tokens=6)

    gap = float(logits[2].topk(2).values @ torch.tensor([1.0, -1.0]))
    lenient = Exactness(kind="statistical", logit_gap=2 * gap, max_logit_difference=gap, rows=1)
    agreement = check_greedy(target, [prompt], wrong, lenient, quantized=False, max_new_tokens=6)
    (tie,) = agreement.from_torch
    assert (tie.profile, tie.step, tie.found, tie.expected) == ("8", 2, second, tokens[2])
    assert tie.gap == pytest.approx(gap, rel=1e-4)
    assert (agreement.prompts, agreement.tokens) == (1, 6)


def run_of(tokens: list[int], **parting: float) -> dict[str, Any]:
    """What the runtime says of a profile: its tokens, and where it parted from plain decoding."""
    return {"token_ids": [tokens], "partings": [{"prompt": 0, **parting}] if parting else []}


def test_of_a_quantized_bundle_plain_decoding_is_the_truth(tiny_target: Path) -> None:
    target = load_target(find_checkpoint(str(tiny_target), what="target"))
    prompt = [0, 10, 20, 30]
    tokens, logits = torch_greedy(target, prompt, max_new_tokens=6)
    other = [*tokens[:2], int(logits[2].topk(9).indices[8]), *tokens[3:]]
    alike = {"plain": run_of(other), "8": run_of(other)}
    agreement = check_greedy(target, [prompt], alike, BITWISE, quantized=True, max_new_tokens=6)
    assert {(parting.profile, parting.step) for parting in agreement.from_torch} == {("plain", 2), ("8", 2)}
    assert agreement.from_plain == ()


@pytest.mark.parametrize(
    ("exactness", "gap", "passes"),
    [(BITWISE, 0.0, False), (EXACT, 9e-5, True), (EXACT, 2e-4, False), (STATISTICAL, 2.0, True)],
)
def test_a_parting_from_plain_decoding_passes_where_the_class_announces_it(
    tiny_target: Path, exactness: Exactness, gap: float, passes: bool
) -> None:
    target = load_target(find_checkpoint(str(tiny_target), what="target"))
    prompt = [0, 10, 20, 30]
    tokens, _ = torch_greedy(target, prompt, max_new_tokens=6)
    apart = run_of([*tokens[:2], 7, *tokens[3:]], step=2, found=7, expected=tokens[2], gap=gap)
    runs = {"plain": run_of(tokens), "8": apart}
    if passes:
        agreement = check_greedy(target, [prompt], runs, exactness, quantized=True, max_new_tokens=6)
        (parting,) = agreement.from_plain
        assert (parting.profile, parting.step, parting.gap) == ("8", 2, gap)
        assert agreement.alike(agreement.from_plain) == 0
    else:
        with pytest.raises(EagleError, match="with profile 8 the bundle says token 7 where plain decoding says"):
            check_greedy(target, [prompt], runs, exactness, quantized=True, max_new_tokens=6)


def test_attention_in_torch_is_the_op_s_definition() -> None:
    random = np.random.default_rng(3)
    query, key, value = (random.standard_normal((2, heads, 3, 8)).astype(np.float32) for heads in (4, 2, 2))
    past_key, past_value = (random.standard_normal((2, 2, 12, 8)).astype(np.float32) for _ in range(2))
    mask = np.broadcast_to(np.array([[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 1, 0, 1]], np.bool_), (2, 3, 5))
    length = np.array([0, 6])
    expected = tree_attention.tree_attention(query, key, value, past_key, past_value, mask, length, scale=0.3)

    rows = attention.Rows(
        tree_mask=torch.tensor(mask),
        kv_length=torch.tensor(length),
        past=[torch.tensor(past_key), torch.tensor(past_value)],
    )
    with attention.rows_of_pass(rows):
        out = attention.tree_attention(*map(torch.tensor, (query, key, value)), layer=0, scale=0.3)
    for found, wanted in zip((out, *rows.all_present()), expected, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, atol=1e-6)
