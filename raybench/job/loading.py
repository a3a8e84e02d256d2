"""Read a job file and check it.

Rules of one section are in `model.py`; rules that depend on the workload are here.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from raybench.errors import ClusterError, JobError, UsageError
from raybench.job import registry
from raybench.job.model import Job, validate
from raybench.job.plan import plan_and_problems, script_path
from raybench.job.point import (
    BATCH_SIZES,
    RUN_SETTINGS,
    SCRIPT,
    UNEVEN,
    Scalar,
    names_in,
    split_arguments,
)
from raybench.job.problems import JobProblem, KeyPath, did_you_mean, key_text, quote, say_unknown
from raybench.job.settings import PointSetting, make_setting, run_setting, settings_of_class
from raybench.job.source import Order, YamlSource, parse_source, read_source

MAX_POINTS = 100_000
_SIZE_RULE = (
    "must be bytes, as in 4096 or 4KiB; an axis also takes a range FIRST:LAST:xFACTOR, as in "
    "8:1GiB:x2"
)
# Jobs must not set these variables: raybench sets them for each rank, or finds processes by them.
_RESERVED_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
)
_RESERVED_PREFIXES = ("RAY_", "RAYBENCH_", "TORCHELASTIC_")
_Settings = Mapping[str, PointSetting]


def load_job(path: Path, overrides: Sequence[str] = (), *, on_cpu: bool = False) -> Job:
    """Return the job of a file, with its rules checked; `make_plan` checks its points.

    Imports the module of the workload. The job is checked with and without its section `cpu`.

    Args:
        overrides: values of `--set`, such as `measure.warmup=5`.
        on_cpu: apply the section `cpu`, as on a cluster without GPUs.

    Raises:
        JobError: the file cannot be read, or the job has problems; one line for each.
        UsageError: a class method of the workload raises.
        ClusterError: `on_cpu` is set, but the job needs a GPU.
    """
    return job_of_source(read_source(path, overrides, on_cpu=on_cpu))


def job_from_text(
    name: str,
    text: str,
    overrides: Sequence[str] = (),
    options: Mapping[KeyPath, str] | None = None,
    *,
    on_cpu: bool = False,
) -> Job:
    """Return the job of a text, checked as by `load_job`.

    Args:
        name: file name for messages, and for `Job.folder` if there are no options.
        options: path -> option of the command that gave the value, for messages.
        on_cpu: see `load_job`.
    """
    return job_of_source(parse_source(name, text, overrides, options, on_cpu=on_cpu))


def job_of_source(source: YamlSource) -> Job:
    """Return the job of a source, checked as by `load_job`."""
    job, problems = _check_source(source)
    other_lines: list[tuple[Order, str]] = []
    if source.has_cpu:
        # A job with a section `cpu` has two forms, for GPUs and for CPU workers: check both.
        # Omit the overrides here, because they may suit only the form that will run.
        other = parse_source(source.name, source.text, on_cpu=not source.on_cpu)
        with_cpu = source if source.on_cpu else other
        other_lines = _problems_of_other_form(with_cpu, other)
    if job is not None and not problems and other_lines:
        # Report problems of points now, because `make_plan` will not be called.
        problems += plan_and_problems(job)[1]
    if job is None or problems or other_lines:
        raise JobError(source.explain_all(problems, other_lines))
    if source.on_cpu and (reason := job.cpu.why_not):
        raise ClusterError(f"{source.name}: needs a GPU: {reason}")
    return job


def _problems_of_other_form(with_cpu: YamlSource, other: YamlSource) -> list[tuple[Order, str]]:
    """Return the problems that the job has only in the form that will not run.

    A job with a section `cpu` has two forms: with the section for CPU workers, without it for GPUs.

    Args:
        with_cpu: the form for CPU workers, which knows the keys that the section replaces.
        other: the form that will not run now; it may be `with_cpu`.
    """
    job, problems = _check_source(other)
    if job is not None and not problems:
        problems += plan_and_problems(job)[1]
    # Problems at other keys are problems of both forms.
    at_replaced_keys = [
        problem for problem in problems if with_cpu.path_in_file(problem.path) != problem.path
    ]
    return other.ordered_lines(at_replaced_keys)


def _check_source(source: YamlSource) -> tuple[Job | None, list[JobProblem]]:
    """Return the job, or None if it cannot be built, and all problems."""
    problems = list(source.problems)
    job, invalid = validate(source.data)
    problems += _new_problems(problems, invalid)
    if job is None:
        # Check the rest without the wrong values, so that the user sees all problems at once.
        valid = {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in source.data.items()
        }
        for problem in invalid:
            section_name, *keys = problem.path
            section = valid.get(section_name)
            if not keys or isinstance(keys[0], int):
                valid.pop(section_name, None)
            elif isinstance(section, dict):
                section.pop(keys[0], None)
        job, _ = validate({"version": 1, "name": "unnamed", **valid})
    if job is not None:
        job.set_source(source)
        problems += _new_problems(problems, _check_with_workload(job, problems))
        # Check the points unless a problem may have changed them. Without any problem, `make_plan`
        # checks them later.
        point_sections = {"workload", "matrix", "zip", "env", "exclude", "include", "baseline"}
        if problems and all(p.path and p.path[0] not in point_sections for p in problems):
            problems += plan_and_problems(job)[1]
    return job, problems


def _new_problems(
    reported: Sequence[JobProblem], problems: Sequence[JobProblem]
) -> list[JobProblem]:
    """Return the problems whose key, and whose sections, have no reported problem yet."""
    reported_paths = {problem.path for problem in reported}
    new_problems = []
    for problem in problems:
        # The path of the problem, and the paths of the sections around it.
        prefixes = {problem.path[:length] for length in range(len(problem.path) + 1)}
        if prefixes.isdisjoint(reported_paths):
            new_problems.append(problem)
    return new_problems


def _check_with_workload(job: Job, problems: Sequence[JobProblem]) -> list[JobProblem]:
    """Set the settings and the class of the job; return problems that depend on the workload."""
    # `_check_source` has removed the wrong values at these paths from the job.
    removed = [problem.path for problem in problems]
    reported: list[JobProblem] = []
    try:
        workload_class = registry.load_workload(job.workload.kind)
        settings, name_problems = _collect_settings(job, workload_class, removed)
    except UsageError as error:
        reported.append(JobProblem(path=("workload", "kind"), message=str(error)))
        # Assume the workload with the nearest name, to find further problems.
        nearest = difflib.get_close_matches(job.workload.kind, registry.BUILTIN, n=1)
        if not nearest:
            settings = {name: run_setting(name) for name in RUN_SETTINGS}
            return reported + _check_settings(job, settings, removed, is_workload_known=False)
        workload_class = registry.load_workload(nearest[0])
        settings, name_problems = _collect_settings(job, workload_class, removed)
    job.set_workload(settings, workload_class)
    return [*reported, *name_problems, *_check_settings(job, settings, removed)]


def _collect_settings(
    job: Job, workload_class: type, removed: Sequence[KeyPath]
) -> tuple[dict[str, PointSetting], list[JobProblem]]:
    """Return name -> setting of the points, and problems of variables and of names in braces."""
    settings = settings_of_class(workload_class)
    env_names = dict.fromkeys([*job.env, *_keys_of_section("env", removed)])
    given_names = {*job.varied, *env_names, *_keys_of_section("matrix", removed)}
    has_batch_size = not given_names.isdisjoint(BATCH_SIZES)
    if not getattr(workload_class, "needs_batch_size", True) and not has_batch_size:
        # The workload runs without a batch size, so its points have no such setting.
        settings = {n: setting for n, setting in settings.items() if n not in BATCH_SIZES}
    problems = list(_check_env_and_script(job, settings))
    variables = {name: make_setting(name, str) for name in env_names if name not in settings}
    # A script declares no parameters: an axis that a text names in braces becomes a setting.
    script_axes: dict[str, PointSetting] = {}
    declared = settings | variables
    for path, text in _texts_with_names(job, getattr(workload_class, "templates", ())):
        try:
            names = names_in(text)
            split_arguments(text)  # only for its ValueError
        except ValueError as error:
            problems.append(JobProblem(path=path, message=f"{error}, given {quote(text)}"))
            continue
        for name in names:
            if name in given_names and name not in declared:
                script_axes[name] = make_setting(name, Scalar)
        for name in names:
            message = ""
            if name in BATCH_SIZES and not has_batch_size:
                message = f"names {{{name}}}, but the job gives no batch size; "
                message += f"put {name} into matrix"
            elif name in BATCH_SIZES and path[0] == "env" and job.batch_search is not None:
                message = f"names {{{name}}}, which does not go with matrix.batch_size: auto; "
                message += "list the batch sizes"
            elif name not in declared and name not in script_axes:
                message = f"{say_unknown('setting', name, [*declared, *script_axes])}, in braces"
            if message:
                problems.append(JobProblem(path=path, message=message))
    return declared | script_axes, problems


def _texts_with_names(job: Job, templates: Sequence[str]) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path, text) of all texts that may name settings in braces."""
    # These are the values of env, and of the parameters that the class lists in `templates`.
    values_by_path: list[tuple[KeyPath, object]] = []
    # (path of a mapping in the job, axis name -> values).
    groups: list[tuple[KeyPath, Mapping[str, tuple[Scalar, ...]]]] = [(("matrix",), job.axes)]
    groups += [(("zip", number), entry) for number, entry in enumerate(job.zip)]
    for name in templates:
        values_by_path.append((("workload", name), job.workload.parameters.get(name)))
        for path, axes in groups:
            for index, value in enumerate(axes.get(name, ())):
                values_by_path.append(((*path, name, index), value))
    for name in (*templates, *job.env):
        for number, point in enumerate(job.include):
            values_by_path.append((("include", number, name), point.get(name)))
    for name, values in job.env.items():
        values_by_path += [(("env", name, index), value) for index, value in enumerate(values)]
    yield from ((path, text) for path, text in values_by_path if isinstance(text, str))


