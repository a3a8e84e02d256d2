"""The bars of a point's step times: every time is in one, and far ones do not flatten the rest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raybench.report.point_details import histogram


def bars(times_ms):
    """Lower end, upper end, count and length of each bar."""
    cells = histogram(np.asarray(times_ms, float)).texts
    numbers = [[float(text.replace(",", "")) for text in c[:3]] for c in cells]
    return [
        (low, high, int(n), len(c[3])) for (low, high, n), c in zip(numbers, cells, strict=True)
    ]


@example([0.2] * 7 + [0.20000000000000004])
@given(st.lists(st.floats(0.2, 1e5), min_size=8, max_size=300))
def test_every_step_is_counted_once_and_no_two_bars_begin_alike(times):
    if max(times) - min(times) <= 1e-6 * max(times):
        assert histogram(np.asarray(times, float)) is None
        return
    found = bars(times)
    assert sum(count for _, _, count, _ in found) == len(times)
    assert all(bool(count) == bool(length) for _, _, count, length in found)
    assert len(found) <= 13


def test_one_step_that_is_far_slower_leaves_the_others_their_bars():
    rng = np.random.default_rng(1)
    times = [*rng.normal(5.0, 0.05, 99), 500.0]
    *near, (low, high, count, _) = bars(times)
    assert (low, high, count) == (500.0, 500.0, 1)
    assert len([n for _, _, n, _ in near if n]) > 5


def test_neighbouring_ranges_of_nearly_equal_times_are_told_apart():
    lows = [low for low, *_ in bars(100 + 1e-4 * np.arange(30))]
    assert len(set(lows)) == len(lows)


@pytest.mark.parametrize("times", [[], [1.0] * 7, [2.0] * 50])
def test_of_few_or_equal_times_there_are_none(times):
    assert histogram(np.asarray(times)) is None
