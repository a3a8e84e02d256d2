"""The rules of texts in which `{name}` stands for a setting: which names a job gives, and where."""

from __future__ import annotations

import math
import re
import shlex
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raybench.job import registry
from raybench.job.point import BATCH_SIZES, RUN_SETTINGS, SCRIPT, Scalar, setting_text
from raybench.job.problems import KeyPath, Problem, quote, say_unknown
from raybench.job.registry import Setting

if TYPE_CHECKING:
    from raybench.job.model import Job

_NAME = re.compile(r"[A-Za-z_]\w*")
_BRACES = "a text names a setting as in {batch_size}; write {{ and }} for braces themselves"


def names_in(text: str) -> list[str]:
    """List the settings that a text names, in their order. Raises ValueError with the rule."""
    try:
        fields = [field for _, *field in string.Formatter().parse(text) if field[0] is not None]
    except ValueError:
        raise ValueError(_BRACES) from None
    for name, format_spec, conversion in fields:
        if not _NAME.fullmatch(name or "") or format_spec or conversion:
            raise ValueError(_BRACES)
    return list(dict.fromkeys(str(name) for name, *_ in fields))


def render(text: str, settings: Mapping[str, Scalar]) -> str:
    """Put the settings in their places, as a command line has them: `true` for True."""
    return text.format_map({name: setting_text(value) for name, value in settings.items()})


def split_arguments(text: str) -> list[str]:
    """Split a command line as a shell does. Raises ValueError with the rule."""
    try:
        return shlex.split(text)
    except ValueError:
        raise ValueError("a quote is not closed") from None


def product_of(text: str) -> int | None:
    """Multiply the whole numbers of a text; None for an empty one. Raises ValueError."""
    if not text.strip():
        return None
    factors = [factor.strip() for factor in text.split("*")]
    if not all(factor.isdecimal() for factor in factors):
        raise ValueError("must be a whole number, or a product of them, as in 64 * 8")
    return math.prod(map(int, factors))


_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# What raybench itself sets for each rank, or by what it finds its processes again.
_OURS = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"),
)
_OUR_PREFIXES = ("RAY_", "RAYBENCH_", "TORCHELASTIC_")


def add_settings(job: Job, workload_class: type) -> tuple[dict[str, Setting], list[Problem]]:
    """Return the settings that a point of the job has, and what is wrong with texts that name them.

    To those of the workload come the variables of `env`, and the axes that a script names itself.
    """
    settings = registry.settings(workload_class)
    given = {*_names_given(job), *job.env}
    if not getattr(workload_class, "needs_batch_size", True) and given.isdisjoint(BATCH_SIZES):
        settings = {name: one for name, one in settings.items() if name not in BATCH_SIZES}
    problems = [*_check_variables(job, settings), *_check_file(job)]
    variables = {name: registry.text_setting(name) for name in job.env if name not in settings}
    own: dict[str, Setting] = {}
    known = {*settings, *variables}
    for path, text in _templates(job, workload_class):
        try:
            names = names_in(text)
            split_arguments(text)
        except ValueError as error:
            problems.append(Problem(path=path, message=f"{error}, given {quote(text)}"))
            continue
        own |= {name: registry.free_setting(name) for name in names if name in given - known}
        for name in names:
            if name in BATCH_SIZES and given.isdisjoint(BATCH_SIZES):
                message = f"names {{{name}}}, but the job gives no batch size; "
                problems.append(Problem(path=path, message=f"{message}put {name} into matrix"))
            elif name not in known and name not in own:
                message = f"{say_unknown('setting', name, [*known, *own])}, in braces"
                problems.append(Problem(path=path, message=message))
    return settings | variables | own, problems


def script_path(job: Job) -> Path | None:
    """Find the script of the job, from here or from the folder of the job file; None: none."""
    name = str(job.workload.parameters.get("path", ""))
    places = (Path(name), job.folder / name)
    return next((place for place in places if name and place.is_file()), None)


def remark_no_items(job: Job) -> Iterator[Problem]:
    """Remark that nobody can tell how much a step of the script finishes."""
    if "items_per_step" not in {*job.workload.parameters, *_names_given(job)}:
        message = (
            "gives no items_per_step, without which there is no throughput and no speed-up; set "
            'it to the samples of a step on one rank, as in items_per_step: "{batch_size}"'
        )
        yield Problem(path=("workload",), at_key=True, message=message)


def _names_given(job: Job) -> Iterator[str]:
    """Name all that the job gives values for beside its workload."""
    yield from job.matrix
    for entry in job.zip:
        yield from entry
    for point in job.include:
        yield from point


def _templates(job: Job, workload_class: type) -> Iterator[tuple[KeyPath, str]]:
    """Find the texts of the job that may name settings."""
    for name in getattr(workload_class, "templates", ()):
        yield from _texts_of(
            ("workload", name), [job.workload.parameters.get(name)], at_index=False
        )
        yield from _texts_of(("matrix", name), job.axes.get(name, ()))
        for number, entry in enumerate(job.zip):
            yield from _texts_of(("zip", number, name), entry.get(name, ()))
        for number, point in enumerate(job.include):
            yield from _texts_of(("include", number, name), [point.get(name)], at_index=False)
    for name, values in job.env.items():
        yield from _texts_of(("env", name), values)


def _texts_of(
    path: KeyPath, values: Sequence[object], *, at_index: bool = True
) -> Iterator[tuple[KeyPath, str]]:
    for index, value in enumerate(values):
        if isinstance(value, str):
            yield ((*path, index) if at_index else path), value


def _check_variables(job: Job, settings: Mapping[str, Setting]) -> Iterator[Problem]:
    for name in job.env:
        path = ("env", name)
        if not _VARIABLE.fullmatch(name):
            message = "must be the name of a variable, as in NCCL_ALGO"
            yield Problem(path=path, at_key=True, message=message)
        elif name in _OURS or name.startswith(_OUR_PREFIXES):
            message = "is set by raybench itself; leave it out"
            yield Problem(path=path, at_key=True, message=message)
        elif name in settings or name in RUN_SETTINGS:
            message = "is the name of a setting; a variable cannot have it"
            yield Problem(path=path, at_key=True, message=message)


def _check_file(job: Job) -> Iterator[Problem]:
    """Check that there is one script, and that it is there."""
    if job.workload.kind != SCRIPT:
        return
    if "path" in {*_names_given(job)}:
        message = "a script cannot be an axis; give one path in workload"
        yield Problem(path=("workload",), at_key=True, message=message)
    path = job.workload.parameters.get("path")
    if isinstance(path, str) and path and script_path(job) is None:
        here, there = Path.cwd(), job.folder.absolute()
        places = f"{here}" if here == there else f"{here} nor in {there}"
        message = f"no such file, given {quote(path)}; it is not in {places}"
        yield Problem(path=("workload", "path"), message=message)
