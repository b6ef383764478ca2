"""Look-up: the text so far proposes how it goes on, where its end has been there before.

Suffixes of the text are looked for, of a few lengths, the longest first; what followed the latest earlier occurrence is
the proposal. It costs no pass of any model, and says much where an answer repeats its prompt or itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

LENGTHS = (8, 4, 2, 1)
"""Tokens of the suffixes that are looked for, in this order. More of them find nothing that is better."""
LONGEST = 16
"""Up to here a match that is longer is a better one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What followed the latest occurrence of the text's end."""

    length: int
    """Tokens of the suffix that occurred, 1 to `LONGEST`."""
    tokens: list[int]
    """What followed; where that reaches the text's end, it goes on with itself, as in a loop."""


class LookupIndex:
    """Where each n-gram of a text was last followed by another token. Adding a token takes constant time."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens: list[int] = []
        self._follower: dict[tuple[int, ...], int] = {}  # n-gram -> position of the token after its latest occurrence
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Adds tokens to the text's end."""
        for token in tokens:
            for suffix in self._suffixes():
                self._follower[suffix] = len(self._tokens)
            self._tokens.append(token)

    def find(self, count: int) -> Match | None:
        """The next `count` tokens, by the longest of those suffixes that occurred before; None where none did."""
        for suffix in self._suffixes():
            position = self._follower.get(suffix)
            if position is not None:
                found = self._tokens[position : position + count]
                period = len(found)
                for index in range(period, count):
                    found.append(found[index - period])
                return Match(length=self._agreeing(position, len(suffix)), tokens=found)
        return None

    def _suffixes(self) -> Iterator[tuple[int, ...]]:
        """The text's suffixes of the lengths that are looked for, the longest first."""
        end = tuple(self._tokens[-LENGTHS[0] :])
        return (end[-length:] for length in LENGTHS if length <= len(end))

    def _agreeing(self, position: int, length: int) -> int:
        """How many tokens before `position` are the text's last ones: `length` at least, `LONGEST` at most."""
        tokens = self._tokens
        while length < min(LONGEST, position) and tokens[position - 1 - length] == tokens[-1 - length]:
            length += 1
        return length
