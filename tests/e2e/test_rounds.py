"""The runtime drafts, verifies and accepts what the plain torch reference does, round by round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from eagle_runtime import Session
from tests.conftest import DEMO_HEAD
from tests.reference.head import ReferenceHead
from tests.reference.loop import ReferenceEagle
from tests.rounds import compare_rounds

PROMPTS, TOKENS = 4, 40


@pytest.mark.real_model
@pytest.mark.parametrize("nodes", [4, 8, 16])
def test_every_round_is_the_reference_s(
    nodes: int, demo_bundle: Path, demo_target: PreTrainedModel, demo_prompts: list[list[dict[str, str]]]
) -> None:
    reference = ReferenceEagle(demo_target, ReferenceHead.load(DEMO_HEAD, demo_target))
    with Session.open(demo_bundle, profile=str(nodes)) as session:
        prompts = [session.encode(messages=messages) for messages in demo_prompts[:: len(demo_prompts) // PROMPTS]]
        compare_rounds(session, reference, nodes, prompts[:PROMPTS], tokens=TOKENS)


@pytest.mark.parametrize("nodes", [4, 16])
def test_every_round_of_a_tiny_model_is_the_reference_s(
    nodes: int, tiny_bundle: Path, tiny_target: Path, tiny_head: Path
) -> None:
    target = LlamaForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    reference = ReferenceEagle(target, ReferenceHead.load(tiny_head, target), taps=(2, 3, 3))
    random = np.random.default_rng(5)
    with Session.open(tiny_bundle, profile=str(nodes), threads=1) as session:
        prompts = [random.integers(2, 300, length).tolist() for length in (2, 15, 16, 17, 40)]  # chunks are 16 tokens
        compare_rounds(session, reference, nodes, prompts, tokens=TOKENS)
