"""Make the points of a job from its axes, and filter points."""

from __future__ import annotations

import ast
import itertools
import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from raybench.errors import UsageError
from raybench.job.declarations import missing_packages, ranks_per_item, shares_work, why_not
from raybench.job.model import BatchSearch, Job
from raybench.job.point import (
    BATCH_SIZES,
    EXECUTION,
    RUN_SETTINGS,
    SCRIPT,
    Point,
    Precision,
    Scalar,
    device_numbers,
    fill_in,
    product_of,
)
from raybench.job.problems import JobProblem, KeyPath, quote, say_unknown
from raybench.job.uneven import why_not_uneven

_INT64_MAX = 2**63 - 1  # what the result tables can hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The ordered points of a job, and warnings for the user."""

    points: tuple[Point, ...]
    warnings: tuple[str, ...] = ()
    # How the run finds batch sizes. `points` then has the first batch of each series, and the
    # batches that earlier sweeps of the run have tried.
    batch_search: BatchSearch | None = None
    # Settings of the points that other points are compared with.
    baseline: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions of all points, each once."""
        return tuple(dict.fromkeys(point.precision for point in self.points))


def varying_settings(points: Sequence[Point]) -> list[str]:
    """Return the names of the settings that differ between points, or that only some points have.

    A batch size that follows from the other batch size is left out.
    """
    # Compare by repr, because 1, 1.0 and True are equal.
    texts: dict[str, set[str]] = {}
    all_settings = [point.settings_as_given for point in points]
    for name in dict.fromkeys(itertools.chain(*all_settings)):
        texts[name] = {repr(settings.get(name)) for settings in all_settings}
    return [name for name, distinct in texts.items() if len(distinct) > 1]


def make_plan(job: Job) -> Plan:
    """Return the plan of a loaded job; duplicate points are dropped with a warning.

    Raises:
        JobError: a point is impossible or refused by the workload, no point is left, or no point
            matches the baseline.
        UsageError: a class method of the workload raises.
    """
    plan, problems = plan_and_problems(job)
    if problems:
        raise job.error(problems)
    return plan


def plan_and_problems(job: Job) -> tuple[Plan, list[JobProblem]]:
    """Return the plan of the points without problems, and the problems.

    Args:
        job: must have passed the checks of `loading.py`.

    Raises:
        UsageError: a class method of the workload raises.
    """
    all_settings, unused_entries = _settings_of_points(job)
    problems: dict[KeyPath, JobProblem] = {}
    points: dict[str, Point] = {}
    duplicates: Counter[KeyPath] = Counter()
    for settings in all_settings:
        point_or_problem = _make_point(job, settings)
        if isinstance(point_or_problem, JobProblem):
            # Report one problem for each path: many points may share the cause.
            problems.setdefault(point_or_problem.path, point_or_problem)
        elif point_or_problem.point_id in points:
            duplicates[settings.path] += 1
        else:
            points[point_or_problem.point_id] = point_or_problem
    if not all_settings:
        problems[()] = JobProblem(path=("exclude",), message="leaves no point to run")
    warnings_of_job = [
        *_warnings_of_sections(job),
        *(JobProblem(path=("exclude", n), message="matches no point") for n in unused_entries),
    ]
    for path, count in duplicates.items():
        plural = "s" if count > 1 else ""
        message = f"{count} duplicate point{plural} dropped"
        warnings_of_job.append(JobProblem(path=path, message=message))
    baseline = _convert(job, job.baseline)
    if points and (no_baseline := _check_baseline(baseline, points.values())):
        if "baseline" in job.model_fields_set:
            problems[no_baseline.path] = no_baseline
        else:
            # The user did not ask for the default baseline.
            warnings_of_job.append(no_baseline)
    plan = Plan(
        points=tuple(points.values()),
        warnings=tuple(map(job.explain, warnings_of_job)),
        batch_search=job.batch_search,
        baseline=baseline,
    )
    return plan, list(problems.values())


class _PointSettings(NamedTuple):
    """The settings of a point, and their paths in the job file for messages."""

    values: dict[str, Scalar]
    # ("matrix",), or the entry of `include`.
    path: KeyPath
    # Path of the batch size; `path` if the job gives none.
    batch_size_path: KeyPath


def _settings_of_points(job: Job) -> tuple[list[_PointSettings], list[int]]:
    """Return the settings of each point, and the indexes of unused entries of `exclude`."""
    defaults = {
        name: setting.accept(setting.default)
        for name, setting in job.settings.items()
        if setting.default is not None
    }
    # Axes override the shared settings.
    shared = {
        **defaults,
        "devices": job.placement.devices,
        "strategy": job.placement.strategy,
        **{name: values[0] for name, values in job.env.items() if len(values) == 1},
        **_convert(job, job.workload.parameters),
    }
    excluded = [_convert_all(job, entry) for entry in job.exclude]
    matching_entries: set[int] = set()
    all_settings = []
    for path, combination in _combinations(job):  # setting -> (value, path of the value)
        values = shared | {name: value for name, (value, _) in combination.items()}
        matching = {number for number, entry in enumerate(excluded) if _matches(values, entry)}
        # `exclude` does not apply to the points of `include`.
        if matching and path == ("matrix",):
            matching_entries |= matching
            continue
        # Where to report a batch size that is impossible.
        batch_size_path = path
        for name in BATCH_SIZES:
            if name in combination:
                _, batch_size_path = combination[name]
                break
        all_settings.append(_PointSettings(values, path, batch_size_path))
    unused_entries = [number for number in range(len(excluded)) if number not in matching_entries]
    return all_settings, unused_entries


def _matches(values: Mapping[str, Scalar], entry: Mapping[str, Sequence[Scalar]]) -> bool:
    """Return whether each setting of the entry has one of the values that the entry lists."""
    return all(values.get(name) in allowed for name, allowed in entry.items())


def _convert(job: Job, entry: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Convert each value to the declared type of its setting, such as 1 to 1.0."""
    return {name: job.settings[name].accept(value) for name, value in entry.items()}


