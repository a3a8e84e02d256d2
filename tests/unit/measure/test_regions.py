"""Regions that a step names: from the step to the table, `show` and the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import region_workloads
import torch
from builders import make_context, make_measure, make_run
from click.testing import CliRunner
from fakes import make_point
from region_workloads import LONG_S, SHORT_S

from raybench import cli, load
from raybench.cluster.local import this_process
from raybench.job.model import Measure
from raybench.job.plan import Plan
from raybench.measure import marks as moments
from raybench.measure import phases
from raybench.measure.breakdown import Extent, break_down
from raybench.measure.marks import Mark, RegionMarks, region_times
from raybench.measure.timing import make_timer
from raybench.results.writer import RunStore
from raybench.sweep.loop import SweepSettings, sweep
from raybench.sweep.rounds import Rounds
from raybench.workloads.base import Context

CPU = torch.device("cpu")
NAMES = ["forward", "attention", "back\nward"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of these workloads in this process."""
    root = tmp_path_factory.mktemp("regions") / "results"
    store = RunStore.create(root, make_run("run-a"), make_measure())
    workloads = ("region_workloads:Parts", "region_workloads:Numbered", "mlp")
    params = {"hidden": 16, "layers": 1}
    points = [
        make_point(workload=name, params=params if name == "mlp" else {}) for name in workloads
    ]
    cluster = this_process()
    cluster.start(1, "pack")
    store.write_devices(cluster.devices)
    settings = SweepSettings(
        measure=Measure(warmup=2, iterations=4), strategy="pack", stop_on_error=False
    )
    list(sweep(Rounds(plan=Plan(points=tuple(points))), settings, cluster, store.write_records))
    return root


@pytest.fixture(scope="module")
def points(results: Path) -> pd.DataFrame:
    return load(results, "points").set_index("workload")


def output(results: Path, *words: str) -> str:
    done = CliRunner().invoke(
        cli.raybench, [*words, "--results", str(results)], catch_exceptions=False
    )
    assert done.exit_code in (0, None), done.output
    return done.stdout


def test_each_region_of_a_point_is_a_row_with_its_time_and_its_share_of_the_step(
    results: Path, points: pd.DataFrame
) -> None:
    found = load(results, "regions")
    assert set(found["point_id"]) == {points.loc["region_workloads:Parts"]["point_id"]}
    assert found["region"].tolist() == NAMES
    assert found["calls"].tolist() == [1, 2, 1]
    forward, attention, backward = found["region_ms"]
    # Not how much longer: the machine may be busy.
    assert attention >= 2 * SHORT_S * 1e3
    assert forward >= LONG_S * 1e3 + attention * 0.9
    assert backward >= LONG_S * 1e3
    step_ms = found["region_ms"] / found["share_pct"] * 100
    assert step_ms.max() - step_ms.min() < 1e-6 * step_ms.max()
    assert 80 < found["share_pct"][0] + found["share_pct"][2] <= 101


def test_how_regions_were_timed_is_among_the_methods(points: pd.DataFrame) -> None:
    assert "host clock" in points.loc["region_workloads:Parts"]["methods"]["regions"]
    assert "regions" not in points.loc["mlp"]["methods"]


def test_a_region_must_be_named_by_a_text(points: pd.DataFrame) -> None:
    row = points.loc["region_workloads:Numbered"]
    assert row["status"] == "error"
    assert row["error_message"].endswith("the name of a region must be a text, given 5")


def test_show_lists_the_regions_of_a_point(results: Path, points: pd.DataFrame) -> None:
    point_id = points.loc["region_workloads:Parts"]["point_id"]
    text = output(results, "show", "run-a", point_id)
    table = text.partition("Regions of the step")[2].splitlines()
    assert table[1].split() == ["region", "calls", "ms", "of", "the", "step"]
    assert [line.split()[0] for line in table[2:5]] == ["forward", "attention", "back"]
    listed = json.loads(output(results, "show", "run-a", point_id, "--json"))["regions"]
    assert [region["region"] for region in listed] == NAMES
    point_id = points.loc["mlp"]["point_id"]
    assert "Regions" not in output(results, "show", "run-a", point_id)


