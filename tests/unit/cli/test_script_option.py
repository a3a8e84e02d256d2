"""`raybench sweep --script`, as a user calls it; nothing is started here."""

import json
import re
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


@pytest.fixture
def dry_run(command):
    """What `raybench sweep --dry-run --json WORDS` ends with."""
    return lambda *words: command("sweep", "--dry-run", "--json", *words, results=None)


def points_of(done):
    return json.loads(done.out)["points"]


def test_what_stands_behind_the_dashes_is_the_scripts(dry_run):
    options = ["--script", "train.py", "--world-size", "1,2", "--items-per-step", "64"]
    points = points_of(dry_run(*options, "--", "--batch-size", "64", "--name", "a b", "--set", "x"))
    assert [point["world_size"] for point in points] == [1, 2]
    assert points[0]["args"] == "--batch-size 64 --name 'a b' --set x"
    assert points[0]["items_per_step"] == "64"


def test_axes_from_set_fill_script_arguments(dry_run):
    options = ["--script", "train.py", "--set", "matrix.batch_size=8,16"]
    points = points_of(dry_run(*options, "--", "--batch-size", "{batch_size}"))
    assert [point["batch_size"] for point in points] == [8, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--script", "trian.py"], "--script trian.py: no such file, given 'trian.py'"),
        (["--script", "sub/none.py"], "no such file, given 'sub/none.py'; it is not in "),
        (["--script", "train.py", "--items-per-step", "{q"], "--items-per-step {q: a text names"),
        (["--script", "train.py", "--world-size", "0"], "--world-size 0: must be greater"),
        (["--script", "train.py", "--world-size", "x"], "must be counts of ranks, as in 1,2,4"),
        (["job.yaml", "--world-size", "1"], "go with --script; a job has them"),
        (["job.yaml", "other.yaml"], "one JOB only, given also other.yaml"),
        (["--script", "train.py", "--", "{lr}"], "--script train.py -- '{lr}': unknown setting"),
    ],
)
def test_a_mistake_is_one_line(dry_run, arguments, message):
    told = dry_run(*arguments).refusal
    assert message in told
    assert "nor in" not in told
    # There is no file whose lines could be named.
    assert not re.search(r":\d+:\d+:", told)


def test_script_name_becomes_a_valid_job_name(dry_run):
    Path("_my train:v2.py").touch()
    assert json.loads(dry_run("--script", "_my train:v2.py").out)["job"] == "my-train-v2"
