import threading
from datetime import UTC, datetime

import pytest
from builders import make_device
from fakes import make_devices, make_measurement, make_point, make_started

from raybench.errors import DETAIL_CHARACTERS, ClusterError
from raybench.job.model import Measure
from raybench.records import Failure, Status, Task
from raybench.sweep.loop import InFlight, RunningAttempt, make_record_of
from raybench.sweep.scheduler import Attempt


def begun(running, cluster, sizes):
    """Start a point for each batch size, and return when the last has ended."""
    for index, size in enumerate(sizes):
        attempt = Attempt(index=index, point=make_point(batch_size=size), number=1)
        task, before = Task(point=attempt.point, settings=Measure()), set(threading.enumerate())
        running.submit(attempt, task, (0,), cluster.devices)
        for thread in set(threading.enumerate()) - before:
            thread.join()


@pytest.fixture
def cluster():
    def answer(point, rank):
        if point.batch_size == 13:
            raise ClusterError("the head is gone")
        return make_measurement(rank)

    return make_started(make_devices(a=1), answer)


def test_what_has_ended_by_now_is_taken_together_up_to_sixty_four(cluster):
    running = InFlight(cluster)
    begun(running, cluster, range(20, 90))
    taken = [running.next_finished(None), running.next_finished(None)]
    assert [len(each) for each in taken] == [64, 6]
    indices = [attempt.index for each in taken for attempt, _ in each]
    assert indices == list(range(70))
    assert running.is_empty
    assert running.next_finished(0.01) == []


def test_attempts_that_ended_before_the_cluster_was_lost_are_kept(cluster):
    running = InFlight(cluster)
    begun(running, cluster, [1, 2, 13])
    assert [attempt.index for attempt, _ in running.next_finished(None)] == [0, 1]
    with pytest.raises(ClusterError, match="the head is gone"):
        running.next_finished(None)
    assert [attempt.attempt.index for attempt in running.now] == [2]


def record_of(point=None, *, status=Status.ERROR, error_type="ValueError", **facts):
    """The record of a lone rank that failed."""
    failure = Failure(rank=0, status=status, error_type=error_type, message="no", **facts)
    attempt = Attempt(index=0, point=point or make_point(), number=1)
    running = RunningAttempt(
        attempt=attempt,
        devices=(make_device(),),
        started_at=datetime.now(UTC),
        outcome=(failure,),
    )
    return make_record_of(running)


def test_the_last_lines_of_a_rank_stand_below_its_traceback():
    lines = [f"line {number}" for number in range(20)]
    told = record_of(detail="Traceback\nValueError: no", output="\n".join(lines)).error_detail
    last = ["the last lines that rank 0 wrote:", *lines[-10:]]
    assert told.splitlines() == ["Traceback", "ValueError: no", "", *last]


def test_a_script_that_ended_itself_says_why_in_its_last_line():
    output = "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --x"
    message = record_of(output=output, error_type="ScriptExit").error_message
    assert message.endswith("no; its last line: train.py: error: unrecognized arguments: --x")
    assert "last line" not in record_of(output=output).error_message


@pytest.mark.parametrize("output", ["", "o" * DETAIL_CHARACTERS])
def test_a_detail_is_no_longer_than_what_readers_take(output):
    found = record_of(detail="t" * (DETAIL_CHARACTERS + 1), output=output)
    assert len(found.error_detail) == DETAIL_CHARACTERS
    assert found.error_detail.startswith("[cut: ")


def test_a_point_that_ran_out_of_memory_names_the_estimate_and_what_fits():
    params = {"grad_accumulation": 1, "hidden": 65_536, "layers": 1, "mode": "train"}
    point = make_point(params=params, batch_size=4_194_304)
    record = record_of(point, status=Status.OOM, error_type="OutOfMemoryError")
    assert record.mem_estimate_bytes
    assert "no; estimated " in record.error_message
    assert " of 140 GiB; what fits by the estimate: batch_size " in record.error_message
