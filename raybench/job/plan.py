"""From the axes of a job to its points, the filter of points, and the rules of axes and settings.

The rules are those that depend on the workload. A text may name settings in braces: the arguments
of a script, environment variables. All is pure, but that a script is looked for.
"""

from __future__ import annotations

import ast
import itertools
import math
import re
import shlex
import string
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import UsageError
from raybench.job import registry
from raybench.job.point import (
    BATCH_SIZES,
    BY_ACCUMULATION,
    EXECUTION,
    FAST,
    RUN_SETTINGS,
    SCRIPT,
    UNEVEN,
    Point,
    Precision,
    Scalar,
    device_numbers,
    setting_text,
)
from raybench.job.problems import KeyPath, Problem, did_you_mean, key_text, quote, say_unknown
from raybench.job.registry import Setting, make_setting

if TYPE_CHECKING:
    from raybench.job.model import BatchSearch, Job

MAX_POINTS = 100_000
_INT64_MAX = 2**63 - 1  # what the result tables can hold
_SIZE_RULE = (
    "must be bytes, as in 4096 or 4KiB; an axis also takes a range FIRST:LAST:xFACTOR, as in "
    "8:1GiB:x2"
)
_BRACES = "a text names a setting as in {batch_size}; write {{ and }} for braces themselves"
# Variables that raybench itself sets for each rank, or by which it finds its processes again.
_OURS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
)
_OUR_PREFIXES = ("RAY_", "RAYBENCH_", "TORCHELASTIC_")


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

    Of batch_size and global_batch_size only the one that the job fixes. Empty for no points.
    """
    told = [point.settings_as_given for point in points]
    names = dict.fromkeys(name for settings in told for name in settings)
    return [
        name for name in names if any(settings.get(name) != told[0].get(name) for settings in told)
    ]


def make_plan(job: Job) -> Plan:
    """Return the plan of `job`: points in the order of its axes' product, then the included ones.

    Raises JobError when a global batch size does not divide, the workload refuses a point, no point
    is left, or none has the baseline that the job gives.
    """
    plan, problems = plan_and_problems(job)
    if problems:
        raise job.error(problems)
    return plan


def plan_and_problems(job: Job) -> tuple[Plan, list[Problem]]:
    """Return the plan, and the problems for which it must not be run; empty if it may."""
    wanted, unused = _not_excluded(job)
    problems: dict[KeyPath, Problem] = {}
    points: dict[str, Point] = {}
    duplicates: Counter[KeyPath] = Counter()
    for origin, values, size_path in wanted:
        point = _make_point(job, values, origin, size_path)
        if isinstance(point, Problem):
            problems.setdefault(point.path, point)
        elif point.point_id in points:
            duplicates[origin] += 1
        else:
            points[point.point_id] = point
    if not wanted:
        problems[()] = Problem(path=("exclude",), message="leaves no point to run")
    remarks = [
        *_remarks(job),
        *(Problem(path=("exclude", n), message="matches no point") for n in unused),
        *(
            Problem(path=path, message=f"{count} duplicate point{'s' * (count > 1)} dropped")
            for path, count in duplicates.items()
        ),
    ]
    baseline = _accept(job, job.baseline)
    if points and (missing := _find_no_baseline(baseline, points.values())):
        if "baseline" in job.model_fields_set:
            problems[missing.path] = missing
        else:
            remarks.append(missing)
    plan = Plan(
        points=tuple(points.values()),
        warnings=tuple(map(job.explain, remarks)),
        batch_search=job.batch_search,
        baseline=baseline,
    )
    return plan, list(problems.values())


def _not_excluded(
    job: Job,
) -> tuple[list[tuple[KeyPath, dict[str, Scalar], KeyPath]], list[int]]:
    """Return the settings of each point to make, and the entries of `exclude` that match none.

    Each point as (where the job file asks for it, its settings, where its batch size is given).
    """
    # What is no axis: defaults, placement, variables with one value, the workload section.
    shared = {
        **{
            n: one.accept(one.default) for n, one in job.settings.items() if one.default is not None
        },
        "devices": job.placement.devices,
        "strategy": job.placement.strategy,
        **{name: values[0] for name, values in job.env.items() if len(values) == 1},
        **_accept(job, job.workload.parameters),
    }
    excluded = [_accept_all(job, entry) for entry in job.exclude]
    used: set[int] = set()
    wanted = []
    for origin, choice in _choices(job):
        values = shared | {name: value for name, (value, _) in choice.items()}
        matching = {
            number
            for number, entry in enumerate(excluded)
            if all(values.get(name) in allowed for name, allowed in entry.items())
        }
        if matching and origin == ("matrix",):  # included points cannot be excluded
            used |= matching
            continue
        size_path = next((choice[name][1] for name in BATCH_SIZES if name in choice), origin)
        wanted.append((origin, values, size_path))
    return wanted, [number for number in range(len(excluded)) if number not in used]


def _accept(job: Job, entry: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return values, converted as the type of each setting says."""
    return {name: job.settings[name].accept(value) for name, value in entry.items()}


