"""The scan of circumstances, on a tiny bundle."""

from __future__ import annotations

import json
from pathlib import Path

import bench_scan
import pytest
from typer.testing import CliRunner

from eagle_graphs import EagleError
from eagle_runtime import Session


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"category": category, "messages": [{"role": "user", "content": text}]}
        for category, text in (("b", "one two three"), ("a", "four five"), ("b", "six"))
    ]
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return path


def test_every_axis_is_measured_and_written(tiny_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "scan.json"
    arguments = [tiny_bundle, "--prompts", prompts, "--profiles", "4,auto", "--limit", 2, "--max-new-tokens", 8]
    result = CliRunner().invoke(bench_scan.app, list(map(str, [*arguments, "--out", out])), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())
    assert list(rows) == list(bench_scan.AXES)
    assert list(rows["prompt"]) == ["64"], "what the cache of 160 rows does not take is left out"
    assert list(rows["answer"]) == ["16", "64"]
    assert list(rows["category"]) == ["a", "b"]
    assert list(rows["bundle"]) == [str(tiny_bundle)]
    assert rows["category"]["a"]["4"]["prompts"] == 1
    for values in rows.values():
        for found in values.values():
            assert list(found) == ["4", "auto"]
            assert found["4"]["identical_share"] == 1
            assert found["4"]["speedup"] > 0
    assert result.output.count("no fixed tree pays at:") == len(bench_scan.AXES)


def test_bundles_of_other_trees_keep_to_their_columns(capsys: pytest.CaptureFixture[str]) -> None:
    def row(speedup: float) -> dict[str, float]:
        return {"plain_tokens_per_s": 100.0, "accepted_length": 1.5, "identical_share": 1.0, "speedup": speedup}

    bench_scan.print_axis(
        "bundle", {"a": {"4": row(1.11), "auto": row(1.22)}, "b": {"8": row(1.33), "auto": row(1.44)}}
    )
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[1]: [cell.split()[0] for cell in line.split("│")[3:-1]] for line in lines if "1.5" in line}
    assert cells == {"a": ["1.11x", "1.22x", "-"], "b": ["-", "1.44x", "1.33x"]}


def test_where_no_fixed_tree_pays_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"plain_tokens_per_s": 100.0, "accepted_length": 1.5, "identical_share": 1.0}
    slow, fast = {**row, "speedup": 0.9}, {**row, "speedup": 1.1}
    values = {"16": {"4": slow, "8": slow, "auto": fast}, "64": {"4": slow, "8": fast, "auto": fast}}
    bench_scan.print_axis("answer", values)
    assert "no fixed tree pays at: 16\n" in capsys.readouterr().out
    bench_scan.print_axis("answer", {"16": {"auto": fast}})
    assert "no fixed tree" not in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [5, 64, 100])
def test_a_prompt_is_made_as_long_as_asked_and_ends_with_its_question(tiny_bundle: Path, tokens: int) -> None:
    texts = [("a", [{"role": "user", "content": text}]) for text in ("what is this", "some other words", "and more")]
    with Session.open(tiny_bundle, profile="plain") as session:
        made = bench_scan.lengthened(session, texts, texts[0][1], tokens)
        short = session.encode(messages=texts[0][1])
    assert len(made) == tokens
    assert made[-min(tokens, 3) :] == short[-min(tokens, 3) :]


def test_an_axis_that_there_is_not_is_refused() -> None:
    with pytest.raises(EagleError, match="--axes names 'width'; expected some of prompt, answer"):
        bench_scan.axes_from_option("prompt,width")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.find_spec", lambda name: None)
    with pytest.raises(EagleError, match="--plot needs matplotlib"):
        CliRunner().invoke(bench_scan.app, [str(tmp_path), "--plot", "x.svg"], catch_exceptions=False)
