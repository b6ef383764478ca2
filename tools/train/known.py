"""A head to go on from: any that eagle-export reads, if it is built as this tool builds them."""

from __future__ import annotations

import numpy as np
import torch

from eagle_exporter.heads import Head, HeadSpec
from eagle_graphs import EagleError
from tools.train.model import DraftHead, Eagle3, Shape

NOT_TRAINED = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "own_embedding",
    "scaled_embedding",
    "position_offset",
)
"""What a head must not have: this tool would train it as if it had not."""
LM_HEAD = "lm_head.weight"


def shape_from_spec(spec: HeadSpec, vocab: int) -> Shape:
    """Sizes of a head that is there. Raises EagleError where this tool cannot train one of its architecture."""
    found = [name for name in NOT_TRAINED if getattr(spec, name)]
    found += [f"{spec.layers} layers"] if spec.layers != 1 else []
    found += [f"activation {spec.activation}"] if spec.activation != "silu" else []
    theta = spec.rope_parameters["rope_theta"]
    found += ["a scaled rope"] if spec.rope_parameters != {"rope_type": "default", "rope_theta": theta} else []
    if found or spec.own_lm_head != (spec.kind == "eagle3"):
        raise _refusal(found or ["an LM head" if spec.own_lm_head else "no LM head"])
    return Shape(
        kind=spec.kind,
        taps=spec.taps,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        heads=spec.attention_heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab=vocab,
        draft_vocab=spec.draft_vocab_size,
        norm_eps=spec.norm_eps,
        rope_theta=float(theta),
        max_positions=spec.max_positions,
    )


@torch.no_grad()
def load_weights(head: DraftHead, known: Head) -> None:
    """Puts a head's weights into one of its shape, but that the draft vocabulary may be another.

    The LM head's rows of tokens that the known one has not stay as they are. Raises EagleError where there are weights
    that would be lost.
    """
    parameters = {name.replace("midlayer.", "layers.0."): own for name, own in head.named_parameters()}
    if left := sorted(known.tensors.keys() ^ parameters.keys()):
        raise _refusal(left)
    for name, own in parameters.items():
        if name != LM_HEAD:
            own.copy_(known.tensors[name])
    if isinstance(head, Eagle3):
        _, here, there = np.intersect1d(head.draft_ids.cpu(), known.draft_to_target, return_indices=True)
        head.lm_head.weight[here] = known.tensors[LM_HEAD][there].to(head.lm_head.weight)
        head.fc.weight.div_(head.tap_scale)  # which a checkpoint has in fc


def _refusal(found: list[str]) -> EagleError:
    return EagleError(
        f"--from: the head has {', '.join(found)}; this tool trains heads of one Llama layer in SafeAILab's layout only"
    )
