"""The job file: what it is made of, and how it is loaded and checked.

Every rule of a job file is in `sections.py`, here or in `rules.py`, so a `Job` that `load_job`
returned breaks none.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from raybench.errors import JobError, UsageError
from raybench.job import registry, rules
from raybench.job.answer import metric_names
from raybench.job.plan import plan_problems
from raybench.job.point import RUN_SETTINGS, SCRIPT, Point, Scalar
from raybench.job.problems import KeyPath, Problem, key_text, quote, rule_of, say_unknown
from raybench.job.sections import (
    AnswerSection,
    Axes,
    BatchSearch,
    EnvValues,
    Items,
    Matrix,
    Measure,
    MeasureOrQuick,
    Placement,
    Question,
    Section,
    Settings,
    Span,
    WorkloadSection,
)
from raybench.job.source import YamlSource, parse_source, read_source

__all__ = ["Job", "Measure", "Span", "job_schema", "load_job"]


def _one(value: object) -> object:
    """Return the value. Raises an error of pydantic for what equals 1 and is none: true, 1.0."""
    if type(value) is not int:
        raise PydanticCustomError("one", "must be 1")
    return value


# Keys that change nothing of what is measured: a run can be resumed with others.
NOT_MEASURED = ("name", "question", "answer", "items", "baseline", "on_error")


class Job(Section):
    """A job file of raybench: a workload, the axes of the sweep, how to measure."""

    version: Annotated[Literal[1], BeforeValidator(_one)] = Field(
        description="Version of the job file format."
    )
    name: Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = Field(
        description="Name of the job, part of every run_id."
    )
    question: Question = Field(
        default="", description="What the job asks, in a sentence; reports begin with it."
    )
    answer: AnswerSection | None = Field(
        default=None,
        description="What the report answers first; by default what the workload declares, else "
        "the speed-up over the devices.",
    )
    items: Items = Field(
        default="",
        description="What a step finishes, in the plural, as in tokens or images; by default as "
        "the workload calls it.",
    )
    workload: WorkloadSection = Field(description="What is timed, and its fixed parameters.")
    matrix: Matrix = Field(
        default={},
        description="Axes of the sweep: setting -> values; all combinations are run, and the first "
        "key varies slowest. Every setting of a point can be an axis, as world_size, precision, "
        "cuda_graph, batch_size or global_batch_size, and every parameter of the workload. "
        "batch_size: auto, or a mapping {start: , max: }, finds the largest batch that fits into "
        "memory. Settings in bytes also take sizes (4KiB) and ranges of them: 8:1GiB:x2 doubles "
        "from 8 bytes to 1 GiB.",
    )
    zip: tuple[Axes, ...] = Field(
        default=(),
        description="Each entry is one more axis of several settings that change together; "
        "its lists have equal lengths.",
    )
    env: dict[str, EnvValues] = Field(
        default={},
        description="Environment variables of the processes of a point: one value for all points, "
        "or a list, which is an axis. {name} in a value stands for a setting of the point. A point "
        "runs in processes that were started with its variables.",
    )
    exclude: tuple[Axes, ...] = Field(
        default=(),
        description="Points of the product to leave out: those that agree with an entry in each "
        "of its settings. A list means any of its values.",
    )
    include: tuple[Settings, ...] = Field(
        default=(), description="Extra points; each entry gives a value for every axis."
    )
    baseline: Settings = Field(
        default={"world_size": 1},
        description="Settings of the point that the report compares the others of a series with; "
        "{} where nothing is to be compared.",
    )
    measure: MeasureOrQuick = Field(
        default=Measure(),
        description="How long each point is measured; quick: a short look, marked as such.",
    )
    placement: Placement = Field(default=Placement(), description="Which devices work on a point.")
    on_error: Literal["continue", "stop"] = Field(
        default="continue", description="What to do after a point that failed."
    )

    _source: YamlSource = PrivateAttr()
    _settings: dict[str, registry.Setting] = PrivateAttr()
    _workload_class: type = PrivateAttr(default=object)
    _remarks: list[Problem] = PrivateAttr(default_factory=list)

    @property
    def text(self) -> str:
        """The job file as it was read, without the overrides."""
        return self._source.text

    @property
    def batch_search(self) -> BatchSearch | None:
        """The search for batch sizes; None where the job lists them, or takes none."""
        search = self.matrix.get("batch_size")
        return search if isinstance(search, BatchSearch) else None

    @property
    def axes(self) -> Mapping[str, tuple[Scalar, ...]]:
        """The values of each axis of `matrix`; of a search, the batch size that it starts with."""
        return {
            name: (values.start,) if isinstance(values, BatchSearch) else values
            for name, values in self.matrix.items()
        }

    @property
    def metrics(self) -> list[str]:
        """The metrics that `answer.metric` can name."""
        return metric_names(self._workload_class)

    @property
    def shares_work(self) -> bool:
        """Whether the ranks of a point finish the same items together."""
        return registry.shares_work(self._workload_class)

    def ranks_per_item(self, settings: Mapping[str, Scalar]) -> int:
        """How many ranks finish the same items together, at a point with these settings."""
        return registry.ranks_per_item(self._workload_class, settings)

    @property
    def folder(self) -> Path:
        """The folder that the job file is in."""
        return Path(self._source.name).parent

    @property
    def settings(self) -> Mapping[str, registry.Setting]:
        """The settings that a point of this job can have, by name."""
        return self._settings

    def why_not(self, point: Point) -> str | None:
        """Return why the workload refuses the point; None where it runs it. Raises UsageError."""
        return (
            point.why_too_few_devices
            or rules.why_not_uneven(point)
            or registry.why_not(self._workload_class, point.settings)
        )

    @property
    def remarks(self) -> Sequence[Problem]:
        """Return remarks on the workload that are no errors."""
        return self._remarks

    @property
    def meaning_sha256(self) -> str:
        """SHA-256 of all that defines what is run, overrides included; comments do not count.

        How often it is run does not count either: a run can go on with more rounds.
        """
        left_out: dict[str, Any] = dict.fromkeys(NOT_MEASURED, True)
        meaning = self.model_dump(mode="json", exclude=left_out | {"measure": {"rounds"}})
        text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def explain(self, problem: Problem) -> str:
        """Return a line with the place of `problem` in the job file, and its message."""
        return self._source.explain(problem)

    def error(self, problems: Sequence[Problem]) -> JobError:
        """Return one error with a located line for each of `problems`."""
        return JobError(self._source.explain_all(problems))


# By dotted path: the models that refuse unknown keys.
_MODELS: Mapping[str, type[BaseModel]] = {
    "": Job,
    "answer": AnswerSection,
    "matrix.batch_size": BatchSearch,
    "measure": Measure,
    "measure.warmup": Span,
    "measure.iterations": Span,
    "placement": Placement,
}


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Return the checked job of the file at `path`; imports the module of its workload.

    overrides: of `--set`, such as `measure.warmup=5`. Raises JobError with one line per problem,
    all of the file at once.
    """
    return _load(read_source(path, overrides))


