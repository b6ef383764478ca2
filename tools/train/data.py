"""`python -m tools.train data`: workers write conversations, one process keeps them."""

from __future__ import annotations

import multiprocessing.connection
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from eagle_calibration.prompts import load_prompts
from eagle_exporter.checkpoint import find_checkpoint, sha256
from eagle_exporter.target import Target, load_target
from eagle_exporter.tokenizer import prompt_tokens
from eagle_graphs import EagleError
from eagle_graphs.native import library_problem
from tools.train.answers import Answer, AnswerFile, Dropped
from tools.train.frames import own_prompt_frame, started_prompts
from tools.train.native_slots import NativeSlots, WritingGraph, write_graph
from tools.train.progress import token_progress
from tools.train.slots import Precision, Slots
from tools.train.torch_slots import TorchSlots
from tools.train.write import MAX_PROMPT, MAX_REST, Plan, write

MAX_GIVEN_PROMPT = 1024
"""Tokens of a prompt from a file; longer ones are left out."""
GRAPH = "graph"
"""Directory below the data for the lowered target, while it is written with."""
ITEM, END, ERROR = "item", "end", "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """What to write, and how."""

    model: str
    out: Path
    tokens: int
    """Answer tokens."""
    prompts: Path | None
    """A file of prompts; without one the target writes them."""
    starts: Path | None
    """A file of beginnings of prompts, which the target ends."""
    answer_tokens: int
    greedy: float
    temperature: float
    top_p: float
    seed: int
    slots: int
    """Conversations at once, in each worker."""
    workers: int
    """Processes."""
    precision: Precision
    device: str

    def __post_init__(self) -> None:
        if self.prompts is not None and self.starts is not None:
            raise EagleError("--prompts and --starts were both given: prompts are whole, or the target ends them")
        limits = {"answer_tokens": (2, 1 << 20), "greedy": (0, 1), "temperature": (0.01, 10), "top_p": (0.01, 1)}
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                option = f"--{name.replace('_', '-')}"
                raise EagleError(f"{option} is {getattr(self, name)}; expected {low} to {high}")

    def settings(self) -> dict[str, Any]:
        """What a run that continues must have in common with the first.

        Not which program computed int8: its texts are as good whether torch or the native graph wrote them.
        """
        names = ("model", "answer_tokens", "greedy", "temperature", "top_p", "seed", "precision")
        files = {"prompts": self.prompts, "starts": self.starts}
        sums = {name: sha256(file) if file else None for name, file in files.items()}
        return {name: getattr(self, name) for name in names} | {"own_prompts": self.prompts is None} | sums


def make_data(options: DataOptions, console: Console) -> None:
    """Writes until there are enough tokens, or the prompts are used up."""
    if given := options.prompts or options.starts:
        load_prompts(given)
    file = AnswerFile(options.out, options.settings())
    before, began = file.tokens, None
    try:
        if before < options.tokens:
            with (
                _job(options, console) as job,
                _items(job, file.done) as items,
                token_progress(console, "writing", options.tokens, before) as moved,
            ):
                for item in items:
                    began = began or time.monotonic()
                    if item is not None:
                        file.add(item)
                        moved(file.tokens)
                    if file.tokens >= options.tokens:
                        break
    finally:
        file.close()
    dropped = ", ".join(f"{count} {why}" for why, count in sorted(file.dropped.items())) or "none"
    console.print(f"{file.tokens:,} answer tokens in {file.path}; conversations dropped: {dropped}", highlight=False)
    if began is not None:
        rate = (file.tokens - before) / (time.monotonic() - began)
        console.print(f"{rate:,.0f} answer tokens a second", highlight=False)
    if file.tokens < options.tokens:
        raise EagleError(
            f"the prompts are used up after {file.tokens:,} of {options.tokens:,} tokens: bring more of them"
        )


Items = Iterator[Answer | Dropped | None]
"""None says that a worker is ready to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What every worker is given."""

    options: DataOptions
    plan: Plan
    graph: WritingGraph | None
    """The target to write with; None for torch's."""

    def slots(self) -> Slots:
        """A worker's."""
        options = self.options
        if self.graph is not None:
            return NativeSlots(self.graph, slots=options.slots, threads=_threads(options))
        torch.set_num_threads(_threads(options))
        target = load_target(find_checkpoint(options.model, what="target"))
        return TorchSlots(target, slots=options.slots, precision=options.precision, device=options.device)


