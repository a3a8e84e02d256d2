"""The rules of a job file that depend on its workload: which axes there are, and their values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from raybench.job.point import (
    BATCH_SIZES,
    BY_ACCUMULATION,
    FAST,
    RUN_SETTINGS,
    SCRIPT,
    UNEVEN,
    Point,
    Scalar,
)
from raybench.job.problems import KeyPath, Problem, did_you_mean, key_text, quote, say_unknown
from raybench.job.registry import Setting

if TYPE_CHECKING:
    from raybench.job.model import Job


MAX_POINTS = 100_000
_LISTED_VALUES = 8
_Settings = Mapping[str, Setting]


def check(job: Job, settings: _Settings, unsound: Sequence[KeyPath]) -> list[Problem]:
    """Find all that is wrong with `job`, given the `settings` that a point of its workload has.

    unsound: paths of what was taken out of the job for being wrong; it was given all the same.
    """
    problems = [
        *_check_workload(job, settings),
        *_check_axes(job, settings),
        *_check_repeated_axes(job),
        *_check_zip_lengths(job),
        *_check_search(job),
        *_check_points(job, settings),
        *_check_answer(job, settings),
    ]
    damaged = {path[0] for path in unsound if path}
    # A merge key may have given any axis.
    is_whole = damaged.isdisjoint({"zip", "include"}) and not {
        ("matrix",),
        ("matrix", "<<"),
    } & set(unsound)
    if is_whole:
        axes = list(dict.fromkeys([*axis_names(job), *_names_below("matrix", unsound)]))
        fixed = {*job.workload.parameters, *_names_below("workload", unsound)}
        problems += _check_sizes(job, settings, axes)
        problems += _check_required(job, settings, axes, fixed)
        problems += _check_include_is_full(job, axes)
        problems += _check_baseline(job, settings, [*unsound, *(p.path for p in problems)])
        problems += () if "matrix" in damaged else _check_count(job)
    return problems


def check_run_settings(job: Job, settings: _Settings, unsound: Sequence[KeyPath]) -> list[Problem]:
    """Check what can be said of a job whose workload is not known: `settings` are those of all."""
    problems = [
        *_check_axes(job, settings, others_are_unknown=True),
        *_check_repeated_axes(job),
        *_check_zip_lengths(job),
        *_check_search(job),
        *_check_points(job, settings, others_are_unknown=True),
    ]
    damaged = {path[0] for path in unsound if path}
    if damaged.isdisjoint({"zip", "include", "matrix"}):
        problems += _check_baseline(job, settings, [*unsound, *(p.path for p in problems)])
    return problems


def axis_names(job: Job) -> list[str]:
    """List the names of all axes, in their order."""
    variables = [name for name, values in job.env.items() if len(values) > 1]
    return [*variables, *job.matrix, *(name for entry in job.zip for name in entry)]


def _names_below(section: str, paths: Sequence[KeyPath]) -> list[str]:
    return [str(path[1]) for path in paths if len(path) > 1 and path[0] == section]


def _check_workload(job: Job, settings: _Settings) -> Iterator[Problem]:
    own = [name for name in settings if name not in RUN_SETTINGS]
    for name, value in job.workload.parameters.items():
        path = ("workload", name)
        if name in RUN_SETTINGS and name in settings:
            yield Problem(path=path, at_key=True, message="not a parameter; put it into matrix")
        elif name not in own:
            yield _setting_problem(job, own, path, "parameter")
        else:
            yield from _check_value(settings[name], path, value)


def _check_axes(
    job: Job, settings: _Settings, *, others_are_unknown: bool = False
) -> Iterator[Problem]:
    """Check the keys and values of matrix, zip and exclude.

    others_are_unknown: nothing can be said of a name that is not in `settings`.
    """
    groups: list[tuple[KeyPath, Mapping[str, tuple[object, ...]], str]]
    groups = [(("matrix",), job.axes, "axis")]
    groups += [(("zip", number), entry, "axis") for number, entry in enumerate(job.zip)]
    groups += [(("exclude", number), entry, "setting") for number, entry in enumerate(job.exclude)]
    for path, group, what in groups:
        if not group and path != ("matrix",):
            yield Problem(path=path, message="must not be empty")
        for name, values in group.items():
            if name not in settings:
                if not others_are_unknown:
                    yield _setting_problem(job, settings, (*path, name), what)
                continue
            for index, value in enumerate(values):
                yield from _check_value(settings[name], (*path, name, index), value)


def _check_points(
    job: Job, settings: _Settings, *, others_are_unknown: bool = False
) -> Iterator[Problem]:
    """Check the keys and values of include and baseline."""
    groups: list[tuple[KeyPath, Mapping[str, object]]]
    groups = [(("include", number), entry) for number, entry in enumerate(job.include)]
    groups += [(("baseline",), job.baseline)]
    for path, group in groups:
        for name, value in group.items():
            if name in settings:
                yield from _check_value(settings[name], (*path, name), value)
            elif not others_are_unknown:
                yield _setting_problem(job, settings, (*path, name), "setting")


def _check_answer(job: Job, settings: _Settings) -> Iterator[Problem]:
    """Check that there is the metric of the answer, and each setting that it is compared over."""
    if job.answer is None:
        return
    known = job.metrics
    if job.answer.metric not in known:
        message = say_unknown("metric", job.answer.metric, known)
        yield Problem(path=("answer", "metric"), message=message)
    for index, name in enumerate(job.answer.over):
        if name not in settings:
            message = say_unknown("setting", name, [*axis_names(job), *settings])
            yield Problem(path=("answer", "over", index), message=message)


def _setting_problem(job: Job, known: Collection[str], path: KeyPath, what: str) -> Problem:
    name = path[-1]
    if name in BATCH_SIZES:
        message = f"workload {job.workload.kind} takes no batch size; leave {name} out"
    elif name in UNEVEN:
        message = (
            f"workload {job.workload.kind} does not say that it multiplies its loss by "
            f"context.loss_weight (weighs_loss = True); leave {name} out"
        )
    else:
        message = say_unknown(what, name, known)
        if job.workload.kind == SCRIPT and path[0] != "workload":
            message += f"; or name {{{name}}} in args or env"
    return Problem(path=path, at_key=True, message=message)


def _check_value(setting: Setting, path: KeyPath, value: object) -> Iterator[Problem]:
    complaint = setting.complaint(value)
    if complaint is not None and setting.name in BATCH_SIZES and value == "auto":
        complaint = "auto is for matrix alone, as its whole value: batch_size: auto"
    elif complaint is not None and path[:2] == ("matrix", "batch_size") and isinstance(value, str):
        complaint += did_you_mean(value.lower(), ["auto"])
    if complaint is not None:
        yield Problem(path=path, message=complaint)


def _check_search(job: Job) -> Iterator[Problem]:
    """Check that no batch sizes and points are fixed beside a search for batch sizes."""
    if job.batch_search is None:
        return
    if job.include:
        message = "does not go with matrix.batch_size: auto; put these points into another job"
        yield Problem(path=("include",), at_key=True, message=message)
    for number, entry in enumerate(job.exclude):
        for name in entry:
            if name in BATCH_SIZES:
                message = "a batch size that matrix.batch_size: auto finds cannot be excluded"
                yield Problem(path=("exclude", number, name), at_key=True, message=message)
    if "batch_size" in job.baseline:
        message = "a batch size that matrix.batch_size: auto finds cannot be the baseline"
        yield Problem(path=("baseline", "batch_size"), at_key=True, message=message)


def _check_repeated_axes(job: Job) -> Iterator[Problem]:
    fixed = set(job.workload.parameters) - set(RUN_SETTINGS)
    first: dict[str, KeyPath] = {name: ("workload", name) for name in fixed}
    first |= {name: ("env", name) for name in job.env}
    paths: list[KeyPath] = [("matrix", name) for name in job.matrix]
    paths += [("zip", number, name) for number, entry in enumerate(job.zip) for name in entry]
    for number, entry in enumerate(job.include):
        paths += [("include", number, name) for name in entry if name in fixed]
    for path in paths:
        known = first.setdefault(str(path[-1]), path)
        if known != path:
            message = f"also given by {key_text(known)}; keep one of them"
            yield Problem(path=path, at_key=True, message=message)


def _check_zip_lengths(job: Job) -> Iterator[Problem]:
    for number, entry in enumerate(job.zip):
        if len({len(values) for values in entry.values()}) > 1:
            lengths = ", ".join(f"{name} {len(values)}" for name, values in entry.items())
            message = f"the lists of one entry must be of equal length, given {lengths}"
            yield Problem(path=("zip", number), message=message)


def _check_sizes(job: Job, settings: _Settings, axes: Sequence[str]) -> Iterator[Problem]:
    """Check that one of batch_size and global_batch_size is given, the same everywhere."""
    if not any(name in settings for name in BATCH_SIZES):
        return
    groups: list[tuple[KeyPath, Collection[str]]]
    groups = [(("include", number), entry) for number, entry in enumerate(job.include)]
    if axes or not groups:
        groups.insert(0, (("matrix",), axes))
    kinds = [[size for size in BATCH_SIZES if size in names] for _, names in groups]
    for (path, _), given in zip(groups, kinds, strict=True):
        if len(given) == 2:
            message = "has both batch_size and global_batch_size; a job has one of them"
            yield Problem(path=path, message=message)
        elif not given:
            message = "has neither batch_size nor global_batch_size; a job needs one of them"
            yield Problem(path=path, message=message)
        elif kinds[0] and given[0] not in kinds[0]:
            message = f"has {given[0]}, but {key_text(groups[0][0])} has {kinds[0][0]}"
            yield Problem(path=path, message=message)


def _check_required(
    job: Job, settings: _Settings, axes: Sequence[str], fixed: Collection[str]
) -> Iterator[Problem]:
    for setting in settings.values():
        in_all = bool(job.include) and all(setting.name in entry for entry in job.include)
        is_given = setting.name in {*fixed, *axes} or (in_all and not axes)
        if setting.is_required and not is_given:
            path = ("workload", setting.name)
            yield Problem(path=path, at_key=True, message="required, but not given")


def _check_include_is_full(job: Job, axes: Sequence[str]) -> Iterator[Problem]:
    for number, entry in enumerate(job.include):
        missing = [n for n in axes if n not in entry and n not in BATCH_SIZES]
        if missing:
            message = f"must give every axis of the job, lacks {', '.join(missing)}"
            yield Problem(path=("include", number), message=message)


def _check_baseline(job: Job, settings: _Settings, unsound: Sequence[KeyPath]) -> Iterator[Problem]:
    """Check that each setting of a baseline that the job gives is one that some point has."""
    unsure = {key for path in unsound for key in path}
    if "baseline" not in job.model_fields_set:
        return
    for name, value in job.baseline.items():
        if name in unsure or name not in settings:
            continue
        known = _values_given(job, settings, name)
        if not known or settings[name].accept(value) in known:
            continue
        have = ", ".join(map(quote, known[:_LISTED_VALUES]))
        more = ", ..." if len(known) > _LISTED_VALUES else ""
        message = f"no point has {name} {quote(value)}; the points have {have}{more}"
        yield Problem(path=("baseline", name), message=message)


def _values_given(job: Job, settings: _Settings, name: str) -> list[Scalar]:
    """List the values that the points have of a setting, in the order given.

    None where it is derived or searched.
    """
    if name == "batch_size" and job.batch_search is not None:
        return []
    given: list[object] = [
        *job.axes.get(name, ()),
        *(value for entry in job.zip for value in entry.get(name, ())),
        *job.env.get(name, ()),
    ]
    if not given and (axis_names(job) or not job.include):
        given += [job.workload.parameters.get(name, settings[name].default)]
    given += [entry[name] for entry in job.include if name in entry]
    accept = settings[name].accept
    try:
        return list(dict.fromkeys(accept(value) for value in given if value is not None))
    except ValueError:
        return []  # one of them is a problem of its own, which is told


def _check_count(job: Job) -> Iterator[Problem]:
    """Count the points from the lengths: nothing that large is ever built."""
    lengths = [len(values) for values in job.axes.values()]
    lengths += [len(next(iter(entry.values()))) for entry in job.zip if entry]
    lengths += [len(values) for values in job.env.values()]
    count = (math.prod(lengths) if lengths else 0) + len(job.include)
    if count > MAX_POINTS:
        message = f"a job has at most {MAX_POINTS:,} points, given {count:,}"
        yield Problem(path=("matrix",), message=message)


def why_not_uneven(point: Point) -> str | None:
    """Why the point cannot have its shares or slow devices, and what to do; None where it can."""
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