def _accept_all(job: Job, entry: Mapping[str, Sequence[Scalar]]) -> dict[str, list[Scalar]]:
    """Return lists of values, converted as the type of each setting says."""
    return {name: [job.settings[name].accept(v) for v in values] for name, values in entry.items()}


# What one value of an axis sets: values by setting, and where the job file gives them.
_Choice = Mapping[str, tuple[Scalar, KeyPath]]


def _choices(job: Job) -> Iterator[tuple[KeyPath, _Choice]]:
    """Yield the product of all axes, then the included points, each with its path."""
    axes: list[list[_Choice]] = []
    # Each change of the environment costs new processes, so it varies slowest.
    variables = {name: values for name, values in job.env.items() if len(values) > 1}
    for section, settings in (("env", variables), ("matrix", _accept_all(job, job.axes))):
        for name, values in settings.items():
            axes.append([{name: (value, (section, name, i))} for i, value in enumerate(values)])
    for number, entry in enumerate(job.zip):
        rows = zip(*_accept_all(job, entry).values(), strict=True)
        axes.append(
            [
                {n: (v, ("zip", number, n, i)) for n, v in zip(entry, row, strict=True)}
                for i, row in enumerate(rows)
            ]
        )
    if axes or not job.include:
        for choices in itertools.product(*axes):
            yield ("matrix",), {name: given for choice in choices for name, given in choice.items()}
    for number, point in enumerate(job.include):
        path = ("include", number)
        yield path, {n: (value, (*path, n)) for n, value in _accept(job, point).items()}


