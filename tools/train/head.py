"""`python -m tools.train head`: features, training, checkpoints, the finished head."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from eagle_exporter.checkpoint import find_checkpoint
from eagle_exporter.heads import Head, load_head
from eagle_exporter.target import Target, load_target
from eagle_graphs import EagleError
from tools.train.answers import Answer, read_answers, read_settings
from tools.train.features import FeatureCache, Features, FreshFeatures, JoinedFeatures
from tools.train.known import load_weights, shape_from_spec
from tools.train.loop import Point, Trainer
from tools.train.model import DraftHead, Kind, Shape
from tools.train.options import Options
from tools.train.plots import plot_training
from tools.train.progress import token_progress
from tools.train.start import covered, most_frequent, new_head, shape_from_target, tap_scale, write_head
from tools.train.state import load_state, save_state

STATE, HISTORY, CURVES = "state.pt", "history.json", "curves.png"
SDPA = "sdpa"
DRAFT_VOCAB = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """Which head to train on which data."""

    kind: Kind
    data: tuple[Path, ...]
    out: Path
    model: str | None
    """The target; the data's own where none is named."""
    draft_vocab: int | None
    """Without a number, `DRAFT_VOCAB` or the known head's own tokens."""
    taps: tuple[int, ...] | None
    init_from_target_layer: bool
    known: str | None
    """A head to go on from, which settles kind and taps."""
    cache: bool
    """Whether the target's hidden states are kept on disk."""
    device: str
    training: Options
    token: bool = True
    feature: bool = True
    """What an EAGLE-1 head sees (ablations)."""


def train_head(options: HeadOptions, console: Console) -> list[dict[str, Any]]:
    """Trains to the end, or goes on with what was begun; returns the run's history."""
    parts = [read_answers(data) for data in options.data]
    answers = [answer for part in parts for answer in part]
    target = load_target(find_checkpoint(options.model or _model_of(options.data), what="target"))
    known = load_head(find_checkpoint(options.known, what="head"), target.config) if options.known else None
    shape, ids = _shape_and_vocabulary(options, known, target, answers)
    if shape.kind == "eagle3":
        trained, held_out = covered(answers, ids)
        console.print(
            f"draft vocabulary: {shape.draft_vocab:,} of {shape.vocab:,} tokens, {trained:.2%} of the answers and "
            f"{held_out:.2%} of the held-out ones",
            highlight=False,
        )
    lm_head = target.model.get_output_embeddings().weight.detach()
    features = _features(target, parts, shape.taps, options, console)
    head = new_head(
        shape,
        target.model,
        ids,
        tap_scale=tap_scale(answers, features),
        seed=options.training.seed,
        from_target_layer=options.init_from_target_layer,
        token=options.token,
        feature=options.feature,
    )
    if known is not None:
        load_weights(head, known)
    trainer = Trainer(head, answers, features, lm_head, options.training, device=options.device)
    del target
    _train(trainer, _settings(options, answers, head), options.out, console)
    return trainer.run.history


def _model_of(data: Sequence[Path]) -> str:
    """The target that wrote the data. Raises EagleError where there are several."""
    models = list(dict.fromkeys(str(read_settings(each)["model"]) for each in data))
    if len(models) > 1:
        raise EagleError(f"the data sets name {' and '.join(models)} as their target: say with --model which one it is")
    return models[0]


def _shape_and_vocabulary(
    options: HeadOptions, known: Head | None, target: Target, answers: list[Answer]
) -> tuple[Shape, torch.Tensor]:
    """Sizes, and [W] the target's ids of the draft's tokens."""
    if known is None:
        size = options.draft_vocab or DRAFT_VOCAB
        shape = shape_from_target(options.kind, target.config, target.kv.head_dim, draft_vocab=size, taps=options.taps)
    else:
        shape = shape_from_spec(known.spec, int(target.config.vocab_size))
        if options.draft_vocab is None:
            return shape, known.draft_to_target
        if shape.kind == "eagle1":
            raise EagleError("--draft-vocab: an EAGLE-1 head says every token of its target, leave the option out")
        shape = replace(shape, draft_vocab=min(options.draft_vocab, shape.vocab))
    return shape, most_frequent(answers, size=shape.draft_vocab, vocab=shape.vocab)


def _features(
    target: Target, parts: list[list[Answer]], taps: tuple[int, ...], options: HeadOptions, console: Console
) -> Features:
    model = target.model.to(options.device)
    model.set_attn_implementation(SDPA)
    bf16 = options.training.bf16
    if not options.cache:
        return FreshFeatures(model, [answer for part in parts for answer in part], taps, bf16=bf16)
    hidden = int(target.config.hidden_size)
    caches = [
        FeatureCache.find(data, answers, taps, layers=target.kv.layers, hidden=hidden)
        for data, answers in zip(options.data, parts, strict=True)
    ]
    for cache, answers in zip(caches, parts, strict=True):
        if cache.done < len(answers):
            _fill(cache, answers, target.model, bf16, console)
    return JoinedFeatures(caches, [len(answers) for answers in parts])


def _fill(cache: FeatureCache, answers: list[Answer], model: PreTrainedModel, bf16: bool, console: Console) -> None:
    total = sum(len(answer.tokens) for answer in answers)
    so_far = sum(len(answer.tokens) for answer in answers[: cache.done])
    with token_progress(console, "features", total, so_far) as moved:

        def more(tokens: int) -> None:
            nonlocal so_far
            so_far += tokens
            moved(so_far)

        with torch.autocast(model.device.type, torch.bfloat16, enabled=bf16):
            cache.fill(model, more)


def _settings(options: HeadOptions, answers: list[Answer], head: DraftHead) -> dict[str, Any]:
    unused = {"muon_lr": None} if options.training.optimizer == "adamw" else {}
    return {
        **asdict(options.training),
        **unused,
        **asdict(head.shape),
        "vocabulary": hashlib.sha256(head.draft_ids.cpu().numpy().tobytes()).hexdigest(),
        "conversations": len(answers),
        "init_from_target_layer": options.init_from_target_layer,
        "from": options.known,
        "cache": options.cache,
        "token": options.token,
        "feature": options.feature,
    }


def _train(trainer: Trainer, settings: dict[str, Any], out: Path, console: Console) -> None:
    place = out / "training"
    if (place / STATE).exists():
        load_state(trainer, settings, place / STATE)
    tokens = trainer.run.tokens
    with token_progress(console, "training", trainer.options.tokens, tokens) as moved:

        def on_step(more: int) -> None:
            nonlocal tokens
            tokens += more
            moved(tokens)

        def on_point(point: Point) -> None:
            console.print(_line(point), highlight=False, soft_wrap=True)
            save_state(trainer, settings, place / STATE)
            write_head(trainer.head, out)
            (place / HISTORY).write_text(json.dumps(trainer.run.history, indent=1))

        trainer.train(on_step, on_point)
    drawn = plot_training(trainer.run.history, place / CURVES)
    console.print(f"wrote {out}/ : try  eagle-export --model M --draft {out}", highlight=False)
    curves = str(place / CURVES) if drawn else "pip install 'eagle-aot[train]' draws them"
    console.print(f"curves: {curves}", markup=False, highlight=False)


def _line(point: Point) -> str:
    text = f"{point.tokens:>11,}  loss {point.loss:.3f}  right {' '.join(f'{a:.3f}' for a in point.acceptance)}"
    if point.held_out is not None:
        chain = " ".join(f"{a:.3f}" for a in point.held_out.acceptance)
        text += f"  held out {chain}, accepted length {point.held_out.length:.3f}"
    return text
