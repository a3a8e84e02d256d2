"""The rules that depend on the workload: here, one that takes no batch size."""

from __future__ import annotations

from pathlib import Path

import pytest

from raybench.errors import JobError
from raybench.job.model import Job, load_job

HEAD = "version: 1\nname: test\n"
COLLECTIVE = HEAD + "workload: {kind: collective}\n"
REFUSED = "workload collective takes no batch size; leave batch_size out"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(text: str, *overrides: str) -> Job:
    Path("job.yaml").write_text(text)
    return load_job(Path("job.yaml"), overrides)


@pytest.mark.parametrize(
    ("rest", "place"),
    [
        ("matrix: {batch_size: [1], world_size: 2}\n", "4:10: matrix.batch_size"),
        ("matrix: {world_size: 2}\nzip: [{batch_size: [1]}]\n", "5:8: zip[0].batch_size"),
        ("matrix: {world_size: 2}\nexclude: [{batch_size: 1}]\n", "5:12: exclude[0].batch_size"),
        ("include: [{world_size: 2, batch_size: 1}]\n", "4:27: include[0].batch_size"),
        ("matrix: {world_size: 2}\nbaseline: {batch_size: 1}\n", "5:12: baseline.batch_size"),
    ],
)
def test_a_workload_without_batches_is_given_no_batch_size(rest: str, place: str) -> None:
    with pytest.raises(JobError) as caught:
        load(COLLECTIVE + rest)
    assert str(caught.value) == f"job.yaml:{place}: {REFUSED}"
    with pytest.raises(JobError, match=r"takes no batch size; leave global_batch_size out$"):
        load(COLLECTIVE + rest.replace("batch_size", "global_batch_size"))


def test_nor_is_it_told_to_put_one_elsewhere() -> None:
    with pytest.raises(JobError) as caught:
        load(HEAD + "workload: {kind: collective, batch_size: 4}\nmatrix: {world_size: 2}\n")
    assert str(caught.value) == f"job.yaml:3:30: workload.batch_size: {REFUSED}"


def test_a_workload_without_batches_needs_no_axis_at_all() -> None:
    assert load(HEAD + "workload: {kind: gemm}\nmatrix: {precision: bf16}\n").settings.keys() == {
        "world_size",
        "precision",
        "cuda_graph",
        "devices",
        "strategy",
        "m",
        "n",
        "k",
    }


def test_include_lacks_no_batch_size_where_there_is_none() -> None:
    text = "matrix: {world_size: [2], size_bytes: 8}\ninclude: [{world_size: 4, size_bytes: 16}]\n"
    assert load(COLLECTIVE + text).include == ({"world_size": 4, "size_bytes": 16},)
    with pytest.raises(
        JobError, match=r"include\[0\]: must give every axis of the job, lacks size"
    ):
        load(COLLECTIVE + text.replace(", size_bytes: 16", ""))
