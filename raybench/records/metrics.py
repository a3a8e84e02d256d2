"""Columns of tables, and metrics of points."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from raybench.errors import UsageError

# How the values of ranks become one value.
OverRanks = Literal["max", "min", "mean", "median", "sum"]
# How an amount per step becomes a metric; `Metric` has the formulas.
OverStep = Literal["ms_each", "per_second", "seconds", "share"]
# How a report writes a value. A `share` of 0.123 and a `percent` of 12.3 are both written as 12.3%;
# `part` and `time` use the unit of the table; `choices` are the choices of NCCL.
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
    """Unit, description and name of a table's column, in the annotation of a field."""

    # Empty if the values have no unit.
    unit: str
    # At most 60 characters.
    description: str
    _: KW_ONLY
    # Empty: the name of the field is the name of the column.
    name: str = ""
    # The fields below have the same meaning as in `Metric`.
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
        unit: unit of the stored value; empty if the value has none.
        description: at most 60 characters.
        kind: type of the column.
        over_ranks: how the values of ranks are combined: max, min, mean, median or sum. None means
            mean for a metric of a workload.
        over_step: for a metric of a workload whose value is an amount per step. ms_each: median
            step in ms / value. per_second: value / mean step in s. seconds: value * mean step in s.
            share: value in ms / median step in ms.
        heading: heading in reports, with the unit. Empty: name and unit.
        meaning: legend in reports, without capital and full stop; {ranks} and {baseline} are
            replaced. Empty: the description.
        format: how reports write the value; "number" and "share" for a metric of a workload.

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
            if (value := getattr(self, name)) not in (None, *get_args(allowed)):
                names = ", ".join(get_args(allowed))
                raise UsageError(
                    f"Metric {self.name}: {name} must be one of {names}, got {value!r}"
                )

    @property
    def title(self) -> str:
        """The heading; if it is empty, name and unit in words, such as "bubble ms"."""
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
    """Return the value of a point from the values of its ranks.

    Returns:
        None if all values are None, and for a sum if any value is None. NaN if any value is NaN.
    """
    known = [value for value in values if value is not None]
    is_sum_incomplete = over_ranks == "sum" and len(known) < len(values)
    if not known or is_sum_incomplete:
        return None
    # Check first, because `max`, `min` and `median` of Python may lose a NaN.
    if any(map(math.isnan, known)):
        return math.nan
    return _COMBINE[over_ranks](known)
