"""Tiny data and heads for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.models import HIDDEN, LAYERS, VOCAB
from tests.reference.variants import Truth, VariantHead
from tools.train.answers import Answer, AnswerFile
from tools.train.batches import Batch, make_batch
from tools.train.features import FeatureCache
from tools.train.model import DraftHead, Eagle3, Kind
from tools.train.options import Options
from tools.train.start import most_frequent, new_head, shape_from_target

HEAD_DIM = 16
TAPS = (1, 3, 5)
DRAFT_VOCAB = 96
FAST = Options(
    tokens=9000,
    batch=200,
    optimizer="adamw",
    lr=1e-2,
    unroll=4,
    ramp=0.2,
    thin=1.0,
    noise=0.0,
    labels="data",
    bf16=False,
)
"""Learns a few texts by heart in seconds."""


def answers_of(model: LlamaForCausalLM, count: int, *, tokens: int = 24, first: int = 1) -> list[Answer]:
    """Greedy answers to random prompts, of different lengths."""
    answers = []
    for index in range(first, first + count):
        random = torch.Generator().manual_seed(index)
        prompt = torch.randint(2, VOCAB, (1, 4 + index % 5), generator=random)
        length = tokens + index % 3
        text = model.generate(prompt, max_new_tokens=length, min_new_tokens=length, do_sample=False, pad_token_id=0)[0]
        answers.append(Answer(index=index, tokens=tuple(text.tolist()), start=prompt.shape[1], greedy=True))
    return answers


def cached(directory: Path, model: LlamaForCausalLM, answers: Sequence[Answer], kind: Kind) -> FeatureCache:
    """Their features."""
    directory.mkdir(parents=True, exist_ok=True)
    cache = FeatureCache(directory, answers, TAPS if kind == "eagle3" else (LAYERS,), HIDDEN)
    cache.fill(model)
    return cache


def write_data(directory: Path, target: Path, texts: Sequence[Sequence[int]], *, first: int, answer: int) -> Path:
    """A data set of these texts, numbered from `first`, each ending in `answer` answer tokens."""
    file = AnswerFile(directory, {"own_prompts": False, "model": str(target)})
    for index, text in enumerate(texts, start=first):
        file.add(Answer(index=index, tokens=tuple(text), start=len(text) - answer, greedy=True))
    file.close()
    return directory


def head_for(model: LlamaForCausalLM, answers: Sequence[Answer], kind: Kind, **more: bool) -> DraftHead:
    """A new head; an EAGLE-3 head can say some of the tokens only."""
    shape = shape_from_target(kind, model.config, HEAD_DIM, draft_vocab=DRAFT_VOCAB, taps=TAPS)
    ids = most_frequent(answers, size=shape.draft_vocab, vocab=VOCAB)
    scale = 0.5 + torch.rand(len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(0))
    return new_head(shape, model, ids, tap_scale=scale, seed=0, **more)


def batch_of(answers: Sequence[Answer], cache: FeatureCache, *, steps: int) -> Batch:
    """All of them in one batch."""
    return make_batch(answers, range(len(answers)), cache, steps=steps, device="cpu")


def reference_of(head: DraftHead) -> VariantHead:
    """The same head in the tests' own arithmetic; gradients reach its parameters."""
    eagle3, shape, tensors = isinstance(head, Eagle3), head.shape, dict[str, Tensor](head.named_parameters())
    if isinstance(head, Eagle3):
        tensors["fc.weight"] = head.fc.weight * head.tap_scale  # as in a checkpoint
    return VariantHead(
        truth=Truth(
            kind=shape.kind,
            layer_names=("midlayer",) if eagle3 else ("layers.0",),
            taps=TAPS if eagle3 else (LAYERS,),
            position_offset=0,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=HEAD_DIM,
            eps=shape.norm_eps,
            rope={"theta": shape.rope_theta},
        ),
        tensors=tensors,
        target_embedding=head.embedding,
        target_lm_head=torch.zeros(shape.vocab, HIDDEN),
    )
