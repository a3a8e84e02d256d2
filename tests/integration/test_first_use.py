"""The first commands of a new user, typed in an empty folder, against a clock."""

import re
import shlex

import pytest

from benchmarks.built_in_jobs import time_sweep
from raybench.cli.jobs import templates
from tests.integration.sweeps import raybench
from tests.unit.commands import REPOSITORY

# On two cores without other work.
FIRST_LINE_S, REPORT_S = 2.0, 60.0


def first_commands():
    """The words of the first two commands of raybench in the README."""
    blocks = re.findall(r"```bash\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    lines = "\n".join(blocks).splitlines()
    return [shlex.split(line) for line in lines if line.startswith("raybench ")][:2]


@pytest.mark.long
@pytest.mark.alone
def test_first_commands_of_the_readme_keep_their_promise(tmp_path):
    init, sweep = first_commands()
    assert init == ["raybench", "init", "--template", "ddp_scaling"]
    assert sweep == ["raybench", "sweep", "ddp_scaling.yaml"]
    timed = time_sweep(tmp_path, "ddp_scaling")
    assert timed.exit_code == 0, timed.last_line
    assert "the section cpu: of ddp_scaling.yaml replaces hidden, " in timed.first_line
    assert timed.first_line_s < FIRST_LINE_S
    # The estimate stands before the first point has ended, and is of the right size.
    assert timed.estimate_line_s < timed.first_point_s
    assert timed.total_s / 3 < timed.estimated_s < 3 * timed.total_s
    assert timed.total_s < REPORT_S
    shown = (tmp_path / "report.txt").read_text()
    assert "Speed-up from 1 worker to 2 workers (ideal 2.00)" in shown
    pasted = raybench("report", "--format", "issue", cwd=tmp_path).stdout
    assert "with the section cpu: of the job" in pasted


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("job", [name for name in templates() if name != "ddp_scaling"])
def test_each_built_in_job_ends_within_a_minute(tmp_path, job):
    timed = time_sweep(tmp_path, job)
    assert timed.first_line_s < FIRST_LINE_S
    assert timed.total_s < REPORT_S
    if timed.exit_code:
        assert timed.exit_code in (2, 3)
        assert timed.first_line == timed.last_line or "needs" in timed.last_line