def _convert_all(job: Job, entry: Mapping[str, Sequence[Scalar]]) -> dict[str, list[Scalar]]:
    """Convert each list of values to the declared type of its setting."""
    converted = {}
    for name, values in entry.items():
        converted[name] = list(map(job.settings[name].accept, values))
    return converted


# Setting -> (value, path of the value in the job file).
_ValuesWithPaths = dict[str, tuple[Scalar, KeyPath]]


def _combinations(job: Job) -> Iterator[tuple[KeyPath, _ValuesWithPaths]]:
    """Yield (path in the job, settings) of the product of all axes, then of `include`."""
    # Each axis is a list of its positions; a position gives one setting, or several of `zip`.
    axes: list[list[_ValuesWithPaths]] = []
    # Variables vary slowest, because each change needs new processes.
    variables = {name: values for name, values in job.env.items() if len(values) > 1}
    for section, settings in (("env", variables), ("matrix", _convert_all(job, job.axes))):
        for name, values in settings.items():
            axes.append([{name: (value, (section, name, i))} for i, value in enumerate(values)])
    for number, entry in enumerate(job.zip):
        lists = _convert_all(job, entry)  # the lists of an entry vary together
        axis: list[_ValuesWithPaths] = []
        for i in range(min(map(len, lists.values()), default=0)):
            axis.append(
                {name: (values[i], ("zip", number, name, i)) for name, values in lists.items()}
            )
        axes.append(axis)
    if axes or not job.include:
        for positions in itertools.product(*axes):
            combination: _ValuesWithPaths = {}
            for position in positions:
                combination |= position
            yield ("matrix",), combination
    for number, point in enumerate(job.include):
        path = ("include", number)
        settings_of_point = _convert(job, point).items()
        yield path, {name: (value, (*path, name)) for name, value in settings_of_point}


