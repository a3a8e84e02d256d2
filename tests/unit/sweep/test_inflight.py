from __future__ import annotations

import time

import pytest
from fakes import make_cluster, make_devices, make_measurement, make_point

from raybench.errors import ClusterError
from raybench.job.model import Measure
from raybench.records import Answer, Task
from raybench.sweep.inflight import Flights
from raybench.sweep.scheduler import Turn


def begun(flights: Flights, cluster, sizes) -> None:
    """Start a point for each batch size, and return when the last has ended."""
    for index, size in enumerate(sizes):
        turn = Turn(index=index, point=make_point(batch_size=size), attempt=1)
        flights.launch(turn, Task(point=turn.point, settings=Measure()), (0,), cluster.devices)
        while flights._landings.qsize() <= index:
            time.sleep(0.001)


@pytest.fixture
def cluster():
    def answer(point, rank: int) -> Answer:
        if point.batch_size == 13:
            raise ClusterError("the head is gone")
        return make_measurement(rank)

    made = make_cluster(make_devices(a=1), answer)
    made.start(1, "pack")
    return made


def test_what_has_ended_by_now_is_taken_together_up_to_sixty_four(cluster) -> None:
    flights = Flights(cluster)
    begun(flights, cluster, range(20, 90))
    taken = [flights.landed(None), flights.landed(None)]
    assert [len(each) for each in taken] == [64, 6]
    indices = [turn.index for each in taken for turn, _ in each]
    assert indices == list(range(70))
    assert flights.are_none
    assert flights.landed(0.01) == []


def test_attempts_that_ended_before_the_cluster_was_lost_are_kept(cluster) -> None:
    flights = Flights(cluster)
    begun(flights, cluster, [1, 2, 13])
    assert [turn.index for turn, _ in flights.landed(None)] == [0, 1]
    with pytest.raises(ClusterError, match="the head is gone"):
        flights.landed(None)
    assert [flight.turn.index for flight in flights.now] == [2]
