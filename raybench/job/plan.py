"""From the axes of a job to its points and their order, and which of them a filter keeps. Pure."""

from __future__ import annotations

import ast
import itertools
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raybench.errors import UsageError
from raybench.job.point import (
    BATCH_SIZES,
    EXECUTION,
    RUN_SETTINGS,
    SCRIPT,
    Point,
    Precision,
    Scalar,
)
from raybench.job.problems import KeyPath, Problem, quote, say_unknown
from raybench.job.rules import product_of, render

if TYPE_CHECKING:
    from raybench.job.model import Job
    from raybench.job.sections import BatchSearch

_INT64_MAX = 2**63 - 1  # what the result tables can hold
_FILTER_EXAMPLE = "world_size > 1 and precision == 'bf16'"


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
    """Return the names of the settings that differ between points, in the order of their settings.

    Without the batch size that follows from the one that the job fixes.
    """
    told = [point.settings_as_given for point in points]
    names = dict.fromkeys(name for settings in told for name in settings)
    return [
        name for name in names if any(settings.get(name) != told[0].get(name) for settings in told)
    ]


# A setting's value, and where the job file gives it.
_Given = tuple[Scalar, KeyPath]
# One value of an axis: what it sets.
_Choice = Mapping[str, _Given]


def make_plan(job: Job) -> Plan:
    """Return the points of `job` in their order: the product of its axes, then the included ones.

    Raises JobError when a global batch size does not divide, the workload refuses a point, no point
    is left, or none has the baseline that the job gives.
    """
    plan, problems = _make_plan(job)
    if problems:
        raise job.error(problems)
    return plan


def plan_problems(job: Job) -> list[Problem]:
    """Return the problems for which `make_plan` would raise JobError."""
    return _make_plan(job)[1]


def _make_plan(job: Job) -> tuple[Plan, list[Problem]]:
    """Return the plan, and the problems for which it must not be run; none where it may."""
    excluded = [_accept_all(job, entry) for entry in job.exclude]
    is_used = [False] * len(excluded)
    problems: dict[KeyPath, Problem] = {}
    points: dict[str, Point] = {}
    duplicates: Counter[KeyPath] = Counter()
    are_any_left = False
    shared = _common_settings(job)
    for origin, choice in (*_product(job), *_included(job)):
        values = shared | {name: value for name, (value, _) in choice.items()}
        if origin == ("matrix",):
            matches = [
                all(values.get(name) in wanted for name, wanted in entry.items())
                for entry in excluded
            ]
            is_used = [used or match for used, match in zip(is_used, matches, strict=True)]
            if any(matches):
                continue
        are_any_left = True
        size_path = next((choice[name][1] for name in BATCH_SIZES if name in choice), origin)
        point = _make_point(job, values, origin, size_path)
        if isinstance(point, Problem):
            problems.setdefault(point.path, point)
        elif point.point_id in points:
            duplicates[origin] += 1
        else:
            points[point.point_id] = point
    if not are_any_left:
        problems[()] = Problem(path=("exclude",), message="leaves no point to run")
    baseline = {name: job.settings[name].accept(value) for name, value in job.baseline.items()}
    remarks = [
        *job.remarks,
        *(
            Problem(path=("exclude", number), message="matches no point")
            for number, used in enumerate(is_used)
            if not used
        ),
        *(
            Problem(path=path, message=f"{count} duplicate point{'s' * (count > 1)} dropped")
            for path, count in duplicates.items()
        ),
    ]
    if points and (missing := _find_no_baseline(baseline, points.values())):
        if "baseline" in job.model_fields_set:
            problems[missing.path] = missing
        else:
            remarks.append(missing)
    plan = Plan(
        points=tuple(points.values()),
        warnings=tuple(map(job.explain, [*remarks, *_budget_remarks(job)])),
        batch_search=job.batch_search,
        baseline=baseline,
    )
    return plan, list(problems.values())


def _accept_all(job: Job, entry: Mapping[str, Sequence[Scalar]]) -> dict[str, list[Scalar]]:
    """Return lists of values, converted as the type of each setting says."""
    return {name: [job.settings[name].accept(v) for v in values] for name, values in entry.items()}


def _product(job: Job) -> Iterator[tuple[KeyPath, _Choice]]:
    """Yield the product of all axes as values of settings, each with the path of the matrix."""
    axes: list[list[_Choice]] = []
    # Each change of the environment costs new processes, so it varies slowest.
    variables = {name: values for name, values in job.env.items() if len(values) > 1}
    for section, settings in (("env", variables), ("matrix", _accept_all(job, job.axes))):
        for name, values in settings.items():
            axes.append([{name: (value, (section, name, i))} for i, value in enumerate(values)])
    for number, entry in enumerate(job.zip):
        columns = _accept_all(job, entry)
        axes.append(
            [
                {name: (values[i], ("zip", number, name, i)) for name, values in columns.items()}
                for i in range(len(next(iter(columns.values()))))
            ]
        )
    if axes or not job.include:
        for choices in itertools.product(*axes):
            yield ("matrix",), {name: given for choice in choices for name, given in choice.items()}


def _included(job: Job) -> Iterator[tuple[KeyPath, _Choice]]:
    """Yield the included points as values of settings, each with its path."""
    for number, entry in enumerate(job.include):
        path = ("include", number)
        yield (
            path,
            {n: (job.settings[n].accept(value), (*path, n)) for n, value in entry.items()},
        )


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


