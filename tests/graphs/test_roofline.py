"""The roofline against values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_graphs import EagleError, KVGeometry, Profile, profile_from_nodes, static_profile
from eagle_graphs.draft_steps import draft_levels
from eagle_graphs.machines import MACHINES, Machine
from eagle_graphs.roofline import (
    PRECISIONS,
    Compiled,
    GraphSize,
    capacity_rows,
    expected_length,
    round_time,
    verdicts,
)

KV = KVGeometry(layers=2, kv_heads=1, head_dim=8)
TARGET = GraphSize(linear=900, lm_head=100, embedding=50, attention_heads=4, kv=KV)
HEAD = GraphSize(linear=90, lm_head=10, embedding=0, attention_heads=4, kv=KVGeometry(layers=1, kv_heads=1, head_dim=8))
BOX = Machine(name="box", bandwidth=1000.0, memory=4000.0, rates={"fp32": 1e4, "fp16": 1e6, "int8": 1e5})


def compiled(
    size: GraphSize = TARGET, precision: str = "fp16", machine: Machine = BOX, overhead: float = 0
) -> Compiled:
    return Compiled(size=size, precision=precision, machine=machine, overhead=overhead)


def test_a_pass_moves_its_weights_and_its_cache_once() -> None:
    passed = compiled().time(1, logit_rows=1, context=9)
    # 1000 weights of 2 bytes; 10 rows of 2 x 2 layers x 1 head x 8 numbers of 2 bytes = 64
    assert passed.moving == pytest.approx((2000 + 10 * 64) / 1000)
    # 2 x 1000 for the weights; 4 x 10 rows x 4 heads x 8 numbers x 2 layers for the scores
    assert passed.computing == pytest.approx((2000 + 2560) / 1e6)
    assert (passed.bound, passed.seconds) == ("memory", passed.moving)


def test_rows_cost_arithmetic_and_only_rows_asked_for_cost_the_lm_head() -> None:
    passed = compiled(precision="int8").time(16, logit_rows=2, context=0, seen=20)
    # weights of 1 byte at the rate of int8; scores of 20 rows at that of fp16
    assert passed.moving == pytest.approx((1000 + 20 * 64) / 1000)
    assert passed.computing == pytest.approx(2 * (900 * 16 + 100 * 2) / 1e5 + 4 * 16 * 20 * 4 * 8 * 2 / 1e6)


def test_many_rows_are_bound_by_arithmetic() -> None:
    passed = compiled(precision="fp32", overhead=0.5).time(32, logit_rows=32, context=0)
    assert passed.bound == "arithmetic"
    assert passed.seconds == passed.computing + 0.5 == pytest.approx((2 * 1000 * 32 + 4 * 32 * 32 * 64) / 1e4 + 0.5)


def test_attention_is_in_16_bits_where_the_machine_has_them() -> None:
    assert compiled(precision="int8").row_bytes == compiled(precision="fp16").row_bytes == 64
    assert compiled(precision="fp32").row_bytes == 128
    without = Machine(name="cpu", bandwidth=1.0, memory=None, rates={"fp32": 1.0, "int8": 4.0})
    assert compiled(precision="int8", machine=without).row_bytes == 128


def test_where_only_weights_are_quantized_products_run_as_attention_does() -> None:
    half, full = (
        compiled(precision="int4", machine=Machine(name="box", bandwidth=1e3, memory=None, rates=rates))
        for rates in ({"fp16": 1e6, "fp32": 1e4}, {"fp32": 1e4})
    )
    operations = 2 * 1000 + 4 * 1 * 4 * 8 * 2
    assert half.time(1, logit_rows=1, context=0).computing == pytest.approx(operations / 1e6)
    assert full.time(1, logit_rows=1, context=0).computing == pytest.approx(operations / 1e4)
    assert full.time(1, logit_rows=1, context=0).moving == pytest.approx((1000 * (0.5 + 2 / 32) + 128) / 1e3)


def test_weights_in_memory_count_tables_that_are_looked_up() -> None:
    assert compiled(precision="fp16").weight_bytes == 2000 + 50 * 2
    assert compiled(precision="int8").weight_bytes == 1000 + 50 * 2
    assert compiled(precision="fp32").weight_bytes == 4000 + 50 * 4


def test_a_round_is_a_verification_an_extension_and_the_levels() -> None:
    target, head = compiled(), compiled(HEAD)
    profile = Profile(nodes=8, top_k=3, depth=3)
    found = round_time(target, head, profile, context=5, accepted_length=2.0)
    extension = head.time(2.0, logit_rows=1, context=5)
    levels = [head.time(3, logit_rows=3, context=5, seen=seen) for seen in (3, 6)]
    assert found.verify == target.time(8, logit_rows=8, context=5)
    assert found.draft == (extension, *levels)
    assert found.seconds == pytest.approx(sum(each.seconds for each in (found.verify, extension, *levels)))
    plain = target.time(1, logit_rows=1, context=5).seconds
    assert found.break_even == pytest.approx(found.seconds / plain)
    assert found.speedup == pytest.approx(2.0 * plain / found.seconds)


def test_levels_of_static_trees_are_as_wide_as_their_expanded_nodes() -> None:
    assert [level.rows for level in draft_levels(static_profile())] == [4, 4, 1, 1]
    assert draft_levels(profile_from_nodes(2)) == ()


def test_expected_length_by_hand() -> None:
    chain = Profile(nodes=4, top_k=1, depth=3)
    assert expected_length(chain, (0.5, 0.2)) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    # best nodes: .5, .25 (its child), then .2 (second child of the root) before .125
    bushy = Profile(nodes=4, top_k=2, depth=3)
    assert expected_length(bushy, (0.5, 0.2)) == pytest.approx(1 + 0.5 + 0.25 + 0.2)
    assert expected_length(static_profile(((0,), (1,), (0, 0))), (0.5, 0.2)) == pytest.approx(1 + 0.5 + 0.2 + 0.25)
    assert expected_length(static_profile(((0,), (1,))), (0.5,)) == pytest.approx(1.5)
    assert expected_length(bushy, ()) == 1.0


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=4), st.integers(2, 40))
def test_a_larger_tree_never_commits_less(shares: list[float], nodes: int) -> None:
    acceptance = sorted(shares, reverse=True)
    small, large = (Profile(nodes=n, top_k=8, depth=6) for n in (nodes, nodes + 5))
    assert 1 <= expected_length(small, acceptance) <= expected_length(large, acceptance) + 1e-12


def test_verdicts_name_the_best_and_say_why_others_are_not_worth_it() -> None:
    target, head = compiled(precision="int8"), compiled(HEAD, "int8")

    def rounds(*lengths: float | None) -> dict[int, str]:
        sizes = (4, 8, 128)
        timed = [
            round_time(target, head, profile_from_nodes(n), context=0, accepted_length=length)
            for n, length in zip(sizes, lengths, strict=True)
        ]
        return verdicts(timed)

    assert rounds(1.9, 3.0, 3.1) == {4: "yes", 8: "best", 128: "no: plain is faster"}
    assert rounds(2.5, 2.5, 9.9)[8] == "no: 4 is as fast"
    assert rounds(None, None, None)[4].startswith("from an accepted length of 1.")


def test_capacity_is_what_weights_and_reserve_leave() -> None:
    target, head = compiled(), compiled(HEAD)
    # 4000 bytes, a tenth kept, weights 2100 + 200, 64 + 32 bytes a row
    assert capacity_rows(target, head) == math.floor((3600 - 2300) / 96)
    with pytest.raises(EagleError, match=r"box has 0 GB and the weights take .* in fp32"):
        capacity_rows(compiled(precision="fp32"), head)
    endless = Machine(name="box", bandwidth=1.0, memory=None, rates={"fp16": 1.0})
    assert capacity_rows(compiled(machine=endless), compiled(HEAD, machine=endless)) is None


def test_a_share_of_the_limits_is_reached() -> None:
    half = compiled(machine=BOX.reaching(0.5)).time(4, logit_rows=4, context=3)
    full = compiled().time(4, logit_rows=4, context=3)
    assert (half.moving, half.computing) == (pytest.approx(2 * full.moving), pytest.approx(2 * full.computing))
    for share in (0, 1.1, math.nan):
        with pytest.raises(EagleError, match="expected above 0, at most 1"):
            BOX.reaching(share)


def test_arithmetic_that_a_machine_lacks_is_refused() -> None:
    with pytest.raises(EagleError, match=r"A100 has no fp8 arithmetic .* only fp32, fp16, int8"):
        compiled(precision="fp8", machine=MACHINES["a100"])
    only = Machine(name="box", bandwidth=1.0, memory=None, rates={"int8": 1.0})
    with pytest.raises(EagleError, match=r"box has no fp32 arithmetic"):
        compiled(precision="int8", machine=only)


@pytest.mark.parametrize("wrong", [{"bandwidth": 0.0}, {"memory": -1.0}, {"rates": {"fp16": math.nan}}])
def test_numbers_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(EagleError, match="expected a positive number"):
        Machine(**{"name": "box", "bandwidth": 1.0, "memory": 1.0, "rates": {}, **wrong})  # type: ignore[arg-type]


def test_every_machine_of_the_table_runs_16_bits_and_computes_faster_than_it_reads() -> None:
    assert all(name == machine.name.lower().replace(" ", "-") for name, machine in MACHINES.items())
    for machine in MACHINES.values():
        assert machine.rates["fp32"] < machine.rates["fp16"] <= machine.rates["int8"]
        assert machine.rates["fp16"] / machine.bandwidth > 70, "a bandwidth or rate of another unit"
        assert {PRECISIONS[name].arithmetic for name in ("fp16", "bf16", "int8")} <= machine.rates.keys()
