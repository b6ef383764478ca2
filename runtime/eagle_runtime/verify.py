"""Verifying: one pass of the target over the rows of a tree, and over a prompt's chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_graphs import EagleError, Tree
from eagle_graphs.tree import chain_mask
from eagle_runtime.engines import Call, Graph, Rows
from eagle_runtime.kv_pool import KVSlot

FOUND = ("argmax_ids", "finite")
"""Outputs that come to the host."""


def kept_outputs(*, logits: bool) -> tuple[str, ...]:
    """Those that stay where the graph runs, until rows of them are asked for."""
    return ("features", "logits") if logits else ("features",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What the target says of the rows asked for. The arrays live until the next pass of the same shape."""

    argmax_ids: npt.NDArray[np.int64]
    """[R] likeliest next token after each row."""
    features: Rows
    """[Q, h] fused features of every row."""
    logits: Rows | None
    """[R, V] logits for the token after each row; None where they were not asked for."""

    @classmethod
    def from_call(cls, call: Call, *, committed: int, logits: bool) -> Verified:
        """What a pass, or a round with one at its end, has found behind so many committed rows.

        Raises EagleError where logits hold NaN or infinite values.
        """
        if b"\0" in call.outputs["finite"].tobytes():  # a third of the time of `all`
            raise EagleError(
                f"the target's logits hold NaN or infinite values after {committed} tokens: the model or the bundle's "
                "precision does not carry this input"
            )
        return cls(
            argmax_ids=call.outputs["argmax_ids"],
            features=call.kept("features"),
            logits=call.kept("logits") if logits else None,
        )


class Verifier:
    """The target over one cache slot."""

    def __init__(self, graph: Graph, slot: KVSlot) -> None:
        self._graph, self._slot = graph, slot

    @property
    def rows(self) -> int:
        """Committed rows."""
        return self._slot.length

    def prefill(self, tokens: Sequence[int], *, logits: bool = False) -> Verified:
        """Commits the rows of a chunk of the prompt and asks for what follows its last one."""
        rows = len(tokens)
        chain = np.arange(rows)
        verified = self._forward(np.asarray(tokens), chain, chain_mask(rows), chain[-1:], logits=logits)
        self.commit(range(rows))
        return verified

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """[V] logits after `tokens`, whose rows are committed."""
        rows = len(tokens)
        chain = np.arange(rows)
        verified = self._forward(np.asarray(tokens), chain, chain_mask(rows), chain[-1:], logits=True)
        self.commit(range(rows))
        assert verified.logits is not None
        logits: npt.NDArray[np.float32] = verified.logits[0].copy()
        return logits

    def verify(self, tree: Tree, *, logits: bool = False) -> Verified:
        """Reserves a row for each node of `tree` and asks for what follows each; `logits`: not only the likeliest."""
        return self._forward(tree.tokens, tree.depths, tree.mask, np.arange(len(tree)), logits=logits)

    def reserve(self, rows: int) -> None:
        """Makes room for a tree that another graph verifies over the same cache."""
        self._slot.reserve(rows)

    def commit(self, path: Sequence[int]) -> None:
        """Keeps the rows of an accepted path."""
        self._slot.commit(path)

    def clear(self) -> None:
        """Forgets all rows, and whatever a pass that failed has left."""
        self._slot.clear()

    def truncate(self, rows: int) -> None:
        """Forgets the committed rows from `rows` on."""
        self._slot.truncate(rows)

    def _forward(
        self,
        tokens: npt.NDArray[np.int64],
        depths: npt.NDArray[np.int64],
        mask: npt.NDArray[np.bool_],
        logit_rows: npt.NDArray[np.int64],
        *,
        logits: bool,
    ) -> Verified:
        rows, start = len(tokens), self._slot.reserve(len(tokens))
        kept = kept_outputs(logits=logits)
        call = self._graph.call(self._slot.index, outputs=FOUND, kept=kept, Q=rows, S=rows, R=len(logit_rows))
        inputs = call.inputs
        inputs["input_ids"][0] = tokens
        inputs["position_ids"][0] = start + depths
        inputs["tree_mask"][0] = mask
        inputs["kv_length"][0] = start
        inputs["logit_rows"][:] = logit_rows
        call.run()
        return Verified.from_call(call, committed=start, logits=logits)