def _make_point(
    job: Job, values: Mapping[str, Scalar], origin: KeyPath, size_path: KeyPath
) -> Point | Problem:
    """Return the point with these settings, or why there is none.

    origin, size_path: where the job file asks for the point, and where it gives its batch size.
    Raises UsageError where a class method of the workload raises.
    """
    sizes = _batch_sizes(job, values)
    if isinstance(sizes, str):
        return Problem(path=size_path, message=sizes)
    batch_size, global_batch_size = sizes
    is_strong = "global_batch_size" in values or registry.shares_work(job.workload_class)
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
    if reason := _why_not(point) or registry.why_not(job.workload_class, point.settings):
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

    Both None where none is given. Raises UsageError where the workload cannot say how many ranks
    share their items.
    """
    if not any(name in values for name in BATCH_SIZES):
        return None, None
    world_size, accumulation = int(values["world_size"]), int(values.get("grad_accumulation", 1))
    # Each has a batch of its own.
    groups = max(1, world_size // registry.ranks_per_item(job.workload_class, values))
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


def _why_not(point: Point) -> str | None:
    """Return why the point cannot have its devices, shares or slow devices; None where it can."""
    named = len(device_numbers(point.devices))
    if named and named < point.world_size:
        return f"devices: {point.devices} are {named}, world_size is {point.world_size}"
    if not point.is_uneven:
        return None
    if point.cuda_graph:
        return "cuda_graph: true does not go with shares and slow_ratio; leave it out"
    if point.shares == FAST and point.slow_ratio < 1 and point.slow_count >= point.world_size:
        return f"shares: fast leaves no device when slow_count {point.slow_count} are all"
    if point.shares == BY_ACCUMULATION and "grad_accumulation" not in point.params:
        return f"shares: {BY_ACCUMULATION} needs a workload with the parameter grad_accumulation"
    if "/" not in point.shares:
        return None
    shares = [int(items) for items in point.shares.split("/")]
    if len(shares) != point.world_size:
        return f"shares: {point.shares} are {len(shares)}, world_size is {point.world_size}"
    if sum(shares) != point.global_batch_size:
        return (
            f"shares: {point.shares} are {sum(shares)} samples together, a step has "
            f"{point.global_batch_size}"
        )
    if any(items % point.grad_accumulation for items in shares):
        return f"shares: {point.shares} cannot be divided by grad_accumulation"
    return None


def _remarks(job: Job) -> Iterator[Problem]:
    """Yield remarks on a script without items_per_step, and on limits that end a point early."""
    given = {*job.workload.parameters, *_axes_and_included(job)}
    if job.workload.kind == SCRIPT and "items_per_step" not in given:
        message = (
            "gives no items_per_step, without which there is no throughput and no speed-up; set "
            'it to the samples of a step on one rank, as in items_per_step: "{batch_size}"'
        )
        yield Problem(path=("workload",), at_key=True, message=message)
    measure = job.measure
    budget_s = measure.repeats * measure.max_seconds
    if "min_seconds" in measure.model_fields_set and measure.min_seconds > measure.max_seconds:
        message = f"max_seconds, {measure.max_seconds:g}, ends a repeat before; raise it"
        yield Problem(path=("measure", "min_seconds"), message=message)
    elif measure.timeout_s <= budget_s:
        message = f"a slow point is stopped before its budget of {budget_s:g} s is used"
        yield Problem(path=("measure", "timeout_s"), message=message)


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


def select_points(
    points: Sequence[Point], expression: str, option: str = "--filter"
) -> tuple[Point, ...]:
    """Return the points for which `expression` is true, in their order.

    It is a Python expression without calls, as "world_size > 1 and precision == 'bf16'"; its names
    are the settings of a point. option: the command-line option that gave it, for messages. Raises
    UsageError when it cannot be evaluated, is no bool for a point, or keeps no point.
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
        example = "world_size > 1 and precision == 'bf16'"
        message = f"{label}: not an expression: {reason}; write it as in {example}"
        raise UsageError(message) from error
    evaluator = EvalWithCompoundTypes(functions={})
    kept = []
    for point in points:
        evaluator.names = point.settings
        try:
            answer = evaluator.eval(expression, previously_parsed=tree)
        except NameNotDefined as error:
            # Most often a text lacks its quotes.
            name = error.name
            of = [key for one in points for key, value in one.settings.items() if value == name]
            message = (
                f"{say_unknown('setting', name, point.settings)}; a text needs quotes: {name!r}"
            )
            if of:
                message = (
                    f"{name} is a value of {of[0]}, and a text needs quotes: {of[0]} == {name!r}"
                )
            raise UsageError(f"{label}: {message}") from error
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


_Settings = Mapping[str, Setting]


