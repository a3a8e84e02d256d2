"""The points that run now, each on a thread of its own, and the records that become of them."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from queue import Empty, SimpleQueue

from raybench.cluster import Cluster
from raybench.cluster.failures import cause_of
from raybench.errors import DETAIL_CHARACTERS, shorten, shorten_start
from raybench.job import memory
from raybench.job.point import Point
from raybench.records import Answer, Cause, Device, Failure, Measurement, Record, Status, Task
from raybench.records.checked_answers import check_answers
from raybench.results.metrics.conditions import crowding
from raybench.sweep.scheduler import Attempt

# More of them in one part would make readers wait for the first, and take memory together.
_MOST_AT_ONCE = 64
_LAST_LINES = 10
# Of a line in a message.
_LINE_CHARACTERS = 500


@dataclass(slots=True, kw_only=True)
class RunningAttempt:
    """An attempt that runs now, or has just ended.

    neighbours: point_ids beside it; a dict keeps their order. outcome: the answers of its ranks, or
    what `Cluster.run` raised. others: who used the devices besides, other than points of this run.
    """

    attempt: Attempt
    devices: tuple[Device, ...]
    started_at: datetime
    neighbours: dict[str, None] = field(default_factory=dict)
    outcome: tuple[Answer, ...] | BaseException = ()
    duration_s: float = 0.0
    others: tuple[str, ...] = ()


class InFlight:
    """Starts attempts on a cluster and gives back their records, one after the other."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._running: dict[int, RunningAttempt] = {}
        self._by_node: defaultdict[str, dict[int, None]] = defaultdict(dict)
        self._finished: SimpleQueue[RunningAttempt] = SimpleQueue()

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
        for node_id in dict.fromkeys(device.node_id for device in devices):
            for index in self._by_node[node_id]:
                other = self._running[index]
                other.neighbours[attempt.point.point_id] = None
                running.neighbours[other.attempt.point.point_id] = None
            self._by_node[node_id][attempt.index] = None
        self._running[attempt.index] = running
        # A daemon: a cluster that is stuck must not keep the process from ending.
        threading.Thread(
            target=self._run,
            args=(running, task, worker_ids),
            name=f"point {attempt.point.point_id}",
            daemon=True,
        ).start()

    def next_finished(self, timeout_s: float | None) -> list[tuple[Attempt, Record]]:
        """Wait for the next attempt that ends; return it with all that have ended by then.

        Empty where none ends in time. Raises what `Cluster.run` raised; that attempt counts as
        running then.
        """
        ended: list[tuple[Attempt, Record]] = []
        with suppress(Empty):
            while len(ended) < _MOST_AT_ONCE:
                running = self._finished.get(block=not ended, timeout=timeout_s)
                if isinstance(running.outcome, BaseException):
                    if not ended:
                        raise running.outcome
                    self._finished.put(running)  # what has ended well comes first
                    break
                del self._running[running.attempt.index]
                for device in running.devices:
                    self._by_node[device.node_id].pop(running.attempt.index, None)
                ended.append((running.attempt, make_record_of(running, running.outcome)))
        return ended

    def _run(self, running: RunningAttempt, task: Task, worker_ids: Sequence[int]) -> None:
        started_s = time.perf_counter()
        try:
            seen = self._cluster.watch_other_users(worker_ids)
            running.outcome = self._cluster.run(task, worker_ids)
            running.duration_s = time.perf_counter() - started_s
            running.others = seen()
        except BaseException as error:
            running.outcome = error  # it is raised again on the thread that waits
        self._finished.put(running)


def make_unmeasured(
    attempt: Attempt,
    cause: Cause,
    reason: str,
    *,
    started_at: datetime,
    neighbours: Collection[str] = (),
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
        neighbours=tuple(neighbours),
    )


def make_record_of(running: RunningAttempt, answers: Sequence[Answer]) -> Record:
    """Return the record of an attempt from the answers of its ranks.

    It has the measurements of all ranks, or none: a rank whose peer failed may have measured
    garbage.
    """
    attempt, devices = running.attempt, running.devices
    outputs = tuple(answer.output for answer in answers)
    answers = check_answers(answers)
    # The formulas are those of CUDA devices.
    is_cuda = all(device.kind == "cuda" for device in devices)
    estimate_bytes = memory.estimate(attempt.point) if is_cuda else None
    record = Record(
        point=attempt.point,
        attempt=attempt.number,
        round=attempt.round,
        control_of=attempt.control_of,
        status=Status.OK,
        started_at=running.started_at,
        duration_s=running.duration_s,
        devices=devices,
        outputs=outputs if any(outputs) else (),
        neighbours=(*running.neighbours, *running.others),
        mem_estimate_bytes=estimate_bytes,
    )
    if failure := cause_of(answers):
        output = outputs[failure.rank]
        return replace(
            record,
            status=failure.status,
            error_type=failure.error_type,
            error_message=_explain(failure, output, devices, attempt.point, estimate_bytes),
            error_rank=failure.rank,
            error_detail=_detail(failure, output),
        )
    measurements = tuple(answer for answer in answers if isinstance(answer, Measurement))
    warnings = [warning for measurement in measurements for warning in measurement.warnings]
    warnings += [f"not alone: {other}" for other in running.others]
    warnings += crowding(devices)
    return replace(record, measurements=measurements, warnings=tuple(dict.fromkeys(warnings)))


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
