"""Jobs as dicts: the same checks and errors as those of a file, without lines and columns."""

import sys

import numpy as np
import pytest
from commands import REPOSITORY, refusal_of

from raybench.api.jobs import job_text, override_texts, read_job
from raybench.errors import JobError, UsageError
from raybench.job.loading import job_from_text
from raybench.job.plan import make_plan

JOB = {
    "name": "mine",
    "workload": {"kind": "mlp", "hidden": 64},
    "matrix": {"world_size": (1, 2), "precision": ["fp32", "bf16"], "batch_size": np.int64(8)},
    "env": {"OMP_NUM_THREADS": 1, "NOTE": "true"},
    "measure": {"seconds": 1e-3, "warmup": {"min": 2, "max": 4}},
}


def test_dict_means_what_its_file_means():
    text = """
        version: 1
        name: mine
        workload: {kind: mlp, hidden: 64}
        matrix: {world_size: [1, 2], precision: [fp32, bf16], batch_size: 8}
        env: {OMP_NUM_THREADS: 1, NOTE: 'true'}
        measure: {seconds: 0.001, warmup: {min: 2, max: 4}}
    """
    assert read_job(JOB)[0].meaning_sha256 == job_from_text("job.yaml", text).meaning_sha256
    # The tables keep the text, from which reports read the job again.
    job, _ = read_job(JOB)
    assert job_from_text("job", job.text).meaning_sha256 == job.meaning_sha256


def test_settings_replace_values_as_set_does():
    settings = {"matrix.world_size": range(1, 4), "measure": "quick", "name": "other"}
    job, _ = read_job(JOB, settings)
    assert {point.world_size for point in make_plan(job).points} == {1, 2, 3}
    assert (job.measure.seconds, job.name) == (0.5, "other")
    assert override_texts(settings) == (
        "matrix.world_size=[1, 2, 3]",
        "measure=quick",
        "name=other",
    )


def test_path_may_be_any_path():
    path = REPOSITORY / "jobs" / "ddp_scaling.yaml"
    assert read_job(path)[0].meaning_sha256 == read_job(str(path))[0].meaning_sha256


def test_all_problems_of_a_dict_are_told():
    matrix = {"world_size": [0], "precision": "fp33", "batch_size": 8}
    with pytest.raises(JobError) as caught:
        read_job(JOB | {"matrix": matrix, "measrue": {}})
    assert sorted(str(caught.value).splitlines(), reverse=True) == [
        "job: measrue: unknown key 'measrue'; did you mean 'measure'?",
        "job: matrix.world_size[0]: must be greater than or equal to 1, given 0",
        "job: matrix.precision[0]: must be 'fp32', 'tf32', 'fp16', 'bf16' or 'float8', given "
        "'fp33'; did you mean 'fp32'?",
    ]


@pytest.mark.parametrize(
    ("job", "settings", "expected"),
    [
        (7, None, "job: must be the path of a job file or a dict with its keys, given 7"),
        (JOB, ["a=b"], "set: must be a dict of dotted keys"),
        (JOB, {"measure": {1, 2}}, "job: measure: cannot be part of a job: no number, text, list"),
        (JOB, {"measure.seconds": -1}, "--set measure.seconds=-1: measure.seconds: must be"),
        ("missing.yaml", None, "missing.yaml:1:1: the job file cannot be read"),
    ],
)
def test_what_no_job_can_have_is_refused(job, settings, expected):
    assert refusal_of(UsageError, read_job, job, settings).startswith(expected)


def test_odd_keys_and_texts_survive_as_yaml():
    odd = {"name": "a: [b]", "a key": None, "note": "no\ttab \N{GRINNING FACE}"}
    assert job_text(odd) == ('name: "a: [b]"\n"a key": null\nnote: "no\\ttab \N{GRINNING FACE}"\n')


def test_a_class_of_main_is_refused(monkeypatch):
    class Mine:
        def __init__(self, context): ...

        def step(self): ...

    monkeypatch.setattr(sys.modules["__main__"], "Mine", Mine, raising=False)
    mine = {"name": "mine", "workload": {"kind": "__main__:Mine"}, "matrix": {"batch_size": 1}}
    told = refusal_of(UsageError, read_job, mine)
    assert told.startswith("workload.kind __main__:Mine: workers cannot import __main__; put the")
