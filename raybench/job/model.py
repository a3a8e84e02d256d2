"""The sections of a job file, the job, and what a run of it answers."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Predicate
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from raybench.errors import JobError, UsageError
from raybench.job import registry
from raybench.job.answer import ANSWER_METRICS, SAMPLES, Answer, Best
from raybench.job.declarations import declared_entries
from raybench.job.point import ANY, RUN_SETTINGS, Isolation, Scalar, Strategy, are_devices
from raybench.job.problems import JobProblem, KeyPath, key_text, quote, rule_of, say_unknown
from raybench.job.settings import PointSetting
from raybench.job.source import CPU, QUICK_SECONDS, YamlSource, parse_source, with_sizes


def _must(rule: str, test: Callable[[Any], object]) -> Callable[[Any], Any]:
    """Return a validator that raises `ValueError(rule)` for a value that fails `test`."""

    def check(value: Any) -> Any:
        if not test(value):
            raise ValueError(rule)
        return value

    return check


def _not_under(lower_field: str) -> AfterValidator:
    """Return a validator that rejects a number below the value of another field."""

    def check(value: int | None, info: ValidationInfo) -> int | None:
        minimum = info.data.get(lower_field)
        if value is not None and minimum is not None and value < minimum:
            raise ValueError(f"must not be below {lower_field}, which is {minimum}")
        return value

    return AfterValidator(check)


def _one_or_more(value: object) -> object:
    """Return a list or a single value as a tuple."""
    if value == []:
        # Check the length here: pydantic's min_length does not count invalid entries.
        raise PydanticCustomError("too_short", "must not be empty")
    return tuple(value) if isinstance(value, list) else (value,)


_AnyScalar = StrictBool | StrictInt | StrictFloat | StrictStr
Value = Annotated[
    _AnyScalar,
    # Without this validator, the union would report an error for each of its types.
    BeforeValidator(_must("must be one value", lambda value: not isinstance(value, dict | list))),
]
_NonEmptyList = Annotated[list[Value], Field(min_length=1)]
Values = Annotated[
    tuple[Value, ...],
    BeforeValidator(_one_or_more, json_schema_input_type=_AnyScalar | _NonEmptyList),
]
# Settings have one value each, axes one or more.
Settings = Annotated[dict[str, Value], BeforeValidator(with_sizes)]
Axes = Annotated[dict[str, Values], BeforeValidator(with_sizes)]
_MAX_COUNT = 1_000_000_000
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=_MAX_COUNT)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=1_000_000)]


# Numbers stay as they are written; true and false are rejected, because shells have no booleans.
_not_bool = _must(
    "must be a text or a number; put true or false in quotes",
    lambda value: not isinstance(value, bool),
)
EnvValue = Annotated[
    str, BeforeValidator(_not_bool, json_schema_input_type=StrictInt | StrictFloat | StrictStr)
]
EnvValues = Annotated[
    tuple[EnvValue, ...],
    BeforeValidator(
        _one_or_more,
        json_schema_input_type=EnvValue | Annotated[list[EnvValue], Field(min_length=1)],
    ),
]


class JobSection(BaseModel):
    """A mapping of the job file that rejects unknown keys."""

    # Defer the build: all validators are built once, with the job.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class WorkloadSection(JobSection):
    """What is timed, and the parameters that all points share."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Value]

    kind: StrictStr = Field(
        description="A built-in workload (`raybench workloads` lists them) or package.module:Class."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, value: object) -> object:
        return with_sizes(value)

    @property
    def parameters(self) -> Mapping[str, bool | int | float | str]:
        """The parameters as given, without `kind`; sizes are in bytes."""
        return self.__pydantic_extra__


class Span(JobSection):
    """A count that raybench chooses between two bounds; equal bounds fix it."""

    min: PositiveCount = Field(description="Minimum.")
    max: Annotated[PositiveCount, _not_under("min")] = Field(description="Maximum.")

    @property
    def is_fixed(self) -> bool:
        """Whether both bounds are equal."""
        return self.min == self.max


