"""The loop of a run: each point of the plan becomes one record, whatever happens to it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from raybench.cluster import Cluster
from raybench.cluster.ranks import Isolation, Strategy
from raybench.errors import ClusterError
from raybench.job import Measure
from raybench.plan import Plan
from raybench.point import Point
from raybench.records import Answer, Device, Failure, Measurement, Record, Status, Task
from raybench.scheduler import Skip, decide, is_tried_again

# What most likely made a point fail, when its ranks fail in different ways: the peers of a dead
# rank report broken connections, and those of a slow one nothing at all.
_CAUSES_FIRST = (Status.OOM, Status.LOST, Status.ERROR, Status.TIMEOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How every point of the run is placed and measured.

    profiled: point_ids of those that are profiled too.
    """

    measure: Measure
    strategy: Strategy
    stop_on_error: bool
    isolation: Isolation = "cluster"
    profiled: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PointStarted:
    """The point is on its way to the workers of `devices`."""

    index: int
    point: Point
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PointFinished:
    """The point has its record, and the record is written."""

    index: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class PointRetried:
    """The point has a record of an attempt that was lost, which is written; it is tried again."""

    index: int
    record: Record


Event = PointStarted | PointFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """One attempt to be made. tries: how many this sweep makes of it, this one included."""

    index: int
    point: Point
    attempt: int
    tries: int = 1


def sweep(
    plan: Plan,
    settings: SweepSettings,
    cluster: Cluster,
    write: Callable[[int, Record], None],
    attempts: Mapping[str, int] | None = None,
) -> Iterator[Event | PointRetried]:
    """Run the points in order; `write` gets each record before the event that tells of it.

    attempts: point_id -> number of its first attempt here; other points are left out. Without it
    all are run, from 1. An index is always the point's position in the whole plan.
    An interrupt writes the point in flight as cancelled, a ClusterError as lost, and both go on
    to the caller.
    """
    stopped_by: str | None = None
    ran_out: list[Point] = []
    turns = deque(_turns(plan, attempts))
    while turns:
        turn = turns.popleft()
        index, point = turn.index, turn.point
        decision = decide(
            point, cluster.devices, cluster.capacity, settings.strategy, stopped_by, ran_out
        )
        if isinstance(decision, Skip):
            skipped = (Status.SKIPPED, decision.error_type, decision.reason)
            record = _unmeasured(turn, datetime.now(UTC), *skipped)
        else:
            devices = tuple(cluster.devices[seat] for seat in decision.seats)
            yield PointStarted(index=index, point=point, devices=devices)
            record = _attempted(turn, decision.seats, settings, cluster, write)
        write(index, record)
        if is_tried_again(record.status, turn.tries):
            turns.appendleft(replace(turn, attempt=turn.attempt + 1, tries=turn.tries + 1))
            yield PointRetried(index=index, record=record)
            continue
        if record.status is Status.OOM:
            ran_out.append(point)
        if settings.stop_on_error and record.status not in (Status.OK, Status.SKIPPED):
            stopped_by = stopped_by or point.point_id
        yield PointFinished(index=index, record=record)


def _turns(plan: Plan, attempts: Mapping[str, int] | None) -> Iterator[_Turn]:
    for index, point in enumerate(plan.points):
        attempt = 1 if attempts is None else attempts.get(point.point_id)
        if attempt is not None:
            yield _Turn(index=index, point=point, attempt=attempt)


def _attempted(
    turn: _Turn,
    seats: Sequence[int],
    settings: SweepSettings,
    cluster: Cluster,
    write: Callable[[int, Record], None],
) -> Record:
    """The attempt on the workers of these seats; one that ends the run is written here."""
    started_at, started_s = datetime.now(UTC), time.perf_counter()
    devices = tuple(cluster.devices[seat] for seat in seats)
    profile = turn.point.point_id in settings.profiled
    task = Task(point=turn.point, settings=settings.measure, profile=profile)
    try:
        answers = cluster.run(task, seats)
    except KeyboardInterrupt:
        interrupted = (Status.CANCELLED, "Interrupted", "by the user")
        write(turn.index, _unmeasured(turn, started_at, *interrupted))
        raise
    except ClusterError as error:
        write(turn.index, _unmeasured(turn, started_at, Status.LOST, "ClusterError", str(error)))
        raise
    return _record(turn, answers, devices, started_at, time.perf_counter() - started_s)


def _unmeasured(
    turn: _Turn, started_at: datetime, status: Status, error_type: str, reason: str
) -> Record:
    return Record(
        point=turn.point,
        attempt=turn.attempt,
        status=status,
        started_at=started_at,
        duration_s=(datetime.now(UTC) - started_at).total_seconds(),
        error_type=error_type,
        error_message=reason,
    )


def _record(
    turn: _Turn,
    answers: Sequence[Answer],
    devices: tuple[Device, ...],
    started_at: datetime,
    duration_s: float,
) -> Record:
    """All measurements, or none: a rank whose peer failed may have measured garbage."""
    failure = _cause(answers)
    measurements = [answer for answer in answers if isinstance(answer, Measurement)]
    return Record(
        point=turn.point,
        attempt=turn.attempt,
        status=failure.status if failure else Status.OK,
        started_at=started_at,
        duration_s=duration_s,
        devices=devices,
        measurements=() if failure else tuple(measurements),
        error_type=failure.error_type if failure else None,
        error_message=_explained(failure, devices) if failure else None,
        warnings=() if failure else _warnings(measurements, devices),
    )


def _cause(answers: Sequence[Answer]) -> Failure | None:
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    own = [failure for failure in failures if failure.error_type != "PeerFailed"]
    candidates = own or failures
    return min(candidates, key=lambda failure: _CAUSES_FIRST.index(failure.status), default=None)


def _explained(failure: Failure, devices: Sequence[Device]) -> str:
    device = devices[failure.rank]
    return f"rank {failure.rank} ({device.host}, {device.kind}:{device.index}): {failure.message}"


def _warnings(measurements: Sequence[Measurement], devices: Sequence[Device]) -> tuple[str, ...]:
    told = [warning for measurement in measurements for warning in measurement.warnings]
    return tuple(dict.fromkeys([*told, *_crowding(devices)]))


def _crowding(devices: Sequence[Device]) -> Iterator[str]:
    """CPU workers are devices only as long as each has a core of its own."""
    cores = {device.node_id: device.cpu_count for device in devices if device.kind == "cpu"}
    for node_id, count in cores.items():
        workers = sum(device.node_id == node_id for device in devices)
        if workers > count:
            yield f"{workers} CPU workers share {count} cores of one node"
