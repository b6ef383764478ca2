"""Measured costs: of every step, kept for the next session, used by it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_graphs.tensorrt.bundle import read_manifest, write_manifest
from eagle_runtime import Session
from tests.commands import eagle_run
from tests.drafters import random_prompt

STEPS = {"draft 16", "draft 4", "draft 8", "verify 1", "verify 16", "verify 4", "verify 8"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "eagle-aot" / "costs.json"


def test_every_step_is_measured_and_kept(tiny_bundle: Path) -> None:
    with Session.open(tiny_bundle, threads=1) as session:
        table = session.tune()
        assert table.keys() == STEPS
        assert all(line.base > 0 and line.slope >= 0 for line in table.values())
        assert session._learned.costs[True].table == table
    with Session.open(tiny_bundle, threads=1) as session:
        assert session._learned.costs[True].table == table
    with Session.open(tiny_bundle, threads=2) as session:
        assert session._learned.costs[True].table == {}, "other threads have other costs"
    with Session.open(tiny_bundle, threads=1, drafting="stepwise") as session:
        assert session._learned.costs[True].table == {}, "and so has another way of drafting"


def test_an_export_leaves_the_costs_of_its_machine(tiny_bundle: Path, tmp_path: Path) -> None:
    """The measuring that it does on a bundle whose manifest is not yet the last one."""
    manifest = read_manifest(tiny_bundle)
    early = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, early)
    other = next(name for name in ("plain", "4") if name != manifest.default_profile)
    write_manifest(early, replace(manifest, default_profile=other))
    request = {
        "prompts": [random_prompt(20)],
        "profiles": ["plain", "8"],
        "kernels": "auto",
        "max_new_tokens": 4,
        "tune": True,
    }
    subprocess.run(
        [sys.executable, "-m", "eagle_runtime.measure", str(early)],
        input=json.dumps(request),
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with Session.open(tiny_bundle) as session:
        assert session._learned.costs[True].table.keys() == STEPS


def test_without_the_head_only_verifying_is_measured(tiny_bundle: Path) -> None:
    with Session.open(tiny_bundle, threads=1, profile="lookup") as session:
        assert session.tune().keys() == {"verify 1", "verify 4", "verify 8", "verify 16"}


def test_answers_before_and_after_are_the_same(tiny_bundle: Path) -> None:
    asked = {"token_ids": random_prompt(20), "max_new_tokens": 30}
    with Session.open(tiny_bundle, threads=1) as session:
        before = session.generate(**asked).token_ids
        session.tune()
        assert session.generate(**asked).token_ids == before


def test_real_rounds_are_measured_too_and_kept_when_the_session_ends(tiny_bundle: Path) -> None:
    with Session.open(tiny_bundle, threads=1) as session:
        session.generate(token_ids=random_prompt(20), max_new_tokens=60, ignore_eos=True)
        learned = session._learned.costs[True].table
        assert learned
    with Session.open(tiny_bundle, threads=1) as session:
        assert session._learned.costs[True].table == learned


def test_the_command_prints_a_row_for_each_size(tiny_bundle: Path, cache: Path) -> None:
    outcome = eagle_run(tiny_bundle, "--tune")
    assert (outcome.status, outcome.err) == (0, "")
    assert "milliseconds of a round, measured here" in outcome.out
    for nodes in ("1", "4", "8", "16"):
        assert f"│ {nodes} " in outcome.out
    assert cache.exists()
