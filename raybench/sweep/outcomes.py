"""From what the ranks of a point answered to its record. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from raybench.cluster.failures import cause_of
from raybench.records import Answer, Cause, Device, Failure, Measurement, Record, Status
from raybench.records.checked_answers import check_answers
from raybench.records.failure_text import DETAIL_CHARACTERS, shorten_start
from raybench.results.quality import crowding
from raybench.sweep.scheduler import Attempt

_LAST_LINES = 10


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
    """All measurements, or none: a rank whose peer failed may have measured garbage.

    others: who used the devices besides, other than points of this run.
    """
    outputs = tuple(answer.output for answer in answers)
    answers = check_answers(answers)
    failure = cause_of(answers)
    measurements = [answer for answer in answers if isinstance(answer, Measurement)]
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
        error_message=_explain(failure, devices) if failure else None,
        error_rank=failure.rank if failure else None,
        error_detail=_detail(failure, outputs[failure.rank]) if failure else None,
        outputs=outputs if any(outputs) else (),
        neighbours=(*neighbours, *others),
        warnings=() if failure else _warnings(measurements, devices, others),
    )


def _explain(failure: Failure, devices: Sequence[Device]) -> str:
    device = devices[failure.rank]
    return f"rank {failure.rank} ({device.host}, {device.kind}:{device.index}): {failure.message}"


def _detail(failure: Failure, output: str) -> str | None:
    """Its detail, which may be the end of its log already, and the last lines that it wrote."""
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
