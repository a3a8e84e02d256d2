import pytest

from raybench.errors import UsageError
from raybench.records.metric import Metric, combine_ranks, relate_to_step


@pytest.mark.parametrize(
    ("how", "value"), [("max", 4), ("min", 1), ("mean", 2.5), ("median", 2.5), ("sum", 10)]
)
def test_the_values_of_ranks_become_one_as_the_metric_says(how, value):
    assert combine_ranks(how, [1, 4, 2, 3]) == value


def test_a_sum_needs_all_ranks_and_the_others_those_that_know_their_value():
    assert combine_ranks("sum", [1.0, None]) is None
    assert combine_ranks("max", [1.0, None]) == 1.0
    assert combine_ranks("max", [None]) is None


@pytest.mark.parametrize(
    ("how", "value"), [(None, 8.0), ("ms_each", 5.0), ("per_second", 160.0), ("seconds", 0.4)]
)
def test_what_a_step_does_becomes_a_time_of_each_a_rate_or_the_time_of_so_many(how, value):
    assert relate_to_step(how, 8.0, typical_ms=40.0, mean_ms=50.0) == value
    assert relate_to_step(how, None, typical_ms=40.0, mean_ms=50.0) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "no name"},
        {"name": "loss", "over_ranks": "largest"},
        {"name": "loss", "over_step": "per_hour"},
        {"name": 5},
    ],
)
def test_a_metric_that_cannot_be_kept_is_refused_where_it_is_declared(wrong):
    with pytest.raises(UsageError, match="Metric"):
        Metric(description="d", **wrong)
