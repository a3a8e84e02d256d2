"""Noise as step times have it: neighbours alike, now and then a slow one."""

import numpy as np


def autocorrelated(rng: np.random.Generator, *, runs: int, count: int, phi: float) -> np.ndarray:
    """`runs` AR(1) series of `count` values with standard deviation 1."""
    shocks = rng.standard_normal((runs, count)) * np.sqrt(1 - phi**2)
    noise = np.empty((runs, count))
    noise[:, 0] = shocks[:, 0] / np.sqrt(1 - phi**2)
    for place in range(1, count):
        noise[:, place] = phi * noise[:, place - 1] + shocks[:, place]
    return noise


def with_outliers(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """1 % of the values are up to half as long again."""
    is_slow = rng.random(values.shape) < 0.01
    return np.where(is_slow, values * (1 + 0.5 * rng.random(values.shape)), values)
