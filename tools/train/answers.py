"""The data set: what a target wrote, one conversation a line, in a file that only grows.

`answers.jsonl` holds finished conversations and, so that a run that continues does not write them again, the numbers
of those that were dropped. `data.json` beside it holds what they were written with. Whatever ends a run, the file is a
prefix of what it would have become: a last line without its end is cut off when it is opened again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_graphs import EagleError

ANSWERS, SETTINGS = "answers.jsonl", "data.json"
LOOP_TOKENS = 24
"""A tail that repeats itself for so many tokens is a loop."""
LOOP_PERIOD = 48
HELD_OUT = 40
"""Every so-manieth conversation is kept out of training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A conversation: a prompt and the target's answer to it."""

    index: int
    """Its number in the run."""
    tokens: tuple[int, ...]
    """Prompt and answer."""
    start: int
    """Index of the answer's first token."""
    greedy: bool

    @property
    def answer(self) -> tuple[int, ...]:
        return self.tokens[self.start :]

    @property
    def held_out(self) -> bool:
        return self.index % HELD_OUT == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A conversation that is not kept."""

    index: int
    why: str


def loop_start(tokens: Sequence[int]) -> int | None:
    """Where the tail of `tokens` begins to repeat itself: the end of its first period; None if it does not.

    A tail is a loop if it has a period of at most `LOOP_PERIOD` tokens, and `LOOP_TOKENS` of it, or two more periods if
    these are longer, come after the first one.
    """
    for period in range(1, min(LOOP_PERIOD, len(tokens) // 3) + 1):
        needed = max(LOOP_TOKENS, 2 * period)
        same = 0
        while same + period < len(tokens) and tokens[-1 - same] == tokens[-1 - same - period]:
            same += 1
        if same >= needed:
            return len(tokens) - same
    return None


class AnswerFile:
    """The data set while it is written. `add` filters duplicates."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Opens a data set, or begins one. Raises EagleError where it was begun with other settings."""
        directory.mkdir(parents=True, exist_ok=True)
        self._own_prompts = bool(settings["own_prompts"])
        stated = directory / SETTINGS
        if stated.exists():
            _check_settings(read_settings(directory), settings, directory)
        else:
            stated.write_text(json.dumps(settings, indent=1))
        self.path = directory / ANSWERS
        self.done: set[int] = set()
        """Numbers of the conversations that need not be written again."""
        self.tokens = 0
        """Answer tokens so far."""
        self.dropped: Counter[str] = Counter()
        self._seen: set[tuple[int, ...]] = set()
        if self.path.exists():
            _cut_unfinished_line(self.path)
        for item in _read(self.path) if self.path.exists() else []:
            self._note(item)
        self._file = self.path.open("a", encoding="utf-8")

    def add(self, item: Answer | Dropped) -> None:
        """Appends a conversation, or the note that it was dropped."""
        if item.index in self.done:
            return
        if isinstance(item, Answer) and not self._seen.isdisjoint(self._keys(item)):
            item = Dropped(index=item.index, why="duplicate")
        self._file.write(json.dumps(_to_dict(item), separators=(",", ":")) + "\n")
        self._file.flush()
        self._note(item)

    def close(self) -> None:
        self._file.close()

    def _note(self, item: Answer | Dropped) -> None:
        self.done.add(item.index)
        if isinstance(item, Dropped):
            self.dropped[item.why] += 1
        else:
            self.tokens += len(item.answer)
            self._seen.update(self._keys(item))

    def _keys(self, item: Answer) -> list[tuple[int, ...]]:
        """What no other conversation may share: the answer, and a prompt that the target wrote itself."""
        return [item.answer, *([item.tokens[: item.start]] if self._own_prompts else [])]


def read_answers(directory: Path) -> list[Answer]:
    """All kept conversations, in the file's order. Raises EagleError where there is none."""
    path = directory / ANSWERS
    if not path.is_file():
        raise EagleError(f"{directory} has no {ANSWERS}: make the data with  python -m tools.train data")
    answers = [item for item in _read(path) if isinstance(item, Answer)]
    if not answers:
        raise EagleError(f"{path} holds no answers yet: let  python -m tools.train data  go on")
    return answers


def read_settings(directory: Path) -> dict[str, Any]:
    """What the data set was written with. Raises EagleError where that cannot be read."""
    path = directory / SETTINGS
    try:
        settings = json.loads(path.read_text("utf-8"))
        return dict(settings)
    except (OSError, ValueError, TypeError) as error:
        raise EagleError(
            f"{path} cannot be read ({error}): name a directory made by  python -m tools.train data"
        ) from None


def _check_settings(found: Mapping[str, Any], wanted: Mapping[str, Any], directory: Path) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise EagleError(
                f"{directory} was begun with {name} {found.get(name)!r}, and this run has {value!r}: continue it with "
                "the same options, or choose another directory"
            )


def _to_dict(item: Answer | Dropped) -> dict[str, Any]:
    if isinstance(item, Dropped):
        return {"index": item.index, "dropped": item.why}
    return {"index": item.index, "start": item.start, "greedy": item.greedy, "tokens": item.tokens}


def _read(path: Path) -> list[Answer | Dropped]:
    items: list[Answer | Dropped] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            data = json.loads(line)
            if "dropped" in data:
                items.append(Dropped(index=data["index"], why=data["dropped"]))
                continue
            tokens = tuple(data["tokens"])
            items.append(Answer(index=data["index"], tokens=tokens, start=data["start"], greedy=data["greedy"]))
        except (ValueError, KeyError, TypeError):
            if not line.strip() or number == 1:
                raise EagleError(f"{path}:{number} is no conversation of this tool") from None
            raise EagleError(f"{path}:{number} is damaged: cut the file off before that line and continue") from None
    return items


def _cut_unfinished_line(path: Path) -> None:
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)
