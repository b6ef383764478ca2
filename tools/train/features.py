"""The target's hidden states over the data, in bfloat16: computed once and kept on disk, or for every batch anew.

A pass of the target costs about as much as one of the five steps that train on it, so a second pass over the data, or
an ablation, should not pay for it again; of tens of millions of tokens no disk has room for them. One flat file holds,
conversation after conversation, a row for each token: the tapped hidden states and then the last one, which the LM head
reads and from which EAGLE-1's features and the target's own distributions come. It grows with the data; what was
computed stays.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from tools.train.answers import Answer

SORTED = 256
"""Conversations among which those of like length share a pass."""
PASS_TOKENS = 4096


class Features(Protocol):
    """Where a batch's hidden states come from."""

    row: tuple[int, int]
    """(taps + 1, h)"""

    def of(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        """[length, taps + 1, h] of each of these conversations, on the CPU."""
        ...


class FreshFeatures:
    """Computed when they are asked for."""

    def __init__(self, model: PreTrainedModel, answers: Sequence[Answer], taps: Sequence[int], *, bf16: bool) -> None:
        self.row = (len(taps) + 1, int(model.base_model.config.hidden_size))
        self._model, self._answers, self._taps, self._bf16 = model, answers, tuple(taps), bf16

    def of(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        with torch.autocast(self._model.device.type, torch.bfloat16, enabled=self._bf16):
            return hidden_states(self._model, [self._answers[number].tokens for number in numbers], self._taps)


class FeatureCache:
    """Read from the file."""

    def __init__(
        self,
        directory: Path,
        answers: Sequence[Answer],
        taps: Sequence[int],
        hidden: int,
        *,
        columns: Sequence[int] | None = None,
    ) -> None:
        """taps: of the file. columns: of its rows those that are read; None for all."""
        self.path = directory / f"features-{'-'.join(map(str, taps))}.bf16"
        self._file_row = (len(taps) + 1, hidden)
        self._columns = slice(None) if columns is None else list(columns)
        self.row = (len(taps) + 1 if columns is None else len(columns), hidden)
        self._starts = [0, *accumulate(len(answer.tokens) for answer in answers)]
        self._answers, self._taps = answers, tuple(taps)
        self._map: np.ndarray | None = None

    @classmethod
    def find(
        cls, directory: Path, answers: Sequence[Answer], taps: Sequence[int], *, layers: int, hidden: int
    ) -> FeatureCache:
        """The cache of these taps of a target of `layers` layers, or a complete one that has all of them.

        EAGLE-1's only hidden state is the last of EAGLE-3's: a head of either kind can use the other's passes.
        """
        own = cls(directory, answers, taps, hidden)
        if own.done < len(answers):
            for path in sorted(directory.glob("features-*.bf16")):
                if not re.fullmatch(r"features(-\d+)+", path.stem):
                    continue
                held = [*map(int, path.stem.split("-")[1:])]
                if {*taps} <= {*held, layers} and cls(directory, answers, held, hidden).done == len(answers):
                    columns = [[*held, layers].index(layer) for layer in (*taps, layers)]
                    return cls(directory, answers, held, hidden, columns=columns)
        return own

    @property
    def done(self) -> int:
        """Conversations that the file holds in full."""
        if not self.path.exists():
            return 0
        rows = self.path.stat().st_size // (2 * self._file_row[0] * self._file_row[1])
        return sum(1 for end in self._starts[1:] if end <= rows)

    def fill(self, model: PreTrainedModel, progress: Callable[[int], None] = lambda _tokens: None) -> None:
        """Computes what the file lacks. `model` runs as it is: its dtype, device and attention are the caller's."""
        done = self.done
        with self.path.open("ab") as file:
            file.truncate(2 * self._starts[done] * self._file_row[0] * self._file_row[1])
            for start in range(done, len(self._answers), SORTED):
                part = self._answers[start : start + SORTED]
                for states in hidden_states(model, [answer.tokens for answer in part], self._taps):
                    file.write(states.view(torch.int16).numpy().tobytes())
                progress(sum(len(answer.tokens) for answer in part))
        self._map = None

    def of(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        if self._map is None:
            self._map = np.memmap(self.path, np.int16, mode="r").reshape(-1, *self._file_row)
        parts = [self._map[self._starts[number] : self._starts[number + 1], self._columns] for number in numbers]
        return [torch.from_numpy(np.array(part)).view(torch.bfloat16) for part in parts]


class JoinedFeatures:
    """Those of several data sets, whose conversations are numbered one set after the other."""

    def __init__(self, parts: Sequence[Features], counts: Sequence[int]) -> None:
        """counts: conversations of each."""
        self.row = parts[0].row
        self._parts, self._starts = parts, [0, *accumulate(counts)]

    def of(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        found = []
        for number in numbers:
            part = bisect_right(self._starts, number) - 1
            found += self._parts[part].of([number - self._starts[part]])
        return found


@torch.inference_mode()
def hidden_states(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], taps: Sequence[int], dtype: torch.dtype = torch.bfloat16
) -> list[torch.Tensor]:
    """[length, taps + 1, h] of each text on the CPU, in the texts' order."""
    body: Any = model.base_model
    layers = int(body.config.num_hidden_layers)
    states: list[torch.Tensor] = [torch.empty(0)] * len(texts)
    waiting = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    while waiting:
        longest = len(texts[waiting[-1]])
        together = [waiting.pop() for _ in range(min(len(waiting), max(1, PASS_TOKENS // longest)))]
        tokens = torch.zeros(len(together), longest, dtype=torch.int64)
        for row, number in enumerate(together):
            tokens[row, : len(texts[number])] = torch.tensor(texts[number])
        # Padding stands behind the text, where a causal model does not see it: no mask is needed.
        result = body(input_ids=tokens.to(model.device), output_hidden_states=True, use_cache=False)
        tapped = torch.stack([result.hidden_states[tap] for tap in (*taps, layers)], dim=2).to(dtype).cpu()
        for row, number in enumerate(together):
            states[number] = tapped[row, : len(texts[number])].clone()
    return states
