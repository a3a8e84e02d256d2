"""The levels of a point over many runs, and `raybench history` as users type it."""

from __future__ import annotations

import json
from datetime import timedelta

import numpy as np
import pytest
from builders import START, column, make_device, make_point, make_record
from compared import sweep, write

from raybench.analysis.compare import find_steps, history
from raybench.analysis.rows import point_rows
from raybench.results import reader


def test_levels_change_where_steps_are_and_nowhere_else():
    flat = 0.002 * np.random.default_rng(5).standard_normal(30)
    assert find_steps(flat, 0.001, 0.015) == []
    stepped = flat + np.repeat([0.0, 0.04, -0.03], 10)
    assert find_steps(stepped, 0.001, 0.015) == [10, 20]
    assert find_steps(stepped, 0.001, 0.2) == []
    assert find_steps(stepped, 0.05, 0.015) == []


def test_fewer_than_five_runs_show_no_step():
    assert find_steps(np.array([0.0, 0.0, 1.0, 1.0]), 0.001, 0.015) == []


def test_a_history_keeps_other_devices_apart(tmp_path):
    for day in range(12):
        device = make_device(0, name="NVIDIA H200" if day < 6 else "NVIDIA B200")
        step_ms = (8.0 if day < 6 else 4.0) * (1 + 0.001 * (day % 2))
        started_at = START + timedelta(days=day)
        one = make_record(
            make_point(world_size=1), step_ms=step_ms, devices=(device,), started_at=started_at
        )
        write(tmp_path, f"run{day}", [one], [device], started_at=started_at)
    found = history(point_rows(reader.load(tmp_path, "points")))
    assert column(found, "machine") == [0] * 6 + [1] * 6
    assert set(column(found, "step")) == {None}


@pytest.fixture
def nights(tmp_path):
    """Ten runs of three points; from the sixth on slower by 8 %, with another driver."""
    for day in range(10):
        device = make_device(0, driver_version="590.2" if day >= 5 else "580.1")
        factor = 1.08 if day >= 5 else 1.0
        sweep(tmp_path, f"night{day}", factor, day=day, devices=[device])


@pytest.mark.usefixtures("nights")
def test_history_marks_the_step_and_what_changed(tmp_path, command):
    code, out, err = command("history", "--chart", tmp_path / "a.svg")
    assert (code, err) == (0, "")
    assert "3 points over 10 runs: 3 steps." in out
    assert "driver 580.1 -> 590.2" in out
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


@pytest.mark.usefixtures("nights")
def test_history_of_one_point_shows_its_runs(command):
    out = command("history", "--filter", "batch_size == 2")[1]
    assert "1 point over 10 runs: 1 step." in out
    point_id = make_point(world_size=1, batch_size=2).point_id
    content = json.loads(command("history", "--point", point_id[:6], "--json")[1])
    assert [point["run_id"] for point in content["points"]] == [f"night{day}" for day in range(10)]


@pytest.mark.usefixtures("nights")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--filter", "world_size > 9"], "keeps none of the 3 points"),
        (["--filter", "hiddn > 9"], "hiddn"),
        (["--point", "zzz"], "no point 'zzz'"),
        (["--chart", "a.pdf"], "--chart: must end in .svg or .png"),
    ],
)
def test_a_mistake_in_a_history_is_one_line(command, words, message):
    code, _, err = command("history", *words)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
