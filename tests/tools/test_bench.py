"""The benchmark over prompts, on a tiny bundle."""

from __future__ import annotations

import json
from pathlib import Path

import bench
import pytest
from typer.testing import CliRunner

from eagle_graphs import EagleError

PROMPTS = Path(bench.__file__).parent / "prompts.jsonl"


def run(*arguments: object) -> str:
    result = CliRunner().invoke(bench.app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_decoder_and_setting_has_a_row(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"category": "a", "turns": ["one two"]}\n{"category": "b", "turns": ["three"]}\n', "utf-8")
    options = ("--prompts", prompts, "--profile", "plain,4,auto-lookup", "--max-new-tokens", 8)
    found = json.loads(run(tiny_bundle, *options, "--temperature", "0,0.8", "--json"))
    rows = {(row["profile"], row["setting"]["temperature"]): row for row in found["results"]}
    assert rows.keys() == {(name, t) for name in ("plain", "4", "auto-lookup") for t in (0.0, 0.8)}
    for row in rows.values():
        assert row["categories"].keys() == {"a", "b"}
        assert (row["overall"]["prompts"], row["overall"]["identical_share"]) == (2, 1)
    assert rows["plain", 0.0]["overall"]["speedup"] == 1
    assert rows["plain", 0.0]["overall"]["accepted_length"] == 1


def test_prompts_are_taken_from_all_over_the_file() -> None:
    assert bench.spread(range(24), 4) == [0, 6, 12, 18]
    assert bench.spread(range(3), None) == bench.spread(range(3), 9) == [0, 1, 2]


@pytest.mark.parametrize("line", ["{", "[]", '{"turns": []}', '{"category": "a"}'])
def test_what_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(PROMPTS.read_text("utf-8").splitlines()[0] + "\n" + line + "\n", "utf-8")
    with pytest.raises(EagleError, match=r"prompts.jsonl:2 is no prompt; expected"):
        bench.read_prompts(path)
