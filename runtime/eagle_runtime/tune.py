"""`eagle-run --tune`: what drafting and verifying cost on this machine, measured in rounds that are real ones.

A pass timed alone is faster than in a round, where target and head take turns in the processor's caches. So an answer
to a meaningless prompt is made with every profile in turn, in a short context and in a long one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from eagle_graphs import Manifest, Profile, Tree, root_only, tree_from_parents
from eagle_runtime.cost_table import Line, Table
from eagle_runtime.draft import Drafting
from eagle_runtime.generate import Progress, Request, SlotState, generate
from eagle_runtime.stats import PhaseClock
from eagle_runtime.text import TextStream

_REPEATS = 9
_SHORT, _LONG = 32, 1024  # tokens of the prompts, at most a fifth and half of what the cache takes


def measure_costs(state: SlotState, manifest: Manifest, tokenizer: Tokenizer) -> Table:
    """The costs of the steps that `state` can take, in a slot that is empty and is left filled."""
    capacity = manifest.limits.capacity
    short = max(min(_SHORT, capacity // 5), 1)
    long = max(min(_LONG, capacity // 2), short + 1)
    seconds = {length: _rehearse(state, manifest, tokenizer, length) for length in (short, long)}
    table = {}
    for step in seconds[long].keys() & seconds[short].keys():
        near, far = seconds[short][step], seconds[long][step]
        slope = max(far - near, 0.0) / (long - short)
        table[step] = Line(base=near - min(slope * short, near / 2), slope=slope)
    return table


def _rehearse(state: SlotState, manifest: Manifest, tokenizer: Tokenizer, length: int) -> dict[str, float]:
    """Seconds of each step after a prompt of so many tokens: the lower quartile, since noise only adds."""
    state.reset()
    done = threading.Event()
    rehearsal = Rehearsal(manifest.profiles, done)
    request = Request(
        prompt=[index % manifest.target.vocab_size for index in range(1, length + 1)],
        profile=manifest.profiles[0],
        max_new_tokens=manifest.limits.capacity,
        eos_token_ids=frozenset(),
        capacity=manifest.limits.capacity,
        prefill_chunk=manifest.limits.prefill_chunk,
        planner=rehearsal,
    )
    for _ in generate(state, request, Progress(text=TextStream(tokenizer)), cancelled=done):
        pass
    return {step: sorted(times)[len(times) // 4] for step, times in rehearsal.seconds.items()}


class Rehearsal:
    """Takes plain decoding and every profile in turn, and times them. See `eagle_runtime.planner.Planning`.

    Args:
        profiles: to take.
        done: is set when all have been taken often enough.
    """

    def __init__(self, profiles: Sequence[Profile], done: threading.Event) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        """By step; see `eagle_runtime.cost_table.Table`."""
        turns = [None, *profiles]
        self._turns, self._first, self._done = turns * (_REPEATS + 1), len(turns), done
        self._taken, self._drafted = 0, False
        self._started = self._draft_s = 0.0

    def propose(self, tokens: Sequence[int], drafter: Drafting | None, clock: PhaseClock) -> Tree:
        """See `Planning`."""
        self._started, profile = clock.total, self._turns[self._taken]
        tree = root_only(tokens[-1])
        self._drafted = profile is not None and drafter is not None
        if profile is not None:
            tree = _chain(tokens[-1], profile.nodes) if drafter is None else drafter.draft(tokens, profile, clock)
        clock.lap("tree")
        self._draft_s = clock.total - self._started
        return tree

    def learn(self, kept: Sequence[int], *, accepted: int, clock: PhaseClock) -> int:
        """See `Planning`."""
        profile = self._turns[self._taken]
        self._taken += 1
        if self._taken > self._first:  # the first turn makes the buffers
            nodes = 1 if profile is None else profile.nodes
            self.seconds[f"verify {nodes}"].append(clock.total - self._started - self._draft_s)
            if self._drafted:
                self.seconds[f"draft {nodes}"].append(self._draft_s)
        if self._taken == len(self._turns):
            self._done.set()
        return 0


def _chain(token: int, nodes: int) -> Tree:
    """A tree that nobody drafted: the same token again and again."""
    return tree_from_parents(np.full(nodes, token), np.arange(-1, nodes - 1))