@pytest.mark.parametrize("kind", ["terminal", "md", "html"])
def test_the_report_has_a_line_for_each_region(results: Path, kind: str) -> None:
    text = output(results, "report", "run-a", "--format", kind)
    assert "regions of the step, ms" in text
    assert text.count("attention") == 1


def test_the_report_for_programs_has_the_regions_by_point(
    results: Path, points: pd.DataFrame
) -> None:
    told = json.loads(output(results, "report", "run-a", "--format", "json"))["regions"]
    (found,) = told.values()
    assert list(told) == [points.loc["region_workloads:Parts"]["point_id"]]
    assert [region["region"] for region in found] == NAMES
    assert all(region["region_ms"] > 0 for region in found)


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each mark that a region makes; the clock goes on by one with each."""
    made: list[int] = []

    def mark() -> Mark:
        made.append(len(made))
        return len(made) * 1_000_000

    monkeypatch.setattr(moments, "marker", lambda device: mark)
    return made


def test_regions_mark_nothing_in_warm_up_and_timed_steps(marks: list[int]) -> None:
    settings = Measure(warmup=2, iterations=4)
    context = make_context()
    without = settings.model_copy(update={"breakdown": False})
    phases.measure(lambda: region_workloads.Parts(context), context, without)
    assert marks == []
    phases.measure(lambda: region_workloads.Parts(context), context, settings)
    assert marks


def test_only_steps_with_regions_are_run_once_more_for_them() -> None:
    class Counted:
        def __init__(self, context: Context, names: Sequence[str]) -> None:
            self.steps, self._context, self._names = 0, context, names

        def step(self) -> None:
            self.steps += 1
            for name in self._names:
                with self._context.region(name):
                    pass

    steps = {}
    for names in ((), ("part",)):
        context = make_context()
        workload = Counted(context, names)
        workload.step()
        found = break_down(workload, make_timer(CPU), context, Extent(steps=3))  # type: ignore[arg-type]
        assert [region.name for region in found.regions] == list(names)
        steps[names] = workload.steps
    # One to warm up, two that are not timed, and three.
    assert steps["part",] == steps[()] + 6


def test_times_of_one_name_add_up_and_outer_regions_contain_inner_ones(marks: list[int]) -> None:
    timed = RegionMarks(CPU)

    def step(times: int) -> None:
        with timed.region("outer"):
            for _ in range(times):
                with timed.region("inner"):
                    pass
        timed.end_step()

    for times in (1, 2, 0):
        step(times)
    outer, inner = region_times(timed.take(), step_ms=10.0)
    # A mark is 1 ms: each inner region takes one, and makes the outer one two longer.
    assert (outer.name, outer.calls, outer.ms, outer.share) == ("outer", 1, 3.0, 0.3)
    assert (inner.name, inner.calls, inner.ms) == ("inner", 2, 1.0)


def test_a_region_that_is_not_timed_is_one_and_the_same_object_and_does_nothing() -> None:
    context = make_context()
    entered: set[int] = set()
    for name in ("a", "b"):
        region: AbstractContextManager[None] = context.region(name)
        with region, region:
            entered.add(id(region))
    assert len(entered) == 1


def test_steps_of_a_cuda_graph_have_no_regions_and_the_reason() -> None:
    context = replace(make_context(), cuda_graph=True)
    parts = region_workloads.Parts(context)
    parts.step()
    found = break_down(parts, make_timer(CPU), context, Extent(steps=3))
    assert found.regions == ()
    assert "CUDA graph" in found.methods["regions"]


def test_a_region_inside_compiled_code_is_left_out_and_named() -> None:
    context = make_context()
    workload = region_workloads.Compiled(context)
    workload.step()
    found = break_down(workload, make_timer(CPU), context, Extent(steps=3))
    assert [region.name for region in found.regions] == ["around"]
    assert found.regions[0].ms >= SHORT_S * 1e3
    assert found.methods["regions"].endswith("torch.compile: inside")
