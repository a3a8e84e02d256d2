"""The first screen of a run: question, answer, doubts and the next command."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from builders import (
    make_failed,
    make_point,
    make_record,
    make_run,
    make_steady,
    make_summary,
    report_text,
    with_values,
)
from commands import EXAMPLES

from raybench.analysis.answer import Next, NextCommand, decide
from raybench.analysis.run_data import RunData, load_run_data
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.status import Status
from raybench.report.documents import Line, format_document
from raybench.report.run_report import RunReport
from raybench.report.words.answer import next_command

NOISY = Path(__file__).parent / "noisy_runs"
RUNS = [
    (folder, path.name)
    for folder in (EXAMPLES, NOISY)
    for path in sorted((folder / "runs").iterdir())
    if not path.name.startswith("health-")
]


def screen(data):
    return format_document(RunReport(answer=decide(data), is_short=True), "terminal")


def run_with_doubts(*doubts_of_points, **run):
    """Points of one GPU in several batches, with these doubts."""
    records = [make_steady(1, 8.0, batch_size=2**place) for place in range(len(doubts_of_points))]
    summary = make_summary(records, make_run("run-a", **run))
    points = with_values(summary.points, doubts=doubts_of_points)
    return RunData(run=summary.run, devices=summary.devices, points=points)


@pytest.mark.parametrize(("folder", "run"), RUNS, ids=lambda value: getattr(value, "name", value))
def test_first_screen_is_short_or_names_full_report(folder, run):
    text = screen(load_run_data(folder, run))
    lines = text.splitlines()
    assert len(lines) <= 24 or "--full" in text
    assert len(lines) <= 36
    # A shell must read the options of the next command whole.
    assert all(len(line) <= 80 for line in lines if not line.startswith("    -"))
    doubts = text.partition("oubts\n")[2].partition("\nNext")[0]
    assert len(re.findall(r"(?m)^and \d+ more doubts?: --full$", doubts)) <= 1


def test_the_question_of_the_job_comes_first():
    job = "question: Is it fast?\nworkload: {kind: mlp}\n"
    data = run_with_doubts((), (), job_text=job)
    assert screen(data).startswith("Is it fast?\n")
    assert RunReport(answer=decide(data)).members()["question"] == "Is it fast?"


@pytest.mark.parametrize(
    ("records", "baseline", "question"),
    [
        (
            [make_steady(1, 8.0), make_steady(2, 9.0)],
            {"world_size": 1},
            "How does mlp scale from 1 GPU to 2 GPUs?",
        ),
        (
            [make_steady(1, 8.0, batch_size=1474), make_failed(make_point(batch_size=1480))],
            {},
            "What is the largest batch of mlp that fits?",
        ),
        ([make_steady(1, 8.0)], {}, "How long does a step of mlp take?"),
        ([], {}, "How long does a step of the workload take?"),
    ],
)
def test_run_without_question_gets_one_from_its_answer(records, baseline, question):
    run = make_run("run-a", baseline=baseline)
    assert RunReport(answer=decide(make_summary(records, run))).title == question


def test_a_script_is_named_with_its_article():
    summary = make_summary([make_record()])
    points = [replace(row, workload="script") for row in summary.points]
    data = RunData(run=summary.run, devices=summary.devices, points=points)
    assert RunReport(answer=decide(data)).title == "How long does a step of the script take?"


def test_no_ok_point_is_told_without_an_answer():
    text = screen(make_summary([make_failed(error_message="it broke", status=Status.ERROR)]))
    assert "No point ended ok.\n" in text
    assert "Failures and doubts\n1 point: error: " in text
    assert "No doubts." not in text


def test_run_without_points_does_not_mention_doubts():
    for is_short in (True, False):
        document = RunReport(answer=decide(make_summary([])), is_short=is_short)
        text = format_document(document, "terminal")
        assert "No point has been finished yet." in text
        assert "No doubts." not in text


def test_no_doubts_are_told_as_such():
    assert "\nNo doubts.\n" in screen(run_with_doubts((), ()))


def test_at_most_three_doubts_are_shown():
    kinds = (
        DoubtKind.HOST_CLOCK,
        DoubtKind.SHARED_NODE,
        DoubtKind.CROWDED,
        DoubtKind.LEFT_BEHIND,
        DoubtKind.BATCH_NORM,
    )
    doubts = tuple(Doubt(kind=kind, value=0.5, limit=0.1, subject="alpha") for kind in kinds)
    report = RunReport(answer=decide(run_with_doubts(doubts, ())), is_short=True)
    texts = [block.text for block in report.blocks() if isinstance(block, Line)]
    shown = texts[texts.index("Doubts") + 1 : texts.index("and 2 more doubts: --full")]
    expected = [f"{one.who}: {one.shortened(150)}" for one in report.doubts[:3]]
    assert shown == [f"Main caveat: {expected[0]}", *expected[1:]]


@pytest.mark.parametrize(("busy", "is_told"), [(1, False), (2, True), (4, True)])
def test_one_sentence_replaces_doubts_of_busy_machine(busy, is_told):
    cores = Doubt(kind=DoubtKind.BUSY_CORES, value=1.2, limit=2.0, subject="alpha")
    short = Doubt(kind=DoubtKind.SHORT, value=0.3, limit=3.0)
    of_points = [(cores, short)] * busy + [(short,)] * (4 - busy)
    text = " ".join(screen(run_with_doubts(*of_points)).split())
    told = (
        f"Doubts Main caveat: Other programs used up to 1.2 of 2 cores during {busy} of 4 "
        "points; these times are not reliable. and 1 more doubt: --full"
    )
    assert (told in text) == is_told
    assert ("max_seconds ended the timing after 0.3 s of the 3 s" in text) != is_told


OF_OTHERS = "{}, not this answer: --full"
SEARCH = "workload: {kind: mlp}\nmatrix: {batch_size: max}\n"
MEMORY = "answer: {metric: peak_mem_allocated_bytes}\nworkload: {kind: mlp}\n"


def doubts_of(*kinds):
    return tuple(Doubt(kind=kind, value=0.5, limit=0.1, subject="alpha") for kind in kinds)


@pytest.mark.parametrize("kind", [DoubtKind.OTHER_CLOCKS, DoubtKind.OTHER_KERNELS])
def test_doubts_about_ratios_need_a_speed_up(kind):
    found = run_with_doubts(doubts_of(kind), ())
    text = screen(found)
    assert OF_OTHERS.format("1 doubt concerns speed-ups") in text
    assert "Doubts\n" not in text
    assert RunReport(answer=decide(found)).doubts[0].text in " ".join(report_text(found).split())
    compared = run_with_doubts(doubts_of(kind), (), baseline={"batch_size": 1})
    assert "Doubts\n" in screen(compared)
    assert "not this answer" not in screen(compared)


def test_doubts_about_times_do_not_concern_memory():
    times = doubts_of(DoubtKind.CROWDED, DoubtKind.SHORT, DoubtKind.BUSY_CORES)
    text = screen(run_with_doubts(times, (), job_text=MEMORY))
    assert OF_OTHERS.format("3 doubts concern the speed") in text
    of_memory = doubts_of(DoubtKind.LEFT_BEHIND)
    text = screen(run_with_doubts((*times, *of_memory), (), job_text=MEMORY))
    assert "Doubts\nMain caveat: batch 1: " in text
    assert "and 3 more doubts: --full" in text


def test_doubts_about_times_do_not_concern_batches():
    short = Doubt(kind=DoubtKind.SHORT, value=0.5, limit=3.0)
    batches = [make_steady(1, 8.0, batch_size=1474), make_failed(make_point(batch_size=1480))]
    found = make_summary(batches, make_run("run-a", job_text=SEARCH))
    points = [replace(row, doubts=(short,)) for row in found.points]
    text = screen(replace(found, points=points))
    assert OF_OTHERS.format("1 doubt concerns the speed") in text


def test_doubts_that_concern_the_answer_come_first():
    kinds = (DoubtKind.OTHER_KERNELS, DoubtKind.SHORT)
    kept = [one.worst.kind for one in decide(run_with_doubts(doubts_of(*kinds), ())).doubts]
    assert kept == [DoubtKind.SHORT, DoubtKind.OTHER_KERNELS]


def test_impossible_numbers_are_told_before_busy_machines():
    cores = Doubt(kind=DoubtKind.BUSY_CORES, value=1.2, limit=2.0, subject="alpha")
    wrong = Doubt(kind=DoubtKind.IMPOSSIBLE, value=150.0, limit=100.0, subject="mfu_pct")
    _, _, text = screen(run_with_doubts((cores, wrong), (cores,))).partition("Doubts\n")
    assert 0 <= text.find("cannot be true") < text.find("Other programs used")


def test_next_command_of_memory_is_the_full_report():
    of_times = decide(run_with_doubts((), ()))
    assert of_times.next_command.kind is Next.RESUME
    of_memory = decide(run_with_doubts((), (), job_text=MEMORY))
    assert of_memory.next_command.kind is Next.FULL_REPORT
    assert "\nNext: raybench report run-a --full" in screen(
        run_with_doubts((), (), job_text=MEMORY)
    )


@pytest.mark.parametrize(
    ("words", "question"),
    [
        ((), "How does it scale to 64 GPUs?"),
        (("--set", "matrix.world_size=1,2"), "How does mlp scale from 1 GPU to 2 GPUs?"),
        (("--set=measure.rounds=1",), "How does it scale to 64 GPUs?"),
    ],
)
def test_other_device_counts_replace_the_question(words, question):
    text = "question: How does it scale to 64 GPUs?\nworkload: {kind: mlp}\n"
    records = [make_steady(1, 8.0), make_steady(2, 9.0)]
    argv = ("raybench", "sweep", "job.yaml", *words)
    run = make_run("run-a", baseline={"world_size": 1}, job_text=text, argv=argv)
    assert RunReport(answer=decide(make_summary(records, run))).title == question


@pytest.mark.parametrize("seconds", [None, 0.4, 359_999.0])
@pytest.mark.parametrize("kind", Next)
def test_label_of_long_commands_has_its_own_line(kind, seconds):
    options = ("--device", "cpu", "-o", "a" * 60)
    words = ("sweep", "job.yaml", "--resume", "b" * 40, *options)
    label, first, *others = next_command(NextCommand(kind=kind, words=words, seconds=seconds))
    assert label.startswith("Next")
    assert label.endswith(":")
    assert len(label) <= 80
    assert first == f"raybench sweep job.yaml --resume {'b' * 40} \\"
    typed = " ".join([first, *others]).replace("\\", " ")
    assert tuple(typed.split()) == ("raybench", *words)


def test_short_commands_stand_behind_their_label():
    words = ("report", "run-a", "--full")
    lines = next_command(NextCommand(kind=Next.FULL_REPORT, words=words))
    assert lines == ["Next: raybench report run-a --full"]


def test_batch_search_lists_no_out_of_memory_failure():
    batches = [make_steady(1, 8.0, batch_size=1474), make_failed(make_point(batch_size=1480))]
    found = make_summary(batches, make_run("run-a", job_text=SEARCH))
    assert found.is_batch_search
    assert "out of memory" not in screen(found).partition("No doubts.")[2]
    assert "Failures and doubts" not in screen(found)
    listed = make_summary(batches, make_run("run-a", job_text="workload: {kind: mlp}\n"))
    assert "Failures and doubts\n1 point: out of memory" in screen(listed)


@pytest.mark.parametrize("width", range(40, 90))
def test_a_number_is_never_folded_from_its_unit(width):
    slow = Doubt(kind=DoubtKind.STALLS, value=0.034, limit=0.01)
    data = run_with_doubts((slow,), (slow,))
    text = report_text(data, width=width)
    assert "3.4 %" in text
    assert "\ue000" not in text
    assert not re.search(r"[\d.]\n *(%|ms|GB/s)(?![\w/])", text)
