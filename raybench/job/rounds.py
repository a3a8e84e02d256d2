"""How many rounds are worth their time, and when a search for the largest batch has ended."""

from __future__ import annotations

# With so many rounds, speed-ups of GPU-bound points are known to half a percent:
# docs/explanation/statistics.md.
WORTHWHILE = 3
# Between two rounds the processes of all workers are replaced: 4.5 s for two on H200s.
BETWEEN_ROUNDS_S = 5.0
# Of the largest batch that fits: as near as the smallest that does not must come.
_RESOLUTION = 0.01


def is_largest_known(fits: int, ran_out: int) -> bool:
    """Return whether `ran_out` is at most 1 %, or one item, above `fits` (0: none fits so far)."""
    return ran_out - fits <= max(1, int(_RESOLUTION * fits))
