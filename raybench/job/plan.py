"""From the axes of a job to its points and their order. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from raybench.job.point import (
    BATCH_SIZES,
    EXECUTION,
    RUN_SETTINGS,
    SCRIPT,
    Point,
    Precision,
    Scalar,
)
from raybench.job.problems import KeyPath, Problem, quote
from raybench.job.rules import product_of, render

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.sections import BatchSearch

_INT64_MAX = 2**63 - 1  # what the result tables can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The ordered points of a job, and what the user should know about them.

    batch_search: how the run finds the batch sizes that follow; the points are then the first of
    each series, a series being all points that are equal but for the batch.
    baseline: settings of the points that the others are compared with.
    """

    points: tuple[Point, ...]
    warnings: tuple[str, ...] = ()
    batch_search: BatchSearch | None = None
    baseline: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Return the precisions of all points, each once, in the order of the points."""
        return tuple(dict.fromkeys(point.precision for point in self.points))


def varying_settings(points: Sequence[Point]) -> list[str]:
    """Return the names of the settings that differ between points."""
    told = [point.settings_as_given for point in points]
    names = dict.fromkeys(name for settings in told for name in settings)
    return [
        name for name in names if any(settings.get(name) != told[0].get(name) for settings in told)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A point before its batch sizes are worked out.

    size_path: where the job file gives its batch size. origin: where it asks for the point.
    """

    values: Mapping[str, Scalar]
    size_path: KeyPath
    origin: KeyPath


