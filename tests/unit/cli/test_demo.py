"""`raybench sweep --demo`: what it takes, and that it stays short."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from raybench.cli import raybench as command_line
from raybench.cli.demo import STOPS
from raybench.errors import UsageError
from raybench.job.catalog import template
from raybench.job.plan import make_plan


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop.name)
@pytest.mark.parametrize("is_on_cpus", [True, False])
def test_a_stop_of_the_tour_is_a_job_of_few_points(stop, is_on_cpus):
    job = template(stop.name)
    loaded = job.load(stop.overrides(job, is_on_cpus=is_on_cpus))
    points = make_plan(loaded).points
    assert loaded.measure.max_seconds == 2
    assert len(points) <= (4 if is_on_cpus else 18)
    if is_on_cpus:
        assert max(point.world_size for point in points) <= 2


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["job.yaml"], "JOB"),
        (["--set", "a=1"], "--set"),
        (["--resume", "latest"], "--resume"),
        (["--json"], "--json"),
    ],
)
def test_the_tour_has_its_own_jobs_and_says_what_to_leave_out(more, told):
    result = CliRunner().invoke(command_line, ["sweep", "--demo", *more], standalone_mode=False)
    assert isinstance(result.exception, UsageError)
    assert str(result.exception).endswith(f"leave out {told}")
