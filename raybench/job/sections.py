"""The sections of the job file and their values, each with the rules it can check by itself.

Sizes of settings `*_bytes` may be written as 4KiB, and ranges of them as 8:1GiB:x2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from raybench.job.point import ANY, Strategy, are_devices

_UNITS = {
    **dict.fromkeys(("", "B"), 1),
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("kMGT", start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]iB|[kMGT]?B|)")
_RANGE = re.compile(r"([^:]+):([^:]+):x(\d+)")
_MOST_BYTES = 2**63 - 1


SIZE_RULE = (
    "must be bytes, as in 4096 or 4KiB; an axis also takes a range FIRST:LAST:xFACTOR, as in "
    "8:1GiB:x2"
)


def read_bytes(text: str) -> float | None:
    """Return the number of bytes above 0 that a text such as 4KiB gives; None for another text.

    It is whole unless the text gives parts of a byte.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, unit = found.groups()
    count = float(number) * _UNITS[unit] if "." in number else int(number) * _UNITS[unit]
    return count if 0 < count <= _MOST_BYTES else None


def _read_sizes(value: Any) -> Any:
    """Return a size as a whole number of bytes, a range of sizes as a list of them.

    Of a list, one list of the sizes of all entries. What is no size stays as it is.
    """
    if isinstance(value, list):
        read = [_read_sizes(one) for one in value]
        return [size for one in read for size in (one if isinstance(one, list) else [one])]
    if not isinstance(value, str):
        return value
    found = _RANGE.fullmatch(value)
    ends = [read_bytes(end) for end in (found.group(1, 2) if found else (value, value))]
    factor = int(found[3]) if found else 2
    if factor < 2 or any(end is None or end != int(end) for end in ends):
        return value
    low, high = (int(end or 0) for end in ends)
    sizes = []
    while low <= high:
        sizes.append(low)
        low *= factor
    return (sizes if found else sizes[0]) or value


def _with_sizes(group: object) -> object:
    """Return a copy of a mapping with its settings `*_bytes` in bytes, ranges as lists of them.

    What is no size stays as it is, for its type to refuse; so does what is no mapping.
    """
    if not isinstance(group, dict):
        return group
    return {
        name: _read_sizes(value) if str(name).endswith("_bytes") else value
        for name, value in group.items()
    }


def _one_value(value: object) -> object:
    """Return the value. Raises an error of pydantic for a list or a mapping."""
    if isinstance(value, dict | list):
        # Before the union below is tried, which would complain once for each of its types.
        raise PydanticCustomError("one_value", "must be one value")
    return value


def _one_or_more(value: object) -> object:
    """Return a list as a tuple, another value as a tuple of it. Raises for an empty list."""
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
# A mapping of settings to a value, or to one or more values.
Settings = Annotated[dict[str, Value], BeforeValidator(_with_sizes)]
Axes = Annotated[dict[str, Values], BeforeValidator(_with_sizes)]
_MAX_COUNT = 1_000_000_000
PositiveCount = Annotated[int, Field(strict=True, ge=1, le=_MAX_COUNT)]
Seconds = Annotated[float, Field(strict=True, gt=0, le=1_000_000)]


def _environment_text(value: object) -> object:
    """Return a number as text. Raises for true and false, which a shell has no form for."""
    if isinstance(value, bool):
        raise PydanticCustomError("env", "must be a text or a number; put true or false in quotes")
    return str(value) if isinstance(value, int | float) else value


EnvValue = Annotated[
    str,
    BeforeValidator(_environment_text, json_schema_input_type=StrictInt | StrictFloat | StrictStr),
]
EnvValues = Annotated[
    tuple[EnvValue, ...],
    BeforeValidator(
        _one_or_more,
        json_schema_input_type=EnvValue | Annotated[list[EnvValue], Field(min_length=1)],
    ),
]


