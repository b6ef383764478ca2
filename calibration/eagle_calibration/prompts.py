"""The conversations that an export is checked and measured on.

Eight are shipped, so that an export needs no data set; whoever serves something narrower gives their own
file. It is JSON Lines in any of the three forms that public sets of prompts come in, and is read
strictly: a line that was skipped would change what the measurements mean.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from eagle_graphs.errors import EagleError

Conversation = list[dict[str, str]]

ROLES = ("system", "user", "assistant", "tool")
_EXPECTED = 'expected {"messages": [{"role": "user", "content": ...}]}, {"turns": [...]} or {"text": ...}'


def load_prompts(path: Path | None = None) -> list[Conversation]:
    """Read the prompts, each as the messages of one conversation.

    A line of the file is a JSON object with exactly one of `messages` (taken as they are), `turns` (a list
    of the user's turns, of which the first is taken) and `text` (one user message). Its other keys, such
    as a category or an id, are not read; empty lines are skipped.

    Args:
        path: a JSON Lines file in UTF-8; the shipped prompts without it.

    Raises:
        EagleError: the file cannot be read, holds no prompt, or has a line in another form.
    """
    source = files("eagle_calibration") / "prompts.jsonl" if path is None else path
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EagleError(
            f"cannot read the prompts from {source} ({error}): expected a JSON Lines file in UTF-8"
        ) from error
    conversations = [
        _conversation(line, f"{source}, line {number}")
        for number, line in enumerate(text.split("\n"), start=1)  # a JSON string may hold other line separators
        if line.strip()
    ]
    if not conversations:
        raise EagleError(f"{source} holds no prompt: {_EXPECTED} on each line")
    return conversations


def _conversation(line: str, where: str) -> Conversation:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EagleError(f"{where} is not JSON ({error}): {_EXPECTED}") from error
    if not isinstance(entry, dict):
        raise EagleError(f"{where} is not a JSON object: {_EXPECTED}")
    match [form for form in ("messages", "turns", "text") if form in entry]:
        case ["messages"]:
            return _messages(entry["messages"], where)
        case ["turns"]:
            turns = entry["turns"]
            if not isinstance(turns, list) or not turns:
                raise EagleError(f'{where}: "turns" must be a list of at least one string')
            return [{"role": "user", "content": _content(turns[0], where, "the first turn")}]
        case ["text"]:
            return [{"role": "user", "content": _content(entry["text"], where, '"text"')}]
        case found:
            keys = ", ".join(found or entry) or "no key"
            raise EagleError(f"{where} has {keys}: {_EXPECTED}")


def _messages(messages: Any, where: str) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise EagleError(f'{where}: "messages" must be a list of at least one message')
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise EagleError(f'{where}: message {number} must be an object with "role" and "content" only')
        if message["role"] not in ROLES:
            raise EagleError(f"{where}: message {number} has the role {message['role']!r}, expected {', '.join(ROLES)}")
        _content(message["content"], where, f'"content" of message {number}')
    return messages


def _content(value: Any, where: str, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise EagleError(f"{where}: {name} is {json.dumps(value)[:40]}, expected a string that is not blank")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise EagleError(f"{where}: {name} holds half of a surrogate pair, expected whole characters") from error
    return value
