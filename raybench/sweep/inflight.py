"""The points that run now, each on a thread of its own, and the records that become of them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from queue import Empty, SimpleQueue

from raybench.cluster import Cluster
from raybench.cluster.failures import cause_of
from raybench.job import memory
from raybench.job.point import Point, Precision
from raybench.records import Answer, Cause, Device, Failure, Measurement, Record, Status, Task
from raybench.records.checked_answers import check_answers
from raybench.records.failure_text import DETAIL_CHARACTERS, shorten, shorten_start
from raybench.results.metrics.conditions import crowding
from raybench.sweep.scheduler import Attempt

# More of them in one part would make readers wait for the first, and take memory together.
_MOST_AT_ONCE = 64
_LAST_LINES = 10
# Of a line in a message.
_LINE_CHARACTERS = 500


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    """An attempt that runs now. neighbours: point_ids beside it; a dict keeps their order."""

    attempt: Attempt
    devices: tuple[Device, ...]
    started_at: datetime
    neighbours: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finished:
    index: int
    outcome: tuple[Answer, ...] | BaseException
    duration_s: float
    others: tuple[str, ...]


class InFlight:
    """Starts attempts on a cluster and gives back their records, one after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._running: dict[int, RunningAttempt] = {}
        self._by_node: defaultdict[str, dict[int, None]] = defaultdict(dict)
        self._finished: SimpleQueue[_Finished] = SimpleQueue()

    @property
    def is_empty(self) -> bool:
        """Whether no attempt runs."""
        return not self._running

    @property
    def now(self) -> Iterable[RunningAttempt]:
        """The attempts that run, in the order of their starts."""
        return self._running.values()

    def submit(
        self, attempt: Attempt, task: Task, worker_ids: Sequence[int], devices: tuple[Device, ...]
    ) -> None:
        """Run the attempt on the workers with these ids."""
        running = RunningAttempt(attempt=attempt, devices=devices, started_at=datetime.now(UTC))
        self._note_neighbours(running)
        self._running[attempt.index] = running
        # A daemon: a cluster that is stuck must not keep the process from ending.
        threading.Thread(
            target=self._run,
            args=(attempt.index, task, worker_ids),
            name=f"point {attempt.point.point_id}",
            daemon=True,
        ).start()

    def next_finished(self, timeout_s: float | None) -> list[tuple[Attempt, Record]]:
        """Wait for the next attempt that ends, and take those that have too; none when none does.

        Raises what `Cluster.run` raised; that attempt counts as running then.
        """
        ended: list[tuple[Attempt, Record]] = []
        with suppress(Empty):
            while len(ended) < _MOST_AT_ONCE:
                finished = self._finished.get(block=not ended, timeout=timeout_s)
                if isinstance(finished.outcome, BaseException):
                    if not ended:
                        raise finished.outcome
                    self._finished.put(finished)  # what has ended well comes first
                    break
                ended.append(self._record(finished, finished.outcome))
        return ended

    def _record(self, finished: _Finished, answers: tuple[Answer, ...]) -> tuple[Attempt, Record]:
        running = self._running.pop(finished.index)
        for device in running.devices:
            self._by_node[device.node_id].pop(finished.index, None)
        record = make_record_of(
            running.attempt,
            answers,
            running.devices,
            started_at=running.started_at,
            duration_s=finished.duration_s,
            neighbours=tuple(running.neighbours),
            others=finished.others,
        )
        return running.attempt, record

    def _run(self, index: int, task: Task, worker_ids: Sequence[int]) -> None:
        started_s = time.perf_counter()
        outcome: tuple[Answer, ...] | BaseException
        others: tuple[str, ...] = ()
        try:
            seen = self._cluster.watch_other_users(worker_ids)
            outcome = self._cluster.run(task, worker_ids)
            duration_s = time.perf_counter() - started_s
            others = seen()
        except BaseException as error:
            # It is raised again on the thread that waits.
            outcome, duration_s = error, time.perf_counter() - started_s
        self._finished.put(
            _Finished(index=index, outcome=outcome, duration_s=duration_s, others=others)
        )

    def _note_neighbours(self, running: RunningAttempt) -> None:
        for node_id in {device.node_id: None for device in running.devices}:
            for index in self._by_node[node_id]:
                other = self._running[index]
                other.neighbours[running.attempt.point.point_id] = None
                running.neighbours[other.attempt.point.point_id] = None
            self._by_node[node_id][running.attempt.index] = None


def make_unmeasured(
    attempt: Attempt,
    cause: Cause,
    reason: str,
    *,
    started_at: datetime,
    neighbours: tuple[str, ...] = (),
) -> Record:
    """Make the record of an attempt that no rank has answered."""
    return Record(
        point=attempt.point,
        attempt=attempt.number,
        round=attempt.round,
        control_of=attempt.control_of,
        status=cause.status,
        started_at=started_at,
        duration_s=(datetime.now(UTC) - started_at).total_seconds(),
        error_type=cause,
        error_message=reason,
        neighbours=neighbours,
    )


