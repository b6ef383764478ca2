"""Costs: guessed, then measured, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_graphs import profile_from_nodes
from eagle_runtime.cost_table import Line, load_table, save_table
from eagle_runtime.costs import Costs, extension_factor
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
    assert extension_factor(3) == 1
    assert extension_factor(200) > 3


def test_nothing_is_known_at_first() -> None:
    costs = Costs(PROFILES)
    assert costs.verify(1, 0) == costs.verify(16, 0) > costs.draft(16, 0)
    assert not costs.measured
    assert costs.table == {}


@pytest.mark.parametrize(
    ("known", "verify", "draft"),
    [
        (["verify 8"], (6.4e-3, 6.4e-3, 8e-3, 8e-3), (0.8e-3, 0.8e-3, 0.8e-3)),
        (["verify 1", "verify 16"], (6e-3, 6e-3, 6e-3, 12e-3), (0.6e-3, 0.6e-3, 0.6e-3)),
        (["draft 8"], (12e-3, 12e-3, 12e-3, 12e-3), (0.48e-3, 1.2e-3, 1.2e-3)),
    ],
)
def test_what_is_not_known_is_taken_for_as_cheap_as_it_may_be(known: list[str], verify: tuple, draft: tuple) -> None:
    costs = Costs(PROFILES, {step: TABLE[step] for step in known})
    assert [costs.verify(nodes, 0) for nodes in (1, 4, 8, 16)] == pytest.approx(verify)
    assert [costs.draft(nodes, 0) for nodes in (4, 8, 16)] == pytest.approx(draft)


def test_steps_of_other_profiles_are_left_out() -> None:
    assert Costs(PROFILES, {"verify 30": TABLE["verify 8"], "other": TABLE["verify 8"]}).table == {}


def observe(costs: Costs, step: str, seconds: float, times: int = 3, rows: int = 0) -> None:
    for _ in range(times):
        costs.observe(step, rows, seconds)


def test_the_first_run_of_a_step_does_not_count() -> None:
    costs = Costs(PROFILES, TABLE)
    costs.observe("verify 8", 0, 5.0)
    assert costs.table == TABLE


def base(costs: Costs, step: str) -> float:
    return costs.table[step].base


def test_steps_are_measured_in_turn() -> None:
    costs = Costs(PROFILES)
    observe(costs, "draft 4", 0.8e-3)
    observe(costs, "verify 4", 7e-3)
    assert (base(costs, "draft 4"), base(costs, "verify 4")) == pytest.approx((0.8e-3, 7e-3))
    observe(costs, "verify 16", 20e-3)
    assert (base(costs, "verify 16"), base(costs, "verify 4")) == pytest.approx((20e-3, 7e-3))
    assert costs.table.keys() == {"draft 4", "verify 4", "verify 16"}


def test_a_new_step_s_line_is_as_steep_as_that_of_its_neighbour() -> None:
    costs = Costs(PROFILES, {"verify 4": TABLE["verify 4"]})
    observe(costs, "verify 8", 22e-3, rows=1000)  # twice what 4 nodes cost there
    assert base(costs, "verify 8") == pytest.approx(14e-3)


def test_a_pause_in_one_of_the_first_runs_says_nothing_either() -> None:
    costs = Costs(PROFILES)
    for seconds in (1.0, 300.0, 7e-3, 7e-3):
        costs.observe("verify 4", 0, seconds)
    assert base(costs, "verify 4") == pytest.approx(7e-3)


def test_a_step_seldom_timed_is_given_some_doubt() -> None:
    costs, believed = Costs(PROFILES), []
    for _ in range(60):
        costs.observe("verify 4", 0, 7e-3)
        believed.append(costs.verify(4, 0))
    assert believed[2:] == sorted(believed[2:])
    assert believed[2] < 0.8 * 7e-3
    assert believed[-1] == pytest.approx(7e-3)


def test_a_step_that_looked_dear_at_first_is_put_right_by_its_own_times() -> None:
    costs = Costs(PROFILES)
    observe(costs, "verify 4", 7e-3)
    observe(costs, "verify 8", 5e-3)
    observe(costs, "verify 8", 9e-3, times=40)
    assert base(costs, "verify 8") == pytest.approx(9e-3, rel=0.05)
    assert base(costs, "verify 4") == pytest.approx(7e-3, rel=0.2)


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