class Section(BaseModel):
    """A mapping of the job file that takes no keys but its own."""

    # Built with the job that holds them, and not each by itself before.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class WorkloadSection(BaseModel):
    """What is timed, and the parameters that all points share."""

    model_config = ConfigDict(extra="allow", frozen=True, defer_build=True)
    __pydantic_extra__: dict[str, Value]

    kind: Annotated[str, Field(strict=True)] = Field(
        description="A built-in workload (`raybench workloads` lists them) or package.module:Class."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_sizes(cls, value: object) -> object:
        return _with_sizes(value)

    @property
    def parameters(self) -> Mapping[str, bool | int | float | str]:
        """The parameters as the file gives them, without defaults."""
        return self.__pydantic_extra__


class Span(Section):
    """A count that raybench chooses between two bounds; equal bounds fix it."""

    min: PositiveCount = Field(description="Minimum.")
    max: PositiveCount = Field(description="Maximum.")

    @property
    def is_fixed(self) -> bool:
        """Whether the bounds leave nothing to choose."""
        return self.min == self.max

    @field_validator("max")
    @classmethod
    def _max_is_not_below_min(cls, value: int, info: ValidationInfo) -> int:
        """Return the value. Raises an error of pydantic where it is below `min`."""
        least = info.data.get("min", value)
        if value < least:
            raise PydanticCustomError("span", f"must not be below min, which is {least}")
        return value


def _span(value: object) -> object:
    """Return a count as equal bounds. Raises for what is neither a count nor a mapping."""
    if isinstance(value, bool) or not isinstance(value, int | dict | Span):
        raise PydanticCustomError("count_or_span", "must be a count or a mapping {min: , max: }")
    if not isinstance(value, int):
        return value
    if not 1 <= value <= _MAX_COUNT:
        raise PydanticCustomError("count", f"must be from 1 to {_MAX_COUNT:,}")
    return {"min": value, "max": value}


class BatchSearch(Section):
    """Batch sizes that raybench searches: doubled until memory runs out, then bisected."""

    start: PositiveCount = Field(default=64, description="The first batch size.")
    # Not by SkipJsonSchema: pydantic complains once for each member of such a union.
    max: Annotated[
        PositiveCount | None, WithJsonSchema(TypeAdapter(PositiveCount).json_schema())
    ] = Field(
        default=None,
        description="The largest batch size to try. Required on CPU workers, which share the "
        "memory of the host.",
    )

    @field_validator("max")
    @classmethod
    def _max_is_not_below_start(cls, value: int | None, info: ValidationInfo) -> int | None:
        """Return the value, also None. Raises an error of pydantic where it is below `start`."""
        first = info.data.get("start")
        if value is not None and first is not None and value < first:
            raise PydanticCustomError("span", f"must not be below start, which is {first}")
        return value


_VALUES: TypeAdapter[tuple[_AnyScalar, ...]] = TypeAdapter(Values)


def _axis(value: object, _: ValidatorFunctionWrapHandler) -> object:
    """Return the values of an axis as a tuple, or of a mapping the search for batch sizes."""
    # Not left to the union: pydantic complains once for each of its members.
    if isinstance(value, dict):
        return BatchSearch.model_validate(value)
    return _VALUES.validate_python(value)


def _matrix(value: object) -> object:
    """Return the matrix with sizes in bytes, and a search for `auto` or a mapping of batch_size.

    Only batch_size is searched: elsewhere `auto` is a text, and a mapping no value.
    """
    if not isinstance(value, dict):
        return value
    axes = {name: [given] if isinstance(given, dict) else given for name, given in value.items()}
    if "batch_size" in value:
        axes["batch_size"] = {} if value["batch_size"] == "auto" else value["batch_size"]
    return _with_sizes(axes)


Axis = Annotated[Values | BatchSearch, WrapValidator(_axis)]
Matrix = Annotated[dict[str, Axis], BeforeValidator(_matrix)]
CountOrSpan = Annotated[Span, BeforeValidator(_span, json_schema_input_type=PositiveCount | Span)]


QUICK = "quick"


def _measure(value: object) -> object:
    """Return the settings of a short look for `quick`, another value as it is.

    Raises an error of pydantic for what is neither a mapping nor quick.
    """
    if value == QUICK:
        return {"min_seconds": 0.0, "iterations": {"min": 5, "max": 1000}}
    if not isinstance(value, dict | Measure):
        raise PydanticCustomError("measure", "must be a mapping or quick")
    return value


class Measure(Section):
    """How long each point is measured."""

    warmup: CountOrSpan = Field(
        default=Span(min=20, max=200),
        description="Untimed iterations first: a count, or bounds between which the warm-up "
        "ends when the step time is steady and half of min_seconds is over.",
    )
    iterations: CountOrSpan = Field(
        default=Span(min=5, max=10_000),
        description="Timed iterations: a count, or bounds between which measuring ends when "
        "min_seconds and 30 iterations are timed and the step time is known within target_ci. "
        "max_seconds never cuts the count or the minimum.",
    )
    target_ci: Annotated[float, Field(strict=True, gt=0, lt=1)] = Field(
        default=0.01,
        description="Target half width of the 95 % interval of the median, relative to it.",
    )
    min_seconds: Annotated[float, Field(strict=True, ge=0, le=1_000_000)] = Field(
        default=2.0,
        description="Timed seconds of a repeat at least, after a warm-up of at least half of it. "
        "Fixed counts of iterations stay as they are. 0, or measure: quick, takes a short look.",
    )
    max_seconds: Seconds = Field(
        default=20.0,
        description="Time budget of a repeat in seconds, with its warm-up, without its first step. "
        "Long steps exceed it: iterations.min are timed in any case.",
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
    breakdown: Annotated[bool, Field(strict=True)] = Field(
        default=True,
        description="Run instrumented steps after the timed ones to show where the time goes.",
    )
    check_gradients: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="After the timed steps compare the gradients of one step with those of one "
        "process over the samples of all ranks, of workloads that can.",
    )
    fresh_workers: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="Run each point in new processes; adds seconds to each point."
    )

    @property
    def is_quick(self) -> bool:
        """Whether only a short look is asked for: few iterations, however short they are."""
        return self.min_seconds == 0

    @property
    def of_a_later_round(self) -> Measure:
        """This section for a later round, without a breakdown: the first round has made it."""
        return self.model_copy(update={"breakdown": False})

    @property
    def least_s(self) -> float:
        """Seconds that the iterations of a repeat take at least; 0 where a count decides."""
        timed_s = 0.0 if self.iterations.is_fixed else self.min_seconds
        warmup_s = 0.0 if self.warmup.is_fixed else self.min_seconds / 2
        return min(warmup_s + timed_s, self.max_seconds)


