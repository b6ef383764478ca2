"""The loop: draft -> verify -> accept -> commit, and what ends it.

A sequence of n + 1 tokens has n committed rows in the target's cache: the last token, which the target
drew and nobody has fed yet, is the root of the next tree. Every round commits as many rows as it adds
tokens, so that this holds after each, wherever it was cut. (Cancelled within the prompt, all rows are fed ones.)
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from eagle_graphs import Profile, Tree, root_only
from eagle_runtime.accept import Accepting, Greedy, Walk
from eagle_runtime.draft import Drafting
from eagle_runtime.logprobs import TokenLogprobs, path_logprobs
from eagle_runtime.planner import Planning
from eagle_runtime.sampled_tree import Proposal
from eagle_runtime.stats import PhaseClock, Stats
from eagle_runtime.text import TextStream
from eagle_runtime.verify import Verified, Verifier
from eagle_runtime.whole_round import WholeRounds

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round, for those who look on: the tree, the walk through it, and the tokens kept of it."""

    tree: Tree
    walk: Walk
    kept: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for, and what ends the answer."""

    prompt: list[int]
    profile: Profile | None
    """None decodes plainly, one token a round, unless there is a planner."""
    max_new_tokens: int
    eos_token_ids: frozenset[int]
    """Empty where end-of-sequence tokens are to be ignored."""
    capacity: int
    """Rows that the cache may commit."""
    prefill_chunk: int
    """Prompt tokens of one pass."""
    accepting: Accepting = field(default_factory=Greedy)
    proposal: Proposal | None = None
    """How to draw a sampled tree; None for a dynamic one."""
    planner: Planning | None = None
    """Chooses what to draft, look up and verify; None where the profile alone says it."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each one; None for no report."""
    on_round: Callable[[Round], None] | None = None

    @property
    def needs_logits(self) -> bool:
        """Whether the target's logits must leave its graph."""
        return self.accepting.needs_logits or self.logprobs is not None


@dataclass(slots=True, kw_only=True)
class SlotState:
    """The tokens of one slot, and the state of target and head over them, which advance together."""

    verifier: Verifier
    drafter: Drafting | None
    whole_rounds: WholeRounds | None = None
    tokens: list[int] = field(default_factory=list)

    def keep_prefix(self, prompt: Sequence[int]) -> int:
        """Drops what does not lead to `prompt`; returns the rows that stay, fewer than its tokens.

        One row less is kept than the tokens agree on: the head's row for it was paired with the token
        that followed then, and its feature comes back with the token fed again.
        """
        cached = self.tokens[: self.verifier.rows]
        agreed = next((i for i, (a, b) in enumerate(zip(cached, prompt, strict=False)) if a != b), None)
        kept = max(min(len(cached) if agreed is None else agreed, len(prompt)) - 1, 0)
        self.verifier.truncate(kept)
        if self.drafter is not None:
            self.drafter.truncate(kept)
        del self.tokens[kept:]
        return kept

    def reset(self) -> None:
        """Forgets everything, also what a pass that failed left half done."""
        self.verifier.clear()
        if self.drafter is not None:
            self.drafter.clear()
        self.tokens.clear()


@dataclass(slots=True, kw_only=True)
class Progress:
    """An answer under way."""

    text: TextStream
    stats: Stats = field(default_factory=Stats)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None


def generate(state: SlotState, request: Request, progress: Progress, *, cancelled: threading.Event) -> Iterator[str]:
    """Yields the answer's text as it is committed; `progress` tells the rest."""
    prefilled = prefill(state, request, progress, cancelled=cancelled)
    if prefilled is not None and (piece := take(state, *prefilled, request, progress)):
        yield piece
    clock = PhaseClock(progress.stats)
    while progress.finish_reason is None:
        clock.start()
        tree, verified = draft_and_verify(state, request, clock)
        walk = request.accepting.walk(tree, verified)
        clock.lap("accept")
        piece = take(state, tree, walk, verified, request, progress)
        kept = state.tokens[state.verifier.rows + 1 :]
        clock.lap("host")
        commit(state, walk.path[: len(kept)], verified)
        clock.lap("commit")
        accepted, looked_up = len(walk.path) - 1, 0
        if request.planner is not None:
            looked_up = request.planner.learn(kept, accepted=min(accepted, len(kept)), clock=clock)
            clock.lap("host")
        progress.stats.count_round(
            nodes=len(tree), tokens=len(kept), accepted=accepted, checked=walk.checked, looked_up=looked_up
        )
        if request.on_round is not None:
            request.on_round(Round(tree=copy.deepcopy(tree), walk=walk, kept=kept))
        if piece:
            yield piece
        if progress.finish_reason is None and cancelled.is_set():
            progress.finish_reason = "cancelled"
    if rest := progress.text.flush():
        yield rest


