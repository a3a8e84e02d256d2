"""What a gate says of its verdicts, of the machine, and of what stopped it."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from raybench.ab.plan import Gate, Settings, Side, Version
from raybench.ab.verdict import (
    Disturbance,
    GateOutcome,
    GateVerdict,
    OpenReason,
    PointVerdict,
    WhyOpen,
)
from raybench.analysis.rows import ScaledRow
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.status import Status
from raybench.report.documents import format_document
from raybench.report.gate_report import GateReport
from raybench.report.page import format_gate

GATE = Gate(
    gate_id="ci-1",
    job=Path("/ci.yaml"),
    cwd=Path("/project"),
    old=Version(revision="main"),
    new=Version(revision="WORKTREE", env={"A": "1"}, overrides=("x=2",)),
    commits={Side.OLD: "a" * 40, Side.NEW: "b" * 40},
    settings=Settings(),
    seed=1,
    started_at=datetime.now(UTC),
)


def row(batch):
    return ScaledRow(
        run_id="r",
        point_id=f"p{batch}",
        attempt=1,
        status=Status.OK,
        started_at=datetime.now(UTC),
        workload="mlp",
        scaling="weak",
        batch_size=batch,
        batch=batch,
        device_type="cuda",
    )


def point(outcome, change=0.0, batch=1, **more):
    return PointVerdict(
        row=row(batch),
        outcome=GateOutcome(outcome),
        pairs=6,
        unit="samples/s",
        **{
            "old_rate": 100.0,
            "new_rate": 100 * (1 + change),
            "change": change,
            "low": change - 0.009,
            "high": change + 0.009,
            "detectable": 0.018,
            **more,
        },
    )


def verdict(*points, **more):
    facts = {"pairs": 6, "starts": 12, "minutes": 14.2, "hosts": 1, **more}
    return GateVerdict(gate=GATE, folder=Path("/results/ab/ci-1"), points=points, **facts)


def text(*points, **more):
    return format_document(GateReport(verdict=verdict(*points, **more)), "terminal")


def test_worst_point_and_certainty_are_in_the_answer():
    said = text(
        point("slower", -0.041, 8),
        point("slower", -0.02, 16),
        point("same", 0.0, 32),
        point("undecided", -0.03, 64, why=OpenReason(kind=WhyOpen.CHANCE)),
    )
    assert "2 of 4 points are slower, the worst by 4.1 % (3.2 to 5.0 %): batch 8." in said
    assert "1 is undecided; 1 is the same." in said
    assert "this machine detects a slowdown of 1.8 % at every point." in " ".join(said.split())
    assert "batch 64  after 12 pairs its interval is still too wide" in said
    assert "OLD: main (aaaaaaaa)\nNEW: working tree (bbbbbbbb), A=1, --set x=2\n" in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(
    ("outcome", "change", "said"),
    [
        ("slower", -0.05, "The point is slower by 5.0 % (4.1 to 5.9 %)."),
        ("faster", 0.05, "The point is faster by 5.0 % (4.1 to 5.9 %)."),
        ("same", 0.0, "The point is the same."),
        ("undecided", 0.0, "The point is undecided."),
    ],
)
def test_lone_point_is_one_sentence(outcome, change, said):
    assert said in text(point(outcome, change))


def test_point_that_fails_on_new_alone_is_named():
    why = OpenReason(kind=WhyOpen.FAILED, side=Side.NEW, text="error: no module")
    crashed = point("not_measured", why=why, new_rate=None)
    said = text(point("same"), replace(crashed, row=row(2)))
    assert "1 of 2 points fails on NEW; no point is slower.\n1 is the same." in said
    assert "All 2 points fail on NEW." in text(crashed, replace(crashed, row=row(2)))
    assert "The point fails on NEW." in text(crashed)
    # It fails on both sides.
    broken = replace(crashed, old_rate=None)
    assert "The point is not measured." in text(broken)
    assert "None of the 2 points was measured." in text(broken, replace(broken, row=row(2)))


def test_equal_verdicts_are_one_sentence():
    assert "All 2 points are the same." in text(point("same"), point("same", batch=2))


def test_gate_without_points_says_why():
    stopped = OpenReason(kind=WhyOpen.STOPPED, side=Side.OLD, text="--setup ended")
    said = text(pairs=0, starts=0, stopped=stopped)
    assert "No point was measured.\nOLD cannot be measured: --setup ended\n" in said
    assert "Go on with: " in said
    assert said.rstrip().endswith("ab --resume /results/ab/ci-1")


def test_disturbances_are_counted_by_start():
    doubt = Doubt(kind=DoubtKind.BUSY_CORES, value=1.2, limit=2.0, subject="alpha")
    disturbance = Disturbance(doubt=doubt, row=row(1), starts=3)
    said = text(point("same"), disturbances=[disturbance], clock_spread=0.042)
    assert "In 3 of 12 starts, other programs used 1.2 of 2 cores of alpha." in said
    assert "The SM clock of a point differed by up to 4.2 % between starts." in said


def test_failing_points_ask_for_a_shared_folder():
    why = OpenReason(kind=WhyOpen.FAILED, side=Side.NEW, text="error: no module")
    failed = point("not_measured", why=why)
    assert "The 2 nodes must share the folder of the gate" in text(failed, hosts=2)
    assert "must share" not in text(failed)


@pytest.mark.parametrize(
    ("outcomes", "outcome", "code"),
    [
        (("slower", "not_measured"), "slower", 1),
        (("undecided", "not_measured"), "not_measured", 5),
        (("undecided", "faster"), "undecided", 5),
        (("same", "faster"), "faster", 0),
        (("same", "same"), "same", 0),
        ((), "not_measured", 5),
    ],
)
def test_most_urgent_point_gives_the_exit_code(outcomes, outcome, code):
    found = verdict(*map(point, outcomes))
    assert (found.outcome, found.exit_code) == (outcome, code)


def test_page_has_bars_and_hides_markup():
    page = format_gate(
        GateReport(
            verdict=verdict(
                point("slower", -0.05, 8),
                point(
                    "not_measured",
                    batch=16,
                    why=OpenReason(kind=WhyOpen.FAILED, side=Side.NEW, text="<script>x</script>"),
                ),
            )
        )
    )
    assert page.count("<svg") == 1
    assert "<script>x" not in page
    assert "1 of 2 points is slower" in page


def test_many_equal_points_are_counted_not_listed():
    said = text(*(point("same", batch=batch) for batch in range(1, 31)))
    assert "and 10 more that are the same" in said
