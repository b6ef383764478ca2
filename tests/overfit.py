"""A tiny head that knows its target: trained in seconds on the answers that it will be measured on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from eagle_calibration.prompts import load_prompts
from tests.heads import TinyHead, write_tensors
from tests.models import VOCAB, tiny_tokenizer
from tests.reference.variants import VariantHead

STEPS = 400
TOKENS = 48
"""Of each answer; more than an export measures."""


def calibration_answers(model: PreTrainedModel) -> list[torch.Tensor]:
    """The prompts that an export uses with the target's greedy answers, each [L]."""
    tokenizer = tiny_tokenizer()
    answers = []
    for conversation in load_prompts():
        prompt = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        tokens = torch.tensor([prompt])
        answers.append(model.generate(tokens, max_new_tokens=TOKENS, do_sample=False)[0])
    return answers


def overfit_head(
    directory: Path,
    head: TinyHead,
    model: PreTrainedModel,
    answers: Sequence[torch.Tensor],
    *,
    embedding_scale: float = 1.0,
) -> None:
    """Writes the checkpoint of `head`, trained on `answers`, its own output fed back once.

    embedding_scale: what the model multiplies its embeddings by.
    """
    assert head.draft_vocab == VOCAB, "the loss is over the target's tokens"
    tensors = {name: t.clone().requires_grad_() for name, t in head.tensors().items()}
    reference = VariantHead(
        truth=head.truth(),
        tensors=tensors,
        target_embedding=model.get_input_embeddings().weight.detach(),
        target_lm_head=model.get_output_embeddings().weight.detach(),
        target_embedding_scale=embedding_scale,
    )
    lessons = [_lesson(reference, model, tokens) for tokens in answers]
    optimizer = torch.optim.Adam(tensors.values(), lr=3e-3)
    for step in range(STEPS):
        tokens, tapped = lessons[step % len(lessons)]
        optimizer.zero_grad()
        loss(reference, tokens, tapped).backward()
        optimizer.step()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(replace(head).config()))
    write_tensors(directory, {name: t.detach() for name, t in tensors.items()}, head.files)


def loss(reference: VariantHead, tokens: torch.Tensor, tapped: list[torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the tokens two and three places after each feature."""
    rows = len(tokens) - 3
    positions = torch.arange(rows) + reference.truth.position_offset
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    features = reference.fuse([state[:rows] for state in tapped])
    out, first, past = reference.forward(tokens[1 : 1 + rows], features, positions, causal, reference.empty_cache())
    seen = torch.cat((causal, torch.eye(rows, dtype=torch.bool)), dim=1)
    _, second, _ = reference.forward(tokens[2 : 2 + rows], out, positions + 1, seen, past)
    return F.nll_loss(first, tokens[2 : 2 + rows]) + F.nll_loss(second, tokens[3 : 3 + rows])


@torch.no_grad()
def _lesson(
    reference: VariantHead, model: PreTrainedModel, tokens: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    states = model(tokens[None], output_hidden_states=True).hidden_states
    return tokens, [states[tap][0] for tap in reference.truth.taps]