def _check_env_and_script(job: Job, settings: _Settings) -> Iterator[JobProblem]:
    """Yield a problem for each reserved variable, and for a missing script."""
    # A point has its variables among its settings, so all names must differ.
    setting_names = {*settings, *RUN_SETTINGS, "grad_accumulation"}
    for name in job.env:
        message = ""
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            message = "must be the name of a variable, as in NCCL_ALGO"
        elif name in _RESERVED_VARIABLES or name.startswith(_RESERVED_PREFIXES):
            message = "is set by raybench itself; leave it out"
        elif name in setting_names:
            message = "is the name of a setting; a variable cannot have it"
        if message:
            yield JobProblem(path=("env", name), at_key=True, message=message)
    if job.workload.kind != SCRIPT:
        return
    if "path" in job.varied:
        message = "a script cannot be an axis; give one path in workload"
        yield JobProblem(path=("workload",), at_key=True, message=message)
    path = job.workload.parameters.get("path")
    if isinstance(path, str) and path and script_path(job) is None:
        here, there = Path.cwd(), job.folder.absolute()
        places = f"{here}" if here == there else f"{here} nor in {there}"
        message = f"no such file, given {quote(path)}; it is not in {places}"
        yield JobProblem(path=("workload", "path"), message=message)


def _check_settings(
    job: Job, settings: _Settings, removed: Sequence[KeyPath], *, is_workload_known: bool = True
) -> list[JobProblem]:
    """Return the problems of values and axes; removed values are not reported as missing."""
    problems = list(_check_values(job, settings, is_workload_known=is_workload_known))
    problems += _check_axes(job)
    if not is_workload_known:
        return problems
    if job.answer is not None:
        metrics = job.metrics
        if job.answer.metric not in metrics:
            message = say_unknown("metric", job.answer.metric, metrics)
            problems.append(JobProblem(path=("answer", "metric"), message=message))
        for index, name in enumerate(job.answer.over):
            if name not in settings:
                message = say_unknown("setting", name, [*_axis_names(job), *settings])
                problems.append(JobProblem(path=("answer", "over", index), message=message))
    # Look for missing axes only if the sections that may give an axis are intact. A merge key (<<)
    # may have given any axis.
    damaged_sections = {path[0] for path in removed if path}
    if damaged_sections.isdisjoint({"zip", "include"}) and ("matrix", "<<") not in removed:
        if ("matrix",) not in removed:
            problems += _check_what_is_missing(job, settings, removed)
        lengths = [len(values) for values in (*job.axes.values(), *job.env.values())]
        for entry in job.zip:
            # The lists of an entry form one axis, so take only the length of the first list.
            lengths += [len(values) for values in entry.values()][:1]
        # Count the points without building them: there may be billions.
        count = (math.prod(lengths) if lengths else 0) + len(job.include)
        if "matrix" not in damaged_sections and count > MAX_POINTS:
            message = f"a job has at most {MAX_POINTS:,} points, given {count:,}"
            problems.append(JobProblem(path=("matrix",), message=message))
    return problems


