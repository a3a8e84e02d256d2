"""A health check as a person reads it, in every form."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import permutations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from builders import (
    START,
    make_device,
    make_finding,
    make_link,
    make_measure,
    make_pair,
    make_point,
    make_record,
    make_run,
    make_subject,
)

from raybench import cli
from raybench.records.health import Action, Finding, Link, Verdict
from raybench.report.charts.health import health_figures
from raybench.report.export import health as exports
from raybench.report.health import HealthReport
from raybench.report.text.health import format_markdown, format_text
from raybench.results.run import RunStatus
from raybench.results.writer import RunStore

RUN = "health-20261122-150000-abcd"


def healthy(count: int, **changes: Any) -> list[Finding]:
    return [make_finding(make_subject(rank), **changes) for rank in range(count)]


def bad(rank: int, **changes: Any) -> Finding:
    settings: dict[str, Any] = {
        "value": 470.0,
        "ratio": 1.6,
        "verdict": Verdict.BAD,
        "reason": "takes 1.60 times as long as those alike",
        "evidence": "in each of 3 passes",
        "action": Action.RESET,
        "command": f"nvidia-smi --gpu-reset -i {rank}  # on alpha",
        **changes,
    }
    return make_finding(make_subject(rank), **settings)


def suspect(rank: int, **changes: Any) -> Finding:
    return bad(rank, value=690.0, verdict=Verdict.SUSPECT, **{"ratio": 1.09, **changes})


def slow_pair(first: int, second: int, **changes: Any) -> Finding:
    settings: dict[str, Any] = {
        "test": "copy 256 MiB",
        "stage": "pairs",
        "unit": "GB/s",
        "value": 150.0,
        "ratio": 2.5,
        "verdict": Verdict.BAD,
        "reason": "slow: the path between the two is to blame",
        **changes,
    }
    return make_finding(make_pair(first, second), **settings)


def report_of(findings: Sequence[Finding], links: Sequence[Link] = ()) -> HealthReport:
    return HealthReport(
        run=make_run(RUN, job_name="health"),
        machine="4 x NVIDIA H200 on 1 node",
        kinds=["cuda"]
        * len({one.subject.uuids for one in findings if one.subject.kind == "device"}),
        findings=findings,
        links=links,
    )


def all_links(count: int) -> list[Link]:
    return [make_link(first, second) for first, second in permutations(range(count), 2)]


ONE_BAD = [*healthy(3), bad(3)]


@pytest.mark.parametrize(
    ("findings", "headline", "exit_code"),
    [
        (healthy(4), "All 4 GPUs are healthy.", 0),
        (healthy(2), "Both GPUs are healthy.", 0),
        (healthy(1), "The GPU is healthy.", 0),
        (ONE_BAD, "1 of 4 GPUs is bad: alpha GPU 3", 1),
        ([*healthy(2), bad(2), bad(3)], "2 of 4 GPUs are bad: alpha GPU 2, alpha GPU 3", 1),
        (
            [*healthy(2), suspect(2), bad(3)],
            "1 of 4 GPUs is bad: alpha GPU 3; 1 of 4 GPUs is suspect: alpha GPU 2",
            1,
        ),
        (
            [*healthy(4), slow_pair(0, 1), slow_pair(1, 0)],
            "1 path is slow: alpha GPU 0 to GPU 1; no GPU is bad by itself",
            1,
        ),
        (
            [*healthy(3), make_finding(make_subject(3), verdict=Verdict.UNTESTED, value=None)],
            "1 of 4 GPUs could not be tested: alpha GPU 3",
            3,
        ),
        (
            [*healthy(4), slow_pair(0, 1, verdict=Verdict.HEALTHY)],
            "All 4 GPUs are healthy, and the paths between them.",
            0,
        ),
        ([], "Nothing could be tested.", 3),
        ([make_finding(verdict=Verdict.UNKNOWN, value=None)], "Nothing could be tested.", 3),
        (
            [make_finding(verdict=Verdict.UNKNOWN, value=1.0)],
            "It ran, but nothing is known to hold it against.",
            3,
        ),
    ],
)
def test_the_first_line_is_the_verdict(
    findings: list[Finding], headline: str, exit_code: int
) -> None:
    report = report_of(findings)
    assert (report.headline, report.exit_code) == (headline, exit_code)
    assert format_text(report).splitlines()[0] == headline


def test_where_only_pairs_were_tried_the_devices_of_the_run_are_counted() -> None:
    only = report_of([slow_pair(0, 1, verdict=Verdict.HEALTHY)])
    assert replace(only, kinds=["cuda"] * 2).headline == "The paths between both GPUs are healthy."
    node = make_finding(make_subject(kind="node", uuids=("GPU-0", "GPU-1"), name="alpha"))
    assert replace(report_of([node]), kinds=["cuda"] * 2).headline == (
        "What was tried of both GPUs is healthy."
    )


def test_all_slow_alike_is_said_to_be_no_devices_fault() -> None:
    subject = make_subject(kind="cluster", name="all 4 NVIDIA H200", uuids=("GPU-0", "GPU-1"))
    reason = "all are slow alike: 1.40 times as long as this model takes elsewhere"
    alike = make_finding(subject, verdict=Verdict.SUSPECT, ratio=None, reason=reason)
    assert report_of([*healthy(4), alike]).headline == (
        f"all 4 NVIDIA H200: {reason}; no GPU is bad by itself"
    )


def test_a_device_that_fails_in_several_tests_is_one_case() -> None:
    findings = [*healthy(3), *(bad(3, test=f"gemm {size}") for size in (256, 2048, 8192))]
    (case,) = report_of(findings).cases
    assert case.what.startswith("gemm 8192: takes 1.60 times as long as those alike (470 TFLOP/s")
    assert "gemm 2048 (1.60x the time), gemm 256 (1.60x the time)" in case.further
    assert case.commands == ["nvidia-smi --gpu-reset -i 3  # on alpha"]


def test_what_is_slow_because_of_a_device_is_no_case_and_is_counted_with_it() -> None:
    victims = [slow_pair(3, rank, culprit="alpha GPU 3") for rank in range(3)]
    report = report_of([*ONE_BAD, *victims])
    assert [case.subject.name for case in report.cases] == ["alpha GPU 3"]
    victims_line = "victims  alpha GPU 3 to GPU 0, alpha GPU 3 to GPU 1, alpha GPU 3 to GPU 2"
    assert victims_line in format_text(report)


def test_the_gravest_action_of_a_case_is_the_one_to_take() -> None:
    broken = bad(3, ratio=None, action=Action.REPLACE, command="kubectl cordon alpha")
    (case,) = report_of([*ONE_BAD, broken]).cases
    assert (case.action, case.commands) == (Action.REPLACE, ["kubectl cordon alpha"])


@pytest.mark.parametrize(
    ("findings", "words"),
    [
        (healthy(4), "As a set: balanced, use all 4."),
        (healthy(2), "As a set: balanced, use both."),
        (healthy(1), "Use alpha GPU 0."),
        (
            [*healthy(3), bad(3, ratio=2.0)],
            "leave out alpha GPU 3. In units of a fast GPU, equal shares on all 4 give 2.00, "
            "the 3 fast alone 3, and shares by their speed 3.50.",
        ),
        ([*healthy(7), suspect(7, ratio=1.05)], "keep alpha GPU 7"),
        (
            [*healthy(3), bad(3, ratio=None, value=750.0)],
            "Leave out alpha GPU 3. As a set: balanced, use the others.",
        ),
    ],
)
def test_advice_on_the_set_weighs_what_a_slow_device_costs(
    findings: list[Finding], words: str
) -> None:
    assert words in report_of(findings).advice


def test_a_report_fits_80_columns_and_marks_outliers_without_colour() -> None:
    links = [
        replace(link, gb_per_s=150.0)
        if (link.from_uuid, link.to_uuid) == ("GPU-0", "GPU-1")
        else link
        for link in all_links(8)
    ]
    report = report_of([*healthy(7), bad(7), slow_pair(0, 1)], links)
    text = format_text(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "! 470" in text
    assert "! 150" in text
    assert "! bad, ? suspect, x not tested" in text
    assert "\x1b" not in text


def test_a_mark_is_of_the_test_that_found_it_and_links_to_the_host_are_no_matrix() -> None:
    others = [replace(link, kind="nccl") for link in all_links(2)]
    host = make_link(0, 1, from_uuid="host", from_name="host", kind="h2d", gb_per_s=55.0)
    report = report_of([*healthy(2), slow_pair(0, 1)], [*all_links(2), *others, host])
    copies, _, messages, *rest = format_text(report).split("Pairs: ")[1:]
    assert copies.startswith("copy of 256 MiB, GB/s")
    assert "! 380" in copies
    assert messages.startswith("nccl of 256 MiB, GB/s")
    assert "! 380" not in messages
    assert not any(one.startswith("h2d") for one in rest)


def test_of_a_large_fleet_the_outliers_are_named_and_the_rest_is_a_range() -> None:
    text = format_text(report_of([*healthy(63), bad(63)], all_links(10)))
    assert "alpha GPU 63 ! 470" in " ".join(text.split())
    assert "90 directions, 380 to 380" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_unknown_model_is_said() -> None:
    reason = "no figures of X are known here: that all are slow would not be seen"
    subject = make_subject(kind="cluster", uuids=(), name="all X", model="X")
    unknown = make_finding(subject, verdict=Verdict.UNKNOWN, value=None, passes=0, reason=reason)
    report = report_of([*healthy(2), unknown])
    assert report.headline == "Both GPUs are healthy."
    assert "No figures of X are known here" in format_text(report)


def test_markdown_has_the_verdict_the_cases_and_the_tables() -> None:
    text = format_markdown(report_of(ONE_BAD, all_links(4)))
    assert text.startswith("## 1 of 4 GPUs is bad: alpha GPU 3\n")
    assert "| from / to | GPU 0 | GPU 1 | GPU 2 | GPU 3 |" in text
    assert "* type: nvidia-smi --gpu-reset -i 3" in text


def test_json_has_cases_with_what_to_type_and_both_tables() -> None:
    found = json.loads(exports.format_json(report_of(ONE_BAD, all_links(4))))
    assert (found["verdict"], found["exit_code"]) == ("bad", 1)
    assert found["cases"][0]["commands"] == ["nvidia-smi --gpu-reset -i 3  # on alpha"]
    assert len(found["findings"]) == 4
    assert len(found["links"]) == 12


def test_junit_has_a_case_for_each_finding() -> None:
    findings = [
        *ONE_BAD,
        slow_pair(3, 0, culprit="alpha GPU 3"),
        make_finding(make_subject(4), verdict=Verdict.UNTESTED, value=None, ratio=None),
    ]
    suite = ET.fromstring(exports.export_junit(report_of(findings)))[0]
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "6", "failures": "1", "errors": "1", "skipped": "1"}
    failure = suite.findall("testcase")[3].find("failure")
    assert failure is not None
    assert failure.get("type") == "bad"
    assert "1.60 times" in (failure.get("message") or "")


def test_csv_has_a_line_for_each_finding() -> None:
    rows = list(csv.DictReader(io.StringIO(exports.export_csv(report_of(ONE_BAD)))))
    assert [row["verdict"] for row in rows] == ["healthy"] * 3 + ["bad"]
    assert rows[3]["uuids"] == "GPU-3"


def test_pairs_are_a_map_and_devices_a_strip_each() -> None:
    pairs, strips = health_figures(report_of(ONE_BAD, all_links(4)))
    assert len(pairs.panels) == 2
    values = strips.panels[0].spec["data"]["values"]
    assert [value["is"] for value in values] == ["as those alike"] * 3 + ["bad"]


def test_where_nothing_was_compared_nothing_is_drawn() -> None:
    assert health_figures(report_of([make_finding(ratio=None)])) == []


@pytest.fixture
def results(tmp_path: Path) -> Path:
    store = RunStore.create(
        tmp_path, make_run(RUN, job_name="health", status=RunStatus.FAILED), make_measure()
    )
    store.write_devices([make_device(rank) for rank in range(4)])
    store.write_health([*ONE_BAD, slow_pair(0, 1)], all_links(4))
    return tmp_path


class Raybench:
    """The command, with these results."""

    def __init__(
        self, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self._results, self._monkeypatch, self._capsys = results, monkeypatch, capsys

    def __call__(self, *args: str, code: int = 0) -> str:
        """Return what the command prints; its exit code must be `code`."""
        argv = ["raybench", *args, "--results", str(self._results)]
        self._monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = self._capsys.readouterr()
        assert stopped.value.code == code, err
        return out + err


@pytest.fixture
def raybench(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Raybench:
    return Raybench(results, monkeypatch, capsys)


def test_report_of_a_health_run_is_its_verdict(raybench: Raybench) -> None:
    assert raybench("report", "latest").startswith(
        "1 of 4 GPUs is bad: alpha GPU 3; 1 path is slow: alpha GPU 0 to GPU 1\n"
    )


@pytest.mark.parametrize(
    ("args", "has"),
    [
        (["report", "--format", "md"], "## 1 of 4 GPUs is bad"),
        (["report", "--json"], '"headline": "1 of 4 GPUs is bad'),
        (["report", "--format", "html"], '<p class="lead">1 of 4 GPUs is bad'),
        (["export", "--format", "csv"], "alpha GPU 3,NVIDIA H200"),
        (["export", "--format", "junit"], "<failure"),
        (["export", "--json"], '"links": ['),
        (["list", "--long"], "1 of 4 GPUs is bad"),
    ],
)
def test_every_form_of_a_health_run_has_the_verdict(
    raybench: Raybench, args: list[str], has: str
) -> None:
    assert has in raybench(*args)


def test_the_page_has_both_figures_and_asks_nobody_for_anything(raybench: Raybench) -> None:
    page = raybench("report", "--format", "html")
    assert '<section id="pairs">' in page
    assert '<section id="devices">' in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "! 470" in page


def test_a_chart_of_a_health_run_is_the_map_of_its_pairs(
    raybench: Raybench, tmp_path: Path
) -> None:
    file = tmp_path / "pairs.svg"
    raybench("report", "--chart", str(file))
    assert "copy of 256 MiB, GB/s" in file.read_text()


def test_a_tracker_cannot_have_a_health_run(raybench: Raybench) -> None:
    found = raybench("export", "--to", "mlflow", code=2)
    assert "a health check is exported as csv, json or junit" in found


def test_a_health_run_is_not_laid_over_another(raybench: Raybench) -> None:
    found = raybench("report", "--format", "html", "--against", "latest", code=2)
    assert "--against latest: a health check is not laid over another" in found


def test_a_check_that_was_interrupted_says_so_and_shows_no_scaling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(RUN, argv=("raybench", "health"), status=RunStatus.INTERRUPTED)
    store = RunStore.create(tmp_path, run, make_measure())
    store.write_records([(0, make_record())])
    out = Raybench(tmp_path, monkeypatch, capsys)("report")
    assert out.startswith("The check did not come to its end: nothing can be said.\n")


@pytest.fixture
def two_checks(tmp_path: Path) -> Path:
    """Two checks of one fleet, of which the second finds products of one device a third slower."""
    for place, slow in enumerate((700.0, 520.0)):
        run = make_run(
            f"health-2026112{place}-150000-abcd",
            job_name="health",
            argv=("raybench", "health"),
            started_at=START + timedelta(days=place),
        )
        store = RunStore.create(tmp_path, run, make_measure())
        store.write_devices([make_device(rank) for rank in range(2)])
        probes = [("gemm", {"k": 256}), ("memory", {"size_bytes": 10**9})]
        for index, (workload, params) in enumerate(probes):
            point = make_point(workload=workload, params=params, world_size=2)
            store.write_records([(index, make_record(point, count=60))])
        memory = healthy(2, test="memory 500 MB", unit="GB/s", value=4330.0 + place)
        verdict = {"verdict": Verdict.SUSPECT, "reason": "slower"} if place else {}
        gemm = [make_finding(make_subject(0), value=700.0)]
        gemm += [make_finding(make_subject(1), value=slow, **verdict)]
        store.write_health([*gemm, *memory], all_links(2))
    return tmp_path


FIRST, SECOND = "health-20261120-150000-abcd", "health-20261121-150000-abcd"


@pytest.fixture
def compare(
    two_checks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    raybench = Raybench(two_checks, monkeypatch, capsys)
    return lambda *words, code=0: raybench("compare", *words, code=code)


def test_two_checks_are_compared_figure_by_figure(compare: Callable[..., str]) -> None:
    text = compare(FIRST, SECOND)
    headline = "1 of 4 figures is slower by more than days differ; the median changed by"
    assert headline in " ".join(text.split())
    assert "No longer healthy" in text
    [line] = [one for one in text.splitlines() if one.endswith("slower")]
    assert line.split()[:3] == ["gemm", "bf16", "8192"]
    assert "-25.7%" in line
    found = json.loads(compare(FIRST, SECOND, "--json"))
    assert [one["verdict"] for one in found["figures"]] == ["same", "slower", "same", "same"]
    assert found["figures"][1]["ratio"] == pytest.approx(700 / 520)
    assert f"## `{SECOND}` against `{FIRST}`" in compare(FIRST, SECOND, "--format", "md")


def test_a_check_that_is_worse_fails_a_gate_and_one_that_is_better_does_not(
    compare: Callable[..., str],
) -> None:
    compare(FIRST, SECOND, "--fail-on", "regression", code=1)
    better = compare(SECOND, FIRST, "--fail-on", "regression")
    assert "None of 4 figures is slower by more than days differ, 1 faster" in " ".join(
        better.split()
    )


def test_a_check_is_not_compared_with_a_sweep(
    two_checks: Path, compare: Callable[..., str]
) -> None:
    store = RunStore.create(two_checks, make_run("sweep-1"), make_measure())
    store.write_records([(0, make_record())])
    assert f"{FIRST} is a health check and sweep-1 is none" in compare("sweep-1", FIRST, code=2)


def test_the_history_of_checks_is_that_of_their_figures(
    two_checks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raybench = Raybench(two_checks, monkeypatch, capsys)
    text = raybench("history", "--health")
    assert text.startswith("4 figures over 2 checks: 1 slower in the last one than before")
    assert text.splitlines()[4].endswith("slower")
    found = json.loads(raybench("history", "--health", "--json"))
    assert found["checks"] == [FIRST, SECOND]
    values = {tuple(one["values"]) for one in found["figures"]}
    assert values == {(700.0, 700.0), (700.0, 520.0), (4330.0, 4331.0)}


def test_the_history_of_one_check_says_that_it_takes_two(
    two_checks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in two_checks.glob(f"*/{SECOND}"):
        shutil.rmtree(folder)
    text = Raybench(two_checks, monkeypatch, capsys)("history", "--health")
    assert text == (
        "0 figures over 1 check: nothing to compare; it takes two checks of the same\ndevices.\n"
    )


def test_the_history_of_sweeps_leaves_checks_out(
    two_checks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raybench = Raybench(two_checks, monkeypatch, capsys)
    assert "no points yet" in raybench("history", code=2)
    store = RunStore.create(two_checks, make_run("sweep-1"), make_measure())
    store.write_records([(0, make_record())])
    found = json.loads(raybench("history", "--json"))
    assert {point["run_id"] for point in found["points"]} == {"sweep-1"}
    message = "--health: goes without --point, --filter and --chart"
    assert message in raybench("history", "--health", "--filter", "world_size == 1", code=2)
