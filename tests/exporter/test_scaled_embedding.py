"""Targets that multiply their embeddings, and heads that borrow them: as stored or multiplied, by the layout.

On Gemma, whose rows are multiplied by the root of their width inside the embedding, and on Granite, which does it
outside.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from eagle_calibration.prompts import load_prompts
from eagle_exporter.checkpoint import Checkpoint, find_checkpoint
from eagle_exporter.heads import Overrides, TargetShape, load_head
from eagle_exporter.pipeline import head_module
from eagle_exporter.probe import Probe, read_answers, run_probe
from eagle_exporter.target import Target, embedding_scale, load_target
from eagle_exporter.tokenizer import prompt_tokens
from eagle_graphs import EagleError
from tests.commands import eagle_export
from tests.heads import HEADS, TinyHead
from tests.models import LAYERS, VOCAB, write_tiny_model
from tests.overfit import calibration_answers, overfit_head
from tests.reference.variants import VariantHead

SCALES = {"llama": 1.0, "gemma2": 8.0, "gemma3_text": 8.0, "granite": 6.0}
ROWS = 7


def make_target(directory: Path, model_type: str, **config: object) -> Target:
    config |= {"embedding_multiplier": 6.0} if model_type == "granite" else {}
    config |= {"head_dim": 16, "sliding_window": 64} if "gemma" in model_type else {}
    write_tiny_model(directory, model_type, layers=LAYERS, tie_word_embeddings=False, **config)
    return load_target(find_checkpoint(str(directory), what="target"))


@pytest.mark.parametrize("model_type", SCALES)
def test_the_target_s_scale_is_measured(model_type: str, tmp_path: Path) -> None:
    assert make_target(tmp_path, model_type).embedding_scale == SCALES[model_type]


def test_what_is_no_multiple_has_no_scale() -> None:
    """Learned positions are added to GPT-2's embeddings."""
    assert embedding_scale(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=4, vocab_size=VOCAB))) == 1.0


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Rows so small that a norm's epsilon tells them from 8 times themselves."""
    return make_target(tmp_path_factory.mktemp("gemma"), "gemma2", initializer_range=0.005)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
@torch.inference_mode()
def test_each_layout_looks_up_what_it_was_trained_on(head: TinyHead, gemma: Target, tmp_path: Path) -> None:
    checkpoint = find_checkpoint(str(head.write(tmp_path / "head")), what="head")
    right = reference_of(head, gemma)
    wrong = replace(right, truth=replace(right.truth, scaled_embedding=not head.scaled_embedding))
    for overrides, expected, other in (
        (Overrides(), right, wrong),
        (Overrides(scaled_embedding=not head.scaled_embedding), wrong, right),
    ):
        found = module_pass(gemma, checkpoint, overrides)
        torch.testing.assert_close(found, reference_pass(expected), atol=1e-4, rtol=1e-4)
        if not head.own_embedding:
            assert (found - reference_pass(other)).abs().max() > 1e-2 * found.abs().max()


def reference_of(head: TinyHead, target: Target) -> VariantHead:
    return VariantHead(
        truth=head.truth(),
        tensors={name: t.float() if t.is_floating_point() else t for name, t in head.tensors().items()},
        target_embedding=target.model.get_input_embeddings().weight,
        target_lm_head=target.model.get_output_embeddings().weight,
        target_embedding_scale=8.0,
    )


def inputs(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [Q], features [Q, h] and mask [Q, Q]."""
    random = torch.Generator().manual_seed(4)
    tokens = torch.randint(0, VOCAB, (ROWS,), generator=random)
    return tokens, torch.randn(ROWS, width, generator=random), torch.ones(ROWS, ROWS, dtype=torch.bool).tril()


def reference_pass(reference: VariantHead) -> torch.Tensor:
    tokens, hidden, visible = inputs(len(reference.tensors["fc.weight"]))
    positions = torch.arange(ROWS) + reference.truth.position_offset
    return reference.forward(tokens, hidden, positions, visible, reference.empty_cache())[0]


def module_pass(target: Target, checkpoint: Checkpoint, overrides: Overrides) -> torch.Tensor:
    loaded = load_head(checkpoint, target.config, overrides)
    spec = loaded.spec
    tokens, hidden, visible = inputs(spec.hidden_size)
    caches = [torch.zeros(1, spec.kv_heads, ROWS, spec.head_dim) for _ in range(2 * spec.layers)]
    positions = torch.arange(ROWS) + spec.position_offset
    committed = torch.zeros(1, dtype=torch.int64)
    module = head_module(loaded, target, top_k=4)
    return module(tokens[None], hidden[None], positions[None], visible[None], committed, torch.arange(ROWS), *caches)[0]


# The probe and the export, with an EAGLE-1 head that was trained either way


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A Gemma, and a head that knows it."""

    target: Target
    model: Path
    head: Path
    scaled: bool
    """Whether the head was trained on multiplied embeddings."""

    def probe(self, *, scaled: bool) -> Probe:
        config = self.target.config
        loaded = load_head(find_checkpoint(str(self.head), what="head"), config, Overrides(scaled_embedding=scaled))
        answers = read_answers(self.target, prompt_tokens(self.target.tokenizer, load_prompts(), longest=400))
        return run_probe(head_module(loaded, self.target, top_k=4), loaded.spec, TargetShape.of(config), answers)


@pytest.fixture(scope="module", params=[False, True], ids=["as stored", "multiplied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    place = tmp_path_factory.mktemp("trained")
    target = make_target(place / "target", "gemma3_text")
    model = AutoModelForCausalLM.from_pretrained(place / "target", attn_implementation="eager").eval()
    head = TinyHead(
        family="safeailab", kind="eagle1", biases=("fc", "qkv"), draft_vocab=VOCAB, scaled_embedding=request.param
    )
    overfit_head(place / "head", head, model, calibration_answers(model), embedding_scale=8.0)
    return Pair(target=target, model=place / "target", head=place / "head", scaled=request.param)


NAMES = {True: "embedding times 8", False: "embedding as stored"}
OPTIONS = {True: "--embedding scaled", False: "--embedding raw"}


def test_the_probe_tells_them_apart(pair: Pair) -> None:
    right = pair.probe(scaled=pair.scaled)
    assert right.problem() is None, right.to_dict()
    assert right.stated.name.endswith(NAMES[pair.scaled])
    assert right.conventions[-1].name == NAMES[not pair.scaled]
    wrong = pair.probe(scaled=not pair.scaled)
    assert wrong.stated.length < right.stated.length - 0.5
    with pytest.raises(EagleError, match=f"with {NAMES[pair.scaled]} .* set {OPTIONS[pair.scaled]}, or keep it"):
        wrong.check()


@pytest.mark.parametrize("pair", [True], ids=["multiplied"], indirect=True)
def test_an_export_takes_the_option(pair: Pair, tmp_path: Path) -> None:
    arguments = ["--model", pair.model, "--draft", pair.head, "--profiles", 8, "--capacity", 300, "--out", tmp_path]
    stopped = eagle_export(*arguments, *OPTIONS[not pair.scaled].split())
    assert stopped.status == 2
    assert f"set {OPTIONS[pair.scaled]}, or keep it" in " ".join(stopped.err.split())
    done = eagle_export(*arguments, *OPTIONS[pair.scaled].split(), "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["measured"]["8"]["accepted_length"] > 2
