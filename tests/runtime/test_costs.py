"""Costs: guessed, then measured, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_graphs import profile_from_nodes
from eagle_runtime.cost_table import Line, load_table, save_table
from eagle_runtime.costs import Costs
from eagle_runtime.user_cache import read_cache, write_cache

PROFILES = [profile_from_nodes(nodes) for nodes in (4, 8, 16)]
TABLE = {
    "verify 1": Line(base=6e-3, slope=2e-6),
    "verify 4": Line(base=7e-3, slope=4e-6),
    "verify 8": Line(base=8e-3, slope=8e-6),
    "verify 16": Line(base=12e-3, slope=16e-6),
    "draft 4": Line(base=0.8e-3, slope=0.0),
    "draft 8": Line(base=1.2e-3, slope=0.0),
    "draft 16": Line(base=2e-3, slope=0.0),
}


def test_a_table_gives_lines_in_the_context() -> None:
    costs = Costs(PROFILES, TABLE)
    assert costs.verify(8, 0) == 8e-3
    assert costs.verify(8, 1000) == pytest.approx(16e-3)
    assert costs.draft(4, 0) == 0.8e-3
    assert costs.table == TABLE


def test_rows_that_waited_make_drafting_dearer() -> None:
    costs = Costs(PROFILES, TABLE)
    assert costs.draft(8, 0, waiting=3) == costs.draft(8, 0)
    assert costs.draft(8, 0, waiting=200) > 3 * costs.draft(8, 0)


def test_guesses_are_in_order_and_nothing_is_known() -> None:
    costs = Costs(PROFILES)
    sizes = [costs.verify(nodes, 0) for nodes in (1, 4, 8, 16)]
    assert sizes == sorted(sizes)
    assert not costs.measured
    assert costs.table == {}


def observe(costs: Costs, step: str, seconds: float, times: int = 3, rows: int = 0) -> None:
    for _ in range(times):
        costs.observe(step, rows, seconds)


def test_the_first_run_of_a_step_does_not_count() -> None:
    costs = Costs(PROFILES, TABLE)
    costs.observe("verify 8", 0, 5.0)
    assert costs.table == TABLE


def test_the_first_measurement_gives_the_unit_and_others_their_own_places() -> None:
    costs = Costs(PROFILES)
    observe(costs, "verify 4", 7e-3)
    guess = costs.verify(16, 0) / costs.verify(4, 0)
    assert costs.verify(4, 0) == pytest.approx(7e-3)
    assert guess == pytest.approx(Costs(PROFILES).verify(16, 0) / Costs(PROFILES).verify(4, 0))
    observe(costs, "verify 16", 20e-3)
    assert costs.verify(16, 0) == pytest.approx(20e-3)
    assert costs.verify(4, 0) == pytest.approx(7e-3)
    assert costs.table.keys() == {"verify 4", "verify 16"}


@pytest.mark.parametrize("step", ["verify 4", "draft 8"])
def test_guesses_stand_in_the_unit_of_what_is_known(step: str) -> None:
    costs, guessed = Costs(PROFILES, {step: TABLE[step]}), Costs(PROFILES)
    assert costs.verify(16, 0) / costs.verify(1, 0) == pytest.approx(guessed.verify(16, 0) / guessed.verify(1, 0))
    kind, nodes = step.split()
    assert (costs.verify if kind == "verify" else costs.draft)(int(nodes), 0) == TABLE[step].base
    assert costs.verify(1, 0) < 0.02


def test_a_pause_in_one_of_the_first_runs_says_nothing_either() -> None:
    costs = Costs(PROFILES)
    for seconds in (1.0, 300.0, 7e-3, 7e-3):
        costs.observe("verify 4", 0, seconds)
    assert costs.verify(4, 0) == pytest.approx(7e-3)


def test_a_machine_that_becomes_slower_makes_all_steps_dearer() -> None:
    costs = Costs(PROFILES, TABLE)
    observe(costs, "verify 4", 14e-3, times=60)
    assert costs.verify(4, 0) == pytest.approx(14e-3, rel=0.02)
    assert 1.5 * 12e-3 < costs.verify(16, 0) < 2 * 12e-3


def test_steps_find_their_true_costs_in_turn() -> None:
    costs = Costs(PROFILES, TABLE)
    for _ in range(400):
        observe(costs, "verify 4", 5e-3, times=1)
        observe(costs, "verify 8", 16e-3, times=1)
        observe(costs, "draft 4", 2e-3, times=1)
    found = (costs.verify(4, 0), costs.verify(8, 0), costs.draft(4, 0))
    assert found == pytest.approx((5e-3, 16e-3, 2e-3), rel=0.1)


def test_a_pause_of_minutes_says_nothing() -> None:
    costs = Costs(PROFILES, TABLE)
    observe(costs, "verify 4", 7e-3)
    observe(costs, "verify 4", 300.0, times=1)
    assert costs.verify(4, 0) < 1.1 * 7e-3


def test_drafting_after_a_long_wait_is_not_measured() -> None:
    costs = Costs(PROFILES, TABLE)
    for _ in range(10):
        costs.observe_drafting(4, 0, 100, 8e-3)
    assert costs.table == TABLE
    for _ in range(10):
        costs.observe_drafting(4, 0, 3, 8e-3)
    assert costs.draft(4, 0) > 0.8e-3


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "eagle-aot" / "costs.json"


def test_a_table_is_kept_under_its_key(cache: Path) -> None:
    assert load_table("a") == {}
    save_table("a", TABLE)
    save_table("b", {})
    assert (load_table("a"), load_table("b")) == (TABLE, {})


@pytest.mark.parametrize(
    "entry",
    [
        '{"verify 1": 3}',
        '{"verify 1": [1.0]}',
        '{"verify 1": ["1", 0.0]}',
        '{"verify 1": [0.0, 0.0]}',
        '{"verify 1": [1.0, -1.0]}',
        '{"verify 1": [NaN, 0.0]}',
        "3",
    ],
)
def test_a_damaged_table_is_none(cache: Path, entry: str) -> None:
    cache.parent.mkdir()
    cache.write_text(f'{{"a": {entry}}}')
    assert load_table("a") == {}


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_damaged_cache_is_empty_and_written_anew(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text, "latin-1")
    assert read_cache("costs.json") == {}
    write_cache("costs.json", {"a": 1})
    assert read_cache("costs.json") == {"a": 1}


def test_only_the_latest_entries_are_kept(cache: Path) -> None:
    write_cache("costs.json", {str(i): i for i in range(600)})
    assert next(iter(read_cache("costs.json"))) == "88"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    write_cache("costs.json", {"a": 1})
    assert read_cache("costs.json") == {}
