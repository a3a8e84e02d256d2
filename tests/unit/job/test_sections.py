"""Sizes and ranges of sizes in a job file, as nccl-tests takes them with -b, -e and -f."""

import pytest

from jobs import load, problems_of

HEAD = "version: 1\nname: sizes\nworkload: {kind: collective}\nbaseline: {}\n"


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
def test_a_range_stands_for_its_sizes(given, sizes):
    job = load(HEAD + f"matrix: {{world_size: [2], size_bytes: {given}}}\n")
    assert list(job.axes["size_bytes"]) == sizes
    listed = load(HEAD + f"matrix: {{world_size: [2], size_bytes: {sizes}}}\n")
    assert job.meaning_sha256 == listed.meaning_sha256


def test_ranges_go_into_overrides_zips_and_excludes_and_sizes_anywhere():
    text = HEAD + "matrix: {world_size: [2]}\n"
    zipped = text + "zip: [{size_bytes: 8:32:x2, cuda_graph: [true, true, false]}]\n"
    assert load(zipped).zip[0]["size_bytes"] == (8, 16, 32)
    assert load(text, "matrix.size_bytes=4KiB,8:16:x2").axes["size_bytes"] == (4096, 8, 16)
    text = HEAD + "matrix: {world_size: [2], size_bytes: 8:64:x2}\n"
    assert load(text + "exclude: [{size_bytes: 16:64:x2}]\n").exclude[0]["size_bytes"] == (
        *(16, 32, 64),
    )
    text += "include: [{world_size: 4, size_bytes: 1KiB}]\n"
    assert load(text).include[0]["size_bytes"] == 1024


@pytest.mark.parametrize(
    "given",
    [
        *("8:1GiB", "16Gb", "0:64:x2", "0.3KiB", "8:64:x1", "64:8:x2", "many"),
    ],
)
def test_what_is_no_size_is_refused_where_it_stands(given):
    text = f"matrix:\n  world_size: [2]\n  size_bytes: [8, '{given}']\n"
    [line] = problems_of(HEAD + text)
    assert line.startswith(
        "job.yaml:7:19: matrix.size_bytes[1]: must be bytes, as in 4096 or 4KiB; "
    )
    assert line.endswith(f"as in 8:1GiB:x2, given '{given}'")


def test_a_parameter_takes_one_size():
    text = HEAD.replace("collective}", "collective, size_bytes: 8:64:x2}")
    text += "matrix: {world_size: [2]}\n"
    assert "workload.size_bytes: must be one value" in problems_of(text)[0]
    one = load(text.replace("8:64:x2", "1MiB"))
    assert one.workload.parameters["size_bytes"] == 2**20
