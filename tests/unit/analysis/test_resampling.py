"""How far a resampled median lies from the truth."""

from __future__ import annotations

import numpy as np
import pytest
from noise import autocorrelated

from raybench.analysis import resampling


@pytest.mark.parametrize(
    ("count", "phi", "length", "why"),
    [
        (1, 0.0, 1, "at least one"),
        (50, 0.0, 4, "the cube root"),
        (1000, 0.0, 10, "the cube root"),
        (1000, 0.5, 14, "the rule of Politis and White"),
        (100, 0.9, 5, "twenty blocks"),
        (30, 0.9, 3, "the cube root though it leaves ten blocks"),
    ],
)
def test_blocks_are_as_long_as_the_autocorrelation_asks(
    count: int, phi: float, length: int, why: str
) -> None:
    assert resampling.block_length(count, phi) == length, why


def test_resampled_medians_scatter_as_the_medians_of_other_series_do() -> None:
    rows = 1 + 0.01 * autocorrelated(np.random.default_rng(7), runs=200, count=200, phi=0.5)
    spread = np.log(np.median(rows, axis=1)).std()
    found = np.median([resampling.log_median_errors([row], seed=1).std() for row in rows[:40]])
    assert spread < found < 1.5 * spread


def test_many_samples_are_resampled_in_bounded_memory() -> None:
    samples = 10 + np.random.default_rng(2).standard_normal(30_000)
    errors = resampling.log_median_errors([samples], seed=1)
    assert len(errors) == resampling.RESAMPLES
    assert np.abs(errors).max() < 0.01