def _axis_names(job: Job) -> list[str]:
    """Return the settings that are axes: variables with several values, matrix, zip."""
    variables = [name for name, values in job.env.items() if len(values) > 1]
    return [*variables, *job.matrix, *(name for entry in job.zip for name in entry)]


def _keys_of_section(section: str, paths: Sequence[KeyPath]) -> list[str]:
    """Return the key of each path that leads into the section, such as `name` of ("env", name)."""
    return [str(path[1]) for path in paths if path[:1] == (section,) and len(path) > 1]


def _check_values(
    job: Job, settings: _Settings, *, is_workload_known: bool
) -> Iterator[JobProblem]:
    """Yield a problem for each unknown name, and for each value that its setting rejects."""
    # (path in the job, name -> value or values, noun for a name in messages).
    groups: list[tuple[KeyPath, Mapping[str, object], str]] = [
        (("workload",), job.workload.parameters if is_workload_known else {}, "parameter"),
        (("matrix",), job.axes, "axis"),
        *((("zip", number), entry, "axis") for number, entry in enumerate(job.zip)),
        *((("exclude", number), entry, "setting") for number, entry in enumerate(job.exclude)),
        *((("include", number), entry, "setting") for number, entry in enumerate(job.include)),
        (("baseline",), job.baseline, "setting"),
    ]
    for path, group, noun in groups:
        if not group and path[0] in ("zip", "exclude"):
            yield JobProblem(path=path, message="must not be empty")
        for name, value_or_values in group.items():
            value_path = (*path, name)
            if name not in settings or (noun == "parameter" and name in RUN_SETTINGS):
                if is_workload_known:
                    message = _explain_unknown(job, settings, noun, name)
                    yield JobProblem(path=value_path, at_key=True, message=message)
                continue
            is_tuple = isinstance(value_or_values, tuple)
            values = value_or_values if isinstance(value_or_values, tuple) else (value_or_values,)
            for index, value in enumerate(values):
                error = settings[name].complaint(value)
                if error is None:
                    continue
                if name.endswith("_bytes") and isinstance(value, str):
                    error = f"{_SIZE_RULE}, given {quote(value)}"
                elif name in BATCH_SIZES and value == "auto":
                    error = "auto is for matrix alone, as its whole value: batch_size: auto"
                elif value_path == ("matrix", "batch_size") and isinstance(value, str):
                    error += did_you_mean(value.lower(), ["auto"])
                path_of_value = (*value_path, index) if is_tuple else value_path
                yield JobProblem(path=path_of_value, message=error)


