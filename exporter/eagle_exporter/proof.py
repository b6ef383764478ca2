"""The last check of an export: the bundle, run by the runtime as a user would, says what torch says.

The runtime is started as a process of its own on the finished directory; the bundle is the only link.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from eagle_exporter.target import Target, as_transformers_runs_it
from eagle_graphs import EagleError
from eagle_graphs.manifest import Exactness

PLAIN = "plain"
SMALLEST_GAP = 1e-4
"""Logits closer than this are a tie in float32, whatever difference the comparison happened to see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """A prompt after which a profile's greedy tokens go another way than those they are compared with, and where."""

    prompt: int
    profile: str
    step: int
    found: int
    expected: int
    gap: float
    """How far apart the two tokens' logits are: in torch, or in the bundle's own plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Greedy tokens of every profile against torch's and plain decoding's."""

    prompts: int
    tokens: int
    """Of each prompt."""
    from_torch: tuple[Parting, ...]
    """Near-ties, or what the rounding of a quantized bundle changes."""
    from_plain: tuple[Parting, ...]
    """Of profiles that draft: no further apart than the exactness class says."""

    def alike(self, partings: Sequence[Parting]) -> int:
        """Prompts at which no profile parts."""
        return self.prompts - len({parting.prompt for parting in partings})

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)


def run_bundle(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    profiles: Sequence[str],
    *,
    kernels: str,
    max_new_tokens: int,
    tune: bool,
) -> dict[str, Any]:
    """What `eagle_runtime.measure` says of the bundle. Raises EagleError where it fails.

    tune: whether it leaves what the steps cost on this machine, for the runtime's `auto`.
    """
    request = {
        "prompts": [list(p) for p in prompts],
        "profiles": list(profiles),
        "kernels": kernels,
        "max_new_tokens": max_new_tokens,
        "tune": tune,
    }
    process = subprocess.run(
        [sys.executable, "-m", "eagle_runtime.measure", str(directory)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
    )
    if process.returncode != 0:
        reason = process.stderr.strip().splitlines() or ["no message"]
        raise EagleError(f"the exported bundle does not run: {reason[-1].removeprefix('error: ')}")
    return cast(dict[str, Any], json.loads(process.stdout))


def torch_greedy(target: Target, prompt: Sequence[int], *, max_new_tokens: int) -> tuple[list[int], list[torch.Tensor]]:
    """Greedy tokens up to its end-of-sequence, with the model's own attention, and the logits [V] behind each."""
    with torch.no_grad(), as_transformers_runs_it(target.model):
        tokens = torch.tensor([list(prompt)])
        result = cast(Any, target.model).generate(
            tokens,
            attention_mask=torch.ones_like(tokens),  # else transformers takes a pad token in the prompt for padding
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return result.sequences[0, len(prompt) :].tolist(), [logits[0] for logits in result.logits]


def check_greedy(
    target: Target,
    prompts: Sequence[Sequence[int]],
    runs: dict[str, Any],
    exactness: Exactness,
    *,
    quantized: bool,
    max_new_tokens: int,
) -> Agreement:
    """Compares every profile's first tokens with plain decoding's and with torch's.

    Raises EagleError on a difference from plain decoding that the exactness class excludes, and, unless the bundle is
    quantized, on one from torch: where the two logits lie further apart than the difference that was measured allows.
    """
    from_plain = _check_plain(runs, exactness)
    from_torch = []
    for number, prompt in enumerate(prompts):
        expected, logits = torch_greedy(target, prompt, max_new_tokens=max_new_tokens)
        for profile, run in runs.items():
            found = run["token_ids"][number]  # it goes on past an end-of-sequence, and may end at the capacity
            step = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
            if step is None:
                continue
            gap = float(logits[step][expected[step]] - logits[step][found[step]])
            if not quantized and not 0 <= gap <= max(exactness.logit_gap, SMALLEST_GAP):
                raise EagleError(
                    f"with profile {profile} the bundle says token {found[step]} where torch says {expected[step]} "
                    f"(prompt {number}, token {step}, logits {gap:.3g} apart): no bundle was written"
                )
            from_torch.append(
                Parting(prompt=number, profile=profile, step=step, found=found[step], expected=expected[step], gap=gap)
            )
    return Agreement(prompts=len(prompts), tokens=max_new_tokens, from_torch=tuple(from_torch), from_plain=from_plain)


def _check_plain(runs: dict[str, Any], exactness: Exactness) -> tuple[Parting, ...]:
    """Where profiles part from plain decoding. The truth is the bundle's own: a class says nothing of torch.

    A parting within the measured gap is what the class announces, as any is in a statistical one. One beyond it means
    that the class is wrong.
    """
    near = max(exactness.logit_gap, SMALLEST_GAP)
    allowed = {"bitwise": -math.inf, "near-tie": near, "statistical": math.inf}[exactness.kind]
    found = [Parting(profile=profile, **parting) for profile, run in runs.items() for parting in run["partings"]]
    for parting in found:
        if parting.gap > allowed:
            raise EagleError(
                f"with profile {parting.profile} the bundle says token {parting.found} where plain decoding says "
                f"{parting.expected} (prompt {parting.prompt}, token {parting.step}, logits {parting.gap:.3g} apart), "
                f"which its measured exactness excludes ({exactness.kind}, gap {exactness.logit_gap:.2g}): no bundle "
                "was written; please report this"
            )
    return tuple(found)


def fastest_profile(runs: dict[str, Any]) -> str:
    """The profile that decoded most tokens a second."""
    return max(runs, key=lambda profile: float(runs[profile]["stats"]["tokens_per_s"]))