def add_settings(job: Job, workload_class: type) -> tuple[dict[str, Setting], list[Problem]]:
    """Return name -> setting of the job's points, and problems of texts that name settings.

    They are the settings of the workload, the variables of `env`, and the axes that a script names
    in braces. Raises UsageError for parameters that no job file could give.
    """
    settings = registry.settings(workload_class)
    given = {*_axes_and_included(job), *job.env}
    if not getattr(workload_class, "needs_batch_size", True) and given.isdisjoint(BATCH_SIZES):
        settings = {name: one for name, one in settings.items() if name not in BATCH_SIZES}
    problems = list(_check_env_and_script(job, settings))
    variables = {name: make_setting(name, str) for name in job.env if name not in settings}
    # The texts that may name settings.
    texts: list[tuple[KeyPath, object]] = []
    for name in getattr(workload_class, "templates", ()):
        texts.append((("workload", name), job.workload.parameters.get(name)))
        axes = [
            (("matrix", name), job.axes),
            *((("zip", n, name), e) for n, e in enumerate(job.zip)),
        ]
        for path, axis in axes:
            texts += [((*path, i), value) for i, value in enumerate(axis.get(name, ()))]
        texts += [(("include", n, name), point.get(name)) for n, point in enumerate(job.include)]
    for name, values in job.env.items():
        texts += [(("env", name, index), value) for index, value in enumerate(values)]
    own: dict[str, Setting] = {}
    known = {*settings, *variables}
    for path, text in texts:
        if not isinstance(text, str):
            continue
        try:
            names = names_in(text)
            split_arguments(text)
        except ValueError as error:
            problems.append(Problem(path=path, message=f"{error}, given {quote(text)}"))
            continue
        own |= {name: make_setting(name, Scalar) for name in names if name in given - known}
        for name in names:
            if name in BATCH_SIZES and given.isdisjoint(BATCH_SIZES):
                message = f"names {{{name}}}, but the job gives no batch size; "
                problems.append(Problem(path=path, message=f"{message}put {name} into matrix"))
            elif name not in known and name not in own:
                message = f"{say_unknown('setting', name, [*known, *own])}, in braces"
                problems.append(Problem(path=path, message=message))
    return settings | variables | own, problems


def _axes_and_included(job: Job) -> set[str]:
    """Return the names of all settings in matrix, zip and include."""
    return set(job.matrix).union(*job.zip, *job.include)


def _check_env_and_script(job: Job, settings: _Settings) -> Iterator[Problem]:
    """Yield a problem for each variable that no job may set, and for a script that is not there."""
    for name in job.env:
        message = ""
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            message = "must be the name of a variable, as in NCCL_ALGO"
        elif name in _OURS or name.startswith(_OUR_PREFIXES):
            message = "is set by raybench itself; leave it out"
        elif name in settings or name in RUN_SETTINGS:
            message = "is the name of a setting; a variable cannot have it"
        if message:
            yield Problem(path=("env", name), at_key=True, message=message)
    if job.workload.kind != SCRIPT:
        return
    if "path" in _axes_and_included(job):
        message = "a script cannot be an axis; give one path in workload"
        yield Problem(path=("workload",), at_key=True, message=message)
    path = job.workload.parameters.get("path")
    if isinstance(path, str) and path and script_path(job) is None:
        here, there = Path.cwd(), job.folder.absolute()
        places = f"{here}" if here == there else f"{here} nor in {there}"
        message = f"no such file, given {quote(path)}; it is not in {places}"
        yield Problem(path=("workload", "path"), message=message)


def script_path(job: Job) -> Path | None:
    """Return the file of the parameter `path`; None if there is no such file or parameter.

    It is looked for in the current directory, then in the folder of the job file.
    """
    name = str(job.workload.parameters.get("path", ""))
    places = (Path(name), job.folder / name)
    return next((place for place in places if name and place.is_file()), None)


def check(
    job: Job, settings: _Settings, unsound: Sequence[KeyPath], *, is_workload_known: bool = True
) -> list[Problem]:
    """Return all that is wrong with `job`.

    settings: those that a point of its workload has. unsound: paths of wrong values that were taken
    out of the job; they are not reported as missing. is_workload_known: False if `settings` are
    only those that every workload has; then no other name is wrong, and nothing is missing.
    """
    problems = list(_check_values(job, settings, is_workload_known=is_workload_known))
    problems += _check_axes(job)
    if not is_workload_known:
        return problems
    if job.answer is not None:
        known = job.metrics
        if job.answer.metric not in known:
            message = say_unknown("metric", job.answer.metric, known)
            problems.append(Problem(path=("answer", "metric"), message=message))
        for index, name in enumerate(job.answer.over):
            if name not in settings:
                message = say_unknown("setting", name, [*_axis_names(job), *settings])
                problems.append(Problem(path=("answer", "over", index), message=message))
    damaged = {path[0] for path in unsound if path}
    # A merge key may have given any axis.
    if damaged.isdisjoint({"zip", "include"}) and ("matrix", "<<") not in unsound:
        if ("matrix",) not in unsound:
            problems += _check_what_is_missing(job, settings, unsound)
        lengths = [len(values) for values in (*job.axes.values(), *job.env.values())]
        lengths += [len(next(iter(entry.values()))) for entry in job.zip if entry]
        # Counted without building them.
        count = (math.prod(lengths) if lengths else 0) + len(job.include)
        if "matrix" not in damaged and count > MAX_POINTS:
            message = f"a job has at most {MAX_POINTS:,} points, given {count:,}"
            problems.append(Problem(path=("matrix",), message=message))
    return problems