def draft_and_verify(state: SlotState, request: Request, clock: PhaseClock) -> tuple[Tree, Verified]:
    """A tree below the last token, whose rows are reserved, and what the target says of them."""
    drafter, logits = state.drafter, request.needs_logits
    if request.planner is not None:
        tree = request.planner.propose(state.tokens, drafter, clock)
    elif request.profile is None or drafter is None:
        tree = root_only(state.tokens[-1])
    else:
        if state.whole_rounds is not None and request.proposal is None:
            done = state.whole_rounds.run(state.tokens, request.profile, clock, logits=logits)
            if done is not None:
                return done
        tree = drafter.draft(state.tokens, request.profile, clock, request.proposal)
    clock.lap("tree")
    verified = state.verifier.verify(tree, logits=logits)
    clock.lap("verify")
    return tree, verified


def prefill(
    state: SlotState, request: Request, progress: Progress, *, cancelled: threading.Event
) -> tuple[Tree, Walk, Verified] | None:
    """Commits the prompt's rows chunk by chunk. Returns the walk that gives the first token; None where cancelled."""
    started = time.perf_counter()
    prompt, chunk = request.prompt, request.prefill_chunk
    kept = state.keep_prefix(prompt)
    prefilled = None
    for start in range(kept, len(prompt), chunk):
        if cancelled.is_set():
            progress.finish_reason = "cancelled"
            break
        piece = prompt[start : start + chunk]
        verified = state.verifier.prefill(piece, logits=request.needs_logits)
        state.tokens.extend(piece)
        if state.drafter is not None:
            state.drafter.observe(verified.features, range(len(piece)), state.tokens)
            if request.profile is not None:
                state.drafter.catch_up(state.tokens)
    else:
        tree = root_only(prompt[-1])
        prefilled = tree, request.accepting.walk(tree, verified), verified
    progress.stats.prompt_tokens, progress.stats.reused_tokens = len(prompt), kept
    progress.stats.prefill_s = time.perf_counter() - started
    return prefilled


def take(state: SlotState, tree: Tree, walk: Walk, verified: Verified, request: Request, progress: Progress) -> str:
    """Takes over a walk's tokens up to whatever ends the answer first; returns the text that may be shown."""
    drawn = [*map(tree.tokens.item, walk.path[1:]), walk.bonus]
    room = min(request.max_new_tokens - len(progress.token_ids), request.capacity + 1 - len(state.tokens))
    kept = drawn[:room]
    end = next((i for i, token in enumerate(kept) if token in request.eos_token_ids), None)
    if end is not None:
        kept = kept[: end + 1]
    piece = progress.text.push(kept)
    if progress.text.stopped:
        kept = kept[: progress.text.tokens_used - len(progress.token_ids)]
    state.tokens.extend(kept)
    progress.token_ids.extend(kept)
    request.accepting.commit(kept)
    if request.logprobs is not None:
        progress.logprobs += path_logprobs(verified.logits, walk.path, kept, request.logprobs)
    progress.stats.tokens += len(kept)
    if progress.text.stopped or end is not None:
        progress.finish_reason = "stop"
    elif len(kept) == room:
        progress.finish_reason = "length"
    return piece


def commit(state: SlotState, path: list[int], verified: Verified) -> None:
    """Keeps the rows of `path` in the target's cache and queues their features for the head."""
    state.verifier.commit(path)
    if state.drafter is not None:
        state.drafter.observe(verified.features, path, state.tokens)
