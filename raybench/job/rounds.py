"""How many rounds pay off, and when a search for the largest batch ends."""

from __future__ import annotations

# Three rounds measure speed-ups of GPU-bound points to 0.5 % (docs/explanation/statistics.md).
WORTHWHILE = 3
# Replacing the processes of two workers takes 4.5 s on H200s.
BETWEEN_ROUNDS_S = 5.0
# Relative resolution of the largest batch that fits.
_RESOLUTION = 0.01


def is_largest_known(fits: int, ran_out: int) -> bool:
    """Return whether batch size `ran_out` exceeds batch size `fits` by at most 1 % or one."""
    return ran_out - fits <= max(1, int(_RESOLUTION * fits))
