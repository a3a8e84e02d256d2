"""The settings of points, as the rows of the tables have them. Pure, and without pandas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from raybench.job import point
from raybench.job.point import Precision

# All that reports tell points apart by, in the order of every format; the parameters of the
# workload follow. `batch` is the batch size that the job fixed.
EXECUTION, OPTIONAL = point.EXECUTION, point.OPTIONAL
SETTINGS = ("workload", "scaling", *EXECUTION, "batch", "world_size")
_BATCH = {"weak": "batch_size", "strong": "global_batch_size"}


class HasSettings(Protocol):
    """A row that has the settings of a point: a field for each of the run, the others in params."""

    @property
    def params(self) -> Mapping[str, str]:
        """Parameters of the workload and variables of env, as text."""
        ...

    @property
    def scaling(self) -> str | None:
        """The kind of scaling: weak, strong, or None."""
        ...


def setting(row: HasSettings, name: str) -> Any:
    """Return the value of a setting: a field, or the text of a parameter; None without it."""
    return getattr(row, name) if name in _fields_of(row) else row.params.get(name)


def _fields_of(row: Any) -> Collection[str]:
    names: Collection[str] = type(row).__dataclass_fields__
    return names


def batch_column(row: HasSettings) -> str | None:
    """Return the name of the batch size that the job fixed; None where the workload takes none."""
    return _BATCH.get(row.scaling or "")


def setting_order(value: Any) -> tuple[int, float, str]:
    """Return a sort key: numbers by size, precisions from the widest, the rest by name."""
    number = number_of(value)
    if number is not None:
        return (0, number, "")
    precisions = [precision.value for precision in Precision]
    return (1, precisions.index(value), "") if value in precisions else (2, 0.0, str(value))


def number_of(value: Any) -> float | None:
    """Return the number that a value or its text is; None for a truth value and any other."""
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def is_numeric(rows: Sequence[HasSettings], name: str) -> bool:
    """Return whether a setting is a number in all rows."""
    return all(number_of(setting(row, name)) is not None for row in rows)


def varying(
    rows: Sequence[HasSettings],
    but: Collection[str] = (),
    *,
    always: Collection[str] = (),
    params_first: bool = False,
) -> list[str]:
    """Return the settings in which rows differ, in the order of SETTINGS, then parameters.

    but: settings to leave out. always: settings to name also where the rows do not differ.
    params_first: whether the parameters stand before all settings but the workload.
    Rows of `points`, which have no `batch`, differ in the column of it: where all of them scale
    weakly, in the batch per device, else in the global one.
    """
    params = dict.fromkeys(name for row in rows for name in row.params)
    is_weak = all(row.scaling == "weak" for row in rows)
    stored = "batch_size" if is_weak else "global_batch_size"
    fixed = [
        stored if name == "batch" and rows and "batch" not in _fields_of(rows[0]) else name
        for name in SETTINGS
    ]
    names = [fixed[0], *params, *fixed[1:]] if params_first else [*fixed, *params]
    return [
        name
        for name in names
        if name not in but and (name in always or len({str(setting(r, name)) for r in rows}) > 1)
    ]
