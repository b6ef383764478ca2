"""What drafting and verifying cost on this machine, in seconds.

A cost grows with the context by a line. The lines come from `eagle-run --tune`, or from the first rounds; every round
then corrects them. Its time moves two factors, one of all costs, since a machine is faster or slower as a whole, and
one of the step that was timed: the step's own while it has seldom been timed, later rather that of all.

A step that nobody has measured is taken to cost as little as it may: what the next smaller one of its kind does. So it
is tried, and measured, wherever it might pay. For the same reason one that was seldom timed is given some doubt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from eagle_graphs import Profile
from eagle_runtime.cost_table import Line, Table

_SHARED, _OWN = 0.1, 0.03  # share of a deviation that moves the factor of all costs, and at least the step's own
_OFTEN = 32  # times that a step must have been timed to be sure of it; what was measured before has been
_DOUBT = 0.3  # share of its cost that is doubted after the first one, less with the root of their number
_BELIEFS = (0.0, *(1 - _DOUBT * (1 / math.sqrt(times) - 1 / math.sqrt(_OFTEN)) for times in range(1, _OFTEN + 1)))
_CLIP = 0.5  # largest deviation, as a logarithm, that one round may claim: a pause says nothing of a step
_RUNS = 3  # of a step before it is measured; the first one makes its buffers
_SMALLER = {"verify": 0.8, "draft": 0.4}  # least that a smaller step may cost beside one that is measured
_DRAFT = 0.1  # least that drafting may cost beside verifying
_UNIT = Line(base=1.0, slope=0.0)
_EXTENSION_FREE = 16  # rows that wait for the head which cost about what one does


class Costs:
    """The costs of a bundle's steps.

    Args:
        profiles: the bundle's.
        table: what was measured before.
    """

    def __init__(self, profiles: Iterable[Profile], table: Table | None = None) -> None:
        nodes = sorted(profile.nodes for profile in profiles)
        self._steps = [*(f"verify {size}" for size in (1, *nodes)), *(f"draft {size}" for size in nodes)]
        self._lines = {step: line for step, line in (table or {}).items() if step in self._steps}
        self._own = dict.fromkeys(self._steps, 1.0)
        self._shared = 1.0
        self._times = dict.fromkeys(self._lines, _OFTEN)  # that a step has been timed
        self._runs: dict[str, list[float]] = {}  # seconds of the first runs in this process
        self._stand_ins = {step: self._stand_in(step) for step in self._steps}

    def verify(self, nodes: int, rows: int) -> float:
        """Seconds of a round that verifies so many nodes in a context of `rows`, its drafting left out."""
        return self._at(f"verify {nodes}", rows)

    def draft(self, nodes: int, rows: int) -> float:
        """Seconds of drafting with the profile of so many nodes, where one committed row waits for the head."""
        return self._at(f"draft {nodes}", rows)

    def observe(self, step: str, rows: int, seconds: float) -> None:
        """Takes in how long a step took."""
        seconds = max(seconds, 1e-9)
        runs = self._runs.setdefault(step, [])
        if not runs or (step not in self._lines and len(runs) < _RUNS - 1):
            runs.append(seconds)
        elif step in self._lines:
            deviation = math.log(seconds * self._belief(step) / self._at(step, rows))
            deviation = min(max(deviation, -_CLIP), _CLIP)
            self._times[step] += 1
            own = max(1 / self._times[step], _OWN)
            self._own[step] *= math.exp(own * deviation)
            self._shared *= math.exp((1 - own) * _SHARED * deviation)
        else:
            self._measure(step, rows, min(*runs[1:], seconds))

    def observe_drafting(self, nodes: int, rows: int, waiting: int, seconds: float) -> None:
        """Takes in how long drafting took; where many rows had waited, it says nothing of the next time."""
        if waiting <= _EXTENSION_FREE:
            self.observe(f"draft {nodes}", rows, seconds)

    @property
    def measured(self) -> bool:
        """Whether anything has been; before, costs stand in no unit."""
        return bool(self._lines)

    @property
    def table(self) -> Table:
        """What has been measured, as it is now."""
        return {step: line.times(self._own[step] * self._shared) for step, line in sorted(self._lines.items())}

    def _at(self, step: str, rows: int) -> float:
        known, times = self._stand_ins[step]
        line = self._lines.get(known, _UNIT)
        return line.at(rows) * self._own[known] * self._shared * self._belief(known) * times

    def _belief(self, step: str) -> float:
        """The share of a step's cost that is not doubted."""
        return _BELIEFS[min(self._times.get(step, _OFTEN), _OFTEN)]

    def _measure(self, step: str, rows: int, seconds: float) -> None:
        """Gives a step its line, as steep as that of the step that stood in for it."""
        known, times = self._stand_ins[step]
        line = self._lines.get(known, _UNIT).times(self._own[known] * times)
        self._times[step] = 1
        self._lines[step] = line.times(seconds / (line.at(rows) * self._shared))
        self._stand_ins = {other: self._stand_in(other) for other in self._steps}

    def _stand_in(self, step: str) -> tuple[str, float]:
        """The measured step whose cost, times a factor, is the least that `step` may cost."""
        if step in self._lines:
            return step, 1.0
        kind = step.split()[0]
        here = self._steps.index(step)
        alike = [index for index, other in enumerate(self._steps) if other in self._lines and other.startswith(kind)]
        if smaller := [index for index in alike if index < here]:
            return self._steps[smaller[-1]], 1.0
        if alike:
            return self._steps[alike[0]], _SMALLER[kind]
        others = [other for other in self._steps if other in self._lines]
        if kind == "draft":
            return (others or self._steps)[0], _DRAFT
        return (others[0], 1 / _DRAFT) if others else (self._steps[0], 1.0)


def extension_factor(waiting: int) -> float:
    """What drafting costs where so many committed rows wait for the head, beside what it does where one does."""
    return max(1.0, 1 + 0.02 * (waiting - _EXTENSION_FREE))
