"""What a session learns of its bundle on this machine: costs, and what answers of each kind have taught."""

from __future__ import annotations

from eagle_graphs.manifest import Engine
from eagle_runtime.bundle import Bundle
from eagle_runtime.controller import Controller
from eagle_runtime.cost_table import Table, load_table, save_table, table_key
from eagle_runtime.costs import Costs
from eagle_runtime.modes import Mode
from eagle_runtime.planner import Experience, Planner

_SAMPLED = " sampled"


class Learned:
    """Starts with the costs that the user's cache holds.

    Greedy and sampled answers have costs of their own, since sampling reads the logits of every node on its way.
    """

    def __init__(self, bundle: Bundle, engine: Engine, *, threads: int | None, drafting: str) -> None:
        self._profiles = bundle.manifest.profiles
        self._key = table_key(bundle, engine, threads, drafting)
        self.experience: dict[tuple[Mode, bool], Experience] = {}
        greedy = load_table(self._key)
        self._start(greedy, load_table(self._key + _SAMPLED) or greedy)

    def planner(self, mode: Mode, *, greedy: bool) -> Planner | None:
        """What makes an answer's trees, by what earlier ones of its kind taught; None where nothing is chosen."""
        if mode.options is None:
            return None
        if (mode, greedy) not in self.experience:
            preferred = mode.profile.nodes if mode.profile is not None else self._profiles[0].nodes
            controller = Controller(mode.options, self.costs[greedy], preferred=preferred)
            self.experience[mode, greedy] = Experience(controller=controller)
        return Planner(self.experience[mode, greedy], self._profiles, lookup=mode.lookup)

    def start_again(self, table: Table) -> None:
        """Takes `table` for the costs, forgets all else, and keeps it."""
        self.experience.clear()
        self._start(table, table)
        self.save()

    def save(self) -> None:
        """Keeps the costs in the user's cache, best effort."""
        for greedy, ending in ((True, ""), (False, _SAMPLED)):
            table = self.costs[greedy].table
            if table and load_table(self._key + ending) != table:
                save_table(self._key + ending, table)

    def _start(self, greedy: Table, sampled: Table) -> None:
        self.costs = {True: Costs(self._profiles, greedy), False: Costs(self._profiles, sampled)}
        """By whether answers are greedy."""