def _threads(options: DataOptions) -> int:
    return max(1, (os.cpu_count() or 1) // options.workers)


@contextmanager
def _job(options: DataOptions, console: Console) -> Iterator[_Job]:
    """The job; the graph's files last as long as the context."""
    target = load_target(find_checkpoint(options.model, what="target"))
    plan = _plan(options, target)
    directory = options.out / GRAPH
    shutil.rmtree(directory, ignore_errors=True)  # of a run that was killed
    directory.mkdir()
    try:
        graph = None
        if (options.precision, options.device) == ("int8", "cpu"):
            try:
                if problem := library_problem():
                    raise EagleError(problem)
                graph = write_graph(target, directory, capacity=plan.longest)
            except EagleError as error:
                console.print(f"torch writes, more slowly than the native CPU kernels: {error}", highlight=False)
        del target
        yield _Job(options=options, plan=plan, graph=graph)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _items(job: _Job, done: set[int]) -> Iterator[Items]:
    workers = job.options.workers
    if workers == 1:
        yield _write(job, 0, done)
        return
    context = multiprocessing.get_context("spawn")
    processes, receivers = [], []
    for stripe in range(workers):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(job, stripe, done, sender), daemon=True)
        process.start()
        sender.close()  # the worker has the other one: when it ends, so does the pipe
        processes.append(process)
        receivers.append(receiver)
    try:
        yield _received(receivers)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _received(receivers: list[Connection]) -> Items:
    """What the workers send, until all have ended."""
    while receivers:
        for receiver in multiprocessing.connection.wait(receivers):
            assert isinstance(receiver, Connection)
            try:
                kind, item = receiver.recv()
            except EOFError:
                raise EagleError("a worker has died: is there memory for so many --workers?") from None
            if kind == ERROR:
                raise EagleError(item)
            if kind == END:
                receivers.remove(receiver)
            else:
                yield item


def _work(job: _Job, stripe: int, done: set[int], sender: Connection) -> None:
    """A worker process. It ends when it is told to, or when nobody reads what it sends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        for item in _write(job, stripe, done):
            sender.send((ITEM, item))
        sender.send((END, None))
    except EagleError as error:
        sender.send((ERROR, str(error)))
    except BrokenPipeError:
        return


def _write(job: _Job, stripe: int, done: set[int]) -> Items:
    """The conversations of one worker: every so-manieth number that is not done."""
    slots = job.slots()
    yield None
    numbers = (index for index in count(stripe, job.options.workers) if index not in done)
    yield from write(slots, job.plan, numbers)


def _plan(options: DataOptions, target: Target) -> Plan:
    context = int(target.config.max_position_embeddings)
    written = 0 if options.prompts else (MAX_REST if options.starts else MAX_PROMPT)
    room = context - options.answer_tokens - written
    if room < 2:
        raise EagleError(
            f"--answer-tokens is {options.answer_tokens}; expected less than the context of {context}"
            + (f", of which prompts have {written}" if written else "")
        )
    closing: tuple[int, ...] = ()
    if options.prompts is not None:
        longest = min(room, MAX_GIVEN_PROMPT)
        prompts = tuple(map(tuple, prompt_tokens(target.tokenizer, load_prompts(options.prompts), longest=longest)))
    elif options.starts is not None:
        prompts, closing = started_prompts(target, options.starts, longest=min(room, MAX_GIVEN_PROMPT))
    else:
        header, closing = own_prompt_frame(target)
        prompts = (header,)
    return Plan(
        prompts=prompts,
        closing=closing,
        eos=target.eos_token_ids,
        answer_tokens=options.answer_tokens,
        greedy=options.greedy,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        prompt_tokens=written or MAX_PROMPT,
    )
