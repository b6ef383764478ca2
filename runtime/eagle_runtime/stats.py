"""What a generation cost and how well its drafts were accepted.

The definitions, which are easily mixed up:

    accepted length   tokens committed / rounds, the bonus token included; 1.0 is plain decoding
    acceptance rate   accepted / checked nodes; the children of every node that the walk stood on are checked
    tokens per second tokens committed in rounds / time of the rounds; the prompt's pass, which also
                      gives the first token, is timed apart
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

PHASES = ("draft", "tree", "verify", "accept", "commit", "host")
"""draft, verify: inside the compiled graphs. tree, accept, commit, host: all that is not."""
HOST_PHASES = ("tree", "accept", "commit", "host")


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counts and times of one generation, or of several added up. Times in seconds."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose cache rows were there from an earlier turn."""
    tokens: int = 0
    """New tokens, the first one included."""
    rounds: int = 0
    round_tokens: int = 0
    """New tokens that rounds committed: all but the first."""
    rounds_by_size: dict[int, int] = field(default_factory=dict)
    """Rounds by the nodes that they verified; of 1 node are plain ones."""
    checked_nodes: int = 0
    accepted_nodes: int = 0
    looked_up_nodes: int = 0
    """Accepted nodes that only look-up had proposed."""
    prefill_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @property
    def decode_s(self) -> float:
        """Time of all rounds."""
        return sum(self.phases_s.values())

    @property
    def accepted_length(self) -> float:
        """Tokens a round; 0 before the first round."""
        return self.round_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted of checked nodes; 0 where nothing was drafted."""
        return self.accepted_nodes / self.checked_nodes if self.checked_nodes else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the rounds over their time; 0 before the first round."""
        return self.round_tokens / self.decode_s if self.rounds else 0.0

    @property
    def phases_ms(self) -> dict[str, float]:
        """Mean time of each phase of a round, in milliseconds."""
        return {phase: 1e3 * seconds / max(self.rounds, 1) for phase, seconds in self.phases_s.items()}

    @property
    def host_share(self) -> float:
        """Share of a round that is neither inside a compiled graph nor waiting for one."""
        return sum(self.phases_s[phase] for phase in HOST_PHASES) / self.decode_s if self.rounds else 0.0

    def count_round(self, *, nodes: int, tokens: int, accepted: int, checked: int, looked_up: int = 0) -> None:
        """Counts one round.

        Args:
            nodes: verified, the root included.
            tokens: committed.
            accepted: nodes of the path, the root not counted.
            checked: nodes compared.
            looked_up: accepted nodes that only look-up had proposed.
        """
        self.rounds += 1
        self.rounds_by_size[nodes] = self.rounds_by_size.get(nodes, 0) + 1
        self.round_tokens += tokens
        self.accepted_nodes += accepted
        self.checked_nodes += checked
        self.looked_up_nodes += looked_up

    def add(self, other: Stats) -> None:
        """Adds another generation's counts and times."""
        for name in ("prompt_tokens", "reused_tokens", "tokens", "rounds", "round_tokens", "checked_nodes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for nodes, rounds in other.rounds_by_size.items():
            self.rounds_by_size[nodes] = self.rounds_by_size.get(nodes, 0) + rounds
        self.accepted_nodes += other.accepted_nodes
        self.looked_up_nodes += other.looked_up_nodes
        self.prefill_s += other.prefill_s
        for phase in PHASES:
            self.phases_s[phase] += other.phases_s[phase]

    def line(self) -> str:
        """Rounds by size, and what look-up gave, in a few words."""
        sizes = sorted(self.rounds_by_size)
        rounds = ", ".join(f"{self.rounds_by_size[nodes]} of {nodes}" for nodes in sizes)
        looked_up = f"; {self.looked_up_nodes} tokens by look-up" if self.looked_up_nodes else ""
        return f"rounds: {rounds or 'none'}{looked_up}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "tokens": self.tokens,
            "rounds": self.rounds,
            "rounds_by_size": {str(nodes): self.rounds_by_size[nodes] for nodes in sorted(self.rounds_by_size)},
            "looked_up_nodes": self.looked_up_nodes,
            "accepted_length": round(self.accepted_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "prefill_s": round(self.prefill_s, 6),
            "decode_s": round(self.decode_s, 6),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "phases_ms": {phase: round(ms, 4) for phase, ms in self.phases_ms.items()},
        }


class PhaseClock:
    """Splits the time of a round among its phases: each lap takes all time since the last one."""

    def __init__(self, stats: Stats) -> None:
        self._phases = stats.phases_s
        self._last = time.perf_counter()

    @property
    def total(self) -> float:
        """Seconds of all laps."""
        return sum(self._phases.values())

    def start(self) -> None:
        """Leaves out the time since the last lap: it was the caller's."""
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Gives the time since the last lap to `phase`."""
        now = time.perf_counter()
        self._phases[phase] += now - self._last
        self._last = now
