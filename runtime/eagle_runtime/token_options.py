"""Sampling options that name tokens, as they are given on a command line.

A token is named by its id, or by a text that is exactly that token. Texts are taken as they stand inside an answer: a
space before a word is part of it, and what some tokenizers put before the first word of a text is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from eagle_graphs import EagleError
from eagle_runtime.sampling import SamplingOptions

_LOGIT_BIAS, _SUPPRESS_TOKEN, _BAD_WORD = "--logit-bias", "--suppress-token", "--bad-word"


def token_options(
    tokenizer: Tokenizer, *, logit_bias: Sequence[str], suppress_token: Sequence[str], bad_word: Sequence[str]
) -> SamplingOptions:
    """Those of `Sampling`'s options that were given.

    Args:
        tokenizer: the target's.
        logit_bias: TOKEN=BIAS each; -inf bans a token.
        suppress_token: a TOKEN each. Digits are an id; in double quotes they are a text.
        bad_word: a text each, banned in the tokenizer's own spelling, after a space and without one; exactly as it is
            where it begins with white space.

    Raises:
        EagleError: a text is not one token, or not as it should be written.
    """
    options: SamplingOptions = {}
    if logit_bias:
        options["logit_bias"] = _biases_from_texts(logit_bias, tokenizer)
    if suppress_token:
        options["suppress_tokens"] = [_token_from_text(text, tokenizer, _SUPPRESS_TOKEN) for text in suppress_token]
    if bad_word:
        options["bad_words_ids"] = [word for text in bad_word for word in _spellings(text, tokenizer)]
    return options


def _biases_from_texts(texts: Sequence[str], tokenizer: Tokenizer) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            bias = float(number)
        except ValueError:
            name = ""
        if not name:
            raise EagleError(f"{_LOGIT_BIAS} is {text!r}; expected TOKEN=BIAS, such as 42=-inf or ' the=1.5'")
        token = _token_from_text(name, tokenizer, _LOGIT_BIAS)
        if token in biases:
            raise EagleError(f"{_LOGIT_BIAS} {text!r} names token {token} again; expected one bias for each token")
        biases[token] = bias
    return biases


def _token_from_text(text: str, tokenizer: Tokenizer, option: str) -> int:
    if text.isascii() and text.isdigit():
        return int(text)
    if len(text) > 2 and text[0] == text[-1] == '"':
        text = text[1:-1]
    tokens = _tokens_inside_text(text, tokenizer, option)
    if len(tokens) != 1:
        pieces = ", ".join(f"{token} {tokenizer.decode([token], skip_special_tokens=False)!r}" for token in tokens)
        raise EagleError(
            f"{option} {text!r} is {len(tokens)} tokens{pieces and f' ({pieces})'}; expected an id, or a text that is "
            f"one token (a space before it counts). {_BAD_WORD} bans longer texts"
        )
    return tokens[0]


def _spellings(text: str, tokenizer: Tokenizer) -> list[list[int]]:
    if not text:
        raise EagleError(f"{_BAD_WORD} is empty: give some text, or leave it out")
    spellings = [_tokens_inside_text(text, tokenizer, _BAD_WORD)]
    if not text[0].isspace():
        spellings.append(_tokens_inside_text(f" {text}", tokenizer, _BAD_WORD))
    return spellings


def _tokens_inside_text(text: str, tokenizer: Tokenizer, option: str) -> list[int]:
    """Tokens of a text on a line of its own: at the beginning of everything some tokenizers add a space to it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise EagleError(f"{option} is not UTF-8 text") from None
    before, both, alone = (tokenizer.encode(t, add_special_tokens=False).ids for t in ("\n", f"\n{text}", text))
    read = tokenizer.decode(both, skip_special_tokens=False)
    if not read.endswith(text):  # else an unknown word would ban the unknown token
        raise EagleError(f"{option} {text!r} cannot be written with this tokenizer, which reads it as {read[1:]!r}")
    return list(both[len(before) :] if both[: len(before)] == before else alone)
