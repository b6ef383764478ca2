"""What drafting and verifying cost on this machine, in seconds.

A cost grows with the context by a line. The lines come from `eagle-run --tune`, or are guessed, low rather than high
so that what looks cheap gets tried; every real round then corrects them. Its time moves two factors: one of all
costs, since a machine is faster or slower as a whole, and more slowly one of the step that was timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from eagle_graphs import Profile
from eagle_runtime.cost_table import Line, Table

_SHARED, _OWN = 0.1, 0.03  # share of a deviation that moves the factor of all costs, and the step's own
_CLIP = 0.5  # largest deviation, as a logarithm, that one round may claim: a pause says nothing of a step
_RUNS = 2  # of a step that nobody has measured, the first one among them, before it is
_EXTENSION_FREE = 16  # rows that wait for the head which cost about what one does


class Costs:
    """The costs of a bundle's steps.

    Args:
        profiles: the bundle's.
        table: what was measured before; other steps are guessed from the cheapest one's.
    """

    def __init__(self, profiles: Iterable[Profile], table: Table | None = None) -> None:
        self._lines = dict(table or {})
        guesses = {"verify 1": 1.0}
        for profile in profiles:
            guesses[f"verify {profile.nodes}"] = 1 + 0.03 * (profile.nodes - 1)
            guesses[f"draft {profile.nodes}"] = 0.05 * profile.depth
        known = next((step for step in guesses if step in self._lines), None)
        unit = self._lines[known].times(1 / guesses[known]) if known else Line(base=1.0, slope=0.0)
        for step, times in guesses.items():
            self._lines.setdefault(step, unit.times(times))
        self._own = dict.fromkeys(self._lines, 1.0)
        self._shared = 1.0
        self._measured = set(table or ())
        self._runs: dict[str, list[float]] = {}  # deviations seen in this process of steps not yet measured

    def verify(self, nodes: int, rows: int) -> float:
        """Seconds of a round that verifies so many nodes in a context of `rows`, its drafting left out."""
        return self._at(f"verify {nodes}", rows)

    def draft(self, nodes: int, rows: int, waiting: int = 1) -> float:
        """Seconds of drafting with the profile of so many nodes. waiting: committed rows that the head has not read."""
        seconds = self._at(f"draft {nodes}", rows)
        return seconds * max(1.0, 1 + 0.02 * (waiting - _EXTENSION_FREE))

    def observe(self, step: str, rows: int, seconds: float) -> None:
        """Takes in how long a step took."""
        deviation = math.log(max(seconds, 1e-9) / self._at(step, rows))
        runs = self._runs.setdefault(step, [])
        if not runs or (step not in self._measured and len(runs) < _RUNS):
            runs.append(deviation)  # the first run of a process makes a step's buffers
            return
        if step in self._measured:
            deviation = min(max(deviation, -_CLIP), _CLIP)
            self._shared *= math.exp(_SHARED * deviation)
            self._own[step] *= math.exp(_OWN * deviation)
            return
        factor = math.exp(min(*runs[1:], deviation))
        if self._measured:
            self._own[step] *= factor
        else:
            self._shared *= factor
        self._measured.add(step)

    def observe_drafting(self, nodes: int, rows: int, waiting: int, seconds: float) -> None:
        """Takes in how long drafting took; where many rows had waited, it says nothing of the next time."""
        if waiting <= _EXTENSION_FREE:
            self.observe(f"draft {nodes}", rows, seconds)

    @property
    def measured(self) -> bool:
        """Whether anything has been; before, costs stand in no unit."""
        return bool(self._measured)

    @property
    def table(self) -> Table:
        """What has been measured, as it is now."""
        return {step: self._lines[step].times(self._own[step] * self._shared) for step in sorted(self._measured)}

    def _at(self, step: str, rows: int) -> float:
        return self._lines[step].at(rows) * self._own[step] * self._shared
