"""What a column of a table is, and what a metric of a point is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from raybench.errors import UsageError

OverRanks = Literal["max", "min", "mean", "median", "sum"]


OverStep = Literal["ms_each", "per_second", "seconds"]


# How a report writes the value: `share` of 1 and `percent` of 100 as 12.3%, `part` and `time` of a
# step in the unit of the table, `choices` what NCCL ran for its collectives.
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
    """What a column of a table holds: stands in the annotation of the field that is written to it.

    unit: empty where it has none. description: in at most 60 characters.
    name: of the column; empty: that of the field. The others as of a `Metric`.
    """

    unit: str
    description: str
    _: KW_ONLY
    name: str = ""
    heading: str = ""
    meaning: str = ""
    format: Format = "number"
    over_ranks: OverRanks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number of a point.

    name: of its column in the table `points`; of a workload's own metric, the attribute of the
    workload that holds the value of a rank after the timed steps.
    unit: of the stored value; empty where it has none.
    description: what it is, in at most 60 characters.
    kind: the type of its column.
    over_ranks: how the values of the ranks become the point's. None: of a workload's own metric by
    their mean, else by a computation of its own.
    over_step: of a workload's own metric whose value says how much one step does. ms_each: the
    metric is the median step in ms over the value. per_second: the value over the mean step in s.
    seconds: what so many steps take, by the mean step.
    heading: of its column in reports, the unit included; empty: `name`, with the unit behind it.
    meaning: what the legend of a report says, without a capital and a full stop; {ranks} is what a
    rank runs on, {baseline} the settings of the baseline. Empty: `description`.
    format: how a report writes the value. With `time` it adds its own unit to the heading.

    Of a workload's own metric the tables keep the heading and the meaning; reports write it as a
    number.

    Raises UsageError for a name that is no identifier, or an unknown `over_ranks` or `over_step`.
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
        """Raise UsageError as the class says."""
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
        """`heading`, else its name in words and the unit, once if alike, as in "bubble ms"."""
        words = self.name.removesuffix(f"_{self.unit.lower()}").replace("_", " ")
        return self.heading or " ".join(dict.fromkeys((words, self.unit))).rstrip()

    @property
    def is_rate(self) -> bool:
        """Whether the value says how much is done in a second."""
        return self.over_step == "per_second" or self.unit.endswith("/s")

    @property
    def follows_step(self) -> bool:
        """Whether the value is a time in proportion to the step time."""
        return self.over_step in ("ms_each", "seconds")


def combine_ranks(how: OverRanks, values: Sequence[float | None]) -> float | None:
    """Return the value of a point from the values of its ranks, of which None ones are left out.

    None if all are None or there are none, and for a sum if one is None; else NaN if one is NaN.
    The largest, smallest or sum of integers is an integer.
    """
    known = [value for value in values if value is not None]
    if not known or (how == "sum" and len(known) < len(values)):
        return None
    # Python's `max`, `min` and `median` may lose it.
    return math.nan if any(map(math.isnan, known)) else _COMBINE[how](known)
