"""A health check as a person reads it, and beside an earlier one."""

import json
from datetime import timedelta
from itertools import permutations
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
from builders import (
    START,
    make_device,
    make_finding,
    make_pair,
    make_point,
    make_record,
    make_run,
    make_subject,
    write_run,
)

from raybench.errors import UsageError
from raybench.health.comparison import FigureChange, trace_figures
from raybench.health.references import read_findings
from raybench.health.report import HealthReport, format_page, health_figures
from raybench.health.suite import WAIT_TEST
from raybench.health.verdicts import OTHER_PROGRAMS_TEST
from raybench.records.devices import Action, Verdict
from raybench.records.status import RunStatus
from raybench.report.documents import format_document

RUN = "health-20261122-150000-abcd"


def format_health(report):
    return format_document(report, "terminal")


def healthy(count, **changes):
    return [make_finding(make_subject(rank), **changes) for rank in range(count)]


def bad(rank, **changes):
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


def suspect(rank, **changes):
    return bad(rank, value=690.0, verdict=Verdict.SUSPECT, **{"ratio": 1.09, **changes})


def slow_pair(first, second, **changes):
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


def report_of(findings, **changes):
    """The report of as many GPUs as have findings of their own, or of two."""
    tested = {one.subject.uuids for one in findings if one.subject.kind == "device"}
    return HealthReport(
        run=make_run(RUN, job_name="health", **changes),
        machine="4 x NVIDIA H200 on 1 node",
        devices=[make_device(rank) for rank in range(len(tested) or 2)],
        findings=findings,
    )


def all_copies(count, *slow):
    """A copy of each pair both ways: 380 GB/s, or bad."""
    fine = {"value": 380.0, "verdict": Verdict.HEALTHY, "ratio": 1.0, "reason": ""}
    pairs = permutations(range(count), 2)
    return [slow_pair(*pair, **({} if pair in slow else fine)) for pair in pairs]


def noted(test, reason, *ranks, **changes):
    """A note on these devices, or on the cluster."""
    subjects = map(make_subject, ranks) if ranks else [ALL]
    settings = {"stage": "environment", "verdict": Verdict.NOTE, "ratio": None, "expected": ""}
    settings |= {"test": test, "reason": reason, "value": 1.0, "unit": "", **changes}
    return [make_finding(subject, **settings) for subject in subjects]


def fact_of(test, **changes):
    return noted(test, "", 0, 1, **{"verdict": Verdict.HEALTHY, **changes})


ONE_BAD = [*healthy(3), bad(3)]
UNTESTED = make_finding(make_subject(3), verdict=Verdict.UNTESTED, value=None)
NOT_TESTED = "Amber: 1 of 4 GPUs could not be tested: alpha GPU 3"
ALL = make_subject(kind="cluster", uuids=("GPU-0", "GPU-1"), name="all 4 NVIDIA H200")
FINE_PAIR = slow_pair(0, 1, verdict=Verdict.HEALTHY)
NODE = make_subject(kind="node", uuids=("GPU-0", "GPU-1"), name="alpha")
ALIKE = "all are slow alike: 1.40 times as long as they should take"


