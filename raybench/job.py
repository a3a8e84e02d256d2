"""The job file: its models, and how it is loaded and checked.

Every rule of a job file is here or in `job_rules`, so a `Job` that `load_job` returned is sound.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from raybench import job_rules, registry
from raybench.errors import JobError, UsageError
from raybench.messages import KeyPath, Problem, dotted, rule_of, unknown
from raybench.yaml_source import YamlSource, read_source


def _one_value(value: object) -> object:
    if isinstance(value, dict | list):
        # Before the union below is tried, which would complain once for each of its types.
        raise PydanticCustomError("one_value", "must be one value")
    return value


def _one_or_more(value: object) -> object:
    if value == []:
        # Here and not by min_length, which does not count the values that are wrong themselves.
        raise PydanticCustomError("too_short", "must not be empty")
    return tuple(value) if isinstance(value, list) else (value,)


_AnyScalar = StrictBool | StrictInt | StrictFloat | StrictStr
Value = Annotated[_AnyScalar, BeforeValidator(_one_value)]
_NonEmptyList = Annotated[list[Value], Field(min_length=1)]
Values = Annotated[
    tuple[Value, ...],
    BeforeValidator(_one_or_more, json_schema_input_type=_AnyScalar | _NonEmptyList),
]
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=1_000_000_000)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=1_000_000)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WorkloadSection(BaseModel):
    """What is timed, and the parameters that all points share."""

    model_config = ConfigDict(extra="allow", frozen=True)
    __pydantic_extra__: dict[str, Value]

    kind: Annotated[str, Field(strict=True)] = Field(
        description="A built-in workload (`raybench workloads` lists them) or package.module:Class."
    )

    @property
    def parameters(self) -> Mapping[str, bool | int | float | str]:
        """The parameters as the file gives them, without defaults."""
        return self.__pydantic_extra__


class Measure(_Section):
    """How long each point is measured."""

    warmup: PositiveCount = Field(default=10, description="Iterations before the timed ones.")
    iterations: PositiveCount = Field(default=50, description="Timed iterations, at most.")
    target_ci: Annotated[float, Field(strict=True, gt=0, lt=1)] = Field(
        default=0.01,
        description="Wanted half width of the 95 % interval of the median, relative to it.",
    )
    max_seconds: Seconds = Field(
        default=20.0,
        description="Time budget of a repeat in seconds, with its warm-up but for the first step.",
    )
    repeats: PositiveCount = Field(
        default=1, description="How often each point is built, warmed up and timed anew."
    )
    timeout_s: Seconds = Field(
        default=300.0, description="A point that takes longer is stopped as hung, in seconds."
    )


class Placement(_Section):
    """Which devices work on a point."""

    strategy: Literal["pack", "spread"] = Field(
        default="pack", description="pack: fill node after node. spread: over as many as possible."
    )
    isolation: Literal["cluster"] = Field(
        default="cluster", description="cluster: one point at a time on the whole cluster."
    )


class Job(_Section):
    """A job file of raybench: a workload, the axes of the sweep, how to measure."""

    version: Literal[1] = Field(description="Version of the job file format.")
    name: Annotated[str, Field(strict=True, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")] = Field(
        description="Name of the job, part of every run_id."
    )
    workload: WorkloadSection = Field(description="What is timed, and its fixed parameters.")
    matrix: dict[str, Values] = Field(
        default={},
        description="Axes of the sweep: setting -> values; all combinations are run, and the first "
        "key varies slowest. world_size, precision, batch_size or global_batch_size, and every "
        "parameter of the workload can be an axis.",
    )
    zip: tuple[dict[str, Values], ...] = Field(
        default=(),
        description="Each entry is one more axis of several settings that change together; "
        "its lists have equal lengths.",
    )
    exclude: tuple[dict[str, Values], ...] = Field(
        default=(),
        description="Points of the product to leave out: those that agree with an entry in each "
        "of its settings. A list means any of its values.",
    )
    include: tuple[dict[str, Value], ...] = Field(
        default=(), description="Extra points; each entry gives a value for every axis."
    )
    baseline: dict[str, Value] = Field(
        default={"world_size": 1},
        description="Settings of the point that the report compares the others of a series with.",
    )
    measure: Measure = Field(default=Measure(), description="How long each point is measured.")
    placement: Placement = Field(default=Placement(), description="Which devices work on a point.")
    on_error: Literal["continue", "stop"] = Field(
        default="continue", description="What to do after a point that failed."
    )

    _source: YamlSource = PrivateAttr()
    _settings: dict[str, registry.Setting] = PrivateAttr()

    @property
    def text(self) -> str:
        """The job file as it was read, without the overrides."""
        return self._source.text

    @property
    def settings(self) -> Mapping[str, registry.Setting]:
        """All that a point of this job can set, by name."""
        return self._settings

    @property
    def meaning_sha256(self) -> str:
        """SHA-256 of all that defines what is run, overrides included; comments do not count."""
        meaning = self.model_dump(mode="json", exclude={"name", "baseline", "on_error"})
        text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def explain(self, problem: Problem) -> str:
        """One line that says where in the job file `problem` is."""
        return self._source.explain(problem)

    def error(self, problems: Sequence[Problem]) -> JobError:
        """One error for all `problems`, a located line each."""
        return JobError(self._source.explain_all(problems))


# By dotted path: the models that refuse unknown keys.
_MODELS: Mapping[str, type[BaseModel]] = {"": Job, "measure": Measure, "placement": Placement}


def load_job(path: Path, overrides: Sequence[str] = ()) -> Job:
    """Read and check the job file at `path` with `--set` overrides such as `measure.warmup=5`.

    Raises JobError with one line per problem, all of the file at once.
    """
    source = read_source(path, overrides)
    problems = list(source.problems)
    job, found = _validate(source.data)
    problems += _not_below(problems, found)
    if job is None:
        # Go on with what is sound, so that the user reads all problems at once.
        job, _ = _validate(_sound_part(source.data, found))
    if job is not None:
        job._source = source
        problems += _not_below(problems, _check_meaning(job, problems))
    if job is None or problems:
        raise JobError(source.explain_all(problems))
    return job


def job_schema() -> dict[str, Any]:
    """The JSON Schema of the job file."""
    schema = Job.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _validate(data: Mapping[str, Any]) -> tuple[Job | None, list[Problem]]:
    try:
        return Job.model_validate(data), []
    except ValidationError as error:
        return None, [_problem(details) for details in error.errors(include_url=False)]


def _problem(error: ErrorDetails) -> Problem:
    path: KeyPath = error["loc"]
    if error["type"] == "extra_forbidden":
        model = _MODELS[dotted(path[:-1])]
        message = unknown("key", path[-1], model.model_fields)
        return Problem(path=path, at_key=True, message=message)
    return Problem(path=path, at_key=error["type"] == "missing", message=rule_of(error))


def _not_below(known: Sequence[Problem], found: Sequence[Problem]) -> list[Problem]:
    """Those found that do not merely follow from a known problem at the same place or above."""
    paths = {problem.path for problem in known}
    return [
        problem
        for problem in found
        if not any(problem.path[:length] in paths for length in range(len(problem.path) + 1))
    ]


def _sound_part(data: Mapping[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """`data` without the values that have problems; a list goes as a whole."""
    sound = {"version": 1, "name": "unnamed", **copy.deepcopy(data)}
    for problem in problems:
        *parents, last = itertools.takewhile(lambda key: isinstance(key, str), problem.path)
        section: Any = sound
        for key in parents:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(last, None)
    return {"version": 1, "name": "unnamed", **sound}


def _check_meaning(job: Job, problems: Sequence[Problem]) -> list[Problem]:
    """Check the job against its workload, which must be imported for that."""
    try:
        settings = registry.settings(registry.load(job.workload.kind))
    except UsageError as error:
        return [Problem(path=("workload", "kind"), message=str(error))]
    job._settings = settings
    damaged = {problem.path[0] for problem in problems}
    is_whole = damaged.isdisjoint({"workload", "matrix", "zip", "include"})
    return job_rules.check(job, settings, is_whole=is_whole)
