"""The asking side of worker.py."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peers.environments import last_line

from eagle_graphs import EagleError


class Worker:
    """One engine in a process of its own. It computes only while it is asked. Use as a context manager."""

    def __init__(self, name: str, command: Sequence[str], *, log: Path, variables: Mapping[str, str]) -> None:
        self.name, self.log = name, log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(variables)
            )
        self._answer()

    def generate(self, tokens: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        """{"tokens", "prefill_s", "decode_s"}; raises EagleError where the engine failed."""
        return self._ask({"generate": list(tokens), "max_new_tokens": max_new_tokens})

    def score(self, tokens: Sequence[int]) -> dict[str, Any]:
        """{"nll", "likeliest"}, of all tokens but the first; raises EagleError where the engine failed."""
        return self._ask({"score": list(tokens)})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self._fail()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._fail()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _fail(self) -> None:
        code = self._process.wait()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with {code}"
        raise EagleError(f"{self.name} {how}: {last_line(self.log)} (all of it: {self.log}); leave it out with --peers")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it had ended by itself, which was an error to whoever asked
            self._process.stdin.close()
        self._process.wait()