def _axis_names(job: Job) -> list[str]:
    """Return the names of all axes, in their order."""
    variables = [name for name, values in job.env.items() if len(values) > 1]
    return [*variables, *job.matrix, *(name for entry in job.zip for name in entry)]


def _check_values(job: Job, settings: _Settings, *, is_workload_known: bool) -> Iterator[Problem]:
    """Yield a problem for each wrong key or value of a setting, wherever the job gives some."""
    # The path of a part of the job, what it gives, and what a name in it is called.
    groups: list[tuple[KeyPath, Mapping[str, object], str]] = [
        (("workload",), job.workload.parameters if is_workload_known else {}, "parameter"),
        (("matrix",), job.axes, "axis"),
        *((("zip", number), entry, "axis") for number, entry in enumerate(job.zip)),
        *((("exclude", number), entry, "setting") for number, entry in enumerate(job.exclude)),
        *((("include", number), entry, "setting") for number, entry in enumerate(job.include)),
        (("baseline",), job.baseline, "setting"),
    ]
    for path, group, what in groups:
        if not group and path[0] in ("zip", "exclude"):
            yield Problem(path=path, message="must not be empty")
        known = [n for n in settings if what != "parameter" or n not in RUN_SETTINGS]
        for name, given in group.items():
            place = (*path, name)
            if name not in known:
                if is_workload_known:
                    message = _explain_unknown(job, name, known, what)
                    if what == "parameter" and name in settings:
                        message = "not a parameter; put it into matrix"
                    yield Problem(path=place, at_key=True, message=message)
                continue
            several = isinstance(given, tuple)
            for index, value in enumerate(given if isinstance(given, tuple) else (given,)):
                complaint = settings[name].complaint(value)
                if complaint is None:
                    continue
                if name.endswith("_bytes") and isinstance(value, str):
                    complaint = f"{_SIZE_RULE}, given {quote(value)}"
                elif name in BATCH_SIZES and value == "auto":
                    complaint = "auto is for matrix alone, as its whole value: batch_size: auto"
                elif place == ("matrix", "batch_size") and isinstance(value, str):
                    complaint += did_you_mean(value.lower(), ["auto"])
                yield Problem(path=(*place, index) if several else place, message=complaint)


def _explain_unknown(job: Job, name: str, known: Collection[str], what: str) -> str:
    """Return why a name is not known as a `what`, with the nearest known one."""
    kind = job.workload.kind
    if name in BATCH_SIZES:
        return f"workload {kind} takes no batch size; leave {name} out"
    if name in UNEVEN:
        return (
            f"workload {kind} does not say that it multiplies its loss by context.loss_weight "
            f"(weighs_loss = True); leave {name} out"
        )
    may_name = kind == SCRIPT and what != "parameter"
    return say_unknown(what, name, known) + f"; or name {{{name}}} in args or env" * may_name


def _check_axes(job: Job) -> Iterator[Problem]:
    """Yield a problem for each axis given twice, of unequal lists, or against a search."""
    fixed = set(job.workload.parameters) - set(RUN_SETTINGS)
    first: dict[str, KeyPath] = {name: ("workload", name) for name in fixed}
    first |= {name: ("env", name) for name in job.env}
    paths: list[KeyPath] = [("matrix", name) for name in job.matrix]
    paths += [("zip", number, name) for number, entry in enumerate(job.zip) for name in entry]
    for number, point in enumerate(job.include):
        paths += [("include", number, name) for name in point if name in fixed]
    for path in paths:
        known = first.setdefault(str(path[-1]), path)
        if known != path:
            message = f"also given by {key_text(known)}; keep one of them"
            yield Problem(path=path, at_key=True, message=message)
    for number, entry in enumerate(job.zip):
        if len({len(values) for values in entry.values()}) > 1:
            lengths = ", ".join(f"{name} {len(values)}" for name, values in entry.items())
            message = f"the lists of one entry must be of equal length, given {lengths}"
            yield Problem(path=("zip", number), message=message)
    if job.batch_search is not None:
        places: list[KeyPath] = [("include",)] if job.include else []
        for number, entry in enumerate(job.exclude):
            places += [("exclude", number, name) for name in BATCH_SIZES if name in entry]
        places += [("baseline", "batch_size")] if "batch_size" in job.baseline else []
        rule = "does not go with matrix.batch_size: auto, which finds the batch sizes; leave it out"
        yield from (Problem(path=path, at_key=True, message=rule) for path in places)


