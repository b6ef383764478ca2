"""Acceptance does not fall with the length of the context by any fault of ours, on the real model.

A head may draft worse at the end of a long text. But a mask, a position or a window of the runtime that is right for
short prompts only would look just like that. So rounds and accepted length are held to those of the plain torch
reference after the same prompts: about 256 and 1000 tokens, and up to 4000 with --lossless-full, in a bundle that has
room for them. (A head that hardly feels positions accepts as much under wrong ones; its trees show them.)
"""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from eagle_runtime import Session
from tests.conftest import DEMO_HEAD, ROOT, demo_model, export
from tests.reference.head import ReferenceHead
from tests.reference.loop import ReferenceEagle
from tests.rounds import compare_rounds

LENGTHS, ALL_LENGTHS = (256, 1000), (256, 1000, 1900, 4000)
CAPACITY = 4352
TOKENS, NODES = 64, 8
QUESTION = "\n\nExplain in your own words what the text above is about."

pytestmark = pytest.mark.real_model


def test_acceptance_in_a_long_context_is_the_reference_s(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    demo_target: PreTrainedModel,
    demo_prompts: list[list[dict[str, str]]],
) -> None:
    full = bool(request.config.getoption("--lossless-full"))
    bundle = tmp_path / "roomy" if full else request.getfixturevalue("demo_bundle")
    if full:
        export(demo_model(), DEMO_HEAD, bundle, "--capacity", str(CAPACITY), "--profiles", str(NODES))
    reference = ReferenceEagle(demo_target, ReferenceHead.load(DEMO_HEAD, demo_target))
    licence = (ROOT / "LICENSE").read_text("utf-8")
    questions = "\n\n".join(message["content"] for messages in demo_prompts for message in messages)
    with Session.open(bundle, profile=str(NODES)) as session:
        for length in ALL_LENGTHS if full else LENGTHS:
            texts = (licence + questions + licence, questions + licence + questions)
            prompts = [prompt_of(session, text, length) for text in texts]
            print(f"after {[len(prompt) for prompt in prompts]} tokens, ", end="")
            assert all(length <= len(prompt) < length + 100 for prompt in prompts)
            compare_rounds(session, reference, NODES, prompts, tokens=TOKENS)


def prompt_of(session: Session, text: str, length: int) -> list[int]:
    """Tokens of a question about the first `length` tokens of a text."""
    beginning = session.tokenizer.decode(session.tokenizer.encode(text).ids[:length])
    return session.encode(messages=[{"role": "user", "content": beginning + QUESTION}])
