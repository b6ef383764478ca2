"""What stands around a prompt that the target writes itself: the chat template, and a given beginning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_calibration.prompts import Conversation, load_prompts
from eagle_exporter.target import Target
from eagle_graphs import EagleError

MARK = "\x1a"
NOTHING: Conversation = [{"role": "user", "content": ""}]


def started_prompts(target: Target, path: Path, *, longest: int) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """What stands before the target's part of each prompt of a file of beginnings, and what follows it."""
    headers, closings = [], set[tuple[int, ...]]()
    for number, start in enumerate(load_prompts(path), start=1):
        if start[-1]["role"] != "user":
            raise EagleError(
                f"{path}: conversation {number} ends with a message of the {start[-1]['role']}; expected one of the "
                "user, which the target ends"
            )
        header, closing = own_prompt_frame(target, start)
        if len(header) > longest:
            raise EagleError(
                f"{path}: conversation {number} has {len(header)} tokens; there is room for {longest} before what the "
                "target writes"
            )
        headers.append(header)
        closings.add(closing)
    if len(closings) > 1:
        raise EagleError(f"{path}: the chat template ends its messages in different ways; expected a single one")
    return tuple(headers), closings.pop()


def own_prompt_frame(target: Target, start: Conversation = NOTHING) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A conversation up to where the target goes on with its last message, and what follows that, as tokens.

    Raises EagleError where the target has no chat template.
    """
    tokenizer: Any = target.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise EagleError("the target has no chat template to write prompts with: name a file with --prompts")
    *earlier, last = start
    marked = [*earlier, {**last, "content": last["content"] + MARK}]
    text = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
    before, mark, after = str(text).partition(MARK)
    if not mark or not before or not after:
        raise EagleError("the target's chat template does not show where a message begins and ends: use --prompts FILE")
    header, closing = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    return tuple(header), tuple(closing)