def _explain_unknown(job: Job, settings: _Settings, noun: str, name: str) -> str:
    """Return the message for a wrong name; `noun` says what the name would be, such as "axis"."""
    kind, is_parameter = job.workload.kind, noun == "parameter"
    if is_parameter and name in settings:
        return "not a parameter; put it into matrix"
    if name in BATCH_SIZES:
        return f"workload {kind} takes no batch size; leave {name} out"
    if name in UNEVEN:  # settings for ranks with unequal shares of the batch
        return (
            f"workload {kind} does not say that it multiplies its loss by context.loss_weight "
            f"(weighs_loss = True); leave {name} out"
        )
    valid = [n for n in settings if not is_parameter or n not in RUN_SETTINGS]
    hint = f"; or name {{{name}}} in args or env" if kind == SCRIPT and not is_parameter else ""
    return say_unknown(noun, name, valid) + hint


def _check_axes(job: Job) -> Iterator[JobProblem]:
    """Yield a problem for duplicate axes, unequal lists, and conflicts with a batch search."""
    # A setting may be given in one section only. Another check rejects a run setting in workload.
    parameters = set(job.workload.parameters) - set(RUN_SETTINGS)
    # Name of a setting -> the first path that gives the setting.
    first_paths: dict[str, KeyPath] = {name: ("workload", name) for name in parameters}
    first_paths |= {name: ("env", name) for name in job.env}
    paths: list[KeyPath] = [("matrix", name) for name in job.matrix]
    paths += [("zip", number, name) for number, entry in enumerate(job.zip) for name in entry]
    for number, point in enumerate(job.include):
        paths += [("include", number, name) for name in point if name in parameters]
    for path in paths:
        first_path = first_paths.setdefault(str(path[-1]), path)
        if first_path != path:
            message = f"also given by {key_text(first_path)}; keep one of them"
            yield JobProblem(path=path, at_key=True, message=message)
    for number, entry in enumerate(job.zip):
        if len({len(values) for values in entry.values()}) > 1:
            lengths = ", ".join(f"{name} {len(values)}" for name, values in entry.items())
            message = f"the lists of one entry must be of equal length, given {lengths}"
            yield JobProblem(path=("zip", number), message=message)
    if job.batch_search is not None:
        conflicting: list[KeyPath] = [("include",)] if job.include else []
        for number, entry in enumerate(job.exclude):
            conflicting += [("exclude", number, name) for name in BATCH_SIZES if name in entry]
        conflicting += [("baseline", "batch_size")] if "batch_size" in job.baseline else []
        rule = "does not go with matrix.batch_size: auto, which finds the batch sizes; leave it out"
        yield from (JobProblem(path=path, at_key=True, message=rule) for path in conflicting)


