"""What the comparison with other engines does around them: the workers' protocol, the arithmetic, the errors."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import bench_peers
import numpy as np
import pytest
from peers import catalogue, worker
from peers.client import Worker
from peers.environments import Environment, run
from peers.results import (
    Engine,
    Run,
    best_of_each_peer,
    median_ratio,
    perplexity_from_scores,
    summary,
    summary_table,
)
from typer.testing import CliRunner

from eagle_graphs import EagleError

FAKE = """
import os, sys
sys.path.insert(0, {tools!r})
import numpy as np
from peers import worker

class Fake:
    def __init__(self, *, start):
        os.write(1, b"a library greets from C\\n")
        self.start = start

    def generate(self, prompt, max_new_tokens):
        print("a library prints")
        if prompt == [13]:
            sys.exit("no luck with 13")
        return list(range(self.start, self.start + max_new_tokens)), 0.25, 0.5

    def logits(self, tokens):
        return np.zeros((len(tokens), 4), np.float32)

worker.ENGINES["fake"] = Fake
worker.main()
"""


def fake_worker(tmp_path: Path) -> Worker:
    script = tmp_path / "fake.py"
    script.write_text(FAKE.format(tools=str(Path(bench_peers.__file__).parent)), "utf-8")
    command = [sys.executable, str(script), "fake", json.dumps({"start": 5})]
    return Worker("fake, plain", command, log=tmp_path / "fake.log", variables=os.environ)


def test_a_worker_answers_line_by_line_whatever_its_libraries_print(tmp_path: Path) -> None:
    with fake_worker(tmp_path) as peer:
        assert peer.generate([1, 2], 3) == {"tokens": [5, 6, 7], "prefill_s": 0.25, "decode_s": 0.5}
        scores = peer.score([1, 2, 3])
    assert scores["nll"] == pytest.approx([math.log(4)] * 2)
    assert scores["likeliest"] == [0, 0]
    assert "a library greets from C" in (tmp_path / "fake.log").read_text("utf-8")


def test_a_worker_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    with fake_worker(tmp_path) as peer:
        with pytest.raises(EagleError, match=r"fake, plain ended with 1: no luck with 13 .*leave it out with --peers"):
            peer.generate([13], 3)
        with pytest.raises(EagleError, match="no luck with 13"):
            peer.generate([1], 3)


def test_answers_are_cut_at_their_end_and_at_the_limit() -> None:
    assert worker.timed(iter([4, 2, 9]), 8, ends=[2])[0] == [4, 2]
    assert worker.timed(iter([4, 3, 9]), 2, ends=[2])[0] == [4, 3]


def test_scores_are_of_the_tokens_that_follow() -> None:
    class Certain:
        def logits(self, tokens: list[int]) -> np.ndarray:
            return np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25], [1.0, 1.0, 1.0]], np.float32))

    found = worker.answer(Certain(), {"score": [0, 2, 1]})  # type: ignore[arg-type]
    assert found["nll"] == pytest.approx([-math.log(0.7), -math.log(0.25)], rel=1e-5)
    assert found["likeliest"] == [2, 0]


def a_run(rate: float, tokens: tuple[int, ...] = (1, 2, 3)) -> Run:
    """So many tokens a second."""
    return Run(tokens=list(tokens), prefill_s=0.1, decode_s=(len(tokens) - 1) / rate)


def an_engine(peer: str, name: str, *runs: Run, plain: bool = True) -> Engine:
    return Engine(peer=peer, name=name, plain=plain, runs=list(runs))


def test_speed_is_of_the_tokens_behind_the_first() -> None:
    assert Run(tokens=[7, 8, 9], prefill_s=5.0, decode_s=0.5).tokens_per_s == 4
    assert Run(tokens=[7], prefill_s=5.0, decode_s=0.0).tokens_per_s == 0


def test_a_ratio_is_the_median_of_the_prompts_ratios_not_the_ratio_of_medians() -> None:
    ours = [a_run(10), a_run(40), a_run(100)]
    theirs = [a_run(10), a_run(10), a_run(50)]
    assert median_ratio(ours, theirs) == pytest.approx(2)  # 1, 4, 2; the ratio of the medians is 4


def test_prompts_with_nothing_to_decode_are_left_out_of_ratios() -> None:
    assert median_ratio([a_run(30), a_run(10, (1,))], [a_run(10), a_run(10)]) == pytest.approx(3)
    assert math.isnan(median_ratio([a_run(10, (1,))], [a_run(10)]))


def test_the_summary_compares_plain_with_plain_and_names_each_peers_best() -> None:
    eagle = an_engine("eagle-aot", "profile 4", a_run(60), a_run(80), plain=False)
    plain = an_engine("eagle-aot", "plain", a_run(50), a_run(50))
    peer = an_engine("peer", "int4", a_run(20), a_run(40))
    guess = an_engine("peer", "int4, look-up 2", a_run(30), a_run(50, (1, 2, 4)), plain=False)
    engines = [eagle, plain, peer, guess]
    rows = summary(engines, eagle=eagle, plain=plain)
    assert [row["eagle_ratio"] for row in rows] == pytest.approx([1, 1.4, 2.5, 1.8])
    assert [row["plain_ratio"] for row in rows] == [None, 1, pytest.approx(1.875), None]
    assert [row["identical"] for row in rows] == [1, None, None, 0.5]
    assert [row["best"] for row in rows] == [True, False, False, True]
    assert best_of_each_peer(engines) == {"eagle-aot": eagle, "peer": guess}
    assert summary_table(rows, title="", eagle="profile 4").row_count == 4


def test_perplexity_is_over_all_windows() -> None:
    original = [{"nll": [0.0, 0.0], "likeliest": [1, 2]}, {"nll": [0.0], "likeliest": [3]}]
    found = [{"nll": [math.log(2), 0.0], "likeliest": [1, 9]}, {"nll": [math.log(4)], "likeliest": [3]}]
    row = perplexity_from_scores("int4", found, original)
    assert row.perplexity == pytest.approx(2)
    assert row.change == pytest.approx(1)
    assert row.agreement == pytest.approx(2 / 3)


def test_an_environment_that_cannot_be_made_says_why_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip = "#!/bin/sh\necho ERROR: no matching distribution\nexit 1\n"
    interpreter = tmp_path / "python"  # its venv holds a pip that fails
    interpreter.write_text(f"#!/bin/sh\nmkdir -p $3/bin\nprintf '{pip}' > $3/bin/python\nchmod +x $3/bin/python\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    environment = Environment(name="peer", requirements=("peer==1",))
    for _ in range(2):
        with pytest.raises(
            EagleError, match=r"environment of peer cannot be made: .* ended with 1: ERROR: no matching distribution"
        ):
            environment.python(tmp_path / "root")


def test_a_command_that_does_not_exist_is_an_error_of_one_line(tmp_path: Path) -> None:
    with pytest.raises(EagleError, match="the environment cannot be made: nowhere/python: No such file"):
        run(["nowhere/python"], log=tmp_path / "log", doing="the environment")


def test_a_failed_conversion_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor last; do :; done\nmkdir "$last"\necho out of memory\nexit 137\n')
    python.chmod(0o755)
    (tmp_path / "logs").mkdir()
    builds = catalogue.Builds(tmp_path / "m.gguf", tmp_path, lambda _: python)
    for _ in range(2):
        with pytest.raises(EagleError, match=r"the openvino build of m\.gguf cannot be made: .*out of memory"):
            builds.openvino()


def test_llama_cpp_is_compiled_for_what_the_processor_has() -> None:
    has = catalogue.llama_cpp_environment({"avx512f", "avx512_vnni"}).build_variables["CMAKE_ARGS"]
    assert "-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON" in has
    assert "BF16" not in has
    assert "NATIVE" not in catalogue.llama_cpp_environment({"neon"}).build_variables["CMAKE_ARGS"]


def test_every_setting_names_a_build_and_an_engine() -> None:
    known = catalogue.environments()
    for setting in catalogue.SETTINGS:
        assert callable(getattr(catalogue.Builds, setting.model))
        assert setting.peer in known
        assert setting.peer in worker.ENGINES


def test_unknown_peers_are_refused() -> None:
    with pytest.raises(EagleError, match=r"--peers names 'vllm'; expected some of llama\.cpp, .*, or all"):
        catalogue.chosen_settings("llama.cpp,vllm")


def test_a_plot_needs_matplotlib_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.find_spec", lambda name: None)
    with pytest.raises(EagleError, match="--plot needs matplotlib"):
        CliRunner().invoke(bench_peers.app, [str(tmp_path), "--plot", "x.svg"], catch_exceptions=False)


def test_a_comparison_from_bundle_to_json(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer is this project itself, without speculation: only the engines are not the real ones."""

    def stand_in(setting: catalogue.Setting, *, python: Path, model: Path, **more: object) -> Worker:
        return catalogue.eagle_worker("plain", bundle=tiny_bundle, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(bench_peers, "ROOT", tmp_path)
    monkeypatch.setattr(bench_peers, "peer_worker", stand_in)
    monkeypatch.setattr(Environment, "python", lambda self, root: Path(sys.executable))
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"turns": ["a b c"]}\n{"turns": ["d e f"]}\n', "utf-8")
    arguments = [tiny_bundle, "--peers", "llama.cpp", "--model", tmp_path / "m.gguf", "--prompts", prompts]
    arguments += ["--profiles", "8", "--max-new-tokens", "5", "--threads", "1", "--out", out]
    CliRunner().invoke(bench_peers.app, list(map(str, arguments)), catch_exceptions=False)
    found = json.loads(out.read_text("utf-8"))
    rows = found["summary"]
    assert [row["peer"] for row in rows[:3]] == ["eagle-aot", "eagle-aot", "llama.cpp"]
    assert rows[0]["identical"] == 1
    assert all(len(engine["runs"]) == 2 for engine in found["engines"])
    assert len({json.dumps([run["tokens"] for run in engine["runs"]]) for engine in found["engines"]}) == 1
