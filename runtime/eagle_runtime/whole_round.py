"""Rounds that draft and verify in one pass of a device, so that the host waits once a round."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_graphs import Profile, Tree
from eagle_graphs.draft_steps import TREE
from eagle_runtime.draft import Drafter, Rounds
from eagle_runtime.stats import PhaseClock
from eagle_runtime.verify import FOUND, Verified, Verifier, kept_outputs


class WholeRounds:
    """Drafts and verifies with graphs that do both over the caches of `drafter` and `verifier`."""

    def __init__(self, drafter: Drafter, verifier: Verifier, rounds: Rounds) -> None:
        self._drafter, self._verifier, self._rounds = drafter, verifier, rounds

    def run(
        self, tokens: Sequence[int], profile: Profile, clock: PhaseClock, *, logits: bool
    ) -> tuple[Tree, Verified] | None:
        """The tree below the last of `tokens`, all so far, and what the target says of its rows, which are reserved.

        None where there is no such graph for the profile. All its time counts as the verification's.

        Raises EagleError where the head or the target gives NaN.
        """
        graph = self._rounds(profile)
        if graph is None:
            return None
        committed = len(tokens) - 1
        kept = kept_outputs(logits=logits)
        call = self._drafter.run_round(graph, tokens, profile, clock, outputs=(*TREE, *FOUND), kept=kept)
        self._verifier.reserve(profile.nodes)
        clock.lap("verify")
        tree = self._drafter.tree_from(call, tokens)
        return tree, Verified.from_call(call, committed=committed, logits=logits)