@pytest.mark.parametrize(
    ("findings", "headline", "exit_code"),
    [
        (healthy(4), "Green: All 4 GPUs are healthy.", 0),
        (healthy(2), "Green: Both GPUs are healthy.", 0),
        (
            [*healthy(4), make_finding(ALL, verdict=Verdict.SUSPECT, ratio=None, reason=ALIKE)],
            f"Amber: all 4 NVIDIA H200: {ALIKE}; no GPU is bad by itself",
            1,
        ),
        (healthy(1), "Green: The GPU is healthy.", 0),
        (ONE_BAD, "Red: 1 of 4 GPUs is bad: alpha GPU 3", 1),
        ([*healthy(2), bad(2), bad(3)], "Red: 2 of 4 GPUs are bad: alpha GPU 2, alpha GPU 3", 1),
        (
            [*healthy(2), suspect(2), bad(3)],
            "Red: 1 of 4 GPUs is bad: alpha GPU 3; 1 of 4 GPUs is suspect: alpha GPU 2",
            1,
        ),
        (
            [*healthy(4), slow_pair(0, 1), slow_pair(1, 0)],
            "Red: 1 path is slow: alpha GPU 0 to alpha GPU 1; no GPU is bad by itself",
            1,
        ),
        (
            [*healthy(4), slow_pair(0, 1, ratio=None)],
            "Red: 1 path is bad: alpha GPU 0 to alpha GPU 1; no GPU is bad by itself",
            1,
        ),
        ([*healthy(3), UNTESTED], NOT_TESTED, 3),
        (
            [*healthy(3), UNTESTED, suspect(3)],
            f"{NOT_TESTED}; 1 of 4 GPUs is suspect: alpha GPU 3",
            1,
        ),
        ([*healthy(4), FINE_PAIR], "Green: All 4 GPUs and the paths between them are healthy.", 0),
        # Where no device was tested alone the devices of the run are counted.
        ([FINE_PAIR], "Green: The paths between both GPUs are healthy.", 0),
        ([make_finding(NODE)], "Green: Both GPUs are healthy together.", 0),
        ([], "Amber: Nothing could be tested.", 3),
        (
            [make_finding(verdict=Verdict.UNKNOWN, value=1.0)],
            "Amber: It ran, but there is nothing to compare it with.",
            3,
        ),
    ],
)
def test_the_verdict_follows_the_question(findings, headline, exit_code):
    report = report_of(findings)
    assert (report.headline, report.exit_code) == (headline, exit_code)
    question = "Which GPUs, links or nodes are slower than they should be?"
    text = " ".join(format_health(report).split())
    assert text.startswith(f"{question} {headline} 4 x NVIDIA H200")


def test_case_has_tests_gravest_action_and_victims():
    victims = [slow_pair(3, rank, culprit="alpha GPU 3") for rank in range(3)]
    gemms = [bad(3, test=f"gemm {size}") for size in (256, 2048, 8192)]
    report = report_of([*healthy(3), *gemms, *victims])
    (case,) = report.cases
    assert "gemm 2048 (1.60x the time), gemm 256 (1.60x the time)" in case.further
    assert case.commands == ["nvidia-smi --gpu-reset -i 3  # on alpha"]
    text = " ".join(format_health(report).split())
    assert "what gemm 8192: takes 1.60 times as long as those alike (470 TFLOP/s" in text
    assert "victims alpha GPU 3 to alpha GPU 0, alpha GPU 3 to alpha GPU 1, " in text
    broken = bad(3, ratio=None, action=Action.REPLACE, command="kubectl cordon alpha")
    (case,) = report_of([*ONE_BAD, broken]).cases
    assert (case.action, case.commands) == (Action.REPLACE, ["kubectl cordon alpha"])


@pytest.mark.parametrize(
    ("findings", "shown"),
    [
        # Two devices have a column for each direction, and up to eight a matrix.
        (
            [*healthy(2), *all_copies(2, (0, 1))],
            ["copy 256 MiB GB/s ! 150 380", "! bad, ? suspect, x not"],
        ),
        (
            [*healthy(7), bad(7), *all_copies(8, (0, 1))],
            ["! 470", "Pairs: copy 256 MiB, GB/s from / to", "GPU 0 - ! 150 380 380"],
        ),
        # Of a large fleet the outliers are named, and the rest is a range.
        (
            [*healthy(63), bad(63), *all_copies(10, (0, 1))],
            ["alpha GPU 63 ! 470", "150 380 380 alpha GPU 0 to alpha GPU 1 ! 150"],
        ),
    ],
)
def test_report_fits_80_columns_and_marks_outliers(findings, shown):
    text = format_health(report_of(findings))
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert [words for words in shown if words not in " ".join(text.split())] == []


def test_page_has_maps_from_four_devices():
    for count, anchors in ((3, ["devices"]), (4, ["pairs", "devices"])):
        figures = health_figures(report_of([*healthy(count), *all_copies(count)]))
        assert [one.anchor for one in figures] == anchors
    # Only unhealthy pairs are outlined.
    unknown = [slow_pair(*pair, verdict=Verdict.UNKNOWN) for pair in permutations(range(4), 2)]
    assert "'strokeWidth': 3" not in str(health_figures(report_of(unknown)))