def _span(value: object) -> object:
    """Return a count as a span with equal bounds; return a mapping as given."""
    if isinstance(value, bool) or not isinstance(value, int | dict | Span):
        raise ValueError("must be a count or a mapping {min: , max: }")
    if not isinstance(value, int):
        return value
    if not 1 <= value <= _MAX_COUNT:
        raise ValueError(f"must be from 1 to {_MAX_COUNT:,}")
    return {"min": value, "max": value}


class BatchSearch(JobSection):
    """Batch sizes that raybench searches: doubled until memory runs out, then bisected."""

    start: PositiveCount = Field(default=64, description="The first batch size.")
    # With SkipJsonSchema, pydantic would report an error for each member of the union.
    max: Annotated[
        PositiveCount | None,
        WithJsonSchema(TypeAdapter(PositiveCount).json_schema()),
        _not_under("start"),
    ] = Field(
        default=None,
        description="The largest batch size to try. Required on CPU workers, which share the "
        "memory of the host.",
    )


_VALUES_ADAPTER: TypeAdapter[tuple[_AnyScalar, ...]] = TypeAdapter(Values)


def _axis(value: object, _: ValidatorFunctionWrapHandler) -> object:
    """Return a mapping as a BatchSearch, and any other value as the tuple of an axis."""
    # Choose the type here: pydantic would report an error for each member of the union.
    if isinstance(value, dict):
        return BatchSearch.model_validate(value)
    return _VALUES_ADAPTER.validate_python(value)


def _matrix(value: object) -> object:
    """Return the matrix with sizes in bytes; `batch_size: auto` becomes a batch search."""
    if not isinstance(value, dict):
        return value
    axes: dict[str, object] = {}
    for name, axis in value.items():
        if name == "batch_size":
            # An empty mapping is a batch search with default bounds.
            axes[name] = {} if axis == "auto" else axis
        else:
            # Only batch_size may be a mapping. In a list, a mapping is rejected as a wrong value.
            axes[name] = [axis] if isinstance(axis, dict) else axis
    return with_sizes(axes)


Axis = Annotated[Values | BatchSearch, WrapValidator(_axis)]
Matrix = Annotated[dict[str, Axis], BeforeValidator(_matrix)]
CountOrSpan = Annotated[Span, BeforeValidator(_span, json_schema_input_type=PositiveCount | Span)]


# Timing goes on up to max_seconds until there are so many samples.
ENOUGH_SAMPLES = 30
# So many samples are timed even beyond max_seconds.
_FEWEST_SAMPLES = 5
# The shortest warm-up, as a share of the timed seconds.
_LEAST_WARMUP_SHARE = 1 / 3
# The longest warm-up, as a share of max_seconds.
_MOST_WARMUP_SHARE = 1 / 2


def _mapping_or_quick(value: object) -> object:
    """Return the section as given; the error for a wrong type mentions `quick`."""
    if not isinstance(value, dict | Measure):
        raise ValueError("must be a mapping or quick")
    return value


