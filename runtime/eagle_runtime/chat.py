"""Conversations to the prompt that the target was trained on, without transformers.

A bundle carries the model's chat template, which is Jinja source from the checkpoint: it is rendered as
Hugging Face renders it, since any other whitespace is another prompt, and in a sandbox, since it is
someone else's program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eagle_graphs.errors import EagleError

ROLES = ("system", "user", "assistant", "tool")
_EXPECTED = 'expected a list such as [{"role": "user", "content": "Hello"}]'


class ChatTemplate:
    """A model's chat template, ready to render.

    Args:
        source: the template, as in `chat_template.jinja`.
        special_tokens: what the template calls its tokens, such as `{"bos_token": "<s>"}`.

    Raises:
        EagleError: the template does not parse.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # deep nesting fails in Python's compiler, not in Jinja
            line = getattr(error, "lineno", None)
            where = "" if line is None else f" (line {line})"
            raise EagleError(
                f"the chat template does not parse: {_message(error)}{where}; export with a Jinja template that does"
            ) from error

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt for a conversation, up to where the assistant's next words begin.

        Args:
            messages: `{"role": ..., "content": ...}` in order.
            add_generation_prompt: end with the opening of an assistant message.

        Raises:
            EagleError: the template refuses the conversation or fails on it.
        """
        names = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,  # templates ask `tools is not none`, which an undefined name passes
            "documents": None,
        }
        try:
            return self._template.render(names)
        except Exception as error:  # whatever a foreign program may do wrong
            roles = ", ".join(str(message.get("role")) for message in messages) or "none"
            raise EagleError(
                f"the chat template refuses the messages (roles: {roles}): {_message(error)}; change them to suit it"
            ) from error


def messages_from_json(text: str, where: str) -> list[dict[str, str]]:
    """Read a conversation from JSON.

    Args:
        text: a JSON list of `{"role": ..., "content": ...}`.
        where: what the text is called in errors, such as the file's name.

    Raises:
        EagleError: the text is anything else, or a role is unknown.
    """
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EagleError(f"{where} is not JSON ({error}): {_EXPECTED}") from error
    return check_messages(messages, where)


def check_messages(messages: object, where: str) -> list[dict[str, str]]:
    """The conversation `messages`, if it is one; raises EagleError as `messages_from_json` does."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise EagleError(f"{where} holds {_kind(messages)}: {_EXPECTED}")
    if not messages:
        raise EagleError(f"{where} holds an empty list: {_EXPECTED}")
    return [_checked(message, f"{where}, message {number}") for number, message in enumerate(messages, start=1)]


def _checked(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise EagleError(f'{where} is {_kind(message)}: expected an object with "role" and "content"')
    for key in ("role", "content"):
        if key not in message:
            raise EagleError(f'{where} has no "{key}": expected "role" and "content"')
        if not isinstance(message[key], str):
            raise EagleError(f'{where}: "{key}" is {_kind(message[key])}, expected a string')
    if unknown := sorted(message.keys() - {"role", "content"}):
        raise EagleError(f'{where} has unknown keys {unknown}: expected only "role" and "content"; remove them')
    if message["role"] not in ROLES:
        raise EagleError(f'{where} has the role "{message["role"]}": expected one of {", ".join(ROLES)}')
    try:
        message["content"].encode()
    except UnicodeEncodeError as error:
        raise EagleError(f'{where}: "content" holds half of a surrogate pair, expected whole characters') from error
    return {"role": message["role"], "content": message["content"]}


def _message(error: Exception) -> str:
    """The error's own words on one line, without the excerpt that Jinja adds to them."""
    message = error.message if isinstance(error, TemplateError) else None
    return " ".join((message or str(error)).split())


def _kind(value: object) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