@pytest.fixture
def one_bad(tmp_path):
    devices = [make_device(rank) for rank in range(4)]
    store = write_run(tmp_path, RUN, (), devices, job_name="health", status=RunStatus.FAILED)
    store.write_health([*ONE_BAD, slow_pair(0, 1)])


@pytest.mark.usefixtures("one_bad")
@pytest.mark.parametrize(
    ("words", "has"),
    [
        ("report latest", "Red: 1 of 4 GPUs is bad: alpha GPU 3; 1 path is slow: alpha GPU 0 to"),
        ("report --format md", "* type: nvidia-smi --gpu-reset -i 3"),
        ("report --json", '"commands": [\n        "nvidia-smi --gpu-reset -i 3  # on alpha"'),
        ("report --format html", '<p class="lead lamp red">Red: 1 of 4 GPUs is bad'),
        ("report --format html", "! 470"),
        ("export --format csv", "alpha GPU 3,NVIDIA H200"),
        ("export --format junit", 'tests="5" failures="2" errors="0" skipped="0"'),
        ("list --long", "1 of 4 GPUs is bad"),
    ],
)
def test_every_format_of_a_check_has_the_verdict(command, words, has):
    assert has in command(*words.split()).out


@pytest.mark.usefixtures("one_bad")
def test_findings_come_back_as_written(tmp_path, command):
    told = command("export", "--to", "mlflow").refusal
    assert "a health check is exported as csv, json, junit or reference" in told
    written = [(RUN, finding) for finding in (*ONE_BAD, slow_pair(0, 1))]
    assert read_findings(tmp_path, RUN) == written
    assert read_findings(tmp_path / "nothing") == []


def test_interrupted_check_says_so(tmp_path, command):
    argv = ("raybench", "health")
    write_run(tmp_path, RUN, [make_record()], argv=argv, status=RunStatus.INTERRUPTED)
    told = "Amber: The check did not come to its end: nothing "
    assert command("report").out.splitlines()[1] == f"{told}can be said."
    partly = report_of(healthy(4), status=RunStatus.INTERRUPTED)
    assert (partly.headline, partly.exit_code) == (f"{told}was wrong in the tests that ended.", 3)
    assert command("export", "--format", "csv").out.startswith("run_id,test,stage,")


FIRST, SECOND = "health-20261120-150000-abcd", "health-20261121-150000-abcd"


@pytest.fixture
def two_checks(tmp_path):
    """Two checks of one fleet, of which the second finds products of one device a third slower."""
    records = [make_record(make_point(workload="gemm", params={"k": 256}, world_size=2))]
    check = {"job_name": "health", "argv": ("raybench", "health")}
    devices = [make_device(rank) for rank in range(2)]
    for day, (run_id, slow) in enumerate(((FIRST, 700.0), (SECOND, 520.0))):
        check["started_at"] = START + timedelta(days=day)
        store = write_run(tmp_path, run_id, records, devices, **check)
        memory = healthy(2, test="memory 500 MB", unit="GB/s", value=4330.0 + day)
        verdict = {"verdict": Verdict.SUSPECT, "reason": "slower"} if day else {}
        gemm = make_finding(make_subject(1), value=slow, **verdict)
        store.write_health([*healthy(1, value=700.0), gemm, *memory])


@pytest.mark.usefixtures("two_checks")
def test_two_checks_are_compared_figure_by_figure(command):
    code, text, _ = command("compare", FIRST, SECOND, "--fail-on", "regression")
    assert code == 1
    headline = "1 of 4 figures is slower by more than days differ; the median changed by"
    assert headline in " ".join(text.split())
    assert "No longer healthy" in text
    [line] = [one for one in text.splitlines() if one.endswith("slower")]
    assert line.split()[:3] == ["gemm", "bf16", "8192"]
    assert "-25.7%" in line
    found = json.loads(command("compare", FIRST, SECOND, "--json").out)
    assert [one["verdict"] for one in found["figures"]] == ["slower", "same", "same", "same"]
    assert found["figures"][0]["ratio"] == pytest.approx(700 / 520)
    assert f"base: `{FIRST}," in command("compare", FIRST, SECOND, "--format", "md").out
    code, text, _ = command("compare", SECOND, FIRST, "--fail-on", "regression")
    assert code == 0
    assert "4 figures is slower by more than days differ, 1 faster" in " ".join(text.split())


