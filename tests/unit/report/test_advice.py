"""What `raybench advise` makes of a run's own measurements, and of a health check."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest
from builders import (
    make_device,
    make_finding,
    make_measure,
    make_measurement,
    make_point,
    make_record,
    make_run,
    make_subject,
)
from click.testing import CliRunner

from raybench.cli import raybench
from raybench.records import Breakdown, Record
from raybench.records.health import Verdict
from raybench.report.advice import Advice, advise_health, advise_run, format_advice
from raybench.report.health import HealthReport
from raybench.report.summary import summarize
from raybench.results.rows import device_row, point_row
from raybench.results.schema import TABLES

EXAMPLES = Path(__file__).parents[3] / "results" / "examples"


def ran(local_ms: Sequence[float], exchange_ms: float = 1.0) -> Record:
    """Equal batches on ranks whose own steps take so long."""
    step_ns = round(1e6 * (max(local_ms) + exchange_ms))
    measurements = tuple(
        make_measurement(
            rank,
            [[step_ns + (place % 2) for place in range(20)]],
            breakdown=Breakdown(local_ms=((own,) * 10, (own,) * 10), device_ms=own),
        )
        for rank, own in enumerate(local_ms)
    )
    return make_record(make_point(world_size=len(local_ms)), measurements=measurements)


def advice_of(*found: Record) -> list[Advice]:
    columns = [column.name for column in TABLES["points"]]
    rows = [point_row("run-a", record, make_measure()) for record in found]
    devices = pd.DataFrame([device_row("run-a", make_device(rank)) for rank in range(2)])
    return advise_run(summarize(make_run(), devices, pd.DataFrame(rows, columns=columns)))


def test_of_a_rank_that_slowed_the_others_the_gain_of_other_shares_is_estimated() -> None:
    record = ran([10.0, 10.0, 10.0, 20.0])
    (advice,) = advice_of(record)
    # By speed a step takes 4 / 3.5 of the fast ones' own, on them alone 4 / 3.
    assert advice.text == (
        "4 GPUs, of which rank 3 is slow: an estimate, at most: shares=by_speed +69.0%, "
        "shares=fast +46.5% over equal shares; jobs/uneven_gpus.yaml measures it"
    )
    assert advice.rows == (record.point.point_id,)


def test_nothing_is_advised_where_all_ranks_are_alike() -> None:
    advice = advice_of(ran([10.0, 10.0]))
    assert advice == []
    assert "nothing to advise" in format_advice(advice, "run-a", 80)


def test_a_device_that_a_check_found_bad_is_left_out_or_given_less() -> None:
    subjects = [make_subject(rank) for rank in range(4)]
    findings = [make_finding(subject, verdict=Verdict.HEALTHY) for subject in subjects[:3]]
    slow = make_finding(subjects[3], verdict=Verdict.BAD, stage="alone", ratio=2.0)
    report = HealthReport(
        run=make_run(), machine="", kinds=["cuda"] * 4, findings=[*findings, slow], links=[]
    )
    (advice,) = advise_health(report)
    assert advice.about == "devices"
    assert advice.text.startswith(f"leave {subjects[3].name} out until it is repaired; ")
    assert "shares=by_speed +75.0%, shares=fast +50.0% over equal shares" in advice.text


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_committed_run_is_advised_on_with_the_rows_that_the_advice_is_from(
    options: tuple[str, ...],
) -> None:
    run_id = "ddp_scaling-20261122-142621-6209"
    result = CliRunner().invoke(
        raybench, ["advise", run_id, "--results", str(EXAMPLES), *options], standalone_mode=False
    )
    assert result.exception is None
    told = json.loads(result.stdout)["advice"] if options else result.stdout
    assert "bf16, batch 1,024" in str(told)
    assert "all 36 points that are ok" in str(told)


def test_show_writes_the_values_of_each_rank_and_of_each_name_as_it_does_others() -> None:
    words = ["show", "uneven_gpus-20261123-000526-0147", "46954a71e3fa", "--results", str(EXAMPLES)]
    found = CliRunner().invoke(raybench, words, env={"COLUMNS": "200"})
    assert "local_step_ms_by_rank" in found.stdout
    assert not re.findall(r"[1-9]\d*\.\d{6,}", found.stdout)


def test_show_has_a_column_of_how_busy_the_devices_were() -> None:
    words = ["show", "ddp_scaling", "--results", str(EXAMPLES)]
    found = CliRunner().invoke(raybench, words, env={"COLUMNS": "200"})
    head, first, second, *_ = found.stdout.splitlines()
    assert head.split()[-1] == "busy"
    # Too short for a sample a second.
    assert second.split()[-1] == "94.0%"
    points = json.loads(CliRunner().invoke(raybench, [*words, "--json"]).stdout)["points"]
    assert points[1]["busy_pct"] == 94.0
    assert points[0]["busy_pct"] is None
    assert "%" not in first.split()[-1]
