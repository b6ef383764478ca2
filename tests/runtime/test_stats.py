"""The figures on hand-made numbers."""

from __future__ import annotations

import json

import pytest

from eagle_runtime.stats import HOST_PHASES, PHASES, PhaseClock, Stats


def two_rounds() -> Stats:
    """A first token from prefill, then 3 and 1 tokens; 10 and 6 nodes were checked, 2 and 1 accepted."""
    stats = Stats(prompt_tokens=20, reused_tokens=5, tokens=5, prefill_s=0.5)
    stats.count_round(nodes=8, tokens=3, accepted=2, checked=10, looked_up=1)
    stats.count_round(nodes=4, tokens=1, accepted=1, checked=6)
    stats.phases_s.update(draft=0.1, tree=0.02, verify=0.2, accept=0.01, commit=0.03, host=0.04)
    return stats


def test_accepted_length_is_tokens_of_rounds_over_rounds_the_bonus_included() -> None:
    assert two_rounds().accepted_length == (3 + 1) / 2


def test_acceptance_rate_is_accepted_over_checked_nodes() -> None:
    assert two_rounds().acceptance_rate == (2 + 1) / (10 + 6)


def test_speed_leaves_out_prefill_and_the_token_it_gives() -> None:
    stats = two_rounds()
    assert stats.decode_s == pytest.approx(0.4)
    assert stats.tokens_per_s == pytest.approx(4 / 0.4)


def test_phases_are_means_over_rounds_in_milliseconds() -> None:
    assert two_rounds().phases_ms == pytest.approx(
        {"draft": 50, "tree": 10, "verify": 100, "accept": 5, "commit": 15, "host": 20}
    )


def test_host_share_is_all_time_outside_the_graphs() -> None:
    assert two_rounds().host_share == pytest.approx((0.02 + 0.01 + 0.03 + 0.04) / 0.4)
    assert set(PHASES) - set(HOST_PHASES) == {"draft", "verify"}


def test_nothing_generated_gives_zeros() -> None:
    stats = Stats(prompt_tokens=4)
    assert (stats.accepted_length, stats.acceptance_rate, stats.tokens_per_s, stats.host_share) == (0, 0, 0, 0)
    assert set(stats.phases_ms.values()) == {0.0}


def test_plain_decoding_checks_no_node() -> None:
    stats = Stats()
    stats.count_round(nodes=1, tokens=1, accepted=0, checked=0)
    assert (stats.accepted_length, stats.acceptance_rate) == (1.0, 0.0)


def test_sums_are_over_tokens_not_means_of_means() -> None:
    """2 rounds of accepted length 2 and 8 rounds of 1 give 1.2, not 1.5."""
    total, other = two_rounds(), Stats(prompt_tokens=7, reused_tokens=1, tokens=9, prefill_s=0.25)
    for _ in range(8):
        other.count_round(nodes=8, tokens=1, accepted=0, checked=4)
    other.phases_s["verify"] = 0.8
    total.add(other)
    assert total.accepted_length == 12 / 10
    assert total.acceptance_rate == 3 / 48
    assert total.tokens_per_s == pytest.approx(12 / 1.2)
    assert (total.prompt_tokens, total.reused_tokens, total.tokens, total.rounds) == (27, 6, 14, 10)
    assert (total.rounds_by_size, total.looked_up_nodes) == ({8: 9, 4: 1}, 1)
    assert total.prefill_s == 0.75
    assert other.rounds == 8


def test_two_of_them_share_no_times() -> None:
    first, second = Stats(), Stats()
    first.phases_s["draft"] = 1.0
    assert second.phases_s["draft"] == 0.0


def test_as_json() -> None:
    data = json.loads(json.dumps(two_rounds().to_dict()))
    assert data.pop("phases_ms") == {"draft": 50, "tree": 10, "verify": 100, "accept": 5, "commit": 15, "host": 20}
    assert data == {
        "prompt_tokens": 20,
        "reused_tokens": 5,
        "tokens": 5,
        "rounds": 2,
        "rounds_by_size": {"4": 1, "8": 1},
        "looked_up_nodes": 1,
        "accepted_length": 2.0,
        "acceptance_rate": 0.1875,
        "prefill_s": 0.5,
        "decode_s": 0.4,
        "tokens_per_s": 10.0,
    }


def test_the_line_says_what_the_rounds_were() -> None:
    assert two_rounds().line() == "rounds: 1 of 4, 1 of 8; 1 tokens by look-up"
    assert Stats().line() == "rounds: none"


def test_a_lap_takes_the_time_since_the_last_one_and_start_leaves_the_callers_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    stats = Stats()
    clock = PhaseClock(stats)  # 0
    clock.start()  # 1
    clock.lap("draft")  # 3
    clock.lap("verify")  # 7
    clock.start()  # 15
    clock.lap("draft")  # 31
    assert stats.phases_s == {**dict.fromkeys(PHASES, 0.0), "draft": 18.0, "verify": 4.0}
    assert clock.total == 22.0
