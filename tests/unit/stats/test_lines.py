"""A line through measured times."""

from __future__ import annotations

import pytest

from raybench.stats.shares import fit_line


def test_a_line_is_found_with_its_errors():
    exact = fit_line([(x, 3.0 + 0.5 * x) for x in (8, 16, 24, 32)])
    assert (exact.intercept, exact.slope) == pytest.approx((3.0, 0.5))
    assert exact.intercept_error == pytest.approx(0, abs=1e-9)
    noisy = fit_line([(8, 7.1), (16, 10.9), (24, 15.1), (32, 18.9)])
    assert abs(noisy.intercept - 3.0) < 2 * noisy.intercept_error
    assert abs(noisy.slope - 0.5) < 2 * noisy.slope_error


def test_a_line_begins_at_0_where_it_would_begin_below():
    line = fit_line([(1, 1.0), (2, 3.0), (4, 7.0)])
    assert line.intercept == 0
    assert line.slope > 1


def test_a_single_time_is_a_line_from_0_without_errors():
    line = fit_line([(4, 8.0)])
    assert (line.intercept, line.slope, line.slope_error) == (0.0, 2.0, 0.0)
    with pytest.raises(ValueError, match="a line needs a point"):
        fit_line([])
