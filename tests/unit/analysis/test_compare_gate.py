"""`raybench compare` as a gate: what the tables do not tell must not pass for noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import (
    START,
    make_device,
    make_failed,
    make_measure,
    make_measurement,
    make_point,
    make_record,
    make_run,
)
from click.testing import CliRunner, Result

from raybench.cli.compare import compare_command
from raybench.cli.history import history_command
from raybench.job.point import Point
from raybench.records import Device
from raybench.results.writer import RunStore

POINTS = tuple(make_point(world_size=1, batch_size=batch) for batch in (32, 64, 128, 256))
REGRESSION, UNCLEAR = 1, 5
GPU = make_device(0)
CPU = make_device(0, kind="cpu", name="Xeon", uuid="process-1", driver_version=None)


def sweep(
    root: Path,
    run_id: str,
    factor: float = 1.0,
    *,
    night: float = 0,
    points: Sequence[Point] = POINTS,
    device: Device = GPU,
    noise: float = 2e-3,
    **changes: Any,
) -> None:
    """A run of 8 ms a step, `factor` times as slow; starts scatter by 0.1 %."""
    started_at = START + timedelta(days=night)
    settings = {"git_commit": None, "tags": {}} | changes
    store = RunStore.create(
        root, make_run(run_id, started_at=started_at, **settings), make_measure()
    )
    store.write_devices([device])
    seed = int.from_bytes(run_id.encode(), "little") % 2**32
    for place, point in enumerate(points):
        rng = np.random.default_rng([seed, place])
        level = 8e6 * factor * (1 + 1e-3 * rng.standard_normal())
        steps = level * (1 + noise * rng.standard_normal(40))
        record = make_record(
            point,
            measurements=(make_measurement(0, [steps]),),
            devices=(device,),
            started_at=started_at,
        )
        store.write_records([(place, record)])


def compare(root: Path, *arguments: object) -> Result:
    given = [str(one) for one in (*arguments, "--results", root)]
    return CliRunner().invoke(compare_command, given, standalone_mode=False)


def verdicts(result: Result) -> dict[str, int]:
    counts: dict[str, int] = json.loads(result.stdout)["verdicts"]
    return counts


@pytest.mark.parametrize("device", [GPU, CPU], ids=["gpu", "cpu"])
def test_a_slowdown_beside_one_good_run_of_the_folder_is_no_noise(
    tmp_path: Path, device: Device
) -> None:
    sweep(tmp_path / "base", "before", device=device)
    sweep(tmp_path / "rest", "good", night=1, device=device)
    sweep(tmp_path / "rest", "slow", 4.0, night=2, device=device)
    baseline = tmp_path / "base" / "runs" / "before"
    for kind in ("regression", "unclear"):
        found = compare(tmp_path / "rest", baseline, "latest", "--fail-on", kind)
        assert "4 slower" in found.stdout
        assert found.return_value == REGRESSION


def test_a_slow_run_beside_a_tagged_one_is_no_noise(tmp_path: Path) -> None:
    sweep(tmp_path, "tagged", tags={"state": "good"})
    sweep(tmp_path, "good", night=1)
    sweep(tmp_path, "slow", 7.0, night=2)
    found = compare(tmp_path, "state=good", "latest", "--fail-on", "regression")
    assert "4 slower" in found.stdout
    assert found.return_value == REGRESSION


def test_good_and_slow_runs_in_one_folder_are_two_levels(tmp_path: Path) -> None:
    for night, factor in enumerate((1.0, 1.0, 5.0, 5.0)):
        sweep(tmp_path, f"night{night}", factor, night=night)
    found = compare(tmp_path, "night0", "night3", "--format", "json", "--fail-on", "regression")
    assert verdicts(found) == {"slower": 4}
    assert found.return_value == REGRESSION
    assert {(p["base_runs"], p["new_runs"]) for p in json.loads(found.stdout)["points"]} == {(2, 2)}
    given = ["--results", str(tmp_path)]
    history = CliRunner().invoke(history_command, given, standalone_mode=False).stdout
    assert "4 points over 4 runs: 4 steps." in history


@pytest.mark.parametrize("tag", ["yes", ""])
def test_a_slow_run_among_named_repeats_is_never_the_same(tmp_path: Path, tag: str) -> None:
    for night, factor in enumerate((1.0, 1.0, 3.0)):
        sweep(tmp_path, f"base{night}", factor, night=night, tags={"base": tag or str(night)})
        sweep(tmp_path, f"new{night}", 3.0, night=3 + night, tags={"new": "yes"})
    base = f"base={tag}" if tag else "base0,base1,base2"
    found = compare(tmp_path, base, "new=yes", "--format", "json", "--fail-on", "unclear")
    assert "same" not in verdicts(found)
    assert found.return_value != 0


def test_nights_before_the_base_and_no_step_between_make_the_mean_surer(tmp_path: Path) -> None:
    for night in range(6):
        sweep(tmp_path, f"night{night}", night=night)
    alone = compare(tmp_path, "night0", "night1", "--format", "json")
    many = compare(tmp_path, "night4", "night5", "--format", "json")
    assert verdicts(many) == {"same": 4}
    points = json.loads(many.stdout)["points"]
    assert {(point["base_runs"], point["new_runs"]) for point in points} == {(5, 1)}
    first = {point["point_id"]: point["least_seen"] for point in json.loads(alone.stdout)["points"]}
    assert all(point["least_seen"] <= first[point["point_id"]] for point in points)


def test_a_run_between_the_two_is_a_repeat_of_neither(tmp_path: Path) -> None:
    for night in range(3):
        sweep(tmp_path, f"night{night}", night=night)
    points = json.loads(compare(tmp_path, "night0", "night2", "--format", "json").stdout)["points"]
    assert {(point["base_runs"], point["new_runs"]) for point in points} == {(1, 1)}
    assert {point["noise_from"] for point in points} == {"documented"}


def test_other_devices_of_the_same_model_count_as_repeats(tmp_path: Path) -> None:
    for night in range(4):
        device = make_device(0, uuid=f"GPU-of-{night}", host=f"node{night}")
        sweep(tmp_path, f"night{night}", night=night, device=device)
    found = compare(tmp_path, "night2", "night3", "--format", "json")
    points = json.loads(found.stdout)["points"]
    assert {point["base_runs"] for point in points} == {3}
    other = make_device(0, driver_version="590.1")
    sweep(tmp_path, "driver", night=4, device=other)
    points = json.loads(compare(tmp_path, "night3", "driver", "--format", "json").stdout)["points"]
    assert {(point["base_runs"], point["new_runs"]) for point in points} == {(4, 1)}


def test_one_run_on_other_devices_of_the_same_model_proves_no_small_change(tmp_path: Path) -> None:
    sweep(tmp_path, "here")
    sweep(tmp_path, "there", 1.03, night=1, device=make_device(0, uuid="GPU-other"))
    sweep(tmp_path, "again", 1.03, night=2, job_sha256="1" * 64)
    elsewhere = compare(tmp_path, "here", "there", "--format", "json")
    assert verdicts(elsewhere) == {"unclear": 4}
    assert "devices of this model may differ as much" in elsewhere.stdout
    assert verdicts(compare(tmp_path, "here", "again", "--format", "json")) == {"slower": 4}


def test_runs_that_were_named_but_differ_are_left_out_and_said(tmp_path: Path) -> None:
    sweep(tmp_path, "old", tags={"branch": "main"}, git_commit="a" * 40)
    sweep(tmp_path, "base", night=1, tags={"branch": "main"}, git_commit="b" * 40)
    sweep(tmp_path, "new", night=2, git_commit="c" * 40)
    found = compare(tmp_path, "branch=main", "new")
    assert "old is left out: it is no repeat, as it differs in git commit." in found.stdout
    listed = json.loads(compare(tmp_path, "old,base", "new", "--format", "json").stdout)
    assert (listed["left_out"], listed["base"]["run_id"]) == ([], "base")
    assert {point["base_runs"] for point in listed["points"]} == {2}


def test_noise_above_the_threshold_is_unclear_and_has_an_exit_code_of_its_own(
    tmp_path: Path,
) -> None:
    for number, factor in enumerate((1.0, 1.06, 0.97, 1.03)):
        for side in ("base", "new"):
            sweep(tmp_path, f"{side}{number}", factor, night=number, tags={"side": side})
    for kind, code in (("regression", 0), ("unclear", UNCLEAR)):
        arguments = ("side=base", "side=new", "--format", "json", "--fail-on", kind)
        found = compare(tmp_path, *arguments)
        assert verdicts(found) == {"unclear": 4}
        assert found.return_value == code


def test_the_least_change_that_could_have_been_seen_is_told(tmp_path: Path) -> None:
    sweep(tmp_path, "base")
    sweep(tmp_path, "new", night=1)
    told = " ".join(compare(tmp_path, "base", "new").stdout.split())
    least = json.loads(compare(tmp_path, "base", "new", "--format", "json").stdout)["points"]
    low, high = (f"{end(p['least_seen'] for p in least):.1%}" for end in (min, max))
    span = low if low == high else f"{low} to {high}"
    assert f"a point that alone became slower by less than {span} would not" in told


def test_verdicts_on_one_run_a_side_say_what_they_suppose(tmp_path: Path) -> None:
    sweep(tmp_path, "base")
    sweep(tmp_path, "new", 1.2, night=1)
    told = " ".join(compare(tmp_path, "base", "new").stdout.split())
    assert "4 verdicts suppose that two runs of the same thing differ by" in told


def test_points_of_one_run_alone_are_counted_and_told_apart(tmp_path: Path) -> None:
    many = [make_point(world_size=1, batch_size=2**n, params={"hidden": 64}) for n in range(36)]
    few = [make_point(world_size=1, batch_size=2**n, params={"hidden": 128}) for n in range(8)]
    sweep(tmp_path, "base", points=many)
    sweep(tmp_path, "new", night=1, points=few)
    found = compare(tmp_path, "base", "new")
    told = " ".join(found.stdout.split())
    assert "36 points in BASE only, 8 points in NEW only; they differ in hidden." in told
    assert "None" not in told
    assert len(found.stdout.splitlines()) < 10


def test_points_that_fail_now_are_still_listed_one_by_one(tmp_path: Path) -> None:
    sweep(tmp_path, "base")
    sweep(tmp_path, "new", night=1, points=POINTS[:2])
    store = RunStore.create(tmp_path, make_run("broken", started_at=START), make_measure())
    store.write_devices([GPU])
    store.write_records([(0, make_failed(POINTS[0]))])
    found = compare(tmp_path, "base", "broken")
    assert "base: ok; new: out of memory" in found.stdout
    assert "3 points in BASE only: batch_size 64, 128, 256." in found.stdout


def test_of_a_large_folder_only_runs_near_the_two_are_read(tmp_path: Path) -> None:
    for night in (0, 1):
        sweep(tmp_path, f"gate-202609{night:02}-000000-abcd", night=night)
    for number in range(300):
        run = tmp_path / "runs" / f"gate-20250101-{number:06}-abcd"
        run.mkdir()
        (run / "run.parquet").write_bytes(b"damaged")
    found = compare(tmp_path, "gate-20260900-000000-abcd", "latest", "--format", "json")
    assert verdicts(found) == {"same": 4}
    read = [warning for warning in found.stderr.splitlines() if "damaged" in warning]
    assert len(read) < 150
