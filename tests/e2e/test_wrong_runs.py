"""What users get wrong, in what eagle-run is asked: status 2, one clear line, nothing left on the disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.commands import assert_refused, assert_usage, eagle_run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt", "x", "--profile", "5"], "profile '5' is not in the bundle; it has auto, plain, lookup, 4, 8, 16"),
        (["--prompt", "x", "--profile", "plain", "--lookup"], 'use the profile "lookup"'),
        (["--prompt", "x", "--profile", "lookup", "--no-lookup"], 'use the profile "plain"'),
        (
            ["--prompt", "x", "--lookup", "--temperature", "1", "--verify-mode", "sampled"],
            "whose trees the head must draw: use deterministic, or no look-up",
        ),
        (["--prompt", "x", "--tune"], "--tune measures and ends: give no prompt"),
        (["--prompt", "x", "--profile", ""], "profile '' is not in the bundle"),
        (["--prompt", "x", "--threads", "0"], "threads is 0; expected 1 or more"),
        (["--prompt", "x", "--threads", "99999999999"], "threads is 99999999999; expected at most"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens is 0; expected"),
        (["--prompt", "x", "--max-new-tokens", "-3"], "max_new_tokens is -3"),
        (["--prompt", "x", "--stop", ""], "stop holds ''"),
        (["--prompt", "x", "--messages", "m.json"], "give one of --prompt, --messages and '-'"),
        (["--prompt", "x", "-"], "give one of --prompt, --messages and '-'"),
        (["--messages", "m.json", "-"], "give one of --prompt, --messages and '-'"),
        (["hello"], "the second argument is 'hello'; it may only be '-'"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "  \n"], "the prompt is empty"),
        (["-"], "the prompt is empty"),
        (["--prompt", "word " * 200], "tokens, the bundle's capacity is 160: shorten it"),
        (["--prompt", os.fsdecode(b"\xff")], "the prompt is not UTF-8 text"),
        (["--prompt", "x" * 9, "--raw", "--messages", "m.json"], "give one of"),
        (["--raw", "--messages", "m.json"], "--raw continues a text as it is; it does not go with --messages"),
        (["--json"], "need a prompt: add --prompt, --messages or '-'"),
        (["--compare"], "need a prompt"),
        (["--raw"], "need a prompt"),
        (["--messages", "absent.json"], "absent.json cannot be read: No such file or directory"),
        (["--messages", "."], ". cannot be read: Is a directory"),
    ],
    ids=lambda value: " ".join(value)[:40].encode("ascii", "replace").decode() if isinstance(value, list) else None,
)
def test_what_cannot_be_run(tiny_bundle: Path, options: list[str], words: str) -> None:
    assert_refused(eagle_run(tiny_bundle, *options), words)


@pytest.mark.parametrize(
    "options",
    [("--threads", "all"), ("--max-new-tokens", "1.5"), ("--creativity", "1")],
    ids=" ".join,
)
def test_what_the_parser_of_eagle_run_refuses(tiny_bundle: Path, options: tuple[str, ...]) -> None:
    assert_usage(eagle_run(tiny_bundle, *options), options[0])


def test_eagle_run_without_a_bundle() -> None:
    assert_usage(eagle_run(), "Missing argument 'bundle'")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not JSON"),
        (b"hello", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"{}", "holds an object"),
        (b"[]", "holds an empty list"),
        (b'["hello"]', "message 1 is a string"),
        (b'[{"role": "user"}]', 'message 1 has no "content"'),
        (b'[{"role": "user", "content": [1]}]', '"content" is a list, expected a string'),
        (b'[{"role": "robot", "content": "x"}]', 'has the role "robot"'),
        (b'[{"role": "user", "content": "\\ud800"}]', "half of a surrogate pair"),
        (b"[" * 100_000, "is not JSON"),
    ],
    ids=lambda value: value[:30].decode("ascii", "replace") if isinstance(value, bytes) else None,
)
def test_messages_that_are_no_conversation(tiny_bundle: Path, tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "messages.json"
    path.write_bytes(content)
    assert_refused(eagle_run(tiny_bundle, "--messages", path), str(path), words)
    assert_refused(eagle_run(tiny_bundle, "--messages", "-", stdin=content), "standard input", words)


def test_standard_input_that_is_not_text(tiny_bundle: Path) -> None:
    assert_refused(eagle_run(tiny_bundle, "-", stdin=b"caf\xe9"), "standard input is not UTF-8 text")
    outcome = eagle_run(tiny_bundle, stdin=b"caf\xe9\n")  # a chat: the banner is out by then
    assert outcome.status == 2
    assert outcome.err == "error: standard input is not UTF-8 text\n"
