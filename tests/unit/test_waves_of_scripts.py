"""The ratio of two sides whose starts step in turns, a wave of them at a time."""

from __future__ import annotations

import pytest

from benchmarks.script_parity import Wave, ratio_within, waves_of

# By numpy.linalg.lstsq over the logarithms, with a column for each wave and one for the side.
LEAST_SQUARES = (1.0170084763543819, 0.89599018842647, 1.1543722848049272)


def test_what_waves_differ_by_is_not_in_the_interval():
    times_ms = {"torchrun": [2.0, 2.002, 4.0, 4.004], "raybench": [2.02, 2.018, 4.04, 4.036]}
    found = ratio_within(waves_of(times_ms, at_once=2))
    assert found.value == pytest.approx(1.0090, abs=1e-4)
    assert 1.005 < found.interval.low < found.value < found.interval.high < 1.013


def test_the_interval_is_that_of_least_squares():
    waves = [Wave([5.0, 5.5, 6.0], [5.2, 5.6, 6.5]), Wave([7.0, 7.7], [7.1, 7.2])]
    found = ratio_within(waves)
    told = found.value, found.interval.low, found.interval.high
    assert told == pytest.approx(LEAST_SQUARES, abs=1e-6)
