"""The runtime's rounds beside the plain torch reference's.

Equal greedy text cannot show a wrong draft, which only makes EAGLE slow. So every round's tree is compared:
tokens, parents, accepted path. Two candidates whose values differ by rounding alone may change places; such
a round must still hold the same nodes up to candidates of that value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_runtime import Session
from eagle_runtime.generate import Round
from tests.reference.loop import ReferenceEagle, ReferenceRound

ROUNDING = 2e-4  # of a candidate's cumulative log-probability
SAME_LENGTH = 0.02  # share of the accepted length


def compare_rounds(
    session: Session, reference: ReferenceEagle, nodes: int, prompts: Sequence[Sequence[int]], *, tokens: int
) -> None:
    """Runs both on every prompt, compares each round and the accepted lengths over all, and prints these."""
    manifest = session.bundle.manifest
    profile = next(profile for profile in manifest.profiles if profile.nodes == nodes)
    rounds = tied = committed = reference_rounds = 0
    for prompt in prompts:
        ours = list[Round]()
        answer = session.generate(token_ids=prompt, max_new_tokens=tokens, on_round=ours.append)
        theirs = reference.generate(
            list(prompt),
            nodes=nodes,
            top_k=profile.top_k,
            depth=profile.depth,
            max_new_tokens=tokens,
            eos_token_ids=manifest.target.eos_token_ids,
        )
        assert answer.token_ids == theirs.tokens
        rounds += len(ours)
        reference_rounds += len(theirs.rounds)
        committed += len(answer.token_ids) - 1
        for mine, its in zip(ours, theirs.rounds, strict=False):
            if same_round(mine, its):
                continue
            tied += 1
            assert same_up_to_rounding(mine, its), f"{mine} is not {its}"
            if accepted(mine) != accepted_by_reference(its):
                break  # from here on the rounds stand at different tokens
    assert rounds > 0
    length, expected = committed / rounds, committed / reference_rounds
    print(
        f"profile {nodes}: {rounds} rounds, {tied} with candidates that rounding put in another order; "
        f"accepted length {length:.3f}, by the reference {expected:.3f}"
    )
    assert tied <= 0.02 * rounds
    assert abs(length - expected) <= SAME_LENGTH * expected


def same_round(mine: Round, its: ReferenceRound) -> bool:
    return (
        mine.tree.tokens.tolist() == its.tree_tokens
        and mine.tree.parents.tolist() == its.parents
        and mine.walk.path == its.path
        and mine.walk.bonus == its.bonus
    )


def same_up_to_rounding(mine: Round, its: ReferenceRound) -> bool:
    """The same nodes, but for some of the least value in the tree, which may have been a tie with ones left out."""
    ours = {
        branch(mine.tree.tokens, mine.tree.parents, row): float(mine.tree.values[row]) for row in range(len(mine.tree))
    }
    theirs = {branch(its.tree_tokens, its.parents, row) for row in range(len(its.tree_tokens))}
    least = min(ours.values())
    only_ours = [value for path, value in ours.items() if path not in theirs]
    return len(ours) == len(theirs) and all(value - least <= ROUNDING for value in only_ours)


def branch(tokens: np.ndarray | list[int], parents: np.ndarray | list[int], row: int) -> tuple[int, ...]:
    """Tokens from the root to a row."""
    path: tuple[int, ...] = ()
    while row >= 0:
        path = (int(tokens[row]), *path)
        row = int(parents[row])
    return path


def accepted(mine: Round) -> list[int]:
    return [*mine.tree.tokens[mine.walk.path].tolist(), mine.walk.bonus]


def accepted_by_reference(its: ReferenceRound) -> list[int]:
    return [*(its.tree_tokens[row] for row in its.path), its.bonus]
