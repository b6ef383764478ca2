"""An engine's graphs, opened for one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from eagle_graphs.manifest import Engine
from eagle_runtime.bundle import Bundle
from eagle_runtime.draft import Drafter, Rounds, level_by_level
from eagle_runtime.engines import Features
from eagle_runtime.engines.buffers import DeviceGraph
from eagle_runtime.engines.features import DeviceFeatures, HostFeatures
from eagle_runtime.engines.memory import DeviceMemory
from eagle_runtime.engines.round_graph import Verifying
from eagle_runtime.engines.rounds import DeviceRounds, DraftRounds
from eagle_runtime.engines.select import open_draft, open_target
from eagle_runtime.generate import SlotState
from eagle_runtime.kv_pool import KVPool
from eagle_runtime.modes import Mode
from eagle_runtime.verify import Verifier
from eagle_runtime.whole_round import WholeRounds


class Closing(Protocol):
    """What is freed with a session."""

    def close(self) -> None:
        """Frees it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """One sequence over an engine."""

    state: SlotState
    graphs: list[Closing]
    """In the order in which they are to be closed."""


def open_state(
    bundle: Bundle, engine: Engine, mode: Mode, *, threads: int | None, compiled: bool, memory: DeviceMemory | None
) -> Opened:
    """Opens what a mode needs of an engine.

    Args:
        bundle: the engine's.
        engine: for the host, or for the device of `memory`.
        mode: whether to draft at all, and with which profile.
        threads: of ONNX Runtime on the host; None for one a core.
        compiled: use graphs of whole rounds where the engine has them; else one pass a level.
        memory: None for the host.

    Raises:
        EagleError: the engine's library refuses a graph.
    """
    target = open_target(bundle, engine, threads=threads, memory=memory)
    slot = target.pool.acquire()
    verifier = Verifier(target.graph, slot)
    if not mode.drafts:
        return Opened(state=SlotState(verifier=verifier, drafter=None), graphs=[target.graph])
    draft = open_draft(bundle, engine, threads=threads, memory=memory)
    manifest = bundle.manifest
    drafting: Rounds = level_by_level
    whole: Rounds = level_by_level
    graphs: list[Closing] = [target.graph, draft.graph]
    if compiled and memory is not None:
        assert isinstance(target.graph, DeviceGraph)
        on_device = DeviceRounds(bundle, engine, memory, draft, Verifying(target=target.graph, slot=slot.index))
        drafting, whole = on_device.drafting, on_device.whole
        graphs = [on_device, *graphs]
    elif compiled:
        assert isinstance(draft.pool, KVPool)
        drafting = on_host = DraftRounds(bundle, engine, draft.pool, threads=threads)
        graphs = [on_host, *graphs]
    for profile in manifest.profiles:  # opened here rather than in the first round
        if mode.options is not None or (profile == mode.profile and whole(profile) is None):
            drafting(profile)
    drafter = Drafter(
        draft.graph,
        draft.pool.acquire(),
        manifest.head,
        _features(bundle, memory),
        chunk=manifest.limits.prefill_chunk,
        rounds=drafting,
    )
    state = SlotState(verifier=verifier, drafter=drafter, whole_rounds=WholeRounds(drafter, verifier, whole))
    return Opened(state=state, graphs=graphs)


def _features(bundle: Bundle, memory: DeviceMemory | None) -> Features:
    if memory is None:
        return HostFeatures()
    manifest = bundle.manifest
    largest = max(manifest.limits.prefill_chunk, *(profile.nodes for profile in manifest.profiles))
    return DeviceFeatures(memory, width=manifest.head.hidden_size, rows=2 * largest)