def _make_point(
    job: Job, values: Mapping[str, Scalar], origin: KeyPath, size_path: KeyPath
) -> Point | Problem:
    """Return the point with these settings, or why there is none.

    origin, size_path: where the job file asks for the point, and where it gives its batch size.
    """
    sizes = _batch_sizes(job, values)
    if isinstance(sizes, str):
        return Problem(path=size_path, message=sizes)
    batch_size, global_batch_size = sizes
    is_strong = "global_batch_size" in values or job.shares_work
    not_params = {*RUN_SETTINGS, *job.env}
    point = Point(
        workload=job.workload.kind,
        params={name: values[name] for name in sorted(values) if name not in not_params},
        world_size=int(values["world_size"]),
        **{name: RUN_SETTINGS[name].restore(values.get(name)) for name in EXECUTION},
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        scaling="strong" if is_strong else "weak" if batch_size else None,
    )
    variables = {name: str(values[name]) for name in sorted(job.env) if name in values}
    settings = {**point.settings, **variables}
    env = {name: render(text, settings) for name, text in variables.items()}
    if reason := job.why_not(point):
        return Problem(path=origin, message=reason)
    point = replace(point, env=env)
    if point.workload == SCRIPT:
        items = render(str(point.params["items_per_step"]), point.settings)
        try:
            product_of(items)
        except ValueError as error:
            message = f"{error}, given {quote(items)}"
            return Problem(path=("workload", "items_per_step"), message=message)
    return point


def _batch_sizes(job: Job, values: Mapping[str, Scalar]) -> tuple[int | None, int | None] | str:
    """Return batch_size and global_batch_size, or what is wrong with the one that is given.

    Both None where none is given.
    """
    if not any(name in values for name in BATCH_SIZES):
        return None, None
    world_size, accumulation = int(values["world_size"]), int(values.get("grad_accumulation", 1))
    # Each has a batch of its own.
    groups = max(1, world_size // job.ranks_per_item(values))
    share = groups * accumulation
    if "global_batch_size" in values:
        global_batch_size = int(values["global_batch_size"])
    else:
        global_batch_size = int(values["batch_size"]) * share
    if global_batch_size % share:
        by = [f"world_size {world_size}"] if groups == world_size else []
        if 1 < groups < world_size:
            by.append(f"{groups} groups of ranks that share their items")
        by += [f"grad_accumulation {accumulation}"] if accumulation > 1 else []
        return f"{global_batch_size} cannot be divided by {' x '.join(by)}"
    if global_batch_size > _INT64_MAX:
        return f"batch_size x {groups} x grad_accumulation {accumulation} does not fit into 64 bits"
    return global_batch_size // share, global_batch_size


def _find_no_baseline(baseline: Mapping[str, Scalar], points: Collection[Point]) -> Problem | None:
    """Return a problem that names the nearest point where no point has all these; else None."""
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
    """Return a remark where `max_seconds` or `timeout_s` ends a point early; else none."""
    measure = job.measure
    budget_s = measure.repeats * measure.max_seconds
    if "min_seconds" in measure.model_fields_set and measure.min_seconds > measure.max_seconds:
        message = f"max_seconds, {measure.max_seconds:g}, ends a repeat before; raise it"
        return [Problem(path=("measure", "min_seconds"), message=message)]
    if measure.timeout_s > budget_s:
        return []
    message = f"a slow point is stopped before its budget of {budget_s:g} s is used"
    return [Problem(path=("measure", "timeout_s"), message=message)]


def select_points(
    points: Sequence[Point], expression: str, option: str = "--filter"
) -> tuple[Point, ...]:
    """Return the points for which `expression`, given with `option`, is true, in their order.

    Its names are the settings of a point. Raises UsageError when it cannot be evaluated, is
    neither true nor false for a point, or keeps no point.
    """
    # Here, so that a sweep without a filter does not load it.
    from simpleeval import EvalWithCompoundTypes, NameNotDefined  # type: ignore[import-untyped]

    label = f"{option} {expression if expression.isprintable() else quote(expression)}"
    try:
        with warnings.catch_warnings():
            # What Python remarks on, as the escape in '\d', would be printed.
            warnings.simplefilter("ignore")
            # Not by simpleeval, which takes statements such as `world_size = 2` and ignores them.
            tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # MemoryError is what Python says to parentheses nested too deep.
        reason = getattr(error, "msg", None) or " ".join(str(error).split())
        message = f"{label}: not an expression: {reason}; write it as in {_FILTER_EXAMPLE}"
        raise UsageError(message) from error
    evaluator = EvalWithCompoundTypes(functions={})
    kept = []
    for point in points:
        evaluator.names = point.settings
        try:
            answer = evaluator.eval(expression, previously_parsed=tree)
        except NameNotDefined as error:
            raise UsageError(f"{label}: {_explain_name(error.name, points)}") from error
        except Exception as error:
            # The expression is the user's, and so is whatever Python says to it.
            reason = " ".join(str(error).split())
            raise UsageError(f"{label}: {type(error).__name__}: {reason}") from error
        if not isinstance(answer, bool):
            raise UsageError(f"{label}: must be true or false, gives {quote(answer)}")
        if answer:
            kept.append(point)
    if not kept:
        raise UsageError(f"{label}: keeps none of the {len(points)} points")
    return tuple(kept)


def _explain_name(name: str, points: Sequence[Point]) -> str:
    """Return what is wrong with a name that is no setting: most often a text lacks its quotes."""
    for point in points:
        for setting, value in point.settings.items():
            if value == name:
                quoted = f"{setting} == {name!r}"
                return f"{name} is a value of {setting}, and a text needs quotes: {quoted}"
    return say_unknown("setting", name, points[0].settings) + f"; a text needs quotes: {name!r}"
