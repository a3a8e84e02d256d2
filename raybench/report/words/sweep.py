"""The first lines of a sweep: what its section `cpu` replaces, and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.job.estimate import TimeEstimate
from raybench.job.plan import Plan
from raybench.job.problems import KeyPath
from raybench.report.formatting import counted, long_time


def replaced_by_cpu(job_name: str, keys: Sequence[KeyPath], why: str) -> str:
    """Return which keys of a job its section `cpu` replaces.

    Args:
        job_name: name of the job file.
        keys: paths of the keys that are replaced; none if `--set` gives all of them.
        why: why the section applies, as "no GPU here".
    """
    names = [str(path[-1]) for path in keys]  # without their sections
    if not names:
        return f"{why}: --set replaces all keys of the section cpu: of {job_name}"
    *others, last = names
    words = f"{', '.join(others)} and {last}" if others else last
    return f"{why}: the section cpu: of {job_name} replaces {words}"


def time_of_sweep(estimate: TimeEstimate, plan: Plan, rounds: int) -> str:
    """Return how many points there are, and how long they take by the settings of the job."""
    count = len(plan.points)
    points = f"{count} batch searches" if plan.batch_search else counted(count, "point")
    in_rounds = f" in {rounds} rounds" if rounds > 1 else ""
    start = f"{long_time(estimate.start_s)} of it to start Ray and the workers"
    return f"{points}{in_rounds}: about {long_time(estimate.total_s)}, {start}"
