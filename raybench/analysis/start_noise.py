"""How far two starts of the same point lie apart though nothing was changed: the A/A noise. Pure.

An interval from the samples of a run speaks of one start of its processes. What another start would
have changed (which clocks and links it met, how memory was laid out) is seen only where the same
job was run again, so it is estimated from such runs. Few of them tell little: their variance is
drawn towards a documented one that counts as PRIOR_DEGREES degrees of freedom (G. K. Smyth,
"Linear models and empirical Bayes methods for assessing differential expression in microarray
experiments", Stat. Appl. Genet. Mol. Biol. 3(1), 2004). Without such runs the repeats in a run, and
the scatter of the points of the two runs, may show that this machine is noisier than documented,
never that it is quieter.

Devices of one model differ too. Runs on other devices share the level of these devices, so more
runs there do not tell it better: `node_noise` is a random effect beside that of starts
(S. R. Searle, G. Casella, C. E. McCulloch, "Variance Components", 1992).

The 95 % intervals of step times and speed-ups hold over starts. Of several rounds the mean of their
logarithms is known to ± t s / sqrt(R), where the standard deviation s of a start is pooled over the
points of a kind (`kind_of`) and t is Student's with their degrees of freedom together; but never
better than the samples allow. Of one round nobody knows how far starts lie apart: what other runs
show, or else what is documented, is added to what the samples leave open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from raybench.analysis.rounds import Trials, latest_trials, records, without_controls
from raybench.errors import ResultsError
from raybench.results import reader
from raybench.results.run import run_ids
from raybench.stats.summary import student_t

if TYPE_CHECKING:
    import pandas as pd

    from raybench.results.run import Run

# What two runs of the same job differ by in 19 of 20 points. From an A/A pair on 4 H200s, see
# docs/benchmarks/same-twice-4xh200.json: points in fp32, tf32 and bf16 differ by 0.3 % in the
# median and one of 27 by more than 0.8 %; those in fp16, whose steps wait for the host, by 1 % in
# the median and by up to 2.7 %. So few points show no tails: of that median, normal starts would
# differ by up to 1.0 %, starts with heavy tails by up to 1.5 %.
TYPICAL = 0.014
LOOSE = 0.03
# Workers on CPUs share cores with whatever else runs there: two runs of one job on 2 cores that
# others used too differed by 11 to 46 % at the worst points.
ON_CPU = 0.25
# Between other devices of one model. Over five clusters runs of one program varied by 8 % on
# average (P. Sinha et al., "Not All GPUs Are Created Equal", SC 2022), which is a range.
BETWEEN_NODES = 0.04
# One pair of runs on one machine tells little of the tails, and nothing of other machines. With 5,
# a fifth of the comparisons of 36 points with heavy-tailed starts had a false verdict.
PRIOR_DEGREES = 3.0
# One point alone does not show how wide the noise of all is.
_MIN_POINTS = 2
# Where a noise was got: `StartNoise.source`.
ROUNDS, RUNS, REPEATS, POINTS, DOCUMENTED = "rounds", "runs", "repeats", "points", "documented"
# Points whose starts scatter alike: workers on CPUs; steps that wait for the host; the rest.
CPU, LOOSE_KIND, TIGHT_KIND = "cpu", "loose", "tight"
# Of a 95 % interval, normal.
_Z_95 = 1.96
# The median of |z|, normal: half of all changes are larger than that many standard deviations.
_MEDIAN = 0.674


@dataclass(frozen=True, slots=True, kw_only=True)
class StartNoise:
    """sd: of the logarithm of one run's step time. degrees: of freedom of that estimate.

    source: where it was got: ROUNDS of the run itself, which hold what its samples leave open too,
    other RUNS, REPEATS (in a run), POINTS (their scatter) or DOCUMENTED.
    """

    sd: float
    degrees: float
    source: str

    @property
    def sd_of_change(self) -> float:
        """Of the logarithm of the ratio of two runs."""
        return math.sqrt(2) * self.sd

    @property
    def floor(self) -> float:
        """The relative change that 19 of 20 pairs of runs of the same thing stay below."""
        return math.expm1(self.sd_of_change * student_t(self.degrees))

    def reach(self, within: float, starts: int = 1) -> float:
        """Half of the 95 % interval of the mean of `starts` starts, of the logarithm.

        within: what the samples leave open, which is never undercut.
        """
        between = student_t(self.degrees) * self.sd / math.sqrt(starts)
        return max(within, between) if self.source == ROUNDS else math.hypot(within, between)


def kind_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Name the kind of points whose starts scatter as these do. rows: of `points`."""
    if any(row["device_type"] == "cpu" for row in rows):
        return CPU
    is_loose = any(row["precision"] == "fp16" or row["host_bound"] is True for row in rows)
    return LOOSE_KIND if is_loose else TIGHT_KIND


