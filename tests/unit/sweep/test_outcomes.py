"""What becomes of the answers of a point's ranks."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from builders import make_device, make_point

from raybench.records import Failure, Record, Status
from raybench.records.failure_text import DETAIL_CHARACTERS
from raybench.sweep.outcomes import make_record_of
from raybench.sweep.scheduler import Attempt


def record_of(detail: str, output: str) -> Record:
    """The record of a lone rank that failed with this traceback and had written this."""
    failure = Failure(
        rank=0,
        status=Status.ERROR,
        error_type="ValueError",
        message="no",
        detail=detail,
        output=output,
    )
    return make_record_of(
        Attempt(index=0, point=make_point(), number=1),
        (failure,),
        (make_device(),),
        started_at=datetime.now(UTC),
        duration_s=1.0,
        neighbours=(),
    )


def test_the_last_lines_of_a_rank_stand_below_its_traceback():
    lines = [f"line {number}" for number in range(20)]
    found = record_of("Traceback\nValueError: no", "\n".join(lines))
    assert found.error_detail == "\n".join(
        ["Traceback", "ValueError: no", "", "the last lines that rank 0 wrote:", *lines[-10:]]
    )


@pytest.mark.parametrize("output", ["", "o" * DETAIL_CHARACTERS])
def test_a_detail_is_no_longer_than_what_readers_take(output):
    found = record_of("t" * (DETAIL_CHARACTERS + 1), output)
    assert found.error_detail is not None
    assert len(found.error_detail) == DETAIL_CHARACTERS
    assert found.error_detail.startswith("[cut: ")
