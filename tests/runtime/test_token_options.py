"""Tokens named by id or by text, for tokenizers that write spaces in both usual ways."""

from __future__ import annotations

import math

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eagle_graphs import EagleError
from eagle_runtime.token_options import token_options

WORDS = ["the", "cat", "e", "5", '"', "=", "t", "h", "c", "a"]


def byte_level() -> Tokenizer:
    """A space is part of the word after it; a text is spelled as it is."""
    pieces = ["<|end|>", "Ċ", "Ġ", *WORDS, *(f"Ġ{word}" for word in WORDS)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges("Ġ")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def metaspace() -> Tokenizer:
    """The same, but a text begins with a space of its own, as SentencePiece's do."""
    pieces = ["<|end|>", "\n", "▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges("▁")))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def merges(space: str) -> list[tuple[str, str]]:
    """Letters make "the" by way of "e" alone, so that only whole words merge."""
    return [(space, word) for word in WORDS if len(word) == 1]


@pytest.fixture(params=[byte_level, metaspace], ids=["byte level", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.param()


def tokens(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """Ids of pieces, a space in them written as the tokenizer writes it."""
    space = "Ġ" if tokenizer.token_to_id("Ġ") is not None else "▁"
    ids = [tokenizer.token_to_id(piece.replace(" ", space)) for piece in pieces]
    assert None not in ids
    return ids


def options(tokenizer: Tokenizer, **given: list[str]) -> dict:
    return dict(token_options(tokenizer, **{"logit_bias": [], "suppress_token": [], "bad_word": [], **given}))


def test_nothing_given_is_no_option(tokenizer: Tokenizer) -> None:
    assert options(tokenizer) == {}


@pytest.mark.parametrize(
    ("text", "piece"), [("e", "e"), (" e", " e"), ('"5"', "5"), ('" 5"', " 5"), ('"', '"'), ("=", "="), (" ", " ")]
)
def test_a_text_that_is_one_token(tokenizer: Tokenizer, text: str, piece: str) -> None:
    expected = tokens(tokenizer, piece)
    assert options(tokenizer, suppress_token=[text]) == {"suppress_tokens": expected}
    assert options(tokenizer, logit_bias=[f"{text}=-1.5"]) == {"logit_bias": {expected[0]: -1.5}}


def test_digits_are_an_id_and_special_tokens_have_names(tokenizer: Tokenizer) -> None:
    assert options(tokenizer, suppress_token=["5", "<|end|>"]) == {"suppress_tokens": [5, 0]}
    assert options(tokenizer, logit_bias=["5=-inf", "7=2"]) == {"logit_bias": {5: -math.inf, 7: 2.0}}


def test_a_bad_word_is_banned_with_a_space_and_without(tokenizer: Tokenizer) -> None:
    inside, after_a_space = tokens(tokenizer, "c", "a", "t"), tokens(tokenizer, " c", "a", "t")
    assert options(tokenizer, bad_word=["cat"]) == {"bad_words_ids": [inside, after_a_space]}
    assert options(tokenizer, bad_word=[" cat"]) == {"bad_words_ids": [after_a_space]}
    assert options(tokenizer, bad_word=["5", "e"]) == {
        "bad_words_ids": [tokens(tokenizer, piece) for piece in ("5", " 5", "e", " e")]
    }


def test_a_text_that_joins_the_line_before_it() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"Ċ": 0, "ĊĊ": 1}, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert options(tokenizer, suppress_token=["\n", "\n\n"]) == {"suppress_tokens": [0, 1]}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"suppress_token": [" the"]}, r"--suppress-token ' the' is 3 tokens .* 'h'.*; expected an id, or a text that"),
        ({"suppress_token": [""]}, "--suppress-token '' is 0 tokens; expected an id"),
        ({"suppress_token": [" 55"]}, "--suppress-token ' 55' is 2 tokens"),
        ({"suppress_token": ["-5"]}, "--suppress-token '-5' cannot be written with this tokenizer, .* reads it as '5'"),
        ({"suppress_token": ["e\udcff"]}, "--suppress-token is not UTF-8 text"),
        ({"logit_bias": ["cat=1"]}, r"--logit-bias 'cat' is 3 tokens .*--bad-word bans longer texts"),
        ({"logit_bias": ["e"]}, "--logit-bias is 'e'; expected TOKEN=BIAS, such as 42=-inf"),
        ({"logit_bias": ["=1"]}, "--logit-bias is '=1'; expected TOKEN=BIAS"),
        ({"logit_bias": ["e=much"]}, "--logit-bias is 'e=much'; expected TOKEN=BIAS"),
        ({"logit_bias": ["3=1", "3=2"]}, "--logit-bias '3=2' names token 3 again; expected one bias for each token"),
        ({"bad_word": ["cat", ""]}, "--bad-word is empty: give some text"),
    ],
)
def test_what_does_not_fit_is_refused(tokenizer: Tokenizer, given: dict[str, list[str]], message: str) -> None:
    with pytest.raises(EagleError, match=message):
        options(tokenizer, **given)