def _make_point(job: Job, point_settings: _PointSettings) -> Point | JobProblem:
    """Return the point with these settings, or why the point is impossible."""
    values, path = point_settings.values, point_settings.path
    sizes = _batch_sizes(job, values)
    if isinstance(sizes, str):
        return JobProblem(path=point_settings.batch_size_path, message=sizes)
    batch_size, global_batch_size = sizes
    is_strong = "global_batch_size" in values or shares_work(job.workload_class)
    point = Point(
        workload=job.workload.kind,
        params={name: values[name] for name in sorted(values.keys() - {*RUN_SETTINGS, *job.env})},
        world_size=int(values["world_size"]),
        **{name: RUN_SETTINGS[name].restore(values.get(name)) for name in EXECUTION},
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        scaling="strong" if is_strong else "weak" if batch_size else None,
    )
    # Variables, and parameters in `templates` of the class, may name settings in braces.
    given_names = {*job.workload.parameters, *job.varied}
    templates = given_names.intersection(getattr(job.workload_class, "templates", ()))
    text_names = sorted({*job.env, *templates})
    texts = {name: str(values[name]) for name in text_names if name in values}
    settings = {**point.settings, **texts}
    try:
        # Fill in parameters only to find missing settings; the workload fills them in again.
        filled_texts = {name: fill_in(text, settings) for name, text in texts.items()}
    except KeyError as error:
        return JobProblem(path=path, message=f"lacks {error.args[0]}, which a text has in braces")
    env = {name: text for name, text in filled_texts.items() if name in job.env}
    if reason := _why_impossible(point) or why_not(job.workload_class, point.settings):
        return JobProblem(path=path, message=reason)
    point = replace(point, env=env)
    if point.workload == SCRIPT:
        items = fill_in(str(point.params["items_per_step"]), point.settings)
        try:
            product_of(items)
        except ValueError as error:
            message = f"{error}, given {quote(items)}"
            return JobProblem(path=("workload", "items_per_step"), message=message)
    return point


