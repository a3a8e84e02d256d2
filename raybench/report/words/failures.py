"""Why points failed, in words."""

from __future__ import annotations

import re

from raybench.records.hang import HangVerdict
from raybench.records.record import Record
from raybench.records.status import Cause, Status
from raybench.report.words.hangs import hang
from raybench.results.point_row import PointRow

# The message of torch.OutOfMemoryError without its advice on fragmentation.
_OUT_OF_MEMORY = re.compile(
    r".*Tried to allocate (?P<needed>[\d.]+ \w+)\. GPU \d+ has a total capacity of "
    r"(?P<total>[\d.]+ \w+) of which (?P<free>[\d.]+ \w+) is free\.[^;]*"
)

# Estimates that versions of raybench append to the message of torch.
_ESTIMATE = re.compile(r"; (estimated|by an estimate,) .*")


def failure_of_row(row: PointRow, *, with_place: bool = True) -> str:
    """Return on one line why a point failed; "" if no reason is known.

    Args:
        row: the point.
        with_place: begin with rank, host and device, as `rank 0 (node1, cuda:0): SystemExit: 3`.
    """
    if row.error_message is None:
        return ""
    if row.hang is not None:
        return _hang_words(row.hang, row.error_type)
    text = _reason(row.status, row.error_type, row.error_message)
    if not with_place or row.error_rank is None or row.error_host is None:
        return text
    return f"{_place(row.error_rank, row.error_host, row.error_device)}: {text}"


def failure_of_record(record: Record) -> str:
    """Return on one line why an attempt failed, with rank, host and device."""
    if record.hang is not None:
        return _hang_words(record.hang, record.error_type)
    text = _reason(record.status, record.error_type, record.error_message or "")
    if record.error_rank is None or not record.devices:
        return text
    device = record.devices[record.error_rank]
    return f"{_place(record.error_rank, device.host, f'{device.kind}:{device.index}')}: {text}"


def without_estimate(reason: str) -> str:
    """Return the reason why a point ran out of memory, without the estimate at its end."""
    return _ESTIMATE.sub("", reason)


def _reason(status: str, error_type: str | None, message: str) -> str:
    """Return a message on one line; with status `error`, after the class of the exception."""
    text = " ".join(message.split())
    if status == Status.OOM:
        words = r"the step needed \g<needed> more, and \g<free> of \g<total> were free"
        text = _OUT_OF_MEMORY.sub(words, text)
    if status != Status.ERROR or error_type is None or text.startswith(error_type):
        return text
    return f"{error_type}: {text}".removesuffix(": ")


def _hang_words(verdict: HangVerdict, error_type: str | None) -> str:
    """Return which rank hangs, and which limit of the job ended the point."""
    limit = "hang_s" if error_type == Cause.HANG else "timeout_s"
    return f"{hang(verdict)} (the point was ended by measure.{limit})"


def _place(rank: int, host: str | None, device: str | None) -> str:
    return f"rank {rank} ({host}, {device})"
