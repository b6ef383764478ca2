"""Runs prompts with several profiles in turn and says what each gave: tokens, times, acceptance.

Also a command, for whoever may not import the runtime, the exporter above all:

    python -m eagle_runtime.measure BUNDLE < request.json

The request is {"prompts": [[token ids], ...], "profiles": ["plain", "8", ...], "kernels": "auto",
"max_new_tokens": n, "tune": false}; the answer on standard output is {profile: {"token_ids": [[...], ...],
"stats": {...}, "partings": [...]}}. Where a profile's tokens part from those of "plain", if that is among them, there
is a parting {"prompt": number, "step": n, "found": token, "expected": plain's token, "gap": how far apart the two
logits are, as the target gives them there}. With "tune", what the steps cost is measured at the end, and kept in the
user's cache for `auto`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Unpack

from eagle_graphs import EagleError
from eagle_graphs.command_line import run_command
from eagle_runtime.compare import first_difference
from eagle_runtime.huge_pages import restart_with_huge_pages
from eagle_runtime.modes import PLAIN
from eagle_runtime.sampling import SamplingOptions
from eagle_runtime.session import Session
from eagle_runtime.stats import Stats


@dataclass(slots=True, kw_only=True)
class ProfileRun:
    """What one profile gave on all prompts."""

    token_ids: list[list[int]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)


def measure(
    session: Session,
    prompts: Sequence[Sequence[int]],
    profiles: Sequence[str],
    *,
    max_new_tokens: int,
    **sampling: Unpack[SamplingOptions],
) -> dict[str, ProfileRun]:
    """Runs every prompt with every profile, prompt by prompt, so that a noisy machine is unfair to none.

    Answers go on past an end-of-sequence token, so that all are equally long. One round of each profile is
    run beforehand and not counted: it makes the buffers.
    """
    runs = {profile: ProfileRun() for profile in profiles}
    for profile in profiles:
        session.generate(token_ids=prompts[0], profile=profile, max_new_tokens=8, ignore_eos=True, **sampling)
    for prompt in prompts:
        for profile, run in runs.items():
            session.reset()
            answer = session.generate(
                token_ids=prompt, profile=profile, max_new_tokens=max_new_tokens, ignore_eos=True, **sampling
            )
            run.token_ids.append(answer.token_ids)
            run.stats.add(answer.stats)
    return runs


def partings(session: Session, prompts: Sequence[Sequence[int]], run: ProfileRun, plain: ProfileRun) -> list[Any]:
    """Where the tokens of `run` part from those of `plain`, prompt by prompt; see the module."""
    found = []
    for number, (prompt, ours, theirs) in enumerate(zip(prompts, run.token_ids, plain.token_ids, strict=True)):
        difference = first_difference(session, prompt, ours, theirs)
        if difference is not None:
            tokens = {"found": difference.eagle, "expected": difference.plain}
            found.append({"prompt": number, "step": difference.step, **tokens, "gap": difference.gap})
    return found


def _answer(directory: str, request: dict[str, Any]) -> dict[str, Any]:
    prompts, profiles = request["prompts"], request["profiles"]
    drafted = next((profile for profile in profiles if profile != PLAIN), PLAIN)
    with Session.open(directory, profile=drafted, kernels=request["kernels"]) as session:
        runs = measure(session, prompts, profiles, max_new_tokens=request["max_new_tokens"])
        if request.get("tune"):
            with suppress(EagleError):  # of a meaningless prompt: nothing that the caller asked for depends on it
                session.tune()
        plain = runs.get(PLAIN)
        return {
            profile: {
                "token_ids": run.token_ids,
                "stats": run.stats.to_dict(),
                "partings": [] if plain is None else partings(session, prompts, run, plain),
            }
            for profile, run in runs.items()
        }


def main() -> None:
    """See the module."""
    run_command(lambda: print(json.dumps(_answer(sys.argv[1], json.load(sys.stdin)))))


if __name__ == "__main__":
    restart_with_huge_pages()
    main()
