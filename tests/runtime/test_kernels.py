"""Which of a bundle's kernels run, and what is said where they are not the best ones."""

from __future__ import annotations

from pathlib import Path

import pytest

import eagle_graphs.native
from eagle_graphs import EagleError
from eagle_runtime import Session
from tests.commands import assert_refused, eagle_run

PROMPT = ("--prompt", "hello", "--max-new-tokens", 8, "--json")
FALLBACK = "on ONNX Runtime's own ops, since the library of native CPU ops cannot be used here: it was not built"


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr(eagle_graphs.native, "library_path", lambda: None)


@pytest.mark.parametrize("kernels", ["auto", "native", "stock"])
def test_kernels_are_chosen_by_name(tiny_bundle: Path, kernels: str) -> None:
    with Session.open(tiny_bundle, kernels=kernels) as session:
        assert session.engine.kernels == ("native" if kernels == "auto" else kernels)
        assert session.fallback is None
    outcome = eagle_run(tiny_bundle, *PROMPT, "--kernels", kernels)
    assert (outcome.status, outcome.err) == (0, "")


def test_falling_back_to_stock_kernels_is_said_once(tiny_bundle: Path, no_library: None) -> None:
    with Session.open(tiny_bundle) as session:
        assert session.engine.kernels == "stock"
        assert session.fallback is not None
        assert session.fallback.startswith(FALLBACK)
    outcome = eagle_run(tiny_bundle, *PROMPT)
    assert outcome.status == 0
    assert outcome.err == f"note: {session.fallback}\n"


def test_stock_kernels_that_were_asked_for_are_no_fallback(tiny_bundle: Path, no_library: None) -> None:
    outcome = eagle_run(tiny_bundle, *PROMPT, "--kernels", "stock")
    assert (outcome.status, outcome.err) == (0, "")


def test_kernels_that_cannot_be_had(tiny_bundle: Path, tiny_int8_bundle: Path, no_library: None) -> None:
    assert_refused(eagle_run(tiny_bundle, *PROMPT, "--kernels", "native"), "cannot be used here: it was not built")
    assert_refused(eagle_run(tiny_int8_bundle, *PROMPT), "cannot be used here: it was not built")
    assert_refused(eagle_run(tiny_int8_bundle, *PROMPT, "--kernels", "stock"), "the bundle has graphs for native")
    assert_refused(eagle_run(tiny_bundle, *PROMPT, "--kernels", "best"), "the bundle has graphs for native, stock")


def test_an_unknown_instruction_set_is_an_error(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_CPU_ISA", "sse9")
    with pytest.raises(EagleError, match=r"^EAGLE_CPU_ISA is 'sse9', but this CPU offers portable"):
        Session.open(tiny_bundle)
    assert_refused(eagle_run(tiny_bundle, *PROMPT), "EAGLE_CPU_ISA is 'sse9'", "name one of them or unset it")
    assert eagle_run(tiny_bundle, *PROMPT, "--kernels", "stock").status == 0
