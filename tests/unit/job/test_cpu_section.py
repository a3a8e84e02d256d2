"""The section `cpu` of a job: what it replaces, its checks, and where mistakes are said to be."""

import pytest

from jobs import HEAD
from raybench.errors import ClusterError, JobError
from raybench.job.loading import job_from_text
from raybench.job.model import Job
from raybench.job.plan import make_plan
from raybench.job.problems import key_text
from raybench.job.source import parse_source

SCALING = """\
version: 1
name: test
workload: {kind: mlp, hidden: 4096, layers: 8}
matrix:
  world_size: [1, 2, 4]
  precision: [fp32, tf32]
  batch_size: [64]
exclude: [{world_size: 4, precision: tf32}]
measure: {rounds: 3, seconds: 3, iterations: 50}
cpu:
  workload: {hidden: 64}
  matrix: {world_size: [1, 2], precision: [fp32]}
  exclude: []
  measure: quick
"""


def on_cpu(text: str, *overrides: str) -> Job:
    return job_from_text("job.yaml", text, overrides, on_cpu=True)


def replaced(text: str, *overrides: str) -> list[str]:
    source = parse_source("job.yaml", text, overrides, on_cpu=True)
    return list(map(key_text, source.replaced_keys))


def refusals(text: str, *overrides: str, is_cpu: bool = True) -> list[str]:
    with pytest.raises(JobError) as caught:
        make_plan(job_from_text("job.yaml", text, overrides, on_cpu=is_cpu))
    return str(caught.value).splitlines()


def test_keys_replace_keys_and_lists_replace_lists():
    job = on_cpu(SCALING)
    assert dict(job.workload.parameters) == {"hidden": 64, "layers": 8}
    assert job.matrix == {"world_size": (1, 2), "precision": ("fp32",), "batch_size": (64,)}
    assert job.exclude == ()
    assert (job.measure.seconds, job.measure.iterations, job.measure.rounds) == (0.5, None, 3)
    assert len(make_plan(job).points) == 2


def test_gpus_run_the_job_without_the_section():
    job = job_from_text("job.yaml", SCALING)
    assert len(make_plan(job).points) == 5
    assert not job.uses_cpu


def test_section_may_add_what_the_job_lacks():
    text = HEAD + "workload: {kind: gemm}\ncpu: {zip: [{m: [8], n: [8], k: [8]}]}\n"
    assert [point.params["m"] for point in make_plan(on_cpu(text)).points] == [8]
    assert replaced(text) == ["zip"]


def test_overrides_beat_the_section():
    overrides = ("workload.hidden=32", "matrix.world_size=1", "measure.seconds=2")
    job = on_cpu(SCALING, *overrides)
    assert job.workload.parameters["hidden"] == 32
    assert job.matrix["world_size"] == (1,)
    assert job.measure.seconds == 2
    assert job.uses_cpu
    assert replaced(SCALING, *overrides) == ["matrix.precision", "exclude"]


def test_overrides_of_the_section_come_before_it():
    job = on_cpu(SCALING, "cpu.matrix.world_size=2,4", "cpu.workload.layers=1")
    assert job.matrix["world_size"] == (2, 4)
    assert dict(job.workload.parameters) == {"hidden": 64, "layers": 1}


def test_keys_given_by_the_section_are_named():
    text = HEAD + "workload: {kind: gemm}\ncpu: {matrix: {m: [8], n: [8]}}\n"
    assert replaced(text) == ["matrix.m", "matrix.n"]


MISTAKES = """\
cpu:
  workload: {hiden: 64}
  matrix:
    world_size: [1, two]
  measure: {second: 1, rounds: 0}
  name: other
  seconds: 1
"""
FOUND = [
    "job.yaml:12:14: cpu.workload.hiden: unknown parameter 'hiden'; did you mean 'hidden'?",
    "job.yaml:14:21: cpu.matrix.world_size[1]: must be an integer, given 'two'",
    "job.yaml:15:13: cpu.measure.second: unknown key 'second'; did you mean 'seconds'?",
    "job.yaml:15:32: cpu.measure.rounds: ",
    "job.yaml:16:3: cpu.name: unknown key 'name'",
    "job.yaml:17:3: cpu.seconds: unknown key 'seconds'; did you mean cpu.measure.seconds?",
]


@pytest.mark.parametrize("is_cpu", [True, False])
def test_mistakes_are_said_where_the_file_has_them(is_cpu):
    text = SCALING[: SCALING.index("cpu:")].replace("exclude", "zip: []\nexclude") + MISTAKES
    lines = refusals(text, is_cpu=is_cpu)
    assert len(lines) == len(FOUND), lines
    for line, begin in zip(lines, FOUND, strict=True):
        assert line.startswith(begin)


def test_replaced_values_are_checked_too():
    text = SCALING.replace("tf32]", "tf33]", 1).replace("hidden: 4096", "hidden: no")
    lines = refusals(text)
    assert [line.split(": ")[1] for line in lines] == [
        "workload.hidden",
        "matrix.precision[1]",
    ]


def test_section_is_checked_on_gpus_too():
    text = SCALING.replace("measure: quick", "workload: {hidden: 64, layers: 0}").replace(
        "  workload: {hidden: 64}\n", ""
    )
    (line,) = refusals(text, is_cpu=False)
    assert line.startswith("job.yaml:13:34: cpu.workload.layers: must be ")


def test_override_that_is_wrong_is_named_itself():
    (line,) = refusals(SCALING, "cpu.measure.rounds=0")
    assert line.startswith("--set cpu.measure.rounds=0: cpu.measure.rounds: ")
    (line,) = refusals(SCALING, "workload.hidden=none")
    assert line.startswith("--set workload.hidden=none: workload.hidden: ")


def test_job_without_its_gpu_is_one_line():
    text = HEAD + "workload: {kind: gemm}\nmatrix: {m: [8], n: [8], k: [8]}\n"
    text += "cpu: {why_not: NCCL runs on GPUs only}\n"
    with pytest.raises(ClusterError) as caught:
        on_cpu(text)
    assert str(caught.value) == "job.yaml: needs a GPU: NCCL runs on GPUs only"
    assert len(make_plan(job_from_text("job.yaml", text)).points) == 1


def test_meaning_follows_what_is_measured():
    plain = job_from_text("job.yaml", SCALING)
    without = job_from_text("job.yaml", SCALING[: SCALING.index("cpu:")])
    assert plain.meaning_sha256 == without.meaning_sha256
    assert on_cpu(SCALING).meaning_sha256 != plain.meaning_sha256


def test_seconds_replace_a_count_of_iterations():
    assert (
        on_cpu(SCALING.replace("measure: quick", "measure: {seconds: 1}")).measure.iterations
        is None
    )
    kept = on_cpu(SCALING.replace("measure: quick", "measure: {rounds: 1}")).measure
    assert (kept.iterations, kept.rounds) == (50, 1)


def test_section_itself_stays_as_it_was_given():
    source = parse_source("job.yaml", SCALING, ["measure.warmup.min=5"], on_cpu=True)
    assert source.data["cpu"]["measure"] == {"seconds": 0.5}
    nested = SCALING.replace("measure: quick", "measure: {warmup: {min: 3, max: 9}}")
    source = parse_source("job.yaml", nested, ["measure.warmup.min=5"], on_cpu=True)
    assert source.data["measure"]["warmup"] == {"min": 5, "max": 9}
    assert source.data["cpu"]["measure"]["warmup"] == {"min": 3, "max": 9}
