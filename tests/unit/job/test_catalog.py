"""The jobs that come with the package: each asks a question, and fits two cores when it is cut."""

import tomllib
from pathlib import Path

import pytest

import raybench
from raybench.errors import UsageError
from raybench.job.catalog import template, templates
from raybench.job.model import load_job
from raybench.job.plan import make_plan

ROOT = Path(__file__).parents[3]
ALL = templates()


def test_the_package_has_the_jobs_of_the_repository():
    assert [one.name for one in ALL] == sorted(path.stem for path in (ROOT / "jobs").glob("*.yaml"))
    # An editable install reads the link; a wheel has the files in its place.
    (package,) = raybench.__path__
    assert Path(package, "jobs").resolve() == ROOT / "jobs"
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert built["targets"]["wheel"] == {
        "packages": ["raybench"],
        "exclude": ["raybench/jobs"],
        "force-include": {"jobs": "raybench/jobs", "docs/how-to": "raybench/how-to"},
    }


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_a_job_has_a_question_and_a_command_that_cuts_it_down(one):
    assert one.question.endswith("?")
    assert one.question.count("?") == 1
    assert one.cut
    assert all("=" in override for override in one.cut)


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_a_job_that_is_cut_needs_two_cores_and_less_than_five_minutes(one):
    job = one.load(one.cut)
    points = make_plan(job).points
    assert max(point.world_size for point in points) <= 2
    # What a point takes beside its budget: its set-up, and the steps that are taken apart.
    assert len(points) * (job.measure.max_seconds + 3) < 300
    assert not any(point.cuda_graph for point in points)


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_what_is_written_of_a_job_has_its_points_and_names_its_own_file(one, tmp_path):
    path = tmp_path / "my job.yaml"
    path.write_text(one.text_for(path, "mine"))
    assert load_job(path).name == "mine"
    assert make_plan(load_job(path)).points == make_plan(one.load()).points
    text = path.read_text()
    assert f"raybench sweep '{path}' --set" in text
    assert text.startswith("# yaml-language-server: $schema=job.schema.json\n")


def test_a_template_is_found_by_its_name_and_else_the_nearest_is_told():
    assert "raybench sweep gemm.yaml --set" in template("gemm").text_for(Path("a\nb.yaml"), "gemm")
    with pytest.raises(UsageError, match="no job 'gem'; did you mean 'gemm'"):
        template("gem")
