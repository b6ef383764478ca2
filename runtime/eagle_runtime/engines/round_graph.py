"""A round on a device: passes of the head, the steps between them, and the verification, with one wait behind them.

Whatever one of them hands to the next stays on the device (`eagle_graphs.draft_steps` has the names). The host fills in
what it knows beforehand, lengths and positions above all, and reads the tree and what the target says of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle_graphs import GraphPorts, Profile
from eagle_graphs.draft_steps import FROM_HEAD, TO_HEAD, TREE, draft_levels
from eagle_runtime.engines.base import Array, Rows
from eagle_runtime.engines.buffers import DeviceGraph, DevicePass, Wiring
from eagle_runtime.engines.features import HIDDEN
from eagle_runtime.engines.frozen import pad_mask, views
from eagle_runtime.engines.memory import DeviceMemory, Replayed

_OF_TREE = {"input_ids": "tokens", "position_ids": "position_ids", "tree_mask": "mask"}
"""The target's inputs, and where the last step has put them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifying:
    """The target behind a round of drafting."""

    target: DeviceGraph
    slot: int


class RoundGraph:
    """See `Graph`: takes what the head's graph takes for an extension; gives the tree and, with a target, its words."""

    def __init__(
        self,
        memory: DeviceMemory,
        profile: Profile,
        ports: GraphPorts,
        draft: DeviceGraph,
        steps: Sequence[DeviceGraph],
        *,
        chunk: int,
        verifying: Verifying | None = None,
    ) -> None:
        """ports: the head's. steps: `eagle_graphs.draft_steps` of the profile. chunk: rows of a prefill pass."""
        self._memory, self._profile, self._ports, self._chunk = memory, profile, ports, chunk
        self._draft, self._steps, self._verifying = draft, steps, verifying
        self._rounds: dict[tuple[int, int, tuple[str, ...]], _Round] = {}

    def call(
        self,
        slot: int,
        *,
        outputs: tuple[str, ...],
        kept: tuple[str, ...] = (),
        given: tuple[str, ...] = (),
        **sizes: int,
    ) -> RoundCall:
        """See `Graph.call`; of Q = S rows, up to a chunk, and R = 1."""
        rows = self._profile.depth + 1
        if sizes["Q"] > rows:
            rows = self._chunk
        key = (slot, rows, outputs)
        if key not in self._rounds:
            self._rounds[key] = self._round(slot, rows, [name for name in outputs if name not in TREE])
        return RoundCall(self._rounds[key], self._ports, sizes)

    def _round(self, slot: int, rows: int, verified: Sequence[str]) -> _Round:
        """verified: outputs of the target."""
        profile, levels = self._profile, draft_levels(self._profile)
        head = self._draft.device_pass(slot, {"B": 1, "Q": rows, "S": rows, "R": 1}, Wiring(given=(HIDDEN,)))
        heads, steps, passes = [head], list[DevicePass](), [head]
        held: dict[str, int] = {}
        for level, graph in enumerate(self._steps):
            held |= {f"{name}.{level}": head.buffers.addresses[name] for name in FROM_HEAD}
            is_last = level == len(levels)
            step = graph.device_pass(slot, {}, Wiring(outputs=TREE if is_last else (), sources=dict(held)))
            held |= step.buffers.addresses
            steps.append(step)
            passes.append(step)
            if not is_last:
                below = levels[level]
                sizes = {"B": 1, "Q": below.rows, "S": below.after, "R": below.rows}
                named = {name: f"{name}.{level + 1}" for name in TO_HEAD}
                sources = {name: held[place] for name, place in named.items() if place in held}
                head = self._draft.device_pass(slot, sizes, Wiring(sources=sources))
                head.buffers.inputs["logit_rows"][:] = np.arange(below.rows)
                if below.mask is not None:
                    head.buffers.inputs["tree_mask"][0] = below.mask
                heads.append(head)
                passes.append(head)
        verify = None
        if self._verifying is not None:
            sources = {name: held[place] for name, place in _OF_TREE.items()}
            sizes = {"B": 1, "Q": profile.nodes, "S": profile.nodes, "R": profile.nodes}
            target = self._verifying
            verify = target.target.device_pass(target.slot, sizes, Wiring(outputs=verified, sources=sources))
            verify.buffers.inputs["logit_rows"][:] = np.arange(profile.nodes)
            passes.append(verify)
        return _Round(self._memory, heads, steps, verify, passes)

    def close(self) -> None:
        """See `Graph.close`."""
        for each in self._rounds.values():
            each.close()
        self._rounds.clear()


class _Round:
    """All passes of a round for one size of the extension."""

    def __init__(
        self,
        memory: DeviceMemory,
        heads: Sequence[DevicePass],
        steps: Sequence[DevicePass],
        verify: DevicePass | None,
        passes: Sequence[DevicePass],
    ) -> None:
        self.heads, self.last, self.verify, self._passes = heads, steps[-1], verify, passes
        self._replayed = Replayed(memory, self._enqueue, recorded=all(each.recordable for each in passes))

    def run(self, *, root: int, position: int, committed: int) -> None:
        """One round. position: the head's, of the root."""
        for level, head in enumerate(self.heads[1:], 1):
            head.buffers.inputs["position_ids"][:] = position + level
            head.buffers.inputs["kv_length"][:] = committed
        self.last.buffers.inputs["root"][:] = root
        self.last.buffers.inputs["committed"][:] = committed
        if self.verify is not None:
            self.verify.buffers.inputs["kv_length"][:] = committed
        self._replayed.run()

    def _enqueue(self) -> None:
        for each in self._passes:
            each.enqueue()

    def close(self) -> None:
        """Frees its buffers."""
        for each in self._passes:
            each.buffers.close()


class RoundCall:
    """See `Call`."""

    def __init__(self, whole: _Round, ports: GraphPorts, sizes: dict[str, int]) -> None:
        self._whole, self._sizes, self._extension = whole, sizes, whole.heads[0].buffers
        self.inputs = views(self._extension.inputs, ports, {"B": 1, **sizes})
        self.outputs: dict[str, Array] = dict(whole.last.buffers.outputs)
        if whole.verify is not None:
            self.outputs |= whole.verify.buffers.outputs

    def kept(self, name: str) -> Rows:
        """See `Call.kept`: of the target's outputs."""
        assert self._whole.verify is not None, "a round without a verification"
        return self._whole.verify.buffers.rows(name)

    def place(self, name: str) -> tuple[int, int]:
        """Address of an input of the extension and its bytes."""
        return self._extension.place(name)

    def run(self) -> None:
        """See `Call.run`."""
        pad_mask(self._extension.inputs["tree_mask"], self._sizes)
        last = self._sizes["Q"] - 1
        self._whole.run(
            root=int(self.inputs["token_ids"][0, last]),
            position=int(self.inputs["position_ids"][0, last]),
            committed=int(self.inputs["kv_length"][0]) + self._sizes["Q"],
        )