def prior_noise(rows: Sequence[Mapping[str, Any]]) -> StartNoise:
    """Look up the noise without A/A runs. rows: of `points`, the attempts that are compared."""
    return prior_of(kind_of(rows))


def prior_of(kind: str) -> StartNoise:
    """As `documented`, of a kind of points."""
    return _of_floor({CPU: ON_CPU, LOOSE_KIND: LOOSE, TIGHT_KIND: TYPICAL}[kind])


def pool(groups: Sequence[Sequence[float]]) -> StartNoise | None:
    """Pool the noise that rounds show; None where no group has two of them.

    groups: logarithms that differ by starts within a group. The points of a kind are taken to
    scatter alike, so that few rounds of many points tell it well.
    """
    degrees = sum(len(group) - 1 for group in groups if group)
    if not degrees:
        return None
    squares = sum(float(((np.array(g) - np.mean(g)) ** 2).sum()) for g in groups if g)
    return StartNoise(sd=math.sqrt(squares / degrees), degrees=degrees, source=ROUNDS)


def noise_of_runs(runs: Sequence[pd.DataFrame]) -> dict[str, StartNoise]:
    """Learn the noise of starts by kind of points, by runs that differ by starts only.

    runs: the rows of `points` of each. Where a run has rounds, each is a start.
    """
    times: dict[str, dict[str, list[float]]] = {}
    spans: dict[str, list[float]] = {}
    for points in runs:
        for row in records(without_controls(latest_trials(points))):
            if row["status"] == "ok" and row["step_ms_p50"] > 0:
                kind = kind_of([row])
                of_point = times.setdefault(kind, {}).setdefault(row["point_id"], [])
                of_point.append(row["step_ms_p50"])
                if row["step_ms_ci_low"] > 0:
                    span = math.log(row["step_ms_ci_high"] / row["step_ms_ci_low"])
                    spans.setdefault(kind, []).append(span)
    found = {}
    for kind, of_kind in times.items():
        within = (float(np.median(spans[kind])) / 2 / _Z_95) ** 2 if kind in spans else 0.0
        found[kind] = update_noise(prior_of(kind), list(of_kind.values()), within, RUNS)
    return {kind: noise for kind, noise in found.items() if noise.source == RUNS}


def of_ratio(one: StartNoise, other: StartNoise) -> StartNoise:
    """Compute the noise of the ratio of two points of a run, each with its own start."""
    return replace(one, sd=math.hypot(one.sd, other.sd), degrees=min(one.degrees, other.degrees))


def _of_floor(floor: float) -> StartNoise:
    sd = math.log1p(floor) / student_t(PRIOR_DEGREES) / math.sqrt(2)
    return StartNoise(sd=sd, degrees=PRIOR_DEGREES, source=DOCUMENTED)


def update_noise(
    prior: StartNoise, groups: Sequence[Sequence[float]], within: float, source: str
) -> StartNoise:
    """Update the noise by what was seen of it; the prior where nothing was.

    groups: step times in any unit; within a group they differ by starts, and by how unsure each
    is. within: variance of the latter, of the logarithm of one step time; it is no noise of starts.
    """
    variance, degrees = _observe(groups, within)
    if not degrees:
        return prior
    whole = prior.degrees + degrees
    variance = (prior.degrees * prior.sd**2 + degrees * variance) / whole
    return StartNoise(sd=math.sqrt(variance), degrees=whole, source=source)


def node_noise(
    groups: Sequence[Mapping[str, Sequence[float]]], starts: StartNoise, within: float
) -> StartNoise:
    """How far nodes of one kind lie apart, drawn towards what is documented.

    groups: step times by node; between the nodes of a group nothing else differs. starts, within:
    the variance of one run on one node, as in `updated`.
    """
    prior = _of_floor(BETWEEN_NODES)
    squares, shares, degrees = 0.0, [], 0
    for group in groups:
        means = np.array([np.log(times).mean() for times in group.values()])
        if len(means) > 1:
            squares += float(((means - means.mean()) ** 2).sum())
            degrees += len(means) - 1
            shares += [1 / len(times) for times in group.values()]
    if not degrees:
        return prior
    of_runs = (starts.sd**2 + within) * float(np.mean(shares))
    seen = max(0.0, squares / degrees - of_runs)
    whole = prior.degrees + degrees
    variance = (prior.degrees * prior.sd**2 + degrees * seen) / whole
    return StartNoise(sd=math.sqrt(variance), degrees=whole, source=RUNS)


