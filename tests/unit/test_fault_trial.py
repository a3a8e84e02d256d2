"""The trial of random faults: what is drawn, which endings count as findings, what is told."""

from __future__ import annotations

from collections import Counter

import pandas as pd
import pytest

from benchmarks.fault_trial import Pace, Trial, by_victim, make_trial, usual, wrong_code
from benchmarks.machine import without_paths
from benchmarks.sweep_family import VICTIMS

PACE = Pace(first_row_s=8.0, last_row_s=12.0, end_s=14.0)


def trial(victim: str, signal: str, code: int, **more: object) -> Trial:
    drawn = {"number": 0, "phase": "runs", "after_rows": 3, "wait_s": 0.1, "struck_s": 9.0}
    return Trial(victim=victim, signal=signal, code=code, **drawn | more)  # type: ignore[arg-type]


def rows(*statuses: str) -> pd.DataFrame:
    points = [f"p{number}" for number in range(len(statuses))]
    return pd.DataFrame({"point_id": points, "attempt": 1, "status": statuses})


ALL_OK = ["ok"] * 6


def test_each_victim_has_its_turn_and_all_moments_lie_in_the_life_of_a_sweep() -> None:
    trials = [make_trial(number, 7, PACE) for number in range(len(VICTIMS) * 50)]
    assert set(Counter(each.victim for each in trials).values()) == {50}
    for each in trials:
        longest_s = {"starts": 8.0, "runs": 4.0 / 6, "ends": 2.0}[each.phase]
        assert 0 <= each.wait_s <= longest_s + 0.01
        assert each.phase != "starts" or (each.after_rows == 0 and each.wait_s >= 1)
    runs = [each.after_rows for each in trials if each.phase == "runs"]
    assert set(runs) == {1, 2, 3, 4, 5}
    assert len(runs) > len(trials) / 3


def test_a_trial_follows_from_its_seed_and_number() -> None:
    assert make_trial(5, 1, PACE) == make_trial(5, 1, PACE)
    assert make_trial(5, 1, PACE) != make_trial(5, 2, PACE)


def test_the_usual_pace_is_the_median() -> None:
    slow = Pace(first_row_s=80.0, last_row_s=120.0, end_s=140.0)
    assert usual([PACE, slow, PACE]) == PACE


@pytest.mark.parametrize(
    ("ended", "statuses"),
    [
        (trial("watcher", "SIGKILL", 0), ALL_OK),
        (trial("head", "SIGSEGV", 3), ["ok", "lost"]),
        (trial("rank", "SIGKILL", 1), [*ALL_OK[:5], "lost"]),
        (trial("driver", "SIGTERM", 130), ["ok"]),
        (trial("driver", "SIGKILL", -9), ["ok"]),
    ],
)
def test_an_exit_code_that_says_what_has_happened_is_no_finding(
    ended: Trial, statuses: list[str]
) -> None:
    assert wrong_code(ended, rows(*statuses)) == ""


@pytest.mark.parametrize(
    ("ended", "statuses", "why"),
    [
        (trial("head", "SIGABRT", 1), [], "without a failed point"),
        (trial("head", "SIGABRT", 1), ALL_OK, "without a failed point"),
        (trial("agent", "SIGKILL", 0), ["ok"] * 5, "without all points ok"),
        (trial("rank", "SIGTERM", 4), ALL_OK, "whatever has happened"),
        (trial("rank", "SIGTERM", -9), ALL_OK, "by a signal that it did not get"),
        (trial("driver", "SIGSEGV", 3), ["ok"], "after SIGSEGV of a driver"),
        (trial("head", "SIGTERM", 130), ["ok"], "after SIGTERM of a head"),
        (trial("head", "SIGTERM", 3, struck_s=None), ["ok"], "after SIGTERM of a head"),
    ],
)
def test_an_exit_code_that_does_not_fit_is_a_finding(
    ended: Trial, statuses: list[str], why: str
) -> None:
    assert wrong_code(ended, rows(*statuses)) == why


def test_the_latest_attempt_of_a_point_counts() -> None:
    tried_again = pd.concat([rows("lost", *ALL_OK[1:]), rows("ok").assign(attempt=2)])
    assert wrong_code(trial("rank", "SIGKILL", 0), tried_again) == ""
    assert wrong_code(trial("rank", "SIGKILL", 1), tried_again) == "without a failed point"


def test_the_summary_has_a_row_for_each_victim_and_signal_that_was_struck() -> None:
    told = by_victim(
        [
            trial("head", "SIGKILL", 3, rows_before=2, resumed_code=0, ended_s=6.0),
            trial("head", "SIGKILL", 0, rows_before=6, resumed_code=0, gone_s=5.0),
            trial("rank", "SIGABRT", 1, resumed_code=1, findings=["x"]),
            trial("rank", "SIGABRT", 0, struck_s=None),
        ]
    )
    head, rank = told
    assert (head["victim"], head["signal"], head["trials"]) == ("head", "SIGKILL", 2)
    assert head["exit_codes"] == {"0": 1, "3": 1}
    assert head["rows_ok_before_resuming"] == {"2": 1, "6": 1}
    assert (head["resumed_ok"], head["slowest_ended_s"], head["slowest_gone_s"]) == (2, 6.0, 5.0)
    assert (rank["trials"], rank["resumed_ok"], rank["with_a_finding"]) == (1, 0, 1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("its logs: /tmp/raybench-x1/r/logs\n", "its logs: …/logs\n"),
        ('File "/home/a/b/z.py", line 3', 'File "…/z.py", line 3'),
        ("http://host/a/b and 3/4 and ../../c/d", "http://host/a/b and 3/4 and ../../c/d"),
    ],
)
def test_texts_for_others_hold_no_folders_of_this_machine(text: str, told: str) -> None:
    assert without_paths(text) == told
