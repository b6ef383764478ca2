"""Prompts: a text, a conversation or tokens, as the tokens that the target reads."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from eagle_graphs import EagleError
from eagle_runtime.bundle import Bundle
from eagle_runtime.chat import ChatTemplate, check_messages


class Prompts:
    """Reads prompts for one bundle. Raises EagleError where its tokenizer or chat template is damaged."""

    def __init__(self, bundle: Bundle) -> None:
        manifest = bundle.manifest
        self.tokenizer = _load_tokenizer(bundle)
        """The target's."""
        self._vocab_size, self._capacity = manifest.target.vocab_size, manifest.limits.capacity
        self._template: ChatTemplate | None = None
        if manifest.tokenizer.chat_template is not None:
            self._template = ChatTemplate(
                bundle.text(manifest.tokenizer.chat_template), manifest.tokenizer.special_tokens
            )

    def tokens(
        self,
        prompt: str | None,
        messages: Sequence[Mapping[str, str]] | None,
        token_ids: Sequence[int] | None,
    ) -> list[int]:
        """The tokens of the one that is given. Raises EagleError where they are no prompt for this bundle."""
        given = [value is not None for value in (prompt, messages, token_ids)]
        if sum(given) != 1:
            raise EagleError(f"give one of prompt, messages and token_ids; found {sum(given)} of them")
        if messages is not None:
            if self._template is None:
                raise EagleError("the target has no chat template: give a prompt without one (eagle-run --raw)")
            text = self._template.render(check_messages(messages, "messages"))
            tokens = self.tokenizer.encode(text, add_special_tokens=False).ids
        elif prompt is not None:
            tokens = self.tokenizer.encode(prompt).ids
        else:
            tokens = _whole_numbers(token_ids)
        if not tokens:
            raise EagleError("the prompt has no tokens: give some text")
        if outside := [token for token in tokens if not 0 <= token < self._vocab_size]:
            raise EagleError(f"token id {outside[0]} is not in the vocabulary of {self._vocab_size}")
        if len(tokens) > self._capacity:
            raise EagleError(
                f"the prompt has {len(tokens)} tokens, the bundle's capacity is {self._capacity}: "
                "shorten it, or export with a larger --capacity"
            )
        return list(tokens)


def _load_tokenizer(bundle: Bundle) -> Tokenizer:
    name = bundle.manifest.tokenizer.tokenizer
    try:
        return Tokenizer.from_file(str(bundle.path(name)))
    except Exception as error:  # tokenizers raises bare Exception
        raise EagleError(f"{bundle.path(name)} is not a tokenizer that `tokenizers` can read: {error}") from None


def _whole_numbers(token_ids: Sequence[int] | None) -> list[int]:
    try:
        return [operator.index(token) for token in (token_ids if token_ids is not None else ())]
    except TypeError:
        raise EagleError(f"token_ids holds something other than whole numbers: {token_ids!r:.80}") from None
