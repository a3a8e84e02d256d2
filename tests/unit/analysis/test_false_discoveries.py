"""q-values: as scipy has the step-up, and no more discoveries by chance than were allowed."""

from __future__ import annotations

import numpy as np
from scipy.stats import false_discovery_control

from raybench.analysis.compare import false_discovery_rates, step_up


def test_p_values_are_stepped_up_as_scipy_does_it():
    p_values = np.array([0.5, 0.001, 0.04, 1.0, 0.04, 0.03, 0.9])
    np.testing.assert_allclose(step_up(p_values), false_discovery_control(p_values))


def test_where_nothing_changed_one_set_of_tests_in_fifty_has_a_discovery():
    rng = np.random.default_rng(0)
    sets = [false_discovery_rates(rng.random(36).tolist(), 0.02) for _ in range(4000)]
    assert 0.012 < np.mean([min(rates) <= 0.02 for rates in sets]) < 0.027


def test_no_test_has_no_rate():
    assert false_discovery_rates([], 0.02) == []