class Measure(JobSection):
    """How long each point is measured."""

    warmup: CountOrSpan = Field(
        default=Span(min=20, max=200),
        description="Untimed iterations first: a count, or min and max. With these they end when "
        "a third of seconds is over, even beyond max, and the step time is steady or max is done.",
    )
    seconds: Seconds = Field(
        default=3.0,
        description="Timed seconds of a repeat after its warm-up, and at least 30 samples. Timing "
        "starts again if the step time drifts, unless warmup or iterations is a count.",
    )
    iterations: Annotated[
        PositiveCount | None, WithJsonSchema(TypeAdapter(PositiveCount).json_schema())
    ] = Field(default=None, description="A fixed count of timed samples, in place of seconds.")
    max_seconds: Seconds = Field(
        default=20.0,
        description="Time budget of a repeat in seconds, with its warm-up and with timing that "
        "starts again, without its first step. Long steps exceed it: 5 samples, or the count of "
        "iterations, are timed in any case.",
    )
    rounds: Annotated[int, Field(strict=True, ge=1, le=100)] = Field(
        default=1,
        description="How many times the whole plan is run, each time in fresh workers and in "
        "another order. Speed-ups are taken within a round, and their scatter over rounds tells "
        "how far starts lie apart.",
    )
    repeats: PositiveCount = Field(
        default=1, description="How many times each point is built, warmed up and timed."
    )
    timeout_s: Seconds = Field(
        default=300.0,
        description="Time limit of a point in seconds; a longer one is stopped as hung.",
    )
    hang_s: Seconds | None = Field(
        default=None,
        description="Stop a point so many seconds after a rank was found to hang, instead of at "
        "timeout_s. A rank that works alone for long, as in an evaluation on rank 0, may look like "
        "a rank that hangs: choose more than that takes. On GPUs torch also records when each "
        "collective begins. Without hang_s a hanging rank is named too, and only timeout_s stops "
        "points.",
    )
    breakdown: StrictBool = Field(
        default=True,
        description="Run instrumented steps after the timed ones to show where the time goes.",
    )
    check_gradients: StrictBool = Field(
        default=False,
        description="After the timed steps compare the gradients of one step with those of one "
        "process over the samples of all ranks, of workloads that can.",
    )
    heat_s: Annotated[float, Field(strict=True, ge=0, le=1_000_000)] = Field(
        default=0.0,
        description="Seconds of steps before the warm-up of a point one of whose devices has run "
        "nothing in this sweep, or nothing for 10 s. For devices that slow down while they heat "
        "up: about three times as long as that takes. timeout_s includes it.",
    )
    fresh_workers: StrictBool = Field(
        default=False, description="Run each point in new processes; adds seconds to each point."
    )

    @property
    def is_quick(self) -> bool:
        """Whether at most QUICK_SECONDS are timed, as with `measure: quick`."""
        return self.iterations is None and self.timed_s <= QUICK_SECONDS

    @property
    def timed_s(self) -> float:
        """Seconds to time, unless `iterations` is given."""
        # The timed seconds and the shortest warm-up must fit into max_seconds together.
        return min(self.seconds, self.max_seconds / (1 + _LEAST_WARMUP_SHARE))

    @property
    def least_warmup_s(self) -> float:
        """Shortest warm-up in seconds, unless its count is fixed."""
        return self.timed_s * _LEAST_WARMUP_SHARE

    @property
    def most_warmup_s(self) -> float:
        """Longest warm-up in seconds."""
        return self.max_seconds * _MOST_WARMUP_SHARE

    @property
    def fewest_samples(self) -> int:
        """Samples of a repeat that are timed even beyond max_seconds."""
        return self.iterations or _FEWEST_SAMPLES

    @property
    def longest_step_s(self) -> float:
        """Longest step time for which max_seconds allows ENOUGH_SAMPLES samples."""
        # The warm-up ends after its minimum count and duration, but at the latest after
        # most_warmup_s.
        least_warmup_s = 0.0 if self.warmup.is_fixed else self.least_warmup_s
        least_warmup_count = self.warmup.min - 1  # the budget excludes the cold first step
        step_by_count_s = self.max_seconds / (least_warmup_count + ENOUGH_SAMPLES)
        step_by_duration_s = (self.max_seconds - least_warmup_s) / ENOUGH_SAMPLES
        step_after_most_s = (self.max_seconds - self.most_warmup_s) / ENOUGH_SAMPLES
        return max(min(step_by_count_s, step_by_duration_s), step_after_most_s)

    @property
    def least_s(self) -> float:
        """Lower bound of the seconds of a repeat; the time of a fixed count of steps is unknown."""
        timed_s = self.timed_s if self.iterations is None else 0.0
        return timed_s + (0.0 if self.warmup.is_fixed else self.least_warmup_s)


MeasureOrQuick = Annotated[
    Measure, BeforeValidator(_mapping_or_quick, json_schema_input_type=Literal["quick"] | Measure)
]


