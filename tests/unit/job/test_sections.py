"""Sizes and ranges of sizes in a job file, as nccl-tests takes them with -b, -e and -f."""

from __future__ import annotations

from pathlib import Path

import pytest

from raybench.errors import JobError
from raybench.job.model import Job, load_job

HEAD = "version: 1\nname: sizes\nworkload: {kind: collective}\nbaseline: {}\n"


def load(text: str, tmp_path: Path, *overrides: str) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(HEAD + text)
    return load_job(path, overrides)


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ("8:1GiB:x2", [8 * 2**power for power in range(28)]),
        ("1KiB:100KiB:x10", [1024, 10240, 102400]),
        ("4KiB", [4096]),
        ("4kB", [4000]),
        ("1.5MiB", [3 * 2**19]),
        ("8:8:x2", [8]),
        ("[4KiB, 8:64:x4, 100]", [4096, 8, 32, 100]),
        ("64", [64]),
    ],
)
def test_a_range_stands_for_its_sizes(given: str, sizes: list[int], tmp_path: Path) -> None:
    job = load(f"matrix: {{world_size: [2], size_bytes: {given}}}\n", tmp_path)
    assert list(job.axes["size_bytes"]) == sizes


def test_ranges_go_into_overrides_zips_and_excludes_and_sizes_anywhere(tmp_path: Path) -> None:
    text = (
        "matrix: {world_size: [2]}\nzip:\n  - {size_bytes: 8:32:x2, cuda_graph: [true, true, no]}\n"
    )
    with pytest.raises(JobError, match="cuda_graph"):
        load(text, tmp_path)
    job = load(text.replace("no]", "false]"), tmp_path)
    assert job.zip[0]["size_bytes"] == (8, 16, 32)
    job = load("matrix: {world_size: [2]}\n", tmp_path, "matrix.size_bytes=4KiB,8:16:x2")
    assert job.axes["size_bytes"] == (4096, 8, 16)
    text = "matrix: {world_size: [2], size_bytes: 8:64:x2}\nexclude: [{size_bytes: 16:64:x2}]\n"
    assert load(text, tmp_path).exclude[0]["size_bytes"] == (16, 32, 64)
    text = (
        "matrix: {world_size: [2], size_bytes: 8}\ninclude: [{world_size: 4, size_bytes: 1KiB}]\n"
    )
    assert load(text, tmp_path).include[0]["size_bytes"] == 1024


def test_a_range_means_the_same_job_as_its_sizes(tmp_path: Path) -> None:
    one, other = (
        load(f"matrix: {{world_size: [2], size_bytes: {given}}}\n", tmp_path)
        for given in ("8:32:x2", "[8, 16, 32]")
    )
    assert one.meaning_sha256 == other.meaning_sha256


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("8:1GiB", "must be bytes, as in 4096 or 4KiB, or a range FIRST:LAST:xFACTOR"),
        ("16Gb", "must be bytes, as in 4096 or 4KiB, or a range FIRST:LAST:xFACTOR"),
        ("0:64:x2", "must be bytes"),
        ("0.3KiB", "must be bytes"),
        ("8:64:x1", "the factor of a range must be at least 2, given '8:64:x1'"),
        ("64:8:x2", "the last size of a range must not be below the first"),
        ("many", "must be an integer, given 'many'"),
    ],
)
def test_what_is_wrong_with_a_range_is_said_where_it_stands(
    given: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError) as caught:
        load(f"matrix:\n  world_size: [2]\n  size_bytes: [8, '{given}']\n", tmp_path)
    [line] = str(caught.value).splitlines()
    assert f"job.yaml:7:19: matrix.size_bytes[1]: {message}" in line


def test_a_parameter_takes_one_size(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    head = HEAD.replace("collective}", "collective, size_bytes: {}}}".format("8:64:x2"))
    path.write_text(head + "matrix: {world_size: [2]}\n")
    with pytest.raises(JobError, match=r"workload\.size_bytes: must be one size, as in 4KiB"):
        load_job(path)
    path.write_text(path.read_text().replace("8:64:x2", "1MiB"))
    assert load_job(path).workload.parameters["size_bytes"] == 2**20
