"""The jobs that come with the package: each asks a question, and fits two cores when it is cut."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

import raybench
from raybench.cli.jobs import templates
from raybench.job.model import job_from_text
from raybench.job.plan import make_plan

ROOT = Path(__file__).parents[3]
ALL = templates()


def overrides_for_two_cores(one):
    """The `--set` values of the command in the comment of a job."""
    command = re.search(r"^#   raybench sweep \S+(.*(?:\n#     .*)*)", one.text, re.MULTILINE)
    words = shlex.split(re.sub(r"\n# +", " ", command[1]))
    return tuple(word for word in words if word != "--set")


def test_the_package_has_the_jobs_of_the_repository():
    assert [one.name for one in ALL] == sorted(path.stem for path in (ROOT / "jobs").glob("*.yaml"))
    # An editable install reads the link; a wheel has the files in its place.
    (package,) = raybench.__path__
    assert Path(package, "jobs").resolve() == ROOT / "jobs"
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert built["targets"]["wheel"] == {
        "packages": ["raybench"],
        "exclude": ["raybench/jobs", "raybench/how-to"],
        "force-include": {"jobs": "raybench/jobs", "docs/how-to": "raybench/how-to"},
    }


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_a_job_has_a_question_and_a_command_that_cuts_it_down(one):
    assert one.question.endswith("?")
    assert one.question.count("?") == 1
    assert overrides_for_two_cores(one)


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_a_job_that_is_cut_needs_two_cores_and_less_than_five_minutes(one):
    job = job_from_text(f"{one.name}.yaml", one.text, overrides_for_two_cores(one))
    points = make_plan(job).points
    assert max(point.world_size for point in points) <= 2
    # What a point takes beside its budget: its set-up, and the steps that are taken apart.
    assert len(points) * (job.measure.max_seconds + 3) < 300
    assert not any(point.cuda_graph for point in points)