class Placement(JobSection):
    """Which devices work on a point."""

    strategy: Strategy = Field(
        default="pack",
        description="Of all points, unless it is an axis. pack: as few nodes as possible, of as "
        "few racks as possible. spread: as many as possible. rail: devices of the same index on "
        "the nodes of a rack.",
    )
    devices: Annotated[StrictStr, Predicate(are_devices)] = Field(
        default=ANY,
        description="Devices that points may use where devices is no axis: any, those of a model, "
        "as in H200 (a part of its name), or those with these numbers, as in 0/2. Devices are "
        "numbered from 0 by rack, node and index; those that come late get the next numbers.",
    )
    isolation: Isolation = Field(
        default="cluster",
        description="What a point shares with no other at the same time. cluster: one point at a "
        "time. node: one per node. device: any points on disjoint devices.",
    )
    oversubscribe: StrictBool = Field(
        default=False,
        description="Let the CPU workers of a private Ray share cores. Otherwise a point that "
        "needs more workers than there are cores is skipped.",
    )


Question = Annotated[str, Field(strict=True, min_length=1, max_length=300)]


# One or more words of up to 24 letters.
_is_items = re.compile("[A-Za-z][A-Za-z ]{0,23}").fullmatch
Items = Annotated[
    StrictStr, AfterValidator(_must("must be a word in the plural, as in tokens", _is_items))
]


class AnswerSection(JobSection):
    """What the report answers first: the values of a metric, compared over some settings."""

    metric: StrictStr = Field(
        description="A column of the results, as throughput, step_ms_p50, speed_up or "
        "peak_mem_allocated_bytes, or a metric of the workload's own."
    )
    over: Annotated[
        tuple[StrictStr, ...],
        BeforeValidator(
            _one_or_more,
            json_schema_input_type=StrictStr | Annotated[list[StrictStr], Field(min_length=1)],
        ),
    ] = Field(
        default=(), description="The settings whose values are compared; by default all that vary."
    )
    best: Annotated[
        Literal["max", "min"] | None, WithJsonSchema({"enum": ["max", "min"], "type": "string"})
    ] = Field(
        default=None,
        description="Whether the largest or the smallest value is the best; by default the "
        "smallest of times, memory and energy, and the largest of all others.",
    )


# Keys that do not affect what is measured; a resumed run may change them.
NOT_MEASURED = ("name", "question", "answer", "items", "baseline", "on_error", "cpu")


class CpuSection(JobSection):
    """Keys that replace keys of other sections on a cluster without GPUs.

    Mappings are replaced key by key, lists as a whole.
    """

    why_not: Annotated[str, Field(strict=True, max_length=200)] = Field(
        default="",
        description="Why the job needs a GPU: without a GPU it ends with this reason.",
    )
    question: Question = Field(default="", description="In place of the question of the job.")
    answer: AnswerSection | None = Field(default=None, description="In place of its answer.")
    workload: Settings = Field(default={}, description="In place of keys of the workload.")
    matrix: Matrix = Field(default={}, description="In place of axes of the matrix.")
    zip: tuple[Axes, ...] = Field(default=(), description="In place of all entries of zip.")
    env: dict[str, EnvValues] = Field(default={}, description="In place of variables of env.")
    exclude: tuple[Axes, ...] = Field(default=(), description="In place of all entries of exclude.")
    include: tuple[Settings, ...] = Field(
        default=(), description="In place of all entries of include."
    )
    baseline: Settings = Field(default={}, description="In place of keys of the baseline.")
    measure: MeasureOrQuick = Field(
        default=Measure(), description="In place of keys of measure, or quick."
    )
    placement: Placement = Field(
        default=Placement(), description="In place of keys of the placement."
    )


