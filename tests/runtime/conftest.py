"""Sessions of the tiny bundle, and a continuation that is known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_runtime import Session
from tests.drafters import Known, random_prompt, run_plain, stop_string


@pytest.fixture(scope="module")
def session(tiny_bundle: Path) -> Iterator[Session]:
    """For the loop's tests, which put their own drafter beside its target."""
    with Session.open(tiny_bundle, profile="8", threads=1) as opened:
        yield opened


@pytest.fixture
def fresh(tiny_bundle: Path) -> Iterator[Session]:
    """A session that nobody has used."""
    with Session.open(tiny_bundle, profile="8", threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def known(session: Session) -> Known:
    """A continuation whose first 11 tokens differ, the 8th and 9th of them readable and new text."""
    for seed in range(200):
        prompt = random_prompt(20, seed)
        tokens = run_plain(session, prompt, 48)
        before, seam = session.tokenizer.decode(tokens[:8]), stop_string(session, tokens)
        if len(set(tokens[:11])) == 11 and len(seam) == 2 and seam.isascii() and seam.isprintable():
            assert seam not in before
            return Known(prompt=prompt, tokens=tokens)
    raise AssertionError("no prompt has such a continuation")