def _check_what_is_missing(
    job: Job,
    settings: _Settings,
    removed: Sequence[KeyPath],  # given keys that the job lacks, because their values are wrong
) -> Iterator[JobProblem]:
    """Yield a problem for each missing axis, batch size or parameter."""
    axes = list(dict.fromkeys([*_axis_names(job), *_keys_of_section("matrix", removed)]))
    names_in_workload = {*job.workload.parameters, *_keys_of_section("workload", removed)}
    # (path, given names) of each group of points: entries of `include`, the product of the axes.
    # Each group must give all axes and required settings.
    groups: list[tuple[KeyPath, Collection[str]]]
    groups = [(("include", number), entry) for number, entry in enumerate(job.include)]
    for path, entry in groups:
        if missing := [name for name in axes if name not in entry and name not in BATCH_SIZES]:
            message = f"must give every axis of the job, lacks {', '.join(missing)}"
            yield JobProblem(path=path, message=message)
    # A job that has only entries of `include` has no product of axes.
    if axes or not groups:
        groups.insert(0, (("matrix",), axes))
    for setting in settings.values():
        is_given = setting.name in names_in_workload or all(
            setting.name in names for _, names in groups
        )
        if setting.is_required and not is_given:
            path = ("workload", setting.name)
            yield JobProblem(path=path, at_key=True, message="required, but not given")
    if not any(name in settings for name in BATCH_SIZES):
        return
    # All groups must give the same one of the two batch sizes.
    first_path, first_names = groups[0]
    expected = [name for name in BATCH_SIZES if name in first_names]
    for path, names in groups:
        given = [name for name in BATCH_SIZES if name in names]
        message = ""
        if len(given) == 2:
            message = "has both batch_size and global_batch_size; a job has one of them"
        elif not given:
            message = "has neither batch_size nor global_batch_size; a job needs one of them"
        elif expected and given[0] not in expected:
            message = f"has {given[0]}, but {key_text(first_path)} has {expected[0]}"
        if message:
            yield JobProblem(path=path, message=message)
