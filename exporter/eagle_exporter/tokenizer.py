"""The tokenizer's part of a bundle: tokenizer.json, the chat template, and the prompts to check with."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from eagle_graphs import EagleError
from eagle_graphs.manifest import TokenizerFiles

TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path) -> TokenizerFiles:
    """Writes what the runtime needs to `directory`."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        saved = Path(scratch) / TOKENIZER
        if not saved.is_file():
            raise EagleError("target: its tokenizer has no tokenizer.json, which the runtime needs")
        (directory / TOKENIZER).write_bytes(saved.read_bytes())
    template = _chat_template(tokenizer)
    if template is not None:
        (directory / CHAT_TEMPLATE).write_text(template, "utf-8")
    return TokenizerFiles(
        tokenizer=TOKENIZER,
        chat_template=CHAT_TEMPLATE if template is not None else None,
        special_tokens={
            name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)
        },
    )


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Mapping[str, str]]], *, longest: int
) -> list[list[int]]:
    """Tokens of each conversation that has at most `longest` (all are cut to it if none has), at least two each."""
    encoded = []
    for messages in conversations:
        if _chat_template(tokenizer) is not None:
            text = tokenizer.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
            )
            ids = tokenizer(cast(str, text), add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer("\n".join(m["content"] for m in messages))["input_ids"]
        encoded.append([int(i) for i in cast(Sequence[Any], ids)])
    longest = max(longest, 2)
    short = [ids for ids in encoded if 2 <= len(ids) <= longest]
    return short or [ids[:longest] for ids in encoded]