def _observe(groups: Sequence[Sequence[float]], within: float) -> tuple[float, int]:
    """Estimate the variance of the noise of starts, and its degrees of freedom."""
    logs = [np.log(group) for group in groups if len(group) > 1]
    degrees = sum(len(group) - 1 for group in logs)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in logs)
    return (max(0.0, squares / degrees - within), degrees) if degrees else (0.0, 0)


def raise_priors(
    priors: Sequence[StartNoise],
    groups: Sequence[Sequence[Sequence[float]]],
    withins: Sequence[float],
) -> list[StartNoise]:
    """Widen the priors of all points where what was seen of most of them is wider.

    groups, withins: for each point as in `updated`. A few runs of a point may be alike by chance,
    and then a prior that is too narrow for this machine would be believed.
    """
    from scipy.special import gammaincinv

    factors = []
    for prior, of_point, within in zip(priors, groups, withins, strict=True):
        variance, degrees = _observe(of_point, within)
        if degrees:
            median = 2 * gammaincinv(degrees / 2, 0.5) / degrees
            factors.append(math.sqrt(variance / median) / prior.sd)
    factor = float(np.median(factors)) if len(factors) >= _MIN_POINTS else 1.0
    return [replace(prior, sd=max(1.0, factor) * prior.sd) for prior in priors]


def widen(
    noises: Sequence[StartNoise], changes: Sequence[float], errors: Sequence[float]
) -> list[StartNoise]:
    """Widen the noise of each point where the points of one pair of runs scatter more than it says.

    changes: logarithms of the ratios of the two runs. errors: the standard deviation of each by
    its samples alone. What is real mostly moves points one way, and then those that moved the
    other way still show the noise. So each way tells a factor, and the smaller one counts.
    """
    moved = np.asarray(changes)
    beyond = (moved / _MEDIAN) ** 2 - np.asarray(errors) ** 2
    factors = np.sqrt(np.maximum(0, beyond)) / [noise.sd_of_change for noise in noises]
    ways = [factors[moved > 0], factors[moved < 0]]
    if min(map(len, ways)) < _MIN_POINTS:
        return list(noises)
    factor = float(min(map(np.median, ways)))
    if factor <= 1:
        return list(noises)
    return [replace(noise, sd=factor * noise.sd, source=POINTS) for noise in noises]


Row = Mapping[str, Any]
Range = tuple[float, float]
_ENDS = ("step_ms_ci_low", "step_ms_p50", "step_ms_ci_high")


class StartIntervals:
    """The intervals of the points of some runs.

    elsewhere: kind of points -> the noise of starts that other runs show.
    """

    def __init__(self, trials: Trials, elsewhere: Mapping[str, StartNoise]) -> None:
        self._trials = trials
        self._elsewhere = elsewhere
        self._of_times: Mapping[str, StartNoise] = {}
        self._of_ratios: Mapping[str, StartNoise] = {}

    def learn_times(self, rows: Iterable[Row]) -> None:
        """Take in how the step times of these points scatter over their rounds."""
        self._of_times = _pool(
            (kind_of([row]), [math.log(one["step_ms_p50"]) for one in self._times(row)])
            for row in rows
        )

    def learn_ratios(self, pairs: Iterable[tuple[Row, Row]]) -> None:
        """Take in how the speed-ups of these points, (baseline point, point), scatter."""
        self._of_ratios = _pool(
            (kind_of(pair), [*self._trials.log_ratios(*pair).values()]) for pair in pairs
        )

    def time_noise(self, row: Row) -> StartNoise:
        """How far starts of a point lie apart, as far as that is known."""
        kind = kind_of([row])
        return self._of_times.get(kind) or self._has_value(kind)

    def ratio_noise(self, base: Row, row: Row) -> StartNoise:
        """How far starts of the ratio of two points lie apart."""
        found = self._of_ratios.get(kind_of([base, row]))
        return found or of_ratio(*(self._has_value(kind_of([one])) for one in (base, row)))

    def step_time(self, row: Row) -> Range | None:
        """Compute the interval of a step time in milliseconds; None where it has none."""
        ranges = [_time_range(one) for one in self._times(row)]
        around = _around(ranges, self.time_noise(row))
        step_ms = row["step_ms_p50"]
        return None if around is None else (step_ms * around[0], step_ms * around[1])

    def speed_up(self, base: Row, row: Row) -> Range | None:
        """Compute the interval of a speed-up, as shares of it; None where samples tell of none."""
        of_base, of_row = self._trials.rounds(base), self._trials.rounds(row)
        both = self._trials.log_ratios(base, row)
        ranges = [ratio_range(of_base[number], of_row[number]) for number in both]
        return _around(ranges, self.ratio_noise(base, row))

    def _times(self, row: Row) -> list[Row]:
        rounds = self._trials.rounds(row).values()
        return [one for one in rounds if not pd.isna(one["step_ms_p50"])]

    def _has_value(self, kind: str) -> StartNoise:
        return self._elsewhere.get(kind) or prior_of(kind)


