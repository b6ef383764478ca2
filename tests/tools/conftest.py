"""What the trainer's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> LlamaForCausalLM:
    """The tiny target, as transformers runs it."""
    return LlamaForCausalLM.from_pretrained(tiny_target).eval()
