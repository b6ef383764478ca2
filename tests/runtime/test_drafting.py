"""One call a round drafts what one call a level does, bit for bit; where there is no such graph the levels do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_graphs import EagleError, KVGeometry, Profile, static_profile
from eagle_graphs.manifest import HeadInfo, Source
from eagle_runtime import Session
from eagle_runtime.draft import Drafter
from eagle_runtime.engines.features import HostFeatures
from eagle_runtime.generate import Round
from eagle_runtime.kv_pool import KVPool
from eagle_runtime.stats import PhaseClock, Stats
from tests.drafters import random_prompt

LENGTHS = (1, 2, 15, 16, 17, 40)  # chunks are 16 tokens
TREE = ("tokens", "parents", "values", "depths", "mask")


def rounds(
    bundle: Path, drafting: Any, *, profiles: Sequence[str] = ("4", "8", "16"), kernels: str = "auto", **options: Any
) -> list[Round]:
    """All rounds of an answer to each of several prompts, drafted with every profile of one session in turn."""
    seen: list[Round] = []
    with Session.open(bundle, profile="8", threads=1, kernels=kernels, drafting=drafting) as session:
        for number, length in enumerate(LENGTHS):
            for profile in profiles:
                prompt = random_prompt(length, number)
                session.generate(token_ids=prompt, max_new_tokens=12, profile=profile, on_round=seen.append, **options)
    return seen


def assert_alike(ours: list[Round], theirs: list[Round]) -> None:
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert (one.kept, one.walk) == (other.kept, other.walk)
        for name in TREE:
            np.testing.assert_array_equal(getattr(one.tree, name), getattr(other.tree, name), err_msg=name)
        for field in fields(one.tree):
            assert getattr(one.tree, field.name).dtype == getattr(other.tree, field.name).dtype


@pytest.mark.parametrize("kernels", ["native", "stock"])
def test_trees_are_the_same_bit_for_bit(kernels: str, tiny_bundle: Path) -> None:
    assert_alike(rounds(tiny_bundle, "compiled", kernels=kernels), rounds(tiny_bundle, "stepwise", kernels=kernels))


def test_trees_are_the_same_in_int8(tiny_int8_bundle: Path) -> None:
    assert_alike(rounds(tiny_int8_bundle, "compiled"), rounds(tiny_int8_bundle, "stepwise"))


def test_trees_are_the_same_where_tokens_are_drawn(tiny_bundle: Path) -> None:
    drawn = {"temperature": 1.0, "seed": 3}
    assert_alike(rounds(tiny_bundle, "compiled", **drawn), rounds(tiny_bundle, "stepwise", **drawn))


def test_a_bundle_without_rounds_is_drafted_level_by_level(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    data = json.loads((bundle / "manifest.json").read_text())
    for engine in data["engines"]:
        assert engine["draft_rounds"].keys() == {"4", "8", "16"}
        engine["draft_rounds"] = {}
    (bundle / "manifest.json").write_text(json.dumps(data))
    assert_alike(rounds(bundle, "compiled", profiles=["8"]), rounds(tiny_bundle, "stepwise", profiles=["8"]))


def test_another_way_of_drafting_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(EagleError, match="drafting is 'fast'; expected compiled or stepwise"):
        Session.open(tiny_bundle, drafting="fast")


SHALLOW = Profile(nodes=3, top_k=2, depth=1, paths=())


class BrokenGraph:
    """A round's graph, the head's and a call of either, all at once; the head says NaN."""

    def __init__(self) -> None:
        shapes = {"token_ids": (1, 2), "hidden": (1, 2, 4), "position_ids": (1, 2), "tree_mask": (1, 2, 2)}
        self.inputs = {name: np.zeros(shape) for name, shape in (shapes | {"kv_length": 1, "logit_rows": 1}).items()}
        tree = {"tokens": [5, 6, 7], "parents": [-1, 0, 0], "values": [0, np.nan, np.nan], "depths": [0, 1, 1]}
        self.results = {name: np.array([values]) for name, values in tree.items()}
        self.results["mask"] = np.ones((1, 3, 3), np.bool_)
        self.results |= {"topk_ids": np.array([[6, 7]]), "topk_logprobs": np.full((1, 2), np.nan, np.float32)}
        self.results["hidden_out"] = np.zeros((1, 4), np.float32)
        self.outputs: dict[str, np.ndarray] = {}

    def call(self, slot: int, *, outputs: tuple[str, ...], **more: object) -> BrokenGraph:
        self.outputs = {name: self.results[name] for name in outputs}
        return self

    def run(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("rounds", [True, False], ids=["compiled", "stepwise"])
@pytest.mark.parametrize("profile", [SHALLOW, static_profile(((0,), (1,)))], ids=["dynamic", "static"])
def test_a_head_that_says_nan_is_an_error(profile: Profile, rounds: bool) -> None:
    kv = KVGeometry(layers=1, kv_heads=1, head_dim=4)
    head = HeadInfo(
        source=Source(name="head", revision=None, files={}),
        kind="eagle3",
        layout="safeailab",
        taps=(1,),
        position_offset=0,
        hidden_size=4,
        draft_vocab_size=8,
        top_k=2,
        kv=kv,
    )
    slot, broken = KVPool(kv, slots=1, rows=32).acquire(), BrokenGraph()
    drafter = Drafter(broken, slot, head, HostFeatures(), chunk=8, rounds=lambda profile: broken if rounds else None)
    drafter.observe(np.zeros((2, 4), np.float32), range(2), [1, 2, 5])
    with pytest.raises(EagleError, match="the head's log-probabilities are NaN after 3 tokens: "):
        drafter.draft([1, 2, 5], profile, PhaseClock(Stats()))