def make_record_of(
    attempt: Attempt,
    answers: Sequence[Answer],
    devices: tuple[Device, ...],
    *,
    started_at: datetime,
    duration_s: float,
    neighbours: tuple[str, ...],
    others: tuple[str, ...] = (),
) -> Record:
    """Return the record of an attempt from the answers of its ranks.

    It has the measurements of all ranks, or none: a rank whose peer failed may have measured
    garbage.

    others: who used the devices besides, other than points of this run.
    """
    outputs = tuple(answer.output for answer in answers)
    answers = check_answers(answers)
    failure = cause_of(answers)
    measurements = [answer for answer in answers if isinstance(answer, Measurement)]
    # The formulas are those of CUDA devices.
    is_cuda = all(device.kind == "cuda" for device in devices)
    estimate_bytes = memory.estimate(attempt.point) if is_cuda else None
    return Record(
        point=attempt.point,
        attempt=attempt.number,
        round=attempt.round,
        control_of=attempt.control_of,
        status=failure.status if failure else Status.OK,
        started_at=started_at,
        duration_s=duration_s,
        devices=devices,
        measurements=() if failure else tuple(measurements),
        error_type=failure.error_type if failure else None,
        error_message=(
            _explain(failure, outputs[failure.rank], devices, attempt.point, estimate_bytes)
            if failure
            else None
        ),
        error_rank=failure.rank if failure else None,
        error_detail=_detail(failure, outputs[failure.rank]) if failure else None,
        outputs=outputs if any(outputs) else (),
        neighbours=(*neighbours, *others),
        warnings=() if failure else _warnings(measurements, devices, others),
        mem_estimate_bytes=estimate_bytes,
    )


def _explain(
    failure: Failure,
    output: str,
    devices: Sequence[Device],
    point: Point,
    estimate_bytes: int | None,
) -> str:
    """Return the message of a failure: its device, what went wrong, and what would fit into memory.

    For a script that ended itself the last line of its output is added, which says why.
    """
    device = devices[failure.rank]
    text = f"rank {failure.rank} ({device.host}, {device.kind}:{device.index}): {failure.message}"
    if failure.error_type == Cause.SCRIPT_EXIT and output:
        return f"{text}; its last line: {shorten(output.splitlines()[-1], _LINE_CHARACTERS)}"
    if failure.status is Status.OOM and estimate_bytes and device.memory_bytes:
        return f"{text}; {memory.explain_oom(point, estimate_bytes, device.memory_bytes)}"
    return text


def _detail(failure: Failure, output: str) -> str | None:
    """Return the detail of a failure with the last ten lines that its rank wrote; None if empty.

    output: of the rank. Its lines are not repeated where the detail has the last one already.
    """
    whole, last = failure.detail, output.splitlines()[-_LAST_LINES:]
    if last and last[-1] not in whole:
        told = "\n".join([f"the last lines that rank {failure.rank} wrote:", *last])
        whole = f"{whole.rstrip()}\n\n{told}" if whole else told
    return shorten_start(whole, DETAIL_CHARACTERS) or None


def _warnings(
    measurements: Sequence[Measurement], devices: Sequence[Device], others: Sequence[str]
) -> tuple[str, ...]:
    told = [warning for measurement in measurements for warning in measurement.warnings]
    not_alone = [f"not alone: {other}" for other in others]
    return tuple(dict.fromkeys([*told, *not_alone, *crowding(devices)]))


class SustainedRates:
    """The TFLOP/s that devices sustain in matrix products, measured once for each precision.

    It is a property of the device and not of its worker: new workers, as of each round, would find
    the same, at 0.4 s for each precision.
    """

    def __init__(self) -> None:
        self._tflops: dict[tuple[str, Precision], float | None] = {}

    def are_known(self, devices: Sequence[Device], precision: Precision) -> bool:
        """Return whether the rates of all these devices in this precision are known."""
        return all((device.lasting_name, precision) in self._tflops for device in devices)

    def complete(self, record: Record) -> Record:
        """Learn what a record tells, and add what its workers were not asked for."""
        known = [
            self._complete(measurement, device, record.point.precision)
            for measurement, device in zip(record.measurements, record.devices, strict=False)
        ]
        return replace(record, measurements=tuple(known)) if known else record

    def _complete(
        self, measurement: Measurement, device: Device, precision: Precision
    ) -> Measurement:
        key = device.lasting_name, precision
        if measurement.gemm_tflops is not None or key not in self._tflops:
            self._tflops[key] = measurement.gemm_tflops
        return replace(measurement, gemm_tflops=self._tflops[key])
