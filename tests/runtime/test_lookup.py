"""The index against a search through the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_runtime.lookup import LENGTHS, LONGEST, LookupIndex, Match

TEXTS = st.integers(1, 4).flatmap(lambda words: st.lists(st.integers(0, words), max_size=60))


def search(text: list[int], count: int) -> Match | None:
    """The next tokens by the longest suffix of one of the lengths that occurs earlier, its latest occurrence."""
    for length in LENGTHS:
        for end in range(len(text) - 1, length - 1, -1):
            if length < len(text) and text[end - length : end] == text[-length:]:
                agreeing = max(n for n in range(length, LONGEST + 1) if n <= end and text[end - n : end] == text[-n:])
                loop = text[end:] * (count + 1)
                return Match(length=agreeing, tokens=loop[:count])
    return None


@given(TEXTS, st.integers(0, 20))
def test_it_finds_what_a_search_finds(text: list[int], count: int) -> None:
    assert LookupIndex(text).find(count) == search(text, count)


@given(st.lists(TEXTS, max_size=4))
def test_a_text_that_comes_in_pieces_is_the_same_text(pieces: list[list[int]]) -> None:
    index, text = LookupIndex(), list[int]()
    for piece in pieces:
        index.extend(piece)
        text += piece
        assert len(index) == len(text)
        assert index.find(9) == search(text, 9)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ([], None),
        ([1], None),
        ([1, 2, 3], None),
        ([1, 1], Match(length=1, tokens=[1, 1, 1, 1])),
        ([1, 2, 9, 1, 2], Match(length=2, tokens=[9, 1, 2, 9])),
        ([1, 2, 8, 1, 2, 9, 1, 2], Match(length=2, tokens=[9, 1, 2, 9])),
        ([5, 6, 1, 2, 8, 1, 2, 9, 5, 6, 1, 2], Match(length=4, tokens=[8, 1, 2, 9])),
    ],
    ids=["nothing", "one token", "no repetition", "a loop", "a repetition", "the latest of two", "the longest of two"],
)
def test_examples(text: list[int], found: Match | None) -> None:
    assert LookupIndex(text).find(4) == found


def test_a_long_match_is_as_long_as_the_longest_that_counts() -> None:
    match = LookupIndex([*range(40), *range(40)]).find(1)
    assert match is not None
    assert match.length == LONGEST