def _pool(groups: Iterable[tuple[str, Sequence[float]]]) -> dict[str, StartNoise]:
    by_kind: dict[str, list[Sequence[float]]] = {}
    for kind, values in groups:
        by_kind.setdefault(kind, []).append(values)
    found = {kind: pool(values) for kind, values in by_kind.items()}
    return {kind: noise for kind, noise in found.items() if noise is not None}


def _time_range(row: Row) -> Range | None:
    """Take the interval of the samples, as shares of the step time."""
    low, middle, high = (row[name] for name in _ENDS)
    # Written as a test that NaN fails.
    return (low / middle, high / middle) if low > 0 and high > 0 else None


def _around(ranges: Sequence[Range | None], noise: StartNoise) -> Range | None:
    """Compute the interval of the mean over rounds, as shares of it.

    ranges: what the samples of each leave open, as shares; None where one does not tell.
    """
    known = [one for one in ranges if one is not None]
    if not known or len(known) < len(ranges):
        return None
    down, up = (math.hypot(*map(math.log, ends)) / len(known) for ends in zip(*known, strict=True))
    return math.exp(-noise.reach(down, len(known))), math.exp(noise.reach(up, len(known)))


def ratio_range(base: Mapping[str, Any], point: Mapping[str, Any]) -> tuple[float, float] | None:
    """Compute the 95 % interval of a speed-up, as shares of it, such as (0.99, 1.01).

    None where it is not known.

    base, point: rows of `points`: the baseline point and the other. Of each, the distance of the
    median's logarithm from those of its bootstrap interval is taken; the two points are measured
    apart from each other, so the distances add up as squares: the method of variance estimates
    recovery, G. Y. Zou, A. Donner, Statistics in Medicine 27(10), 2008.
    It speaks of the samples of this run: another start of the same processes can be farther away.
    """
    names = ("step_ms_ci_low", "step_ms_p50", "step_ms_ci_high")
    if any(pd.isna(row[name]) or row[name] <= 0 for row in (base, point) for name in names):
        return None
    (base_down, base_up), (point_down, point_up) = (
        (math.log(middle / low), math.log(high / middle))
        for low, middle, high in ([row[name] for name in names] for row in (base, point))
    )
    # A longer step of the baseline point, or a shorter one of the other, is a higher speed-up.
    return math.exp(-math.hypot(base_down, point_up)), math.exp(math.hypot(base_up, point_down))


# A folder may hold ten thousand runs; those near in time tell most of how the machine is now.
_MOST_READ = 10
_COLUMNS = (
    *("run_id", "point_id", "attempt", "round", "control_of", "status", "device_type"),
    *("precision", "host_bound", "step_ms_p50", "step_ms_ci_low", "step_ms_ci_high"),
)


def known_starts(root: Path, run: Run) -> dict[str, StartNoise]:
    """Learn the noise of starts by kind of points, where other runs of the same tell.

    Runs count that the tables tell no difference of from `run`, on the same devices.
    """
    alike = list(_alike(root, run))
    if not alike:
        return {}

    return noise_of_runs([_points(root, run_id) for run_id in (run.run_id, *alike)])


def _alike(root: Path, run: Run) -> Iterator[str]:
    ids = run_ids(root)
    of_job = [one for one in ids if one.startswith(f"{run.job_name}-") or one == run.run_id]
    if run.run_id not in of_job:
        return
    place = of_job.index(run.run_id)
    near = sorted(range(len(of_job)), key=lambda other: abs(other - place))[1 : _MOST_READ + 1]
    facts = _facts(root, run) if near else {}
    for run_id in (of_job[other] for other in near):
        with suppress(ResultsError):
            other = reader.read_run(root, run_id)
            if other.job_sha256 == run.job_sha256 and _facts(root, other) == facts:
                yield run_id


def _facts(root: Path, run: Run) -> Mapping[str, str]:
    from raybench.analysis.environment_changes import facts

    return facts(run, reader.load(root, "devices", run.run_id))


def _points(root: Path, run_id: str) -> pd.DataFrame:
    read = reader.read_table(root, "points", run_id, _COLUMNS)
    frame: pd.DataFrame = read.to_pandas()
    return frame
