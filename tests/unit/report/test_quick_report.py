"""The report of a node on a terminal."""

from dataclasses import replace

import pytest

from raybench.records.devices import Action, Finding, Subject, Verdict
from raybench.records.node_report import (
    DrainKind,
    DrainReason,
    NodeReport,
    NodeState,
    UntestedKind,
    UntestedReason,
)
from raybench.report.quick_report import format_node_report

GPUS = [
    Subject(kind="device", name=f"alpha GPU {number}", model="H200", uuids=(f"GPU-{number}",))
    for number in range(2)
]
FINE = Finding(
    test="gemm bf16 8192",
    stage="alone",
    subject=GPUS[0],
    passes=1,
    value=712.3,
    unit="TFLOP/s",
    verdict=Verdict.HEALTHY,
)
WRONG = replace(
    FINE,
    test="same bits bf16 2048",
    subject=GPUS[1],
    verdict=Verdict.BAD,
    reason="wrong bits: its product changed from one check to the next",
    action=Action.REPLACE,
    command="kubectl cordon alpha",
)
REPORT = NodeReport(
    host="alpha",
    state=NodeState.HEALTHY,
    began="2026-11-30T11:07:00+00:00",
    seconds=9.1,
    raybench_version="1",
    devices=("alpha GPU 0", "alpha GPU 1"),
    device_kind="cuda",
    findings=(FINE, replace(FINE, subject=GPUS[1], value=705.0)),
)


def lines_of(report, width=80):
    lines = format_node_report(report, width=width).splitlines()
    assert max(map(len, lines)) <= width
    return lines


def test_healthy_node_has_verdict_time_and_table():
    first, second, *rest = lines_of(REPORT)
    assert first == "Healthy: 2 GPUs of alpha."
    assert second == "9.1 s, 2 GPUs."
    [row] = [line for line in rest if line.startswith("gemm bf16 8192")]
    assert row.split()[-2:] == ["712", "705"]


def test_cpu_workers_do_not_pass_for_gpus():
    lines = lines_of(replace(REPORT, devices=("alpha worker 0",), device_kind="cpu", findings=()))
    assert lines[:2] == ["Healthy: 1 CPU worker of alpha.", "9.1 s, 1 CPU worker."]


def test_a_check_without_devices_counts_none():
    assert lines_of(replace(REPORT, devices=(), state=NodeState.UNTESTED))[1] == "9.1 s."


def test_drained_node_says_which_device_and_why():
    reason = DrainReason(kind=DrainKind.FAILED_TWICE, device="alpha GPU 1", test=WRONG.test)
    report = replace(
        REPORT, state=NodeState.DRAIN, drain=(reason,), findings=(*REPORT.findings, WRONG)
    )
    lines = lines_of(report)
    assert lines[0].startswith("Drain alpha: GPU 1 failed twice in same bits bf16 2048")
    text = " ".join(lines)
    assert "wrong bits" in text
    assert "replace it" in text
    assert "  kubectl cordon alpha" in lines
    assert any("!712" in line for line in lines)


def test_other_programs_do_not_explain_a_drain():
    reason = DrainReason(kind=DrainKind.FAILED_TWICE, device="alpha GPU 1", test=WRONG.test)
    busy = UntestedReason(kind=UntestedKind.BUSY, detail="python3 uses alpha GPU 0")
    report = replace(
        REPORT, state=NodeState.DRAIN, drain=(reason,), untested=(busy,), findings=(FINE, WRONG)
    )
    text = " ".join(lines_of(report))
    assert "Why:" not in text
    assert text.index("replace it") < text.index("Not tested in full: python3 uses alpha GPU 0.")


def test_an_untested_device_is_not_called_suspect():
    untested = replace(FINE, verdict=Verdict.UNTESTED)
    suspect = replace(WRONG, verdict=Verdict.SUSPECT)
    report = replace(REPORT, state=NodeState.SUSPECT, findings=(untested, suspect))
    assert lines_of(report)[0] == "Suspect: GPU 1 of alpha."


@pytest.mark.parametrize("kind", list(UntestedKind))
def test_untested_node_says_why_and_what_to_do(kind):
    reason = UntestedReason(kind=kind, detail="python3 (process 4242 of bob) uses alpha GPU 1")
    report = replace(REPORT, state=NodeState.UNTESTED, untested=(reason,))
    first, *rest = lines_of(report)
    assert first.startswith("Not tested: alpha: ")
    text = " ".join(rest)
    assert "process 4242 of bob" in text
    assert "Do: " in text


def test_note_is_shown_without_changing_the_verdict():
    note = replace(
        FINE, stage="environment", test="other programs", verdict=Verdict.NOTE, reason="load of 7"
    )
    lines = lines_of(replace(REPORT, findings=(*REPORT.findings, note)))
    assert lines[0].startswith("Healthy")
    assert any("load of 7" in line for line in lines)


def test_equal_notes_of_devices_are_one_line():
    notes = [
        replace(
            FINE,
            stage="environment",
            test="niceness",
            subject=subject,
            verdict=Verdict.NOTE,
            reason="niceness 3: other programs get the CPU first",
        )
        for subject in GPUS
    ]
    lines = lines_of(replace(REPORT, findings=(*REPORT.findings, *notes)))
    assert sum("Note: niceness 3: other programs" in line for line in lines) == 1


def test_many_devices_become_a_range():
    subjects = [replace(GPUS[0], name=f"alpha GPU {number}") for number in range(8)]
    findings = tuple(
        replace(FINE, subject=subject, value=700.0 + number)
        for number, subject in enumerate(subjects)
    )
    names = tuple(subject.name for subject in subjects)
    lines = lines_of(replace(REPORT, devices=names, findings=findings))
    [row] = [line for line in lines if line.startswith("gemm bf16 8192")]
    assert row.split()[-2:] == ["700", "707"]
