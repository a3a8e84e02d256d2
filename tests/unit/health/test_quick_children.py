"""Child processes of a quick check that do not answer."""

import os
import signal
import time
from pathlib import Path

import pytest

from raybench.hangs.processes import read_facts
from raybench.health.quick.children import Child, Death, Silence, ask, collect, end_all


@pytest.fixture
def start(monkeypatch):
    # For `tests.quick_child`: children do not import from the working directory.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    started = []

    def start_child(mode):
        started.append(Child("tests.quick_child", mode))
        return started[-1]

    yield start_child
    end_all(started)


def in_seconds(seconds):
    return time.monotonic() + seconds


def test_children_import_nothing_from_the_working_directory(start, tmp_path, monkeypatch):
    (tmp_path / "pickle.py").write_text("raise RuntimeError('a file of a user')")
    monkeypatch.chdir(tmp_path)
    assert ask({start("echo"): 1}, in_seconds(20.0)).received


def test_children_answer_together(start):
    children = [start("echo"), start("echo")]
    answers = ask({child: number for number, child in enumerate(children)}, in_seconds(20.0))
    assert [answers.received[child] for child in children] == [0, 1]
    assert not answers.lost


@pytest.mark.parametrize("mode", ["silent", "half"])
def test_silent_child_is_killed_at_its_deadline(start, mode):
    child = start(mode)
    began_s = time.monotonic()
    answers = collect([child], in_seconds(1.0))
    assert time.monotonic() - began_s < 3.0
    assert isinstance(answers.lost[child], Silence)
    assert not answers.lost[child].facts.has_ended
    deadline_s = in_seconds(5.0)
    while not read_facts(child.process_id).has_ended and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert read_facts(child.process_id).has_ended


def test_stopped_child_is_reported_as_stopped(start):
    child = start("echo")
    assert ask({child: 1}, in_seconds(20.0)).received
    os.kill(child.process_id, signal.SIGSTOP)
    answers = ask({child: 2}, in_seconds(0.5))
    assert answers.lost[child].facts.is_stopped


def test_dead_child_has_its_last_line(start):
    child = start("dies")
    answers = collect([child], in_seconds(20.0))
    assert answers.lost[child] == Death(exit_code=3, last_line="Xyz cannot be loaded")


def test_ended_children_are_gone(start):
    child = start("echo")
    assert ask({child: 1}, in_seconds(20.0)).received
    end_all([child])
    assert read_facts(child.process_id).has_ended
