"""Verifying: one pass of the target over the rows of a tree, and over a prompt's chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_graphs import EagleError, Tree
from eagle_graphs.tree import chain_mask
from eagle_runtime.engines import Call, Graph
from eagle_runtime.kv_pool import KVSlot

_OUTPUTS = ("argmax_ids", "finite", "features")
_WITH_LOGITS = (*_OUTPUTS, "logits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What the target says of the rows asked for. The arrays live until the next pass of the same shape."""

    argmax_ids: npt.NDArray[np.int64]
    """[R] likeliest next token after each row."""
    features: npt.NDArray[np.float32]
    """[Q, h] fused features of every row."""
    logits: npt.NDArray[np.float32] | None
    """[R, V] logits for the token after each row; None where they were not asked for."""


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
        outputs = _WITH_LOGITS if logits else _OUTPUTS
        call = self._forward(np.asarray(tokens), chain, chain_mask(rows), chain[-1:], outputs)
        self.commit(range(rows))
        return _verified(call)

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """[V] logits after `tokens`, whose rows are committed."""
        rows = len(tokens)
        chain = np.arange(rows)
        call = self._forward(np.asarray(tokens), chain, chain_mask(rows), chain[-1:], ("logits", "finite"))
        self.commit(range(rows))
        logits: npt.NDArray[np.float32] = call.outputs["logits"][0].copy()
        return logits

    def verify(self, tree: Tree, *, logits: bool = False) -> Verified:
        """Reserves a row for each node of `tree` and asks for what follows each; `logits`: not only the likeliest."""
        outputs = _WITH_LOGITS if logits else _OUTPUTS
        return _verified(self._forward(tree.tokens, tree.depths, tree.mask, np.arange(len(tree)), outputs))

    def commit(self, path: Sequence[int]) -> None:
        """Keeps the rows of an accepted path."""
        self._slot.commit(path)

    def rollback(self) -> None:
        """Keeps none of the rows of a pass."""
        self._slot.rollback()

    def truncate(self, rows: int) -> None:
        """Forgets the committed rows from `rows` on."""
        self._slot.truncate(rows)

    def _forward(
        self,
        tokens: npt.NDArray[np.int64],
        depths: npt.NDArray[np.int64],
        mask: npt.NDArray[np.bool_],
        logit_rows: npt.NDArray[np.int64],
        outputs: tuple[str, ...],
    ) -> Call:
        rows, start = len(tokens), self._slot.reserve(len(tokens))
        call = self._graph.call(self._slot.index, outputs=outputs, Q=rows, S=rows, R=len(logit_rows))
        inputs = call.inputs
        inputs["input_ids"][0] = tokens
        inputs["position_ids"][0] = start + depths
        inputs["tree_mask"][0] = mask
        inputs["kv_length"][0] = start
        inputs["logit_rows"][:] = logit_rows
        call.run()
        if b"\0" in call.outputs["finite"].tobytes():  # a third of the time of `all`
            raise EagleError(
                f"the target's logits hold NaN or infinite values after {start} tokens: the model or the bundle's "
                "precision does not carry this input"
            )
        return call


def _verified(call: Call) -> Verified:
    outputs = call.outputs
    return Verified(argmax_ids=outputs["argmax_ids"], features=outputs["features"][0], logits=outputs.get("logits"))
