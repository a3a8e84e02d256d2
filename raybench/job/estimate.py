"""How long a sweep takes, estimated from its settings before anything runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raybench.job.model import Job
from raybench.job.plan import Plan
from raybench.job.point import SCRIPT
from raybench.job.rounds import BETWEEN_ROUNDS_S

# Ray and the first workers: 10 to 20 s on two cores and on nodes of H200s.
START_S = 15.0
# Set-up, first step and breakdown of a point, measured with ddp_scaling on H200s.
SET_UP_S = 0.55
# Start of new processes for a point.
_NEW_PROCESSES_S = 6.0
# The part of the optional time, beyond the shortest timing, that an average point uses: most steps
# are steady, so few points use their whole budget.
_USED_SHARE = 0.1
# Points of a search for the largest batch without a maximum: five doublings, six bisections.
_POINTS_OF_OPEN_SEARCH = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeEstimate:
    """The estimated seconds of a sweep."""

    # Start of Ray and of the workers.
    start_s: float
    # One point in one round.
    trial_s: float
    # All points in all rounds.
    trials_s: float

    @property
    def total_s(self) -> float:
        """Seconds from the start of Ray to the end of the last point."""
        return self.start_s + self.trials_s


def estimate_time(job: Job, plan: Plan, trials: int) -> TimeEstimate:
    """Return how long a sweep takes.

    Args:
        trials: number of trials that are left, over all rounds.
    """
    measure = job.measure
    if measure.iterations is None:
        # Few points use their whole budget.
        optional_s = max(0.0, measure.max_seconds - measure.least_s)
        repeat_s = measure.least_s + _USED_SHARE * optional_s
    else:
        # The step time is unknown, so assume half of the budget.
        repeat_s = measure.max_seconds / 2
    trial_s = SET_UP_S + measure.repeats * repeat_s
    if measure.fresh_workers or job.workload.kind == SCRIPT:
        trial_s += _NEW_PROCESSES_S
    if (search := plan.batch_search) is not None:
        if search.max is None:
            trials *= _POINTS_OF_OPEN_SEARCH
        else:
            # The search doubles the batch from start to max.
            trials *= math.ceil(math.log2(search.max / search.start)) + 1
    between_s = (measure.rounds - 1) * BETWEEN_ROUNDS_S
    return TimeEstimate(
        start_s=START_S,
        trial_s=trial_s,
        trials_s=trials * trial_s + between_s + measure.heat_s,
    )
