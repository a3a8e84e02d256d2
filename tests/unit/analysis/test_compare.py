"""Comparisons of runs whose difference is known."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
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

from raybench import cli
from raybench.analysis.compare import compare
from raybench.analysis.environment_changes import changes, facts
from raybench.analysis.history import find_steps, history
from raybench.analysis.measured_runs import Measured, Other
from raybench.analysis.point_changes import point_changes
from raybench.analysis.start_noise import (
    LOOSE,
    ON_CPU,
    TYPICAL,
    prior_noise,
    raise_priors,
    update_noise,
    widen,
)
from raybench.records import Device, Record
from raybench.results import reader
from raybench.results.quality import BREAKDOWN
from raybench.results.writer import RunStore

RANKS = (1, 2, 4)


def record(world_size: int = 1, factor: float = 1.0, seed: int = 0, **changes: Any) -> Record:
    """8 ms and noise of 0.2 %, by 40 samples."""
    rng = np.random.default_rng([world_size, seed])
    steps = 8e6 * factor * (1 + 2e-3 * rng.standard_normal(40))
    settings: dict[str, Any] = {
        "measurements": tuple(make_measurement(rank, [steps]) for rank in range(world_size)),
        **changes,
    }
    return make_record(make_point(world_size=world_size), **settings)


def write(
    root: Path,
    run_id: str,
    records: Sequence[Record],
    devices: Sequence[Device] = (make_device(0), make_device(1)),
    **changes: Any,
) -> None:
    written = RunStore.create(root, make_run(run_id, **changes), make_measure())
    written.write_devices(devices)
    for place, one in enumerate(records):
        written.write_records([(place, one)])


def measured(root: Path, run_id: str, again: Sequence[str] = ()) -> Measured:
    return Measured(
        points=reader.load(root, "points", run_id),
        samples=reader.load(root, "samples", run_id),
        named=[Other(points=reader.load(root, "points", other)) for other in again] or None,
    )


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """`base` twice; `new` is 5 % slower on 2 ranks and 5 % faster on 4, with another driver."""
    root = tmp_path / "results"
    hour, day = START + timedelta(hours=1), START + timedelta(days=1)
    write(root, "base", [record(ranks, seed=1) for ranks in RANKS])
    twins = [record(ranks, seed=2, started_at=hour) for ranks in RANKS]
    write(root, "twin", twins, started_at=hour)
    factors = {1: 1.0, 2: 1.05, 4: 0.95}
    write(
        root,
        "new",
        [record(ranks, factors[ranks], seed=3, started_at=day) for ranks in RANKS],
        [make_device(0, driver_version="590.2"), make_device(1, driver_version="590.2")],
        started_at=day,
        tags={"driver": "590"},
    )
    return root


def verdicts(frame: pd.DataFrame) -> dict[int, str]:
    return dict(zip(frame["world_size"], frame["verdict"], strict=True))


def test_a_change_is_told_from_none(results: Path) -> None:
    frame = compare(measured(results, "base"), measured(results, "new"))
    assert verdicts(frame) == {1: "same", 2: "slower", 4: "faster"}
    slower = frame.set_index("world_size").loc[2]
    assert slower["ratio"] == pytest.approx(1.05, rel=2e-3)
    assert slower["ratio_low"] < 1.05 < slower["ratio_high"]
    # Its starts are in it: pairs differ by up to 1.4 % in 19 of 20, as documented.
    assert 0.015 < slower["ratio_high"] - slower["ratio_low"] < 0.03
    assert list(frame["noise_from"]) == ["documented"] * 3


def test_two_runs_of_the_same_are_the_same(results: Path) -> None:
    frame = compare(measured(results, "base"), measured(results, "twin"))
    assert set(frame["verdict"]) == {"same"}
    assert frame["p_value"].min() > 0.05


def test_the_two_runs_change_places_without_changing_what_is_said(results: Path) -> None:
    there = compare(measured(results, "base"), measured(results, "new"))
    back = compare(measured(results, "new"), measured(results, "base"))
    assert verdicts(back) == {1: "same", 2: "faster", 4: "slower"}
    assert np.allclose(there["ratio"] * back["ratio"], 1)


def test_changes_up_to_the_threshold_are_none(results: Path) -> None:
    frame = compare(measured(results, "base"), measured(results, "new"), threshold=0.08)
    assert set(frame["verdict"]) == {"same"}


def test_the_slowest_rank_is_compared_and_warm_up_is_not(tmp_path: Path) -> None:
    even = tuple(make_measurement(rank, [[8_000_000] * 20], warmup=9) for rank in range(2))
    odd = (even[0], make_measurement(1, [[9_000_000] * 20], warmup=9))
    write(tmp_path, "a", [record(2, measurements=even)])
    write(tmp_path, "b", [record(2, measurements=odd)])
    row = compare(measured(tmp_path, "a"), measured(tmp_path, "b")).iloc[0]
    assert (row["base_ms"], row["new_ms"]) == (pytest.approx(8.0), pytest.approx(9.0))
    assert row["verdict"] == "slower"


def test_one_small_change_among_many_points_may_be_chance(tmp_path: Path) -> None:
    points = [make_point(batch_size=2**place) for place in range(40)]

    def records(seed: int, factor: float) -> list[Record]:
        made = [record(1, factor if not n else 1.0, seed=seed + n) for n in range(40)]
        return [
            make_record(point, measurements=one.measurements)
            for point, one in zip(points, made, strict=True)
        ]

    write(tmp_path, "a", records(100, 1.0))
    write(tmp_path, "b", records(200, 1.022))
    many = compare(measured(tmp_path, "a"), measured(tmp_path, "b"))
    assert many["verdict"].iloc[0] == "unclear"
    assert "of 40 points" in many["why"].iloc[0]
    one = [
        Measured(points=side.points.iloc[:1], samples=side.samples)
        for side in (measured(tmp_path, "a"), measured(tmp_path, "b"))
    ]
    assert compare(*one)["verdict"].iloc[0] == "slower"


def test_more_runs_of_either_side_find_one_small_change_among_many_points(tmp_path: Path) -> None:
    def records(seed: int, factor: float) -> list[Record]:
        made = [record(1, factor if not n else 1.0, seed=seed + n) for n in range(20)]
        return [
            make_record(make_point(batch_size=2**n), measurements=one.measurements)
            for n, one in enumerate(made)
        ]

    for number in range(3):
        write(tmp_path, f"a{number}", records(100 * number, 1.0))
        write(tmp_path, f"b{number}", records(50 + 100 * number, 1.03))
    alone = compare(measured(tmp_path, "a0"), measured(tmp_path, "b0"))
    assert alone["verdict"].value_counts().to_dict() == {"same": 19, "unclear": 1}
    more = [measured(tmp_path, f"{side}0", [f"{side}1", f"{side}2"]) for side in "ab"]
    found = compare(*more)
    assert set(found["noise_from"]) == {"runs"}
    assert list(found["verdict"]) == ["slower"] + ["same"] * 19


def test_a_run_that_is_like_both_tells_of_the_noise_and_not_of_the_change(results: Path) -> None:
    sides = [measured(results, name, ["twin"]) for name in ("base", "new")]
    shared = compare(*sides).set_index("world_size").loc[2]
    alone = compare(measured(results, "base"), measured(results, "new")).set_index("world_size")
    assert (shared["base_runs"], shared["new_runs"]) == (1, 1)
    assert shared["ratio"] == alone.loc[2, "ratio"]


def test_noisy_runs_of_the_same_job_raise_the_floor(results: Path) -> None:
    for number, factor in enumerate((0.96, 1.05, 1.0)):
        write(results, f"noisy{number}", [record(r, factor, seed=number) for r in RANKS])
    again = [f"noisy{number}" for number in range(3)]
    frame = compare(measured(results, "base", again), measured(results, "new"))
    assert set(frame["noise_from"]) == {"runs"}
    assert frame["noise_floor"].min() > 0.05
    assert "slower" not in set(frame["verdict"])


def test_repeats_tell_of_noise_where_no_other_run_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    levels = (8e6, 8.6e6, 8.3e6, 7.8e6)
    for run_id, factor in (("a", 1.0), ("b", 1.03)):
        repeats = [factor * level * (1 + 1e-3 * rng.standard_normal(30)) for level in levels]
        write(tmp_path, run_id, [record(1, measurements=(make_measurement(0, repeats),))])
    row = compare(measured(tmp_path, "a"), measured(tmp_path, "b")).iloc[0]
    assert row["noise_from"] == "repeats"
    assert row["ratio_low"] < 1 < row["ratio_high"]
    assert row["verdict"] == "unclear"


def test_repeats_that_agree_tell_nothing_of_other_starts(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    for run_id in ("a", "b"):
        repeats = [8e6 * (1 + 1e-3 * rng.standard_normal(30)) for _ in range(5)]
        write(tmp_path, run_id, [record(1, measurements=(make_measurement(0, repeats),))])
    row = compare(measured(tmp_path, "a"), measured(tmp_path, "b")).iloc[0]
    assert row["noise_from"] == "documented"
    assert row["noise_floor"] == pytest.approx(TYPICAL)


def test_points_of_one_run_alone_and_failed_ones_have_no_verdict(tmp_path: Path) -> None:
    write(tmp_path, "a", [record(1), record(2)])
    write(tmp_path, "b", [make_failed(make_point(world_size=1)), record(4)])
    frame = compare(measured(tmp_path, "a"), measured(tmp_path, "b")).set_index("world_size")
    assert frame["verdict"].isna().all()
    assert (frame.loc[1, "status_base"], frame.loc[1, "status_new"]) == ("ok", "oom")
    assert pd.isna(frame.loc[2, "status_new"])
    assert pd.isna(frame.loc[4, "status_base"])


def test_runs_without_points_compare_to_nothing(results: Path) -> None:
    none = measured(results, "base")
    none = Measured(points=none.points.iloc[:0], samples=none.samples.iloc[:0])
    assert compare(none, none).empty


def test_few_samples_are_unclear(tmp_path: Path) -> None:
    few = (make_measurement(0, [[8_000_000] * 4]),)
    write(tmp_path, "a", [record(1, measurements=few)])
    write(tmp_path, "b", [record(1, 1.5)])
    row = compare(measured(tmp_path, "a"), measured(tmp_path, "b")).iloc[0]
    assert (row["verdict"], row["why"]) == ("unclear", "fewer than 5 samples")


def test_documented_noise_is_wider_where_the_host_is_waited_for() -> None:
    steady = {"precision": "bf16", "host_bound": False, "device_type": "cuda"}
    assert prior_noise([steady, steady]).floor == pytest.approx(TYPICAL)
    for loose in (steady | {"precision": "fp16"}, steady | {"host_bound": True}):
        assert prior_noise([steady, loose]).floor == pytest.approx(LOOSE)
    assert prior_noise([steady | {"device_type": "cpu"}]).floor == pytest.approx(ON_CPU)


def test_what_was_seen_of_the_noise_outweighs_what_is_documented() -> None:
    prior = prior_noise([{"precision": "bf16", "host_bound": False, "device_type": "cuda"}])
    assert update_noise(prior, [[8.0], []], 0.0, "runs") is prior
    quiet = update_noise(prior, [[8.0] * 40], 0.0, "runs")
    loud = update_noise(prior, [[8.0, 8.8] * 20], 0.0, "runs")
    assert quiet.floor < TYPICAL / 2
    assert 0.1 < loud.floor < 0.2
    unsure = update_noise(prior, [[8.0, 8.8] * 20], 0.05**2, "runs")
    assert unsure.floor < loud.floor / 2


def test_runs_that_differ_at_most_points_are_believed_at_all() -> None:
    prior = prior_noise([{"precision": "bf16", "host_bound": False, "device_type": "cuda"}])
    loud, alike = [[8.0, 8.6, 8.2]], [[8.0, 8.0, 8.0]]
    wide = raise_priors([prior] * 3, [loud, loud, alike], [0.0] * 3)
    assert wide[2].floor > 3 * TYPICAL
    assert wide[2].degrees == prior.degrees
    assert raise_priors([prior] * 3, [loud, alike, alike], [0.0] * 3) == [prior] * 3
    assert raise_priors([prior], [loud], [0.0]) == [prior]
    assert raise_priors([prior] * 2, [[[8.0]], [[8.0]]], [0.0] * 2) == [prior] * 2


def test_points_that_scatter_widen_the_noise_and_a_change_of_many_does_not() -> None:
    noises = [prior_noise([{"precision": "bf16", "host_bound": False, "device_type": "cuda"}])] * 40
    rng = np.random.default_rng(8)
    loud = 0.03 * np.abs(rng.standard_normal(40)) * np.where(np.arange(40) % 2, -1, 1)
    unsure = [0.001] * 40
    wide = widen(noises, list(loud), unsure)
    assert {noise.source for noise in wide} == {"points"}
    assert 0.04 < wide[0].floor < 0.15
    quiet = 0.001 * rng.standard_normal(40)
    half = quiet + np.where(np.arange(40) < 20, 0.05, 0.0)
    for moved in (quiet, quiet + 0.05, half, loud[:3]):
        count = len(moved)
        assert widen(noises[:count], list(moved), unsure[:count]) == noises[:count]
    assert widen([], [], []) == []


def test_two_runs_on_a_noisy_machine_are_unclear(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    points = [make_point(batch_size=2**place) for place in range(30)]
    for run_id in ("a", "b"):
        levels = 1 + 0.03 * rng.standard_normal(30)
        made = [record(1, level, seed=place) for place, level in enumerate(levels)]
        pairs = zip(points, made, strict=True)
        write(tmp_path, run_id, [make_record(p, measurements=one.measurements) for p, one in pairs])
    frame = compare(measured(tmp_path, "a"), measured(tmp_path, "b"))
    assert set(frame["noise_from"]) == {"points"}
    assert set(frame["verdict"]) == {"unclear"}


def test_environments_are_told_apart_by_what_differs(results: Path) -> None:
    runs = {run.run_id: run for run in reader.read_runs(results)}
    found = {name: facts(run, reader.load(results, "devices", name)) for name, run in runs.items()}
    assert changes(found["base"], found["twin"]) == ()
    assert [(c.name, c.base, c.new) for c in changes(found["base"], found["new"])] == [
        ("driver", "580.1", "590.2")
    ]


def test_variables_and_commits_are_among_what_changed(tmp_path: Path) -> None:
    write(tmp_path, "a", [])
    device = make_device(0, environment={"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"})
    write(tmp_path, "b", [], [device, make_device(1)], git_commit="b" * 40 + "+changes")
    runs = {run.run_id: run for run in reader.read_runs(tmp_path)}
    a, b = (facts(runs[name], reader.load(tmp_path, "devices", name)) for name in ("a", "b"))
    assert [(c.name, c.base, c.new) for c in changes(a, b)] == [
        ("git commit", "a" * 12, "b" * 12 + "+changes"),
        ("variable NCCL_ALGO", "none", "Ring"),
    ]


def test_changed_code_is_named_by_its_file_but_not_where_one_run_tells_of_none(
    tmp_path: Path,
) -> None:
    told = {"raybench_sha256": "a" * 64}
    write(tmp_path, "old", [])
    write(tmp_path, "a", [], **told, workload_files={"net.py": "1" * 64, "loss.py": "3" * 64})
    write(tmp_path, "b", [], **told, workload_files={"net.py": "2" * 64, "loss.py": "3" * 64})
    runs = {run.run_id: run for run in reader.read_runs(tmp_path)}
    old, a, b = (facts(runs[n], reader.load(tmp_path, "devices", n)) for n in ("old", "a", "b"))
    assert [(c.name, c.base, c.new) for c in changes(a, b)] == [("code net.py", "1" * 12, "2" * 12)]
    assert changes(old, a) == ()


@pytest.mark.parametrize(("kind", "told"), [("cuda", ["device UUIDs"]), ("cpu", [])])
def test_another_gpu_is_a_change_and_another_process_on_the_cpu_is_none(
    tmp_path: Path, kind: str, told: list[str]
) -> None:
    for run_id in ("a", "b"):
        write(tmp_path, run_id, [], [make_device(0, kind=kind, uuid=f"of-{run_id}")])
    runs = {run.run_id: run for run in reader.read_runs(tmp_path)}
    a, b = (facts(runs[name], reader.load(tmp_path, "devices", name)) for name in ("a", "b"))
    assert [change.name for change in changes(a, b)] == told


def test_the_part_that_moved_with_the_step_is_named() -> None:
    base = dict.fromkeys(BREAKDOWN, 1.0) | {"step_ms_p50": 8.0}
    base |= {"throttled": False, "host_bound": None}
    base |= {"device_type": "cuda", "local_step_ms": 8.0}
    new = base | {"step_ms_p50": 9.0, "comm_exposed_ms": 1.9, "compute_ms": 0.5, "throttled": True}
    found = point_changes({**base, "clock_mhz": 1980.0}, {**new, "clock_mhz": 1410.0})
    assert [one.name for one in found] == ["exposed communication", "throttled", "SM clock"]
    late = point_changes(base, base | {"step_ms_p50": 9.0, "straggler_ms": 2.0})
    assert [one.name for one in late] == ["one rank slower"]


def test_levels_change_where_steps_are_and_nowhere_else() -> None:
    rng = np.random.default_rng(5)
    flat = 0.002 * rng.standard_normal(30)
    assert find_steps(flat, 0.003, 10, 0.015) == []
    stepped = flat + np.repeat([0.0, 0.04, -0.03], 10)
    assert find_steps(stepped, 0.003, 10, 0.015) == [10, 20]
    assert find_steps(stepped, 0.003, 10, 0.2) == []
    assert find_steps(flat[:1], 0.003, 10, 0.015) == []


def test_a_history_keeps_other_devices_apart(tmp_path: Path) -> None:
    for day in range(6):
        device = make_device(0, name="NVIDIA H200" if day < 3 else "NVIDIA B200")
        one = record(1, 1.0 if day < 3 else 0.5, seed=day, devices=(device,))
        write(tmp_path, f"run{day}", [one], [device], started_at=START + timedelta(days=day))
    frame = history(reader.load(tmp_path, "points"))
    assert list(frame["machine"]) == [0, 0, 0, 1, 1, 1]
    assert frame["step"].isna().all()


def call(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sys, "argv", ["raybench", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return (stopped.value.code, *capsys.readouterr())  # type: ignore[return-value]


@pytest.fixture
def raybench(results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):  # type: ignore[no-untyped-def]
    return lambda *arguments: call(monkeypatch, capsys, *arguments, "--results", results)


def test_compare_says_what_is_slower_and_what_changed(raybench) -> None:  # type: ignore[no-untyped-def]
    code, out, err = raybench("compare", "base", "driver=590")
    assert (code, err) == (0, "")
    told = r"1 slower \(by (4\.9|5\..)%\), 1 faster \(by (4\.9|5\..)%\), 1 same"
    assert re.search(told, " ".join(out.split()))
    assert "driver  580.1 -> 590.2" in out
    assert "By 2 runs of base and 1 run of new, a point that alone" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80


def test_changes_that_may_be_chance_are_to_be_measured_again(results: Path, raybench) -> None:  # type: ignore[no-untyped-def]
    assert "More runs tell" not in raybench("compare", "base", "twin")[1]
    many = [make_point(batch_size=2**place) for place in range(20)]
    for run_id, factor in (("a", 1.0), ("b", 1.03)):
        rows = [record(1, factor if not n else 1.0, seed=n) for n in range(20)]
        pairs = zip(many, rows, strict=True)
        write(results, run_id, [make_record(p, measurements=one.measurements) for p, one in pairs])
    told = "1 point is unclear, 1 of them changed by more than 1.5%. More runs tell: sweep the job"
    assert told in " ".join(raybench("compare", "a", "b")[1].split())
    assert told in raybench("compare", "a", "b", "--format", "md")[1]


def test_runs_chosen_by_a_tag_are_joined_by_those_that_have_it(results: Path, raybench) -> None:  # type: ignore[no-untyped-def]
    for number, kind in enumerate(("on", "off", "on", "off", "off")):
        records = [record(1, 1.03 if kind == "on" else 1.0, seed=number)]
        write(results, f"{kind}{number}", records, tags={"fans": kind})
    told = json.loads(raybench("compare", "fans=off", "fans=on", "--format", "json")[1])
    assert told["verdicts"] == {"slower": 1}
    [point] = told["points"]
    assert (point["base_runs"], point["new_runs"], point["noise_from"]) == (3, 2, "runs")


def test_a_regression_fails_where_that_is_asked_for(raybench) -> None:  # type: ignore[no-untyped-def]
    assert raybench("compare", "base", "new", "--fail-on", "regression")[0] == 1
    assert (
        raybench("compare", "base", "new", "--fail-on", "regression", "--threshold", "9%")[0] == 0
    )
    assert raybench("compare", "base", "twin", "--fail-on", "regression")[0] == 0


def test_a_point_that_fails_now_is_a_regression(results: Path, raybench) -> None:  # type: ignore[no-untyped-def]
    write(results, "broken", [record(1), make_failed(make_point(world_size=2))])
    code, out, _ = raybench("compare", "base", "broken", "--fail-on", "regression")
    assert code == 1
    assert "1 fail now" in out
    assert "base: ok; new: out of memory" in out


def test_other_devices_are_said_loudly_and_no_gate(results: Path, raybench) -> None:  # type: ignore[no-untyped-def]
    other = make_device(0, name="NVIDIA B200")
    write(results, "other", [record(1, 1.5, devices=(other,))], [other])
    code, out, _ = raybench("compare", "base", "other")
    assert code == 0
    assert "NOT COMPARABLE: other device: NVIDIA H200, then NVIDIA B200" in " ".join(out.split())
    code, _, err = raybench("compare", "base", "other", "--fail-on", "regression")
    assert code == 2
    assert "not comparable: other device" in err
    assert err.count("\n") == 1


def test_compare_as_markdown_and_json(raybench) -> None:  # type: ignore[no-untyped-def]
    text = raybench("compare", "base", "new", "--format", "md")[1]
    assert "| slower |" in text
    content = json.loads(raybench("compare", "base", "new", "--format", "json")[1])
    assert content["verdicts"] == {"slower": 1, "faster": 1, "same": 1}
    assert content["comparable"] is True
    assert {point["world_size"] for point in content["points"]} == {1, 2, 4}
    assert content["changes"] == [{"name": "driver", "base": "580.1", "new": "590.2"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["base", "base"], "are the same run"),
        (["base", "nothing"], "no run 'nothing'"),
        (["base", "driver=1"], "no run with the tag 'driver=1'; there are: driver=590"),
        (["base", "new", "--threshold", "x"], "--threshold: must be from 0% up to 100%"),
        (["base", "new", "--threshold", "150%"], "--threshold: must be from 0% up to 100%"),
    ],
)
def test_a_mistake_in_a_comparison_is_one_line(raybench, arguments, message) -> None:  # type: ignore[no-untyped-def]
    code, _, err = raybench("compare", *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_history_marks_the_step_and_what_changed(raybench, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    code, out, err = raybench("history", "--chart", tmp_path / "a.svg")
    assert (code, err) == (0, "")
    assert "3 points over 3 runs: 2 steps." in out
    assert "driver 580.1 -> 590.2" in out
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_history_of_one_point_shows_its_runs(raybench) -> None:  # type: ignore[no-untyped-def]
    out = raybench("history", "--filter", "world_size == 2")[1]
    assert [line.split()[2] for line in out.splitlines() if "2026-08" in line][:3] == [
        "base",
        "twin",
        "new",
    ]
    point_id = make_point(world_size=2).point_id
    content = json.loads(raybench("history", "--point", point_id[:6], "--json")[1])
    assert [point["run_id"] for point in content["points"]] == ["base", "twin", "new"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "world_size > 9"], "keeps none of the 3 points"),
        (["--filter", "hiddn > 9"], "hiddn"),
        (["--point", "zzz"], "no point 'zzz'"),
        (["--chart", "a.pdf"], "--chart: must end in .svg or .png"),
    ],
)
def test_a_mistake_in_a_history_is_one_line(raybench, arguments, message) -> None:  # type: ignore[no-untyped-def]
    code, _, err = raybench("history", *arguments)
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