def job_from_text(
    name: str,
    text: str,
    overrides: Sequence[str] = (),
    options: Mapping[KeyPath, str] | None = None,
) -> Job:
    """Return the job of a text that is in no file, checked as by `load_job`.

    name: stands for the file in messages. options: the command-line option that gave a value, by
    the path of the value; messages name it in place of the file. Raises JobError as `load_job`.
    """
    return _load(parse_source(name, text, overrides, options))


def _load(source: YamlSource) -> Job:
    """Return the checked job of a source. Raises JobError with a line for each problem of it."""
    problems = list(source.problems)
    job, found = _validate(source.data)
    problems += _not_below(problems, found)
    if job is None:
        # Go on with what is sound, so that the user reads all problems at once.
        job, _ = _validate(_sound_part(source.data, found))
    if job is not None:
        job._source = source
        problems += _not_below(problems, _check_meaning(job, problems))
        shaping = {"workload", "matrix", "zip", "env", "exclude", "include", "baseline"}
        # Without any problem, making the plan reports those of the points.
        if problems and all(p.path and p.path[0] not in shaping for p in problems):
            problems += plan_problems(job)
    if job is None or problems:
        raise JobError(source.explain_all(problems))
    return job


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of the job file."""
    schema = Job.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _validate(data: Mapping[str, Any]) -> tuple[Job | None, list[Problem]]:
    """Return the job of this data; None, and what pydantic finds wrong, where it is not valid."""
    try:
        return Job.model_validate(data), []
    except ValidationError as error:
        return None, [_problem(details) for details in error.errors(include_url=False)]


def _problem(error: ErrorDetails) -> Problem:
    """Return an error of pydantic in our words; of an unknown key, where it may belong."""
    path: KeyPath = error["loc"]
    if error["type"] == "extra_forbidden":
        model = _MODELS[key_text(path[:-1])]
        message = say_unknown("key", path[-1], model.model_fields)
        # The dotted keys under which a job file has a key that stands at a wrong place.
        places = [
            f"{section}.{path[-1]}"
            for section in ("answer", "measure", "placement")
            if path[-1] in _MODELS[section].model_fields
        ]
        places += [f"matrix.{path[-1]}"] * (path[-1] in RUN_SETTINGS)
        if places:
            message = f"unknown key {quote(path[-1])}; did you mean {' or '.join(places)}?"
        return Problem(path=path, at_key=True, message=message)
    return Problem(path=path, at_key=error["type"] == "missing", message=rule_of(error))


def _not_below(known: Sequence[Problem], found: Sequence[Problem]) -> list[Problem]:
    """Return the problems found, without those at or below the place of a known problem."""
    paths = {problem.path for problem in known}
    return [
        problem
        for problem in found
        if not any(problem.path[:length] in paths for length in range(len(problem.path) + 1))
    ]


def _sound_part(data: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """Return a copy of `data` without the values that have problems, with a version and a name.

    A list or a span goes as a whole.
    """
    sound: dict[str, Any] = {
        name: dict(value) if isinstance(value, dict) else value for name, value in data.items()
    }
    for problem in problems:
        keys = itertools.takewhile(lambda key: isinstance(key, str), problem.path)
        *parents, last = itertools.islice(keys, 2)
        section: Any = sound
        for key in parents:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(last, None)
    return {"version": 1, "name": "unnamed", **sound}


def _check_meaning(job: Job, problems: Sequence[Problem]) -> list[Problem]:
    """Return what is wrong with the job by its workload, whose module is imported for that.

    Gives the job its settings and remarks. Where there is no such workload, the one with the
    nearest name is taken. problems: those known already, whose values count as given.
    """
    unsound = [problem.path for problem in problems]
    found: list[Problem] = []
    try:
        workload_class = registry.load(job.workload.kind)
        settings, unknown = rules.add_settings(job, workload_class)
    except UsageError as error:
        found.append(Problem(path=("workload", "kind"), message=str(error)))
        nearest = registry.nearest(job.workload.kind)
        if nearest is None:
            # What every workload has can be checked all the same.
            settings = {name: registry.run_setting(name) for name in RUN_SETTINGS}
            return found + rules.check(job, settings, unsound, is_workload_known=False)
        workload_class = registry.load(nearest)
        settings, unknown = rules.add_settings(job, workload_class)
    job._settings, job._workload_class = settings, workload_class
    if job.workload.kind == SCRIPT:
        job._remarks += rules.remark_no_items(job)
    return [*found, *unknown, *rules.check(job, settings, unsound)]
