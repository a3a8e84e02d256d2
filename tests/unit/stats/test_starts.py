"""The scatter of starts is right for alike points, for shifts that points share, and for one."""

import numpy as np
import pytest
from scipy.stats import t as student

from raybench.stats.summary import scatter


def coverage(count, starts, *, own, common):
    """How often the 95 % interval of the mean of some starts holds their true level, 0."""
    rng = np.random.default_rng(5)
    held = []
    for _ in range(400):
        values = own * rng.standard_normal((count, starts)) + common * rng.standard_normal(starts)
        for of_point, found in zip(values, scatter(values), strict=True):
            held.append(abs(of_point.mean()) <= found.half_width(1 / starts))
    return float(np.mean(held))


@pytest.mark.parametrize("count", [1, 5, 36])
@pytest.mark.parametrize(("own", "common"), [(0.015, 0.0), (0.003, 0.02)])
def test_an_interval_over_three_starts_holds_the_level_in_95_of_100(count, own, common):
    assert 0.92 < coverage(count, 3, own=own, common=common) < 0.99


def test_one_point_alone_has_students_interval():
    values = np.array([[0.01, -0.02, 0.04]])
    [found] = scatter(values)
    assert (found.sd, found.degrees) == (pytest.approx(values.std(ddof=1)), 2)
    expected = student.ppf(0.975, 2) * values.std(ddof=1) / 3**0.5
    assert found.half_width(1 / 3) == pytest.approx(expected)


def test_a_noisy_point_among_quiet_ones_keeps_its_noise():
    rng = np.random.default_rng(3)
    sds = np.array([0.003] * 9 + [0.05])
    found = scatter(sds[:, np.newaxis] * rng.standard_normal((10, 4)))
    assert found[9].sd > 4 * found[0].sd


def test_the_level_of_a_side_is_no_scatter_of_its_starts():
    values = np.array([[0.0, 0.01, 1.0, 1.01]])
    [apart] = scatter(values, sides=[0, 0, 1, 1])
    assert (apart.degrees, apart.sd) == (2, pytest.approx(0.01 / 2**0.5))


def test_a_point_without_two_starts_on_a_side_has_no_scatter():
    values = np.array([[0.0, np.nan, 1.0], [0.0, 0.1, np.nan]])
    found = scatter(values, sides=[0, 0, 1])
    assert found[0] is None
    assert found[1] is not None
    assert scatter(np.array([[1.0], [2.0]])) == [None, None]


def test_starts_that_agree_to_the_last_digit_make_any_change_certain():
    [found] = scatter(np.zeros((1, 4)))
    assert found.p_value(0.01, 1.0) == 0
    assert found.p_value(-0.01, 1.0) == 1
