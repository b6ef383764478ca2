"""eagle-run as people and scripts use it: JSON, standard input in every form, trees, the chat."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from eagle_runtime import Session
from tests.commands import eagle_run

PROMPT = "the quick brown fox"
MESSAGES = [{"role": "user", "content": PROMPT}]
ANSWER = {"text", "token_ids", "finish_reason", "stats"}
STATS = {"tokens", "rounds", "accepted_length", "acceptance_rate", "prefill_s", "decode_s", "tokens_per_s", "phases_ms"}
PHASES = {"draft", "tree", "verify", "accept", "commit", "host"}
REUSED = re.compile(r"(stop|length|cancelled); \d+ tokens, .*?, (\d+) of (\d+)\s+prompt\s+tokens\s+reused", re.DOTALL)
PATIENCE_S = 60


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> str:
    """The answer to MESSAGES."""
    with Session.open(tiny_bundle, profile="8") as session:
        return session.generate(messages=MESSAGES, max_new_tokens=12).text


# One answer


def test_text_is_streamed_and_nothing_else_is_printed(tiny_bundle: Path, expected: str) -> None:
    outcome = eagle_run(tiny_bundle, "--prompt", PROMPT, "--profile", "8", "--max-new-tokens", 12)
    assert (outcome.status, outcome.out, outcome.err) == (0, expected + "\n", "")


def test_json_has_these_keys(tiny_bundle: Path, expected: str) -> None:
    outcome = eagle_run(tiny_bundle, "--prompt", PROMPT, "--profile", "8", "--max-new-tokens", 12, "--json")
    assert (outcome.status, outcome.err, outcome.out.count("\n")) == (0, "", 1)
    answer = json.loads(outcome.out)
    assert answer.keys() == ANSWER
    assert answer["text"] == expected
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == answer["stats"]["tokens"] == 12
    assert answer["stats"].keys() >= STATS
    assert answer["stats"]["phases_ms"].keys() == PHASES


def test_json_of_a_comparison_has_these_keys(tiny_bundle: Path) -> None:
    options = ["--profile", "8", "--max-new-tokens", 12, "--json", "--compare"]
    answer = json.loads(eagle_run(tiny_bundle, "--prompt", PROMPT, *options).out)
    assert answer.keys() == ANSWER | {"plain", "identical", "speedup"}
    assert answer["plain"].keys() == ANSWER
    assert answer["identical"] is True
    assert answer["plain"]["token_ids"] == answer["token_ids"]
    assert answer["plain"]["stats"]["accepted_length"] == 1.0
    assert answer["speedup"] > 0


def test_a_comparison_for_people(tiny_bundle: Path, expected: str) -> None:
    outcome = eagle_run(tiny_bundle, "--prompt", PROMPT, "--profile", "8", "--max-new-tokens", 12, "--compare")
    assert outcome.out.startswith(expected)
    assert re.search(r"^exactness: near-tie|^exactness: bitwise", outcome.out, re.MULTILINE)
    assert re.search(r"^identical: yes  accepted length: \d\.\d\d  speed-up: \d", outcome.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "stdin"),
    [
        (["-"], PROMPT),
        (["-"], f"  {PROMPT}\r\n"),
        (["--prompt", "-"], PROMPT + "\n"),
        (["-", "--prompt", "-"], PROMPT + "\n"),
        (["--messages", "-"], json.dumps(MESSAGES)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_every_way_in_gives_the_same_answer(tiny_bundle: Path, expected: str, options: list[str], stdin: str) -> None:
    outcome = eagle_run(tiny_bundle, *options, "--profile", "8", "--max-new-tokens", 12, stdin=stdin)
    assert (outcome.status, outcome.out) == (0, expected + "\n")


def test_messages_from_a_file(tiny_bundle: Path, tmp_path: Path, expected: str) -> None:
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(MESSAGES))
    outcome = eagle_run(tiny_bundle, "--messages", path, "--profile", "8", "--max-new-tokens", 12)
    assert (outcome.status, outcome.out) == (0, expected + "\n")


@pytest.mark.parametrize("way", [["--prompt", PROMPT, "--raw"], ["-", "--raw"]], ids=" ".join)
def test_raw_leaves_the_template_out(tiny_bundle: Path, way: list[str]) -> None:
    with Session.open(tiny_bundle) as session:
        continued = session.generate(PROMPT, max_new_tokens=12).token_ids
    outcome = eagle_run(tiny_bundle, *way, "--max-new-tokens", 12, "--json", stdin=PROMPT)
    assert json.loads(outcome.out)["token_ids"] == continued


def test_stop_strings_end_an_answer(tiny_bundle: Path, expected: str) -> None:
    stop = expected[3:5]
    outcome = eagle_run(tiny_bundle, "--prompt", PROMPT, "--stop", "never said", "--stop", stop, "--json")
    answer = json.loads(outcome.out)
    assert answer["finish_reason"] == "stop"
    assert answer["text"] == expected[: expected.index(stop)]


def test_trees_are_drawn(tiny_bundle: Path, expected: str) -> None:
    outcome = eagle_run(tiny_bundle, "--prompt", PROMPT, "--profile", "8", "--max-new-tokens", 12, "--show-tree")
    rounds = re.findall(r"^round (\d+): \d+ of 7 drafted accepted, \d+ committed", outcome.out, re.MULTILINE)
    assert rounds == [str(number) for number in range(1, len(rounds) + 1)]
    assert len(rounds) > 1
    assert outcome.out.count("%") == 7 * len(rounds)
    assert outcome.out.endswith(expected + "\n")


def test_an_output_that_cannot_show_every_character_still_gets_the_rest(tiny_bundle: Path) -> None:
    command = [sys.executable, "-m", "eagle_runtime", str(tiny_bundle), "--prompt", PROMPT]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


# The chat


def reused(output: str) -> list[tuple[int, int]]:
    """Prompt tokens reused, and all of them, of each turn."""
    return [(int(kept), int(total)) for _, kept, total in REUSED.findall(output)]


def test_a_chat_keeps_the_conversation_and_its_cache(tiny_bundle: Path) -> None:
    lines = ["hello", "", "and then", "/new", "hello", "/exit", "never read"]
    outcome = eagle_run(tiny_bundle, "--profile", "4", "--max-new-tokens", 6, "--ignore-eos", stdin="\n".join(lines))
    assert (outcome.status, outcome.err) == (0, "")
    (first, total), (second, longer), (again, same) = reused(outcome.out)
    assert first == 0
    assert total - 1 <= second < longer  # one row is read again
    assert same == total
    assert again < total


def test_the_end_of_input_ends_a_chat(tiny_bundle: Path) -> None:
    for text in ("", "hello"):
        outcome = eagle_run(tiny_bundle, "--max-new-tokens", 2, stdin=text)
        assert (outcome.status, len(reused(outcome.out))) == (0, len(text.split()))


def test_a_message_that_cannot_be_answered_does_not_end_a_chat(tiny_bundle: Path) -> None:
    lines = ["hello", "word " * 200, "and then"]
    outcome = eagle_run(tiny_bundle, "--max-new-tokens", 4, "--ignore-eos", stdin="\n".join(lines))
    assert outcome.status == 0
    assert re.fullmatch(r"error: the prompt has \d+ tokens, .* \(/new starts over\)\n", outcome.err)
    (_, total), (kept, longer) = reused(outcome.out)
    assert total - 1 <= kept < longer < 160


def test_ctrl_c_ends_an_answer_and_not_the_chat(tiny_bundle: Path) -> None:
    command = [sys.executable, "-m", "eagle_runtime", str(tiny_bundle), "--profile", "16", "--show-tree"]
    with subprocess.Popen(
        [*command, "--ignore-eos", "--max-new-tokens", "100000"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        fcntl.fcntl(
            chat.stdout, fcntl.F_SETPIPE_SZ, 4096
        )  # so that the answer waits for us, soon after its first round
        chat.stdin.write(b"hello\n")
        chat.stdin.flush()
        seen = b""
        while b"round 1:" not in seen:
            seen += os.read(chat.stdout.fileno(), 256)
        chat.send_signal(signal.SIGINT)
        out, _ = chat.communicate(b"again\n", timeout=PATIENCE_S)
    ends = [end for end, *_ in REUSED.findall((seen + out).decode())]
    assert ends == ["cancelled", "length"]
    assert chat.returncode == 0


def test_ctrl_c_ends_a_single_answer_with_130(tiny_bundle: Path) -> None:
    command = [sys.executable, "-m", "eagle_runtime", str(tiny_bundle), "--profile", "16", "--show-tree"]
    with subprocess.Popen(
        [*command, "--ignore-eos", "--prompt", "hello"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout is not None
        fcntl.fcntl(run.stdout, fcntl.F_SETPIPE_SZ, 4096)
        assert run.stdout.read(6) == b"round "
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, err) == (130, b"")


def test_a_chat_at_a_terminal(tiny_bundle: Path) -> None:
    ours, its = pty.openpty()
    termios.tcsetwinsize(ours, (50, 200))
    command = [sys.executable, "-m", "eagle_runtime", str(tiny_bundle), "--max-new-tokens", "4", "--ignore-eos"]
    with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=os.environ | {"TERM": "dumb"}) as chat:
        os.close(its)
        seen = ""
        for line in ("hello", "and then", "/new", "hello", "/exit"):
            seen += _read_up_to(ours, "> ")
            os.write(ours, line.encode() + b"\n")
        seen += _read_up_to(ours, None)
        assert chat.wait(PATIENCE_S) == 0
    os.close(ours)
    (first, total), (second, _), (again, same) = reused(seen)
    assert first == 0
    assert second >= total - 1
    assert same == total
    assert again < total
    assert "Ctrl-C stops an answer" in seen


def _read_up_to(terminal: int, prompt: str | None) -> str:
    """What the terminal shows up to the next prompt at the beginning of a line, or to the end."""
    seen = b""
    while prompt is None or not re.search(rb"(^|\n|\r)(\x1b\[\S*)?" + prompt.encode() + b"$", seen):
        try:
            piece = os.read(terminal, 1024)
        except OSError:  # closed at the other end
            piece = b""
        if not piece:
            break
        seen += piece
    return seen.decode("utf-8", "replace")


@pytest.mark.parametrize(
    ("module", "defaults"),
    [
        (
            "eagle_exporter.cli",
            ["(4,8,16)", "(MODEL-eagle)", "(as --precision)", "(2048)", "(256)", "(fp32; fp16 for TensorRT)"],
        ),
        ("eagle_runtime", ["(greedy)", "(a new one)", "(one a core)", "512"]),
    ],
)
def test_the_help_says_what_is_taken_by_default(module: str, defaults: list[str]) -> None:
    environment = os.environ | {"COLUMNS": "200"}
    command = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    for default in defaults:
        assert f"[default: {default}]" in shown