def test_device_without_readings_is_a_regression(tmp_path, command):
    for run_id, found in ((FIRST, make_finding(make_subject(3))), (SECOND, UNTESTED)):
        write_run(tmp_path, run_id, [], argv=("raybench", "health")).write_health([found])
    for runs, code in (((FIRST, SECOND), 1), ((SECOND, FIRST), 2)):
        assert command("compare", *runs, "--fail-on", "regression")[0] == code


@pytest.mark.usefixtures("two_checks")
def test_history_of_checks_has_their_figures(command):
    text = command("history", "--health").out
    assert text.startswith("4 figures over 2 checks: 1 slower when last tested than before")
    assert text.splitlines()[4].endswith("slower")
    found = json.loads(command("history", "--health", "--json").out)
    assert found["checks"] == [FIRST, SECOND]
    values = {tuple(one["values"]) for one in found["figures"]}
    assert values == {(700.0, 700.0), (700.0, 520.0), (4330.0, 4331.0)}


@pytest.mark.usefixtures("two_checks")
def test_checks_and_sweeps_are_kept_apart(tmp_path, command):
    assert "no points to read; " in command("history").err
    write_run(tmp_path, "sweep-1", [make_record()])
    found = json.loads(command("history", "--json").out)
    assert {point["run_id"] for point in found["points"]} == {"sweep-1"}
    for base in ("sweep-1", f"{SECOND},sweep-1", f"sweep-1,{SECOND}"):
        told = command("compare", base, FIRST).refusal
        assert f"{FIRST} is a health check and sweep-1 is none" in told
    told = command("history", "--health", "--filter", "world_size == 1").refusal
    assert "--health: goes without --point, --filter and --chart" in told


def change_of(base: float, new: float, least: float = 1.015, **changes: Any) -> FigureChange:
    checks = [[make_finding(value=value, **changes)] for value in (base, new)]
    return trace_figures(checks, least)[0]


GEMM = {"test": "gemm fp32 8192", "unit": "TFLOP/s"}


def test_fallen_rate_is_slower_beyond_drift():
    assert change_of(50.0, 46.0, **GEMM).verdict == "same"
    found = change_of(50.0, 40.0, **GEMM)
    assert (found.verdict, found.ratio) == ("slower", 1.25)
    assert change_of(40.0, 50.0, **GEMM).verdict == "faster"
    # Of a time the larger is slower; one H200, in two checks six minutes apart, is the same.
    step = {"test": "step compute", "unit": "ms", "stage": "straggler"}
    assert change_of(5.0, 7.0, **step).verdict == "slower"
    assert change_of(5.39, 6.23, **step).verdict == "same"


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        (GEMM, 1.1),
        ({"test": "gemm bf16 8192"}, 1.125),
        ({"test": "both alone", "unit": "GB/s", "stage": "host-links"}, 1.5),
        ({"test": "gemm fp32 256"}, 1.1),
        ({"test": "gemm fp32 256", "subject": make_subject(uuids=("alpha/0",))}, 10),
        ({"test": "of a later version"}, 1.1),
    ],
)
def test_each_test_has_the_limit_of_its_verdict(settings, limit):
    assert change_of(1.0, 1.0, **settings).limit == pytest.approx(limit)
    assert change_of(1.0, 1.0, least=20.0, **settings).limit == 20.0


