"""`raybench sweep --script`, as a user calls it; nothing is started here."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import refusal_of

from raybench.cli import raybench as command_line
from raybench.errors import UsageError


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()


def dry_run(*arguments):
    words = ["sweep", "--dry-run", "--json", *arguments]
    result = CliRunner().invoke(command_line, words, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return json.loads(result.stdout)


def plan(*arguments):
    return dry_run(*arguments)["points"]


def test_what_stands_behind_the_dashes_is_the_scripts():
    options = ["--script", "train.py", "--world-size", "1,2", "--items-per-step", "64"]
    points = plan(*options, "--", "--batch-size", "64", "--name", "a b", "--set", "x")
    assert [point["world_size"] for point in points] == [1, 2]
    assert points[0]["args"] == "--batch-size 64 --name 'a b' --set x"
    assert points[0]["items_per_step"] == "64"


def test_axes_come_by_set_and_stand_in_the_arguments():
    options = ["--script", "train.py", "--set", "matrix.batch_size=8,16"]
    points = plan(*options, "--", "--batch-size", "{batch_size}")
    assert [point["batch_size"] for point in points] == [8, 16]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--script", "trian.py"], "--script trian.py: no such file, given 'trian.py'"),
        (["--script", "sub/none.py"], "no such file, given 'sub/none.py'; it is not in "),
        (["--script", "train.py", "--items-per-step", "{q"], "--items-per-step {q: a text names"),
        (["--script", "train.py", "--world-size", "0"], "--script train.py: matrix.world_size"),
        (["--script", "train.py", "--world-size", "x"], "must be counts of ranks, as in 1,2,4"),
        (["job.yaml", "--world-size", "1"], "go with --script; a job has them"),
        (["job.yaml", "other.yaml"], "one JOB only, given also other.yaml"),
        (["--script", "train.py", "--", "{lr}"], "--script train.py -- '{lr}': unknown setting"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    told = refusal_of(UsageError, plan, *arguments)
    assert message in told
    assert "nor in" not in told
    # There is no file whose lines could be named.
    assert not re.search(r":\d+:\d+:", told)


def test_the_job_has_a_name_that_runs_can_have():
    Path("_my train:v2.py").touch()
    assert dry_run("--script", "_my train:v2.py")["job"] == "my-train-v2"
