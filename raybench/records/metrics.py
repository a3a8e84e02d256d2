"""What a column of a table is, and what a metric of a point is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from raybench.errors import UsageError

# How the values of ranks become one value.
OverRanks = Literal["max", "min", "mean", "median", "sum"]
# How an amount per step becomes a metric: see `Metric`.
OverStep = Literal["ms_each", "per_second", "seconds"]
# How a report writes a value. `share` of 1 and `percent` of 100 are both written as 12.3%; `part`
# and `time` use the unit of the table; `choices` are the choices of NCCL.
Format = Literal["number", "ratio", "share", "percent", "gib", "part", "time", "choices"]


_COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "min": min,
    "mean": statistics.fmean,
    "median": statistics.median,
    "sum": sum,
}


@dataclass(frozen=True, slots=True)
class Column:
    """What a column of a table holds; stands in the annotation of a field."""

    # Empty if the values have no unit.
    unit: str
    # At most 60 characters.
    description: str
    _: KW_ONLY
    # Empty: name of the field.
    name: str = ""
    # This field and the following: as in `Metric`.
    heading: str = ""
    meaning: str = ""
    format: Format = "number"
    over_ranks: OverRanks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number of a point. `Workload.metrics` lists the metrics that a workload declares.

    >>> import raybench
    >>> raybench.Metric(name="bubble_ms", unit="ms", description="idle time of a stage").title
    'bubble ms'

    Args:
        name: column of the table `points`. For a metric of a workload: the attribute of the
            workload that holds the number of this rank after the timed steps, and the key in
            `workload_metrics`.
        unit: of the stored value; empty if it has none.
        description: at most 60 characters.
        kind: type of the column.
        over_ranks: how the values of ranks are combined: max, min, mean, median or sum. None: the
            mean, for a metric of a workload.
        over_step: for a metric of a workload whose value is an amount per step. ms_each: median
            step in ms / value. per_second: value / mean step in s. seconds: value * mean step in s.
        heading: heading in reports, with the unit. Empty: name and unit.
        meaning: legend in reports, without capital and full stop; {ranks} and {baseline} are
            replaced. Empty: the description.
        format: how reports write the value; ignored for a metric of a workload.

    Raises:
        UsageError: `name` is not an identifier, or `over_ranks` or `over_step` is unknown.
    """

    name: str
    unit: str = ""
    description: str
    kind: str = "double"
    over_ranks: OverRanks | None = None
    over_step: OverStep | None = None
    heading: str = ""
    meaning: str = ""
    format: Format = "number"

    def __post_init__(self) -> None:
        if not str(self.name).isidentifier():
            raise UsageError(f"Metric: name must be an identifier, got {self.name!r}")
        for name, allowed in (("over_ranks", OverRanks), ("over_step", OverStep)):
            if (given := getattr(self, name)) not in (None, *get_args(allowed)):
                names = ", ".join(get_args(allowed))
                raise UsageError(
                    f"Metric {self.name}: {name} must be one of {names}, got {given!r}"
                )

    @property
    def title(self) -> str:
        """The heading, or else name and unit in words, such as "bubble ms"."""
        words = self.name.removesuffix(f"_{self.unit.lower()}").replace("_", " ")
        return self.heading or " ".join(dict.fromkeys((words, self.unit))).rstrip()

    @property
    def is_rate(self) -> bool:
        """Whether the value is an amount per second."""
        return self.over_step == "per_second" or self.unit.endswith("/s")

    @property
    def follows_step(self) -> bool:
        """Whether the value is a time in proportion to the step time."""
        return self.over_step in ("ms_each", "seconds")


def combine_ranks(over_ranks: OverRanks, values: Sequence[float | None]) -> float | None:
    """Return the value of a point from the values of its ranks; None values are left out.

    Returns:
        None if no value is left, and for a sum if any value is None. NaN if any value is NaN.
    """
    present = [value for value in values if value is not None]
    if not present or (over_ranks == "sum" and len(present) < len(values)):
        return None
    # `max`, `min` and `median` of Python may lose a NaN, so check for it.
    return math.nan if any(map(math.isnan, present)) else _COMBINE[over_ranks](present)
