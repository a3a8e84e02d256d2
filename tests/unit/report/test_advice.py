"""What `raybench advise` makes of a run's own measurements, and of a health check."""

from __future__ import annotations

from pathlib import Path

from builders import (
    make_apart,
    make_finding,
    make_run,
    make_subject,
    make_summary,
)

from raybench.health.report import HealthReport
from raybench.records.devices import Verdict
from raybench.report.documents import format_document
from raybench.report.show import AdviceList, advise_run

EXAMPLES = Path(__file__).parents[3] / "results" / "examples"


def test_of_a_rank_that_slowed_the_others_the_gain_of_other_shares_is_estimated():
    record = make_apart([10.0, 10.0, 10.0, 20.0], 21.0)
    (advice,) = advise_run(make_summary([record]))
    # By speed a step takes 4 / 3.5 of the fast ones' own, on them alone 4 / 3.
    assert advice.text == (
        "4 GPUs, of which rank 3 is slow: an estimate, at most: shares=by_speed +69.0%, "
        "shares=fast +46.5% over equal shares; jobs/uneven_gpus.yaml measures it"
    )
    assert advice.rows == (record.point.point_id,)


def test_nothing_is_advised_where_all_ranks_are_alike():
    advice = list(advise_run(make_summary([make_apart([10.0, 10.0], 11.0)])))
    assert advice == []
    assert "nothing to advise" in format_document(
        AdviceList(run_id="run-a", advice=advice), "terminal"
    )


def test_a_device_that_a_check_found_bad_is_left_out_or_given_less():
    subjects = [make_subject(rank) for rank in range(4)]
    findings = [make_finding(subject, verdict=Verdict.HEALTHY) for subject in subjects[:3]]
    slow = make_finding(subjects[3], verdict=Verdict.BAD, stage="alone", ratio=2.0)
    report = HealthReport(
        run=make_run(), machine="", kinds=["cuda"] * 4, findings=[*findings, slow]
    )
    (advice,) = report.advice
    assert advice.about == "devices"
    assert advice.text.startswith(f"leave {subjects[3].name} out until it is repaired; ")
    assert "shares=by_speed +75.0%, shares=fast +50.0% over equal shares" in advice.text