def test_facts_and_waits_are_no_figures():
    first = [
        make_finding(test="Xid errors", stage="facts", unit="errors"),
        make_finding(test=WAIT_TEST, unit="ms", stage="straggler"),
        make_finding(make_subject(0)),
        make_finding(make_subject(1), value=None),
        make_finding(make_subject(2), value=0.0),
    ]
    second = [*first[:2], make_finding(make_subject(1)), make_finding(make_subject(2))]
    assert trace_figures([first, second], 1.0) == []
    # Of both nodes, each slow alike, and of all devices at once: the same devices.
    same = {"kind": "cluster", "uuids": ("GPU-0", "GPU-1")}
    one, other = (make_finding(make_subject(name=name, **same)) for name in ("nodes", "GPUs"))
    assert trace_figures([[one, other]], 1.0) == []


@pytest.fixture
def examined(monkeypatch):
    """What each check was asked for; none is made."""
    examine = Mock(side_effect=UsageError("stopped"))
    monkeypatch.setattr("raybench.health.check.examine", examine)
    return examine


def test_unwritable_list_is_refused_before_the_check(tmp_path, examined, command):
    missing = tmp_path / "missing" / "healthy.txt"
    words = ("health", "-o", tmp_path, "--healthy-devices", missing)
    assert f"{missing}: cannot be written: No such file" in command(*words, results=None).err
    examined.assert_not_called()


def test_only_the_devices_of_a_file_are_checked(tmp_path, examined, command):
    some = tmp_path / "some.txt"
    some.write_text("alpha:1  # the second worker\n")
    kept = tmp_path / "healthy.txt"
    kept.write_text("GPU-1\n")
    words = ("--devices", some, "--healthy-devices", kept)
    command("health", "-o", tmp_path, *words, results=None)
    assert [asked.args[0].only.names for asked in examined.call_args_list] == [("alpha:1",)]
    # The list of an earlier check stays until there is a new one.
    assert kept.read_text() == "GPU-1\n"
    missing = command("health", "-o", tmp_path, "--devices", tmp_path / "no.txt", results=None)
    assert "no.txt: No such file" in missing.err


@pytest.mark.parametrize(("at_once", "is_told"), [(78.4, True), (99.0, False)])
def test_copies_that_share_a_bottleneck_are_told(at_once, is_told):
    findings = [
        *healthy(2, test="both alone", stage="host-links", unit="GB/s", value=101.0),
        *healthy(2, test="both all at once", stage="host-links", unit="GB/s", value=at_once),
    ]
    told = (
        "Copies between host and device in both directions reach 101 GB/s on one device; if all "
        "devices copy at once, each reaches 78 GB/s."
    )
    assert (told in " ".join(format_health(report_of(findings)).split())) == is_told


PERSISTENCE = noted("persistence", "off: starts take longer", 0, 1, command="nvidia-smi -pm 1")
TRANSPORT = fact_of("transport", evidence="P2P/CUMEM", value=1.0, unit="transports")
ENVIRONMENT = [*fact_of("ECC"), *TRANSPORT, *PERSISTENCE]


def test_notes_follow_cases_and_keep_the_exit_code():
    report = report_of([*ENVIRONMENT, *healthy(2)])
    assert report.exit_code == 0
    assert report.headline == "Green: Both GPUs are healthy."
    text = format_health(report)
    assert "Environment: 2 facts are fine; transport: P2P/CUMEM." in text
    assert "note  persistence of alpha GPU 0, alpha GPU 1: off: starts take longer" in text
    assert "type  nvidia-smi -pm 1" in text
    with_bad = format_health(report_of([*ENVIRONMENT, *ONE_BAD]))
    assert with_bad.index("alpha GPU 3: bad") < with_bad.index("Environment:")
    # All facts are in the table of the page only.
    assert "stands out" not in text


def test_many_notes_fit_on_the_first_screen():
    many = [one for number in range(9) for one in noted(f"fact {number}", "wrong " * 9)]
    lines = format_health(report_of([*many, *healthy(2)])).splitlines()
    assert max(map(len, lines)) <= 80
    end = next(number for number, line in enumerate(lines) if "5 more notes" in line)
    assert end < 24


