"""A drafter that knows what the target will say, and the loop run with it: shared by the runtime's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from eagle_graphs import Profile, Tree, tree_from_parents
from eagle_runtime import Processor, Sampling, Session
from eagle_runtime.accept import Accepting, Greedy
from eagle_runtime.draft import Drafting
from eagle_runtime.engines import Rows
from eagle_runtime.generate import Progress, Request, Round, SlotState, generate
from eagle_runtime.planner import Planning
from eagle_runtime.sampled_tree import Proposal
from eagle_runtime.sampler import Sampler
from eagle_runtime.stats import PhaseClock
from eagle_runtime.text import TextStream
from tests.models import VOCAB

DEEPEST = 16
"""Levels that a shape may ask for."""

Shape = Callable[[Sequence[int]], Tree]
"""A tree from the tokens to come: the root, what the target says after it, after that, ..."""


def wrong(token: int, distance: int = 1) -> int:
    """A token other than `token`, and another one for each distance."""
    return (token + distance) % VOCAB


def chain(right: int, depth: int) -> Shape:
    """One branch of `depth` levels, of which the first `right` are what the target says."""

    def shape(coming: Sequence[int]) -> Tree:
        drafted = [coming[level] if level <= right else wrong(coming[level]) for level in range(1, depth + 1)]
        return tree_from_parents(np.array([coming[0], *drafted]), np.arange(-1, depth))

    return shape


def bush(coming: Sequence[int]) -> Tree:
    """The target's next three tokens in rows 2, 6, 7, among wrong siblings; row 4 is right but below a wrong one."""
    _, first, second, third = coming[:4]
    tokens = [coming[0], wrong(first), first, wrong(first, 2), second, wrong(second), second, third, wrong(third)]
    return tree_from_parents(np.array(tokens), np.array([-1, 0, 0, 0, 1, 2, 2, 6, 6]))


class Scripted:
    """Drafts from the tokens to come. See `eagle_runtime.draft.Drafting`.

    Args:
        script: the prompt and the target's own continuation of it.
        shape: makes the trees; None leaves them to `head`.
        head: the real drafter, which then sees all that this one sees.
    """

    def __init__(self, script: Sequence[int], shape: Shape | None, *, head: Drafting | None = None) -> None:
        self.script, self.shape, self.head = list(script), shape, head
        self.rows = 0

    def observe(self, features: Rows, path: Sequence[int], tokens: Sequence[int]) -> None:
        self.rows += len(path)
        if self.head is not None:
            self.head.observe(features, path, tokens)

    def clear(self) -> None:
        self.rows = 0
        if self.head is not None:
            self.head.clear()

    def catch_up(self, tokens: Sequence[int]) -> None:
        if self.head is not None:
            self.head.catch_up(tokens)

    def draft(
        self, tokens: Sequence[int], profile: Profile, clock: PhaseClock, proposal: Proposal | None = None
    ) -> Tree:
        assert self.rows == len(tokens) - 1, "the drafter was not told of every committed row"
        drafted = self.head.draft(tokens, profile, clock, proposal) if self.head is not None else None
        if self.shape is None:
            assert drafted is not None
            return drafted
        assert list(tokens) == self.script[: len(tokens)], "the answer left the target's own continuation"
        return self.shape(self.script[len(tokens) - 1 :] + [0] * DEEPEST)

    def truncate(self, rows: int) -> None:
        self.rows = min(rows, self.rows)
        if self.head is not None:
            self.head.truncate(rows)


@dataclass(kw_only=True)
class Answer:
    """What a run of the loop gave."""

    progress: Progress
    rounds: list[Round] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.progress.token_ids


def state_with(session: Session, drafter: Drafting | None) -> SlotState:
    """The session's target, emptied, with another drafter."""
    verifier = session._state.verifier
    verifier.truncate(0)
    return SlotState(verifier=verifier, drafter=drafter)


def stream(
    session: Session,
    state: SlotState,
    prompt: Sequence[int],
    answer: Answer,
    *,
    plain: bool = False,
    max_new_tokens: int = 21,
    eos: Sequence[int] = (),
    chunk: int | None = None,
    cancelled: threading.Event | None = None,
    on_round: Callable[[Round], None] | None = None,
    sampling: Sampling | None = None,
    processors: Sequence[Processor] = (),
    logprobs: int | None = None,
    planner: Planning | None = None,
) -> Iterator[str]:
    """The loop, run as a session runs it; after every round each committed row must have its token."""
    limits = session.bundle.manifest.limits

    def look_on(done: Round) -> None:
        answer.rounds.append(done)
        assert state.verifier.rows == len(state.tokens) - 1
        if on_round is not None:
            on_round(done)

    accepting: Accepting = Greedy()
    if sampling is not None:
        accepting = Sampler(sampling, prompt=prompt, eos_token_ids=eos, capacity=limits.capacity, processors=processors)
    request = Request(
        prompt=list(prompt),
        profile=None if plain or state.drafter is None else session._mode.profile,
        max_new_tokens=max_new_tokens,
        eos_token_ids=frozenset(eos),
        capacity=limits.capacity,
        prefill_chunk=limits.prefill_chunk if chunk is None else chunk,
        accepting=accepting,
        proposal=None if sampling is None else sampling.proposal,
        planner=planner,
        logprobs=logprobs,
        on_round=look_on,
    )
    return generate(state, request, answer.progress, cancelled=cancelled or threading.Event())


def run(
    session: Session, state: SlotState, prompt: Sequence[int], *, stop: Sequence[str] = (), **options: object
) -> Answer:
    """The whole answer; takes what `stream` takes."""
    answer = Answer(progress=Progress(text=TextStream(session.tokenizer, stop=stop)))
    answer.pieces.extend(stream(session, state, prompt, answer, **options))
    assert "".join(answer.pieces) == answer.progress.text.text
    if answer.tokens:
        assert state.tokens == [*prompt, *answer.tokens]
        assert state.verifier.rows == len(state.tokens) - 1
    return answer


def run_plain(session: Session, prompt: Sequence[int], max_new_tokens: int, **options: object) -> list[int]:
    """The target's own continuation, token by token."""
    return run(session, state_with(session, None), prompt, max_new_tokens=max_new_tokens, **options).tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A prompt and its plain continuation."""

    prompt: list[int]
    tokens: list[int]

    @property
    def script(self) -> list[int]:
        return self.prompt + self.tokens


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """A prompt without special tokens."""
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


def stop_string(session: Session, tokens: Sequence[int]) -> str:
    """The last character of token 7 and the first of token 8: complete with token 8, in the middle of round 2."""
    last, first = session.tokenizer.decode([tokens[7]]), session.tokenizer.decode([tokens[8]])
    return last[-1:] + first[:1]


def scripted(session: Session, known: Known, shape: Shape) -> SlotState:
    """The session's target beside a drafter that knows the continuation."""
    return state_with(session, Scripted(known.script, shape))


def assert_same_rounds(rounds: Sequence[Round], expected: Sequence[Round]) -> None:
    assert len(rounds) == len(expected)
    for found, wanted in zip(rounds, expected, strict=True):
        np.testing.assert_array_equal(found.tree.tokens, wanted.tree.tokens)
        np.testing.assert_array_equal(found.tree.parents, wanted.tree.parents)
        np.testing.assert_allclose(found.tree.values, wanted.tree.values, atol=1e-4)
        assert (found.walk, found.kept) == (wanted.walk, wanted.kept)
