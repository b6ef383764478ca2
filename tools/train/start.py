"""A new head for a target: its sizes, its vocabulary, its first weights; and how it is written."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from eagle_exporter.heads.spec import TargetShape
from eagle_graphs import EagleError
from tools.train.answers import Answer
from tools.train.features import Features
from tools.train.model import DraftHead, Eagle1, Eagle3, Kind, Shape

ROPE_THETA = 10000.0
SMALL = 0.1
"""Factor on random weights beside copied ones."""
SAMPLE = 64
"""Conversations from which the scale of hidden states is taken."""


def shape_from_target(
    kind: Kind, config: PretrainedConfig, head_dim: int, *, draft_vocab: int, taps: tuple[int, ...] | None
) -> Shape:
    """Sizes of a head that mirrors a layer of the target. EAGLE-1's vocabulary is the target's.

    taps: of EAGLE-3; without them those of the reference, 2, n // 2 and n - 3 of n layers.
    """
    target = TargetShape.of(config)
    if kind == "eagle1":
        draft_vocab, taps = target.vocab_size, (target.layers,)
    elif taps is None:
        taps = (2, target.layers // 2, target.layers - 3)
    if not all(0 <= tap <= target.layers for tap in taps):
        raise EagleError(f"taps are {list(taps)}; expected indices of 0 to {target.layers}: name them with --taps")
    heads = int(config.num_attention_heads)
    return Shape(
        kind=kind,
        taps=taps,
        hidden=target.hidden_size,
        intermediate=int(config.intermediate_size),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        vocab=target.vocab_size,
        draft_vocab=min(draft_vocab, target.vocab_size),
        norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rope_theta=target.rope_theta or ROPE_THETA,
        max_positions=int(config.max_position_embeddings),
    )


def most_frequent(answers: Sequence[Answer], *, size: int, vocab: int) -> torch.Tensor:
    """[size] the most frequent answer tokens of what is trained on, rising; a tie, and what is left, by lower id."""
    counts = Counter(token for answer in answers if not answer.held_out for token in answer.answer)
    return torch.tensor(sorted(sorted(range(vocab), key=lambda token: (-counts[token], token))[:size]))


def covered(answers: Sequence[Answer], ids: torch.Tensor) -> tuple[float, float]:
    """The share of answer tokens that a vocabulary has: of what is trained on, and of what is held out."""
    known = set(ids.tolist())
    said: list[list[bool]] = [[], []]
    for answer in answers:
        said[answer.held_out] += [token in known for token in answer.answer]
    trained, held_out = (sum(part) / max(1, len(part)) for part in said)
    return trained, held_out


def new_head(
    shape: Shape,
    target: PreTrainedModel,
    draft_ids: torch.Tensor,
    *,
    tap_scale: torch.Tensor,
    seed: int,
    from_target_layer: bool = False,
    token: bool = True,
    feature: bool = True,
) -> DraftHead:
    """A head with random weights whose outputs are about as large as their inputs, or with the target's last layer.

    EAGLE-3's LM head and last norm begin as the target's.
    """
    embedding = _weight(target.get_input_embeddings())
    lm_head = _weight(target.get_output_embeddings())
    head: DraftHead
    if shape.kind == "eagle1":
        head = Eagle1(shape, embedding, lm_head, token=token, feature=feature)
    else:
        head = Eagle3(shape, embedding, draft_ids, tap_scale)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=random)
        if isinstance(head, Eagle3):
            head.lm_head.weight.copy_(lm_head[draft_ids])
            _copy_if_it_fits(head.norm.weight, _last_norm(target))
            if not from_target_layer:  # logits of about one: of random hidden states they would mean nothing yet
                head.norm.weight.div_((head.lm_head.weight * head.norm.weight).norm(dim=1).mean())
        if from_target_layer:
            _copy_layer(head, target)
        if isinstance(head, Eagle1):
            head.fc.weight.mul_(head.sees)
    return head


def _weight(module: nn.Module | None) -> torch.Tensor:
    assert module is not None
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.detach()


def _last_norm(target: PreTrainedModel) -> torch.Tensor | None:
    norm = getattr(target.base_model, "norm", None)
    return getattr(norm, "weight", None)


def _copy_if_it_fits(own: torch.Tensor, other: object) -> None:
    if isinstance(other, torch.Tensor) and other.shape == own.shape:
        own.copy_(other)


def _copy_layer(head: DraftHead, target: PreTrainedModel) -> None:
    """The weights of the target's last layer, and features that begin as the last tap.

    What has no counterpart there, the parts of q, k, v and fc that read the embedding, stays random and small. Raises
    EagleError where the target's layers are not of the Llama kind.
    """
    layers: Any = target.base_model.layers
    theirs, hidden = dict(layers[-1].named_parameters()), head.shape.hidden
    own = dict(head.layer.named_parameters())
    own.pop("input_layernorm.weight", None)  # of the embedding
    for name, parameter in own.items():
        source = theirs.get(name.replace("hidden_norm", "input_layernorm"))
        if source is None:
            raise EagleError(f"--init-from-target-layer: the target's layers have no {name}; leave the option out")
        parameter.mul_(SMALL)
        parameter[..., -source.shape[-1] :].copy_(source)
    fc: torch.Tensor = head.fc.weight  # type: ignore[union-attr, assignment]
    fc.mul_(SMALL)
    scale = head.tap_scale[-hidden:] if isinstance(head, Eagle3) else torch.ones(hidden)
    fc[:, -hidden:] += torch.diag(1 / scale)


def tap_scale(answers: Sequence[Answer], features: Features) -> torch.Tensor:
    """[taps * h] one over the root mean square of each tapped channel, over some answers' tokens.

    Prompts are left out: what a text begins with often has hidden states a hundred times larger than all others.
    """
    sample = features.of(range(min(len(answers), SAMPLE)))
    states = [own[answer.start :, :-1] for own, answer in zip(sample, answers, strict=False)]
    return torch.cat(states).float().square().mean(dim=0).clamp(min=1e-6).rsqrt().flatten()


def write_head(head: DraftHead, directory: Path) -> None:
    """Writes a checkpoint in SafeAILab's layout, in half precision but for EAGLE-3's fc."""
    shape = head.shape
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if shape.kind == "eagle3" else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": shape.vocab,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }
    tensors = {name: tensor.detach().half().cpu().contiguous() for name, tensor in head.state_dict().items()}
    if isinstance(head, Eagle3):
        tensors["fc.weight"] = (head.fc.weight.detach() * head.tap_scale).cpu()  # half precision may not reach so low
        config |= {"draft_vocab_size": shape.draft_vocab, "eagle_feature_layers": list(shape.taps)}
        ids = head.draft_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(shape.vocab, dtype=torch.bool).index_fill(0, ids, True)
    else:
        config |= {"bias": False}
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1))