class Job(JobSection):
    """A job file of raybench: a workload, the axes of the sweep, how to measure."""

    version: Annotated[
        # The type alone would accept true and 1.0.
        Literal[1], BeforeValidator(_must("must be 1", lambda value: type(value) is int))
    ] = Field(description="Version of the job file format.")
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
    cpu: CpuSection = Field(
        default=CpuSection(),
        description="What replaces other keys where the cluster has no GPU, or with --device cpu. "
        "Mappings are replaced key by key, lists as a whole; --set comes after.",
    )

    # Set by `loading.py`; earlier, the properties that need these fields raise AttributeError.
    _source: YamlSource = PrivateAttr()
    _settings: dict[str, PointSetting] = PrivateAttr()
    _workload_class: type = PrivateAttr(default=object)

    def set_source(self, source: YamlSource) -> None:
        """Set the source of messages, `text` and `folder`."""
        self._source = source

    def set_workload(self, settings: dict[str, PointSetting], workload_class: type) -> None:
        """Set `settings` and `workload_class`."""
        self._settings, self._workload_class = settings, workload_class

    @property
    def text(self) -> str:
        """The job file as it was read, without overrides."""
        return self._source.text

    @property
    def uses_cpu(self) -> bool:
        """Whether the section `cpu` has replaced any key."""
        return self._source.uses_cpu

    @property
    def replaced_keys(self) -> list[str]:
        """Dotted keys that the section `cpu` has replaced and `--set` has not."""
        return list(map(key_text, self._source.replaced_keys))

    @property
    def batch_search(self) -> BatchSearch | None:
        """The search for batch sizes; None if the job lists batch sizes or has none."""
        search = self.matrix.get("batch_size")
        return search if isinstance(search, BatchSearch) else None

    @property
    def axes(self) -> Mapping[str, tuple[Scalar, ...]]:
        """Values of each axis of `matrix`; a batch search has only its start."""
        return {
            name: (values.start,) if isinstance(values, BatchSearch) else values
            for name, values in self.matrix.items()
        }

    @property
    def varied(self) -> set[str]:
        """Names of the settings in matrix, zip and include, even with one value."""
        return set(self.matrix).union(*self.zip, *self.include)

    @property
    def metrics(self) -> list[str]:
        """Metrics that `answer.metric` can name; metrics of the workload come first."""
        metrics = declared_entries(self._workload_class, "metrics", "name", "unit")
        return [*(metric.name for metric in metrics), *ANSWER_METRICS]

    @property
    def folder(self) -> Path:
        """The folder of the job file; `.` for a job made from options of the command."""
        return Path() if self._source.options else Path(self._source.name).parent

    @property
    def settings(self) -> Mapping[str, PointSetting]:
        """The settings that the job can give, including variables of env."""
        return self._settings

    @property
    def workload_class(self) -> type:
        """The class of the workload; `object` before `set_workload`."""
        return self._workload_class

    @property
    def meaning_sha256(self) -> str:
        """SHA-256 of what the job measures, with overrides and defaults.

        A resumed run must have the same hash. It may change the number of rounds, the keys of
        `NOT_MEASURED`, the order of keys, and the content of a script.
        """
        excluded: dict[str, Any] = dict.fromkeys(NOT_MEASURED, True)
        meaning = self.model_dump(mode="json", exclude=excluded | {"measure": {"rounds"}})
        text = json.dumps(meaning, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def explain(self, problem: JobProblem) -> str:
        """Return `YamlSource.explain` of a problem."""
        return self._source.explain(problem)

    def error(self, problems: Sequence[JobProblem]) -> JobError:
        """Return the problems as a JobError."""
        return JobError(self._source.explain_all(problems))


# Models that reject unknown keys, by dotted path.
_MODELS: Mapping[str, type[BaseModel]] = {
    "": Job,
    "answer": AnswerSection,
    "matrix.batch_size": BatchSearch,
    "measure": Measure,
    "measure.warmup": Span,
    "placement": Placement,
}
_MODELS_OF_CPU: Mapping[str, type[BaseModel]] = {
    CPU: CpuSection,
    **{f"{CPU}.{key}": model for key, model in _MODELS.items()},
}


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of the job file, which accepts any parameter and any axis."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Job.model_json_schema()}


def validate(data: Mapping[str, Any]) -> tuple[Job | None, list[JobProblem]]:
    """Check the rules that need no workload, and return (job, []) or (None, problems).

    The job lacks its source and settings: `load_job` sets them.
    """
    try:
        return Job.model_validate(data), []
    except ValidationError as error:
        return None, [_problem(details) for details in error.errors(include_url=False)]


def _problem(error: ErrorDetails) -> JobProblem:
    """Return an error of pydantic as a problem; for an unknown key, propose similar keys."""
    path: KeyPath = error["loc"]
    if error["type"] != "extra_forbidden":
        is_key_missing = error["type"] == "missing"
        return JobProblem(path=path, at_key=is_key_missing, message=rule_of(error))
    key = path[-1]
    # The section `cpu` contains other sections, whose keys it replaces on CPU workers.
    is_in_cpu = path[0] == CPU and len(path) > 1
    models, prefix = (_MODELS_OF_CPU, f"{CPU}.") if is_in_cpu else (_MODELS, "")
    model = models[key_text(path[:-1])]
    # The user may have put the key into the wrong section.
    sections = [
        name for name in ("answer", "measure", "placement") if key in _MODELS[name].model_fields
    ]
    if key in RUN_SETTINGS:
        sections.append("matrix")
    if sections:
        proposals = " or ".join(f"{prefix}{section}.{key}" for section in sections)
        message = f"unknown key {quote(key)}; did you mean {proposals}?"
    else:
        message = say_unknown("key", key, model.model_fields)
    return JobProblem(path=path, at_key=True, message=message)


def answer_of_run(
    job_text: str, overrides: Sequence[str], varying: Sequence[str], *, on_cpu: bool = False
) -> Answer:
    """Return what a stored run answers: by its job file, else its workload, else the speed-up.

    Imports the module of the workload. Invalid parts of the job file are ignored.

    Args:
        overrides: values of `--set` of the run.
        varying: settings that differ between its points; `Answer.over` is limited to these.
        on_cpu: whether the run used the section `cpu`.
    """
    data: dict[str, Any] = {}
    with suppress(JobError):
        data = parse_source("job", job_text, overrides, on_cpu=on_cpu).data
    kind, name = _kind(data), str(data.get("name"))
    file = files("raybench").joinpath("jobs", f"{name}.yaml")
    if re.fullmatch(r"[a-z0-9_]+", name) and file.is_file():
        # The run may be of an older version of a shipped job, which lacked these keys.
        shipped = parse_source(name, file.read_text(encoding="utf-8"), on_cpu=on_cpu).data
        if kind == _kind(shipped):
            shipped_keys = shipped.keys() & {"question", "answer", "items"}
            data = {key: shipped[key] for key in shipped_keys} | data
    workload_class: type = object
    with suppress(KeyError, UsageError):
        workload_class = registry.load_workload(kind)
    asked_answer = _validated(AnswerSection, data.get("answer"))
    if asked_answer is None:
        answer = _declared_answer(workload_class, varying)
    else:
        best = asked_answer.best or _best_value(workload_class, asked_answer.metric)
        answer = Answer(metric=asked_answer.metric, over=asked_answer.over, best=best)
    items = _validated(Items, data.get("items"))
    items = items or _validated(Items, getattr(workload_class, "items", None))
    return replace(
        answer,
        over=tuple(name for name in varying if not answer.over or name in answer.over),
        items=items or SAMPLES,
        question=_validated(Question, data.get("question")) or "",
    )


def _declared_answer(workload_class: type, varying: Sequence[str]) -> Answer:
    """Return the first answer that the class declares over settings that vary, or a default."""
    answers: list[Answer] = declared_entries(workload_class, "answers", "metric", "over")
    for answer in answers:
        if not answer.over or not set(answer.over).isdisjoint(varying):
            return answer
    return Answer(metric="speed_up", over=("world_size",))


def _best_value(workload_class: type, metric_name: str) -> Best:
    """Return whether the largest or the smallest value of a metric is the best."""
    for metric in declared_entries(workload_class, "metrics", "name", "unit"):
        if metric.name == metric_name:
            is_cost = metric.unit in ("s", "ms", "us", "ns", "bytes", "J")
            return "min" if is_cost else "max"
    return ANSWER_METRICS.get(metric_name, "max")


def _kind(data: Mapping[str, Any]) -> str:
    """Return `workload.kind` of unvalidated data; "" if it is missing."""
    workload = data.get("workload")
    return str(workload.get("kind", "")) if isinstance(workload, dict) else ""


def _validated(expected_type: Any, value: object) -> Any:
    """Return a value of the job file; None if the value is missing or invalid."""
    try:
        return None if value is None else TypeAdapter(expected_type).validate_python(value)
    except ValidationError:
        return None
