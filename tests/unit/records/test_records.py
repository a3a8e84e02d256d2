"""Metrics, statuses and causes."""

import pickle

import pytest

from raybench.errors import UsageError
from raybench.records.measurement import Failure
from raybench.records.metrics import Metric, combine_ranks
from raybench.records.status import Cause
from raybench.results.metrics import relate_to_step


@pytest.mark.parametrize("cause", Cause)
def test_failure_keeps_status_after_pickling(cause):
    failure = Failure.of(cause, rank=3, message="so it was")
    assert (failure.status, failure.error_type) == (cause.status, cause.value)
    assert pickle.loads(pickle.dumps(failure)) == failure
    assert not failure.worker_reusable


@pytest.mark.parametrize(
    ("how", "value"), [("max", 4), ("min", 1), ("mean", 2.5), ("median", 2.5), ("sum", 10)]
)
def test_ranks_are_combined_as_metric_says(how, value):
    assert combine_ranks(how, [1, 4, 2, 3]) == value
    # A sum needs all ranks, and the others one that knows its value.
    assert combine_ranks(how, [1.0, None]) == (None if how == "sum" else 1.0)
    assert combine_ranks(how, [None]) is None
    assert str(combine_ranks(how, [1.0, float("nan")])) == "nan", "in any place"


@pytest.mark.parametrize(
    ("how", "value"), [(None, 8.0), ("ms_each", 5.0), ("per_second", 160.0), ("seconds", 0.4)]
)
def test_metric_is_related_to_step_time(how, value):
    assert relate_to_step(how, 8.0, typical_ms=40.0, mean_ms=50.0) == value
    assert relate_to_step(how, None, typical_ms=40.0, mean_ms=50.0) is None


def test_metric_title_has_unit_once():
    titles = [Metric(name=name, unit="ms", description="d").title for name in ("a_ms", "ms")]
    assert titles == ["a ms", "ms"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "no name"},
        {"name": "loss", "over_ranks": "largest"},
        {"name": "loss", "over_step": "per_hour"},
        {"name": 5},
    ],
)
def test_invalid_metric_is_refused(wrong):
    with pytest.raises(UsageError, match="Metric"):
        Metric(description="d", **wrong)