def test_check_of_environment_alone_shows_all_facts():
    report = report_of(ENVIRONMENT)
    text = format_health(report)
    assert text.startswith("Is the cluster fit to be measured?")
    assert report.headline.startswith(
        "Green: Nothing is wrong with the environment of both GPUs; 1 fact may disturb"
    )
    row = next(line for line in text.splitlines() if line.startswith("ECC"))
    assert row.split() == ["ECC", "on"]
    assert "note: alpha GPU 0, alpha GPU 1" in text


def test_bad_environment_ends_with_code_1():
    bad_variable = noted("NCCL_P2P_DISABLE", "set to 1; slow", verdict=Verdict.BAD)
    report = report_of([*fact_of("ECC"), *bad_variable, *healthy(2)])
    assert report.exit_code == 1
    assert report.headline == ("Red: NCCL_P2P_DISABLE: set to 1; slow; no GPU is bad by itself")


def test_facts_of_the_environment_are_no_figures():
    disk = [[make_finding(test="disk", stage="environment", value=size)] for size in (9.0, 1.0)]
    assert not trace_figures(disk, 1.0)


def test_unknown_devices_stay_untested_in_sound_environment():
    unknown = healthy(1, verdict=Verdict.UNKNOWN, ratio=None)
    assert report_of([*fact_of("ECC"), *unknown]).exit_code == 3


def test_page_has_all_facts_of_the_environment():
    page = format_page(report_of([*ENVIRONMENT, *healthy(2)]), pd.DataFrame())
    section = page[page.index('<section id="environment">') :]
    assert "2 facts are fine" in section
    assert "nvidia-smi -pm 1" in section
    assert "P2P/CUMEM" in section
    assert "note: alpha GPU 0, alpha GPU 1" in section
    without = format_page(report_of(healthy(2)), pd.DataFrame())
    assert "facts are fine" not in without


def test_first_screen_says_what_the_check_finds():
    lines = " ".join(format_health(report_of(healthy(4))).split())
    assert "Finds a GPU that is " in lines
    assert "(simulated)." in lines
    interrupted = report_of(healthy(4), status=RunStatus.INTERRUPTED)
    busy = report_of([*healthy(4), make_finding(ALL, test=OTHER_PROGRAMS_TEST)])
    assert (interrupted.detection, busy.detection) == (None, None)


def test_other_programs_are_a_case_without_a_row():
    of_all = {"subject": ALL, "stage": "together"}
    reduce = make_finding(**of_all, test="all_reduce 1 MiB", unit="GB/s")
    settings = {"verdict": Verdict.SUSPECT, "unit": "% of points", "reason": "in 6 of 9 points"}
    busy = make_finding(**of_all, **settings, test=OTHER_PROGRAMS_TEST, value=66.7)
    case, table = format_health(report_of([reduce, busy])).split("Collectives over all devices")
    assert f"{OTHER_PROGRAMS_TEST}: in 6 of 9 points" in case
    assert "all_reduce 1 MiB" in table
    assert OTHER_PROGRAMS_TEST not in table


@pytest.mark.parametrize(("test", "is_told"), [("gemm bf16 8192", True), ("launch", False)])
def test_gain_is_estimated_by_tests_of_the_device(test, is_told):
    [advice] = report_of([*healthy(3), bad(3, test=test, ratio=8.0)]).advice
    assert ("samples/s are gained" in advice.text) == is_told


def test_case_shows_the_evidence_of_its_action():
    launch = bad(3, test="launch", ratio=8.0, action=Action.WATCH, evidence="the host is slow")
    heat = bad(3, ratio=1.7, action=Action.COOL, evidence="the GPU is at 91 °C")
    (case,) = report_of([*healthy(3), launch, heat]).cases
    assert (case.action, case.evidence) == (Action.COOL, "the GPU is at 91 °C")


def test_device_of_a_slow_host_is_not_left_out():
    [advice] = report_of([*healthy(3), bad(3, test="launch", action=Action.WATCH)]).advice
    assert advice.text == "look at alpha GPU 3 first"


def test_busy_device_is_checked_again_not_repaired():
    busy = report_of([*healthy(3), bad(3, action=Action.WAIT)])
    assert [one.text.partition(";")[0] for one in busy.advice] == [
        "check alpha GPU 3 again without the other programs"
    ]