# One value of an axis: what it sets, and where the job file says so.
_Choice = tuple[tuple[str, Scalar, KeyPath], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worked:
    """The points of a job by their ids, with the problems and remarks found on the way."""

    points: Mapping[str, Point]
    problems: Sequence[Problem]
    remarks: Sequence[Problem]


def make_plan(job: Job) -> Plan:
    """Make the points of `job` in their order: the product of its axes, then the included ones.

    Raises JobError when a global batch size does not divide, the workload refuses a point, no
    point is left, or none has the baseline that the job gives.
    """
    worked = _work_out(job)
    if worked.problems:
        raise job.error(worked.problems)
    return Plan(
        points=tuple(worked.points.values()),
        warnings=tuple(map(job.explain, worked.remarks)),
        batch_search=job.batch_search,
        baseline=_baseline(job),
    )


def plan_problems(job: Job) -> list[Problem]:
    """Return the problems for which `make_plan` would raise JobError."""
    return list(_work_out(job).problems)


def _work_out(job: Job) -> _Worked:
    excludes = _Excludes(job)
    product = [candidate for candidate in _product(job) if not excludes.match(candidate.values)]
    candidates = [*product, *_include(job)]
    problems: dict[KeyPath, Problem] = {}
    points: dict[str, Point] = {}
    duplicates: Counter[KeyPath] = Counter()
    for candidate in candidates:
        point = _make_point(job, candidate)
        if isinstance(point, Problem):
            problems.setdefault(point.path, point)
        elif point.point_id in points:
            duplicates[candidate.origin] += 1
        else:
            points[point.point_id] = point
    if not candidates:
        problems[()] = Problem(path=("exclude",), message="leaves no point to run")
    baseline = _baseline_remark(job, points.values()) if points else None
    is_given = "baseline" in job.model_fields_set
    if baseline and is_given:
        problems[baseline.path] = baseline
    return _Worked(
        points=points,
        problems=list(problems.values()),
        remarks=[
            *job.remarks,
            *excludes.remarks(),
            *(
                Problem(path=path, message=f"{count} duplicate point{'s' * (count > 1)} dropped")
                for path, count in duplicates.items()
            ),
            *([baseline] if baseline and not is_given else []),
            *_budget_remarks(job),
        ],
    )


def _product(job: Job) -> Iterator[_Candidate]:
    # Each change of the environment costs new processes, so it varies slowest.
    axes: list[list[_Choice]] = [
        [((name, value, ("env", name, index)),) for index, value in enumerate(values)]
        for name, values in job.env.items()
        if len(values) > 1
    ]
    for name, values in job.axes.items():
        accepted = map(job.settings[name].accept, values)
        axes.append([((name, value, ("matrix", name, at)),) for at, value in enumerate(accepted)])
    for number, entry in enumerate(job.zip):
        columns = [
            [
                (name, job.settings[name].accept(value), ("zip", number, name, index))
                for index, value in enumerate(values)
            ]
            for name, values in entry.items()
        ]
        axes.append(list(zip(*columns, strict=True)))
    if not axes and job.include:
        return
    shared = _common_settings(job)
    for choices in itertools.product(*axes):
        given = {name: (value, path) for choice in choices for name, value, path in choice}
        own = {name: value for name, (value, _) in given.items()}
        size_path = next((given[name][1] for name in BATCH_SIZES if name in given), ())
        yield _Candidate(values=shared | own, size_path=size_path, origin=("matrix",))


def _include(job: Job) -> Iterator[_Candidate]:
    shared = _common_settings(job)
    for number, entry in enumerate(job.include):
        values = {name: job.settings[name].accept(value) for name, value in entry.items()}
        origin = ("include", number)
        size_path = next(((*origin, name) for name in BATCH_SIZES if name in values), origin)
        yield _Candidate(values=shared | values, size_path=size_path, origin=origin)


def _common_settings(job: Job) -> dict[str, Scalar]:
    """Return the settings that are no axes: defaults, then the workload section."""
    defaults = {
        name: setting.accept(setting.default)
        for name, setting in job.settings.items()
        if setting.default is not None
    }
    defaults["devices"] = job.placement.devices
    defaults["strategy"] = job.placement.strategy
    fixed = job.workload.parameters.items()
    variables = {name: values[0] for name, values in job.env.items() if len(values) == 1}
    return defaults | variables | {n: job.settings[n].accept(value) for n, value in fixed}


class _Excludes:
    """The exclude entries of a job, and how many points each has taken out."""

    def __init__(self, job: Job) -> None:
        self._entries = [
            {name: [job.settings[name].accept(v) for v in values] for name, values in entry.items()}
            for entry in job.exclude
        ]
        self._matched = [False] * len(self._entries)

    def match(self, values: Mapping[str, Scalar]) -> bool:
        is_excluded = False
        for number, entry in enumerate(self._entries):
            if all(values.get(name) in wanted for name, wanted in entry.items()):
                self._matched[number] = is_excluded = True
        return is_excluded

    def remarks(self) -> list[Problem]:
        return [
            Problem(path=("exclude", number), message="matches no point")
            for number, matched in enumerate(self._matched)
            if not matched
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """The batch sizes of a point, under the names that they have there."""

    batch_size: int | None = None
    global_batch_size: int | None = None
    scaling: Literal["weak", "strong"] | None = None


def _make_point(job: Job, candidate: _Candidate) -> Point | Problem:
    values = candidate.values
    batch = _batch(candidate, job)
    if isinstance(batch, Problem):
        return batch
    not_params = {*RUN_SETTINGS, *job.env}
    point = Point(
        workload=job.workload.kind,
        params={name: values[name] for name in sorted(values) if name not in not_params},
        world_size=int(values["world_size"]),
        **{name: RUN_SETTINGS[name].restore(values.get(name)) for name in EXECUTION},
        batch_size=batch.batch_size,
        global_batch_size=batch.global_batch_size,
        scaling=batch.scaling,
    )
    variables = {name: str(values[name]) for name in sorted(job.env) if name in values}
    settings = {**point.settings, **variables}
    env = {name: render(text, settings) for name, text in variables.items()}
    reason = job.why_not(point)
    if reason:
        return Problem(path=candidate.origin, message=reason)
    point = replace(point, env=env)
    if point.workload == SCRIPT:
        items = render(str(point.params["items_per_step"]), point.settings)
        try:
            product_of(items)
        except ValueError as error:
            message = f"{error}, given {quote(items)}"
            return Problem(path=("workload", "items_per_step"), message=message)
    return point


def _batch(candidate: _Candidate, job: Job) -> _Batch | Problem:
    """Work out the batch sizes."""
    values, shares_work = candidate.values, job.shares_work
    if not any(name in values for name in BATCH_SIZES):
        return _Batch(scaling="strong" if shares_work else None)
    world_size, accumulation = int(values["world_size"]), int(values.get("grad_accumulation", 1))
    # Each has a batch of its own.
    groups = max(1, world_size // job.ranks_per_item(values))
    share = groups * accumulation
    is_strong = "global_batch_size" in values
    global_batch_size = int(values["global_batch_size" if is_strong else "batch_size"])
    if not is_strong:
        global_batch_size *= share
    if global_batch_size % share:
        by = [f"world_size {world_size}"] if groups == world_size else []
        if 1 < groups < world_size:
            by.append(f"{groups} groups of ranks that share their items")
        by += [f"grad_accumulation {accumulation}"] if accumulation > 1 else []
        message = f"{global_batch_size} cannot be divided by {' x '.join(by)}"
        return Problem(path=candidate.size_path, message=message)
    if global_batch_size > _INT64_MAX:
        message = f"batch_size x {groups} x grad_accumulation {accumulation}"
        return Problem(path=candidate.size_path, message=f"{message} does not fit into 64 bits")
    return _Batch(
        batch_size=global_batch_size // share,
        global_batch_size=global_batch_size,
        scaling="strong" if is_strong or shares_work else "weak",
    )


def _baseline(job: Job) -> dict[str, Scalar]:
    return {name: job.settings[name].accept(value) for name, value in job.baseline.items()}


def _baseline_remark(job: Job, points: Collection[Point]) -> Problem | None:
    """Return a remark naming the nearest point where none has all baseline settings; else None."""
    baseline = _baseline(job)
    nearest = max(points, key=lambda point: len(baseline.items() & point.settings.items()))
    if baseline.items() <= nearest.settings.items():
        return None
    wanted = ", ".join(f"{name}: {quote(value)}" for name, value in baseline.items())
    have = ", ".join(f"{name}: {quote(nearest.settings.get(name))}" for name in baseline)
    message = (
        f"no point has {{{wanted}}}, so there is no speed-up; the nearest has {{{have}}}; "
        "baseline: {} compares nothing"
    )
    return Problem(path=("baseline",), message=message)


def _budget_remarks(job: Job) -> list[Problem]:
    measure = job.measure
    budget_s = measure.repeats * measure.max_seconds
    if "min_seconds" in measure.model_fields_set and measure.min_seconds > measure.max_seconds:
        message = f"max_seconds, {measure.max_seconds:g}, ends a repeat before; raise it"
        return [Problem(path=("measure", "min_seconds"), message=message)]
    if measure.timeout_s > budget_s:
        return []
    message = f"a slow point is stopped before its budget of {budget_s:g} s is used"
    return [Problem(path=("measure", "timeout_s"), message=message)]
