"""A session: one bundle, opened, and one conversation with it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, Unpack, get_args

import numpy as np
import numpy.typing as npt

from eagle_graphs import EagleError
from eagle_runtime.accept import Accepting, Greedy
from eagle_runtime.answer import Generation, StreamOptions
from eagle_runtime.bundle import Bundle, open_bundle
from eagle_runtime.cost_table import Table
from eagle_runtime.engines.cuda import CudaMemory
from eagle_runtime.engines.memory import DeviceMemory
from eagle_runtime.engines.select import installed_backends, select_cuda_engine, select_engine
from eagle_runtime.generate import Progress, Request, Round, generate
from eagle_runtime.learned import Learned
from eagle_runtime.modes import AUTO, mode_from_name
from eagle_runtime.opened import open_state
from eagle_runtime.processors import Processor
from eagle_runtime.prompts import Prompts
from eagle_runtime.sampler import Sampler
from eagle_runtime.sampling import Sampling, SamplingOptions
from eagle_runtime.stats import Stats
from eagle_runtime.text import TextStream
from eagle_runtime.tune import measure_costs

DEFAULT_MAX_NEW_TOKENS = 512
DraftingMode = Literal["compiled", "stepwise"]
_CLOSED = "the session is closed: open another"


class SessionBusyError(EagleError):
    """The session is answering already; it answers one request at a time."""


class Session:
    """Answers with EAGLE from one bundle. Use `open`; close it, or use it as a context manager."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        profile: str,
        threads: int | None,
        kernels: str,
        drafting: DraftingMode,
        memory: DeviceMemory | None,
    ) -> None:
        manifest = bundle.manifest
        self.bundle = bundle
        self.stats = Stats()
        """Counts and times of the latest answer."""
        self.last: Generation | None = None
        """The latest answer, once it is finished."""
        self._name = profile
        self._mode = mode_from_name(profile, manifest, lookup=None)
        self._lock, self._cancelled, self._closed = threading.Lock(), threading.Event(), False
        self._answering = 0  # the thread that holds the lock, or held it last
        self._streams: weakref.WeakSet[Generator[str, None, None]] = weakref.WeakSet()
        self._prompts = Prompts(bundle)
        self.tokenizer = self._prompts.tokenizer
        """The target's."""
        self._memory = memory
        if memory is None:
            self.engine, self.fallback = select_engine(manifest, kernels)
        else:
            self.engine, self.fallback = select_cuda_engine(
                manifest, architecture=memory.architecture, installed=installed_backends()
            )
        """The compiled graphs in use, and how exact they are; and why they are not the bundle's first, or None."""
        self._learned = Learned(bundle, self.engine, threads=threads, drafting=drafting)
        try:
            opened = open_state(
                bundle, self.engine, self._mode, threads=threads, compiled=drafting == "compiled", memory=memory
            )
        except BaseException:
            if memory is not None:
                memory.close()
            raise
        self._state, self._graphs = opened.state, opened.graphs

    @classmethod
    def open(
        cls,
        directory: Path | str,
        *,
        profile: str = AUTO,
        threads: int | None = None,
        kernels: str = AUTO,
        drafting: DraftingMode = "compiled",
        device: str = "cpu",
        verify: bool = False,
    ) -> Self:
        """Opens a bundle.

        Args:
            directory: the bundle.
            profile: nodes of the tree to verify, as text; "auto" for what pays in each round; "lookup" for trees that
                no head drafts; "plain" for none.
            threads: of ONNX Runtime; None for one a core.
            kernels: "native" or "stock", where the bundle holds graphs for both; "auto" for the best that runs here.
            drafting: "compiled": a tree in one call where the bundle has its graph; "stepwise": one call a level.
            device: "cpu", or "cuda" for the first GPU and the bundle's engines or portable graphs for it.
            verify: hash every file of the bundle even if this machine has done so before.

        Raises:
            EagleError: the bundle is damaged or of another version, or the profile is not one of it.
        """
        if threads is not None and threads < 1:
            raise EagleError(f"threads is {threads}; expected 1 or more, or none to use every core")
        if drafting not in get_args(DraftingMode):
            raise EagleError(f"drafting is {drafting!r}; expected {' or '.join(get_args(DraftingMode))}")
        if device not in ("cpu", "cuda"):
            raise EagleError(f"device is {device!r}; expected 'cpu' or 'cuda'")
        bundle = open_bundle(directory, verify=verify)
        memory = CudaMemory() if device == "cuda" else None
        return cls(bundle, profile=profile, threads=threads, kernels=kernels, drafting=drafting, memory=memory)

    def generate(self, prompt: str | None = None, **options: Unpack[StreamOptions]) -> Generation:
        """The whole answer at once; takes what `stream` takes."""
        for _ in self.stream(prompt, **options):
            pass
        assert self.last is not None
        return self.last

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, str]] | None = None,
        token_ids: Sequence[int] | None = None,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        stop_strings: Sequence[str] = (),
        ignore_eos: bool = False,
        profile: str | None = None,
        lookup: bool | None = None,
        on_round: Callable[[Round], None] | None = None,
        logprobs: int | None = None,
        processors: Sequence[Processor] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """Yields the answer's text as it is committed; `last` and `stats` tell the rest afterwards.

        Cache rows that an earlier answer left are reused as far as the new prompt begins with its tokens.

        Args:
            prompt: text to continue as it is; or
            messages: a conversation for the chat template, each {"role": ..., "content": ...}; or
            token_ids: the prompt's tokens.
            max_new_tokens: where the answer is cut.
            stop_strings: texts that end the answer; they are not part of it.
            ignore_eos: go on after an end-of-sequence token.
            profile: instead of the session's.
            lookup: whether the text so far proposes tokens too; None where it pays: with "auto" and "lookup".
            on_round: called after every round.
            logprobs: report the target's log-probability of each new token and of so many likeliest ones.
            processors: of your own, run before temperature; see `eagle_runtime.processors.Processor`.
            sampling: temperature, top_p, seed, ...: the fields of `eagle_runtime.Sampling`. Greedy without.

        Raises:
            EagleError: at once, on an option or a prompt that cannot be served.
            SessionBusyError: at the first piece, while another answer is under way.
        """
        manifest = self.bundle.manifest
        if self._closed:
            raise EagleError(_CLOSED)
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise EagleError(f"max_new_tokens is {max_new_tokens!r}; expected a whole number, 1 or more")
        vocab_size = manifest.target.vocab_size
        if logprobs is not None and not (isinstance(logprobs, int) and 0 <= logprobs <= vocab_size):
            raise EagleError(f"logprobs is {logprobs!r}; expected a whole number of 0 to {vocab_size}, the vocabulary")
        options = Sampling(**sampling).seeded()
        options.check_tokens(vocab_size)
        if options.min_new_tokens > max_new_tokens:
            raise EagleError(f"min_new_tokens is {options.min_new_tokens}, more than max_new_tokens, {max_new_tokens}")
        tokens = self._prompts.tokens(prompt, messages, token_ids)
        mode = mode_from_name(
            self._name if profile is None else profile, manifest, lookup=lookup, sampled=options.proposal is not None
        )
        if mode.drafts and self._state.drafter is None:
            raise EagleError(
                f"the session was opened with profile {self._name!r}, without the draft head: open it with another"
            )
        if mode.profile is not None and mode.profile.paths and options.proposal is not None:
            raise EagleError(
                'verify_mode is "sampled" but the profile\'s tree is static: use deterministic, or another profile'
            )
        eos = frozenset(() if ignore_eos else manifest.target.eos_token_ids)
        capacity = manifest.limits.capacity
        accepting: Accepting = Greedy()
        if processors or not options.changes_nothing:
            accepting = Sampler(options, prompt=tokens, eos_token_ids=eos, capacity=capacity, processors=processors)
        request = Request(
            prompt=tokens,
            profile=mode.profile,
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos,
            capacity=capacity,
            prefill_chunk=manifest.limits.prefill_chunk,
            accepting=accepting,
            proposal=options.proposal,
            planner=self._learned.planner(mode, greedy=options.greedy),
            logprobs=logprobs,
            on_round=on_round,
        )
        progress = Progress(text=TextStream(self.tokenizer, stop=stop_strings))
        stream = self._answer(request, progress, sampling=options)
        self._streams.add(stream)
        return stream

    def encode(self, prompt: str | None = None, *, messages: Sequence[Mapping[str, str]] | None = None) -> list[int]:
        """The tokens of a prompt or a conversation, as `stream` would feed them. Raises EagleError as it does."""
        return self._prompts.tokens(prompt, messages, None)

    def piece(self, token_id: int) -> str:
        """The text of one token, special ones by their name; for showing, since a token may be half a character."""
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def logits(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The target's logits [vocabulary] for the token after `token_ids`, read from their beginning.

        Raises EagleError as `stream` does; SessionBusyError while an answer is under way.
        """
        tokens = self._prompts.tokens(None, None, token_ids)
        chunk = self.bundle.manifest.limits.prefill_chunk
        with self._exclusive():
            self._state.reset()
            try:
                for start in range(0, len(tokens), chunk):
                    logits = self._state.verifier.logits(tokens[start : start + chunk])
                return logits
            finally:
                self._state.reset()

    def tune(self) -> Table:
        """Measures what the profile's steps cost on this machine, and keeps it for this bundle. Takes seconds.

        Raises SessionBusyError while an answer is under way.
        """
        manifest = self.bundle.manifest
        with self._exclusive():
            try:
                table = measure_costs(self._state, manifest, self.tokenizer)
            finally:
                self._state.reset()
            self._learned.start_again(table)
        return table

    def reset(self) -> None:
        """Forgets the conversation's cache rows, so that the next prompt is read from its beginning.

        Raises SessionBusyError while an answer is under way.
        """
        with self._exclusive():
            self._state.reset()

    def cancel(self) -> None:
        """Ends the answer under way after its current round; from any thread."""
        self._cancelled.set()

    def close(self) -> None:
        """Frees the graphs and caches, after ending an answer under way.

        Called by the answer itself, from `on_round`, it takes effect when that round is done.
        """
        self._closed = True
        self.cancel()
        while not self._lock.acquire(timeout=0.05):
            if not self._close_suspended() and self._answering == threading.get_ident():
                return
        self._lock.release()
        self._free()

    def _close_suspended(self) -> bool:
        """Ends answers that nobody reads on; False where one is running, which will see that it is cancelled."""
        try:
            for stream in list(self._streams):
                stream.close()
        except ValueError:  # generator already executing
            return False
        return True

    def _free(self) -> None:
        self._learned.save()
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self, request: Request, progress: Progress, *, sampling: Sampling) -> Generator[str, None, None]:
        with self._exclusive():
            self.stats = progress.stats
            try:
                yield from generate(self._state, request, progress, cancelled=self._cancelled)
            except GeneratorExit:
                progress.finish_reason = progress.finish_reason or "cancelled"
                raise
            except BaseException:
                self._state.reset()
                raise
            finally:
                if progress.finish_reason is not None:
                    self.last = Generation(
                        text=progress.text.text,
                        token_ids=progress.token_ids,
                        finish_reason=progress.finish_reason,
                        stats=progress.stats,
                        sampling=sampling,
                        logprobs=None if request.logprobs is None else progress.logprobs,
                    )

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError("the session is answering already: wait, cancel it, or open another session")
        self._answering = threading.get_ident()
        try:
            self._cancelled.clear()
            if self._closed:
                raise EagleError(_CLOSED)
            yield
        finally:
            if self._closed:
                self._free()
            self._lock.release()