def _batch_sizes(job: Job, values: Mapping[str, Scalar]) -> tuple[int | None, int | None] | str:
    """Return batch_size and global_batch_size (None if not given), or an error message."""
    if not any(name in values for name in BATCH_SIZES):
        return None, None
    world_size, accumulation = int(values["world_size"]), int(values.get("grad_accumulation", 1))
    # A group is the ranks that work on the same items. Each group has its own batch.
    groups = max(1, world_size // ranks_per_item(job.workload_class, values))
    batches_per_step = groups * accumulation
    if "global_batch_size" in values:
        global_batch_size = int(values["global_batch_size"])
    else:
        global_batch_size = int(values["batch_size"]) * batches_per_step
    if global_batch_size % batches_per_step:
        factors = [f"world_size {world_size}"] if groups == world_size else []
        if 1 < groups < world_size:
            factors.append(f"{groups} groups of ranks that share their items")
        factors += [f"grad_accumulation {accumulation}"] if accumulation > 1 else []
        return f"{global_batch_size} cannot be divided by {' x '.join(factors)}"
    if global_batch_size > _INT64_MAX:
        return f"batch_size x {groups} x grad_accumulation {accumulation} does not fit into 64 bits"
    return global_batch_size // batches_per_step, global_batch_size


def _why_impossible(point: Point) -> str | None:
    """Return why the devices or the shares of a point are impossible, or None."""
    device_count = len(device_numbers(point.devices))
    # The setting `devices` may also be a model, which has no numbers.
    if device_count and device_count < point.world_size:
        return f"devices: {point.devices} are {device_count}, world_size is {point.world_size}"
    return why_not_uneven(point) if point.is_uneven else None


def _warnings_of_sections(job: Job) -> Iterator[JobProblem]:
    """Yield warnings: missing packages, missing items_per_step, time limits that are too short."""
    for package, cure in missing_packages(job.workload_class).items():
        message = f"needs {package} on every worker, and it is not installed here; {cure}"
        yield JobProblem(path=("workload", "kind"), message=message)
    given = {*job.workload.parameters, *job.varied}
    if job.workload.kind == SCRIPT and "items_per_step" not in given:
        message = (
            "gives no items_per_step, without which there is no throughput and no speed-up; set "
            'it to the samples of a step on one rank, as in items_per_step: "{batch_size}"'
        )
        yield JobProblem(path=("workload",), at_key=True, message=message)
    measure = job.measure
    budget_s = measure.repeats * measure.max_seconds
    if "seconds" in measure.model_fields_set and measure.seconds > measure.timed_s:
        message = (
            f"max_seconds, {measure.max_seconds:g}, leaves {measure.timed_s:.3g} s after the "
            "warm-up; raise it"
        )
        yield JobProblem(path=("measure", "seconds"), message=message)
    elif measure.timeout_s <= measure.heat_s:
        message = (
            f"a point that heats for {measure.heat_s:g} s is stopped after "
            f"{measure.timeout_s:g} s, before it is timed; raise it"
        )
        yield JobProblem(path=("measure", "timeout_s"), message=message)
    elif measure.timeout_s <= budget_s + measure.heat_s:
        heat = f" after heat_s, {measure.heat_s:g} s," if measure.heat_s else ""
        message = f"a slow point is stopped before its budget of {budget_s:g} s{heat} is used"
        yield JobProblem(path=("measure", "timeout_s"), message=message)


def _check_baseline(baseline: Mapping[str, Scalar], points: Collection[Point]) -> JobProblem | None:
    """Return a problem with the nearest point if no point matches the baseline."""
    nearest = max(points, key=lambda point: len(baseline.items() & point.settings.items()))
    if baseline.items() <= nearest.settings.items():
        return None
    wanted = ", ".join(f"{name}: {quote(value)}" for name, value in baseline.items())
    have = ", ".join(f"{name}: {quote(nearest.settings.get(name))}" for name in baseline)
    message = (
        f"no point has {{{wanted}}}, so there is no speed-up; the nearest has {{{have}}}; "
        "baseline: {} compares nothing"
    )
    return JobProblem(path=("baseline",), message=message)


def select_points(
    points: Sequence[Point], expression: str, option: str = "--filter"
) -> tuple[Point, ...]:
    """Return the points for which `expression` is true, in their order.

    Args:
        expression: Python expression over the names of `Point.settings`, without functions, such as
            "world_size > 1 and precision == 'bf16'".
        option: option of the command, for messages.

    Raises:
        UsageError: the expression is invalid, fails, names a setting that a point lacks, gives no
            bool, or keeps no point.
    """
    # Import here, so that sweeps without a filter start faster.
    from simpleeval import EvalWithCompoundTypes, NameNotDefined  # type: ignore[import-untyped]

    label = f"{option} {expression if expression.isprintable() else quote(expression)}"
    try:
        # simpleeval would accept and ignore statements such as `world_size = 2`.
        with warnings.catch_warnings():
            # Python would print warnings, such as for the escape in '\d'.
            warnings.simplefilter("ignore")
            tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # Python raises MemoryError for deeply nested parentheses.
        reason = getattr(error, "msg", None) or " ".join(str(error).split())
        example = "world_size > 1 and precision == 'bf16'"
        message = f"{label}: not an expression: {reason}; write it as in {example}"
        raise UsageError(message) from error
    evaluator = EvalWithCompoundTypes(functions={})
    kept = []
    for point in points:
        evaluator.names = point.settings | {"point_id": point.point_id}
        try:
            answer = evaluator.eval(expression, previously_parsed=tree)
        except NameNotDefined as error:
            # The user has probably left out the quotes of a text.
            name = error.name
            settings = itertools.chain(*(other.settings.items() for other in points))
            # The setting that has this text as a value.
            owner = next((setting for setting, value in settings if value == name), "")
            unknown = say_unknown("setting", name, point.settings)
            article = " A" if unknown.endswith("?") else "; a"
            message = f"{unknown}{article} text needs quotes: {name!r}"
            if owner:
                message = f"{name} is a value of {owner}, and a text needs quotes: "
                message += f"{owner} == {name!r}"
            raise UsageError(f"{label}: {message}") from error
        except Exception as error:
            # Evaluating an expression of the user may raise anything.
            reason = " ".join(str(error).split())
            raise UsageError(f"{label}: {type(error).__name__}: {reason}") from error
        if not isinstance(answer, bool):
            raise UsageError(f"{label}: must be true or false, gives {quote(answer)}")
        if answer:
            kept.append(point)
    if not kept:
        raise UsageError(f"{label}: keeps none of the {len(points)} points")
    return tuple(kept)


def script_path(job: Job) -> Path | None:
    """Return the path of the script, relative to here or to `Job.folder`; None if missing."""
    name = str(job.workload.parameters.get("path", ""))
    candidates = (Path(name), job.folder / name)
    # Path.is_file raises for long names and for closed folders.
    return next((path for path in candidates if name and os.path.isfile(path)), None)  # noqa: PTH113
