"""What a check finds: the file of the simulation, and its line."""

import math

import numpy as np
import pytest

from benchmarks.simulations.detection import (
    GRID,
    Cell,
    count_alarms,
    draw,
    found_share,
    outcome,
)
from raybench.health.detection import detection_limit, simulated_limits
from raybench.records.detection import DetectionLimit, upper_bound
from raybench.report.words.health import detection

CHECKS = 150


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(Cell("full", "cuda", 2, True), marks=pytest.mark.long),
        pytest.param(Cell("quick", "cuda", 4, False), marks=pytest.mark.long),
        Cell("quick", "cpu", 2, False),
    ],
    ids=str,
)
def test_file_agrees_with_a_new_simulation(cell):
    row = detection_limit(cell.mode, cell.kind, cell.count, cell.has_references)
    error = math.sqrt(row.found_share * (1 - row.found_share) / CHECKS + 1 / CHECKS**2)
    assert found_share(cell, row.slowdown, CHECKS) >= row.found_share - 4 * error
    # A much smaller slowdown is not found.
    smaller = max(GRID[0], round(0.6 * row.slowdown, 2))
    assert found_share(cell, smaller, CHECKS) < row.found_share - 4 * error
    alarms, drains = count_alarms(cell, CHECKS)
    assert drains <= 1
    assert alarms / CHECKS <= row.alarm_share + 4 * math.sqrt(row.alarm_share / CHECKS)


@pytest.mark.parametrize("mode", ["full", "quick"])
def test_checks_without_a_verdict_have_no_alarm(mode):
    cell = Cell(mode, "cuda", 4, True)
    batch = draw(np.random.default_rng(7), cell, 0.02, 60)
    skipped = np.flatnonzero(~batch.may_alarm)
    assert len(skipped)
    assert not any(outcome(batch, int(check)).is_alarm for check in skipped)


def test_next_smaller_number_of_devices_counts():
    assert detection_limit("full", "cuda", 7, False).devices == 4
    assert detection_limit("full", "cuda", 1000, False).devices == 8
    assert detection_limit("quick", "cpu", 2, True) is None


def test_single_device_without_references_finds_nothing():
    limit = detection_limit("quick", "cuda", 1, False)
    assert limit.slowdown is None
    assert detection(limit).startswith("Cannot find a slow GPU")


def test_quick_checks_seldom_drain_healthy_gpus():
    quick = [row for row in simulated_limits() if (row.mode, row.kind) == ("quick", "cuda")]
    assert len(quick) == 8
    assert max(row.drain_share for row in quick) < 2e-4


@pytest.mark.parametrize(("events", "bound"), [(0, 0.00499), (1, 0.0079), (600, 1.0)])
def test_upper_bound_is_above_the_share(events, bound):
    assert upper_bound(events, 600) == pytest.approx(bound, abs=2e-5)


def test_line_says_slowdown_and_drained_nodes():
    limit = DetectionLimit(
        mode="quick",
        kind="cuda",
        devices=8,
        has_references=True,
        slowdown=0.08,
        found_share=0.99,
        checks=1000,
        healthy_checks=32_000,
        alarms=0,
        drains=0,
    )
    assert detection(limit) == (
        "Finds a GPU that is 8 % slow in 99 % of checks; drains a healthy node in fewer than 1 of "
        "10,000 (simulated)."
    )