MeasureOrQuick = Annotated[
    Measure, BeforeValidator(_measure, json_schema_input_type=Literal["quick"] | Measure)
]


Isolation = Literal["cluster", "node", "device"]


def _devices(value: str) -> str:
    """Return the value, which `placement.devices` can have. Raises with the rule for another."""
    try:
        are_devices(value)
    except ValueError as error:
        raise PydanticCustomError("devices", "{rule}", {"rule": str(error)}) from None
    return value


class Placement(Section):
    """Which devices work on a point."""

    strategy: Strategy = Field(
        default="pack",
        description="Of all points, unless it is an axis. pack: as few nodes as possible, of as "
        "few racks as possible. spread: as many as possible. rail: devices of the same index on "
        "the nodes of a rack.",
    )
    devices: Annotated[str, Field(strict=True), AfterValidator(_devices)] = Field(
        default=ANY,
        description="Devices that points may use where devices is no axis: any, those of a model, "
        "as in H200 (a part of its name), or those with these numbers by node and index, as in "
        "0/2.",
    )
    isolation: Isolation = Field(
        default="cluster",
        description="What a point shares with no other at the same time. cluster: one point at a "
        "time. node: one per node. device: any points on disjoint devices.",
    )
    oversubscribe: bool = Field(
        default=False,
        description="Let the CPU workers of a private Ray share cores. Otherwise a point that "
        "needs more workers than there are cores is skipped.",
    )


Question = Annotated[str, Field(strict=True, min_length=1, max_length=300)]


def _items(value: str) -> str:
    """Return the value if it is a word, or words, of up to 24 letters. Raises for another."""
    if not re.fullmatch("[A-Za-z][A-Za-z ]{0,23}", value):
        raise PydanticCustomError("items", "must be a word in the plural, as in tokens")
    return value


Items = Annotated[str, Field(strict=True), AfterValidator(_items)]
_SettingName = Annotated[str, Field(strict=True)]


class AnswerSection(Section):
    """What the report answers first: the values of a metric, compared over some settings."""

    metric: Annotated[str, Field(strict=True)] = Field(
        description="A column of the results, as throughput, step_ms_p50, speed_up or "
        "peak_mem_allocated_bytes, or a metric of the workload's own."
    )
    over: Annotated[
        tuple[_SettingName, ...],
        BeforeValidator(
            _one_or_more,
            json_schema_input_type=_SettingName
            | Annotated[list[_SettingName], Field(min_length=1)],
        ),
    ] = Field(
        default=(),
        description="The settings whose values are compared; by default all that vary.",
    )
    best: Annotated[
        Literal["max", "min"] | None, WithJsonSchema({"enum": ["max", "min"], "type": "string"})
    ] = Field(
        default=None,
        description="Whether the largest or the smallest value is the best; by default the "
        "smallest of times, memory and energy, and the largest of all others.",
    )