def _check_what_is_missing(
    job: Job, settings: _Settings, unsound: Sequence[KeyPath]
) -> Iterator[Problem]:
    """Yield a problem for each axis, batch size or parameter that points lack, or have twice."""
    below = {
        section: [str(p[1]) for p in unsound if p[0:1] == (section,) and len(p) > 1]
        for section in ("matrix", "workload")
    }
    axes = list(dict.fromkeys([*_axis_names(job), *below["matrix"]]))
    fixed = {*job.workload.parameters, *below["workload"]}
    groups: list[tuple[KeyPath, Collection[str]]]
    groups = [(("include", number), entry) for number, entry in enumerate(job.include)]
    for path, entry in groups:
        if missing := [name for name in axes if name not in entry and name not in BATCH_SIZES]:
            message = f"must give every axis of the job, lacks {', '.join(missing)}"
            yield Problem(path=path, message=message)
    if axes or not groups:
        groups.insert(0, (("matrix",), axes))
    for setting in settings.values():
        in_all = all(setting.name in given for _, given in groups)
        if setting.is_required and setting.name not in fixed and not in_all:
            path = ("workload", setting.name)
            yield Problem(path=path, at_key=True, message="required, but not given")
    if not any(name in settings for name in BATCH_SIZES):
        return
    # All groups of points give batch_size, or all global_batch_size.
    kinds = [[size for size in BATCH_SIZES if size in names] for _, names in groups]
    for (path, _), given in zip(groups, kinds, strict=True):
        message = ""
        if len(given) == 2:
            message = "has both batch_size and global_batch_size; a job has one of them"
        elif not given:
            message = "has neither batch_size nor global_batch_size; a job needs one of them"
        elif kinds[0] and given[0] not in kinds[0]:
            message = f"has {given[0]}, but {key_text(groups[0][0])} has {kinds[0][0]}"
        if message:
            yield Problem(path=path, message=message)


def names_in(text: str) -> list[str]:
    """Return the names of settings in a text's braces, each once, in their order.

    Raises ValueError, with the rule, where braces hold anything but a name.
    """
    try:
        fields = [field for _, *field in string.Formatter().parse(text) if field[0] is not None]
    except ValueError:
        raise ValueError(_BRACES) from None
    for name, format_spec, conversion in fields:
        if not re.fullmatch(r"[A-Za-z_]\w*", name or "") or format_spec or conversion:
            raise ValueError(_BRACES)
    return list(dict.fromkeys(str(name) for name, *_ in fields))


def render(text: str, settings: Mapping[str, Scalar]) -> str:
    """Return the text with values in place of names in braces; a bool becomes `true` or `false`.

    Raises KeyError for a name that is not in `settings`.
    """
    return text.format_map({name: setting_text(value) for name, value in settings.items()})


def split_arguments(text: str) -> list[str]:
    """Return the words of a command line, split as a shell does.

    Raises ValueError for a quote that is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError:
        raise ValueError("a quote is not closed") from None


def product_of(text: str) -> int | None:
    """Return the number that a text such as `64 * 8` or `512` means; None for an empty text.

    Raises ValueError, with the rule, for any other text.
    """
    if not text.strip():
        return None
    factors = [factor.strip() for factor in text.split("*")]
    if not all(factor.isdecimal() for factor in factors):
        raise ValueError("must be a whole number, or a product of them, as in 64 * 8")
    return math.prod(map(int, factors))
