"""Optional attributes and methods of a workload's class that are read before any point runs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from raybench.job.point import Precision, Scalar
from raybench.job.registry import usage_errors


def declared_entries(workload_class: type, name: str, *attributes: str) -> list[Any]:
    """Return the entries of the class attribute `name`, such as `metrics`.

    The class attribute may be a tuple, a list, a single entry, or missing.

    Args:
        attributes: an entry without one of these attributes is left out.
    """
    declared = getattr(workload_class, name, ())
    entries = declared if isinstance(declared, tuple | list) else (declared,)
    # Leave out incomplete entries, because a class of the user may declare anything.
    complete = []
    for entry in entries:
        if all(hasattr(entry, attribute) for attribute in attributes):
            complete.append(entry)
    return complete


def shares_work(workload_class: type) -> bool:
    """Return whether all ranks work on the same items, as in tensor parallelism."""
    return bool(getattr(workload_class, "shares_work", False))


def missing_packages(workload_class: type) -> dict[str, str]:
    """Return package -> how to install the package, for the packages that are not installed."""
    packages: Mapping[str, str] = getattr(workload_class, "packages", {})
    return {name: cure for name, cure in packages.items() if find_spec(name) is None}


def ranks_per_item(workload_class: type, settings: Mapping[str, Scalar]) -> int:
    """Return how many ranks work on the same items; may exceed world_size.

    Args:
        settings: world_size and the parameters of the workload.

    Raises:
        UsageError: the method `ranks_per_item` of the class raises, or returns no number.
    """
    if shares_work(workload_class):
        return int(settings["world_size"])
    with usage_errors("ranks_per_item() of the workload"):
        return int(call_if_declared(workload_class, "ranks_per_item", settings) or 1)


def why_not(workload_class: type, settings: Mapping[str, Scalar]) -> str | None:
    """Return why the class refuses a point; None if it accepts the point.

    Args:
        settings: see `Point.settings`.

    Raises:
        UsageError: the method `why_not` of the class raises.
    """
    precision, name = settings.get("precision", Precision.FP32), workload_class.__name__
    if precision != Precision.FP32 and not getattr(workload_class, "takes_precision", True):
        return f"precision {precision} means nothing to {name}; leave precision out"
    if precision == Precision.FLOAT8 and not getattr(workload_class, "takes_float8", False):
        return f"precision float8 is not for {name}; transformer takes it"
    return call_if_declared(workload_class, "why_not", settings) or None


def call_if_declared(workload_class: type, method: str, settings: Mapping[str, Scalar]) -> Any:
    """Return the result of an optional class method; None if the class lacks the method.

    Raises:
        UsageError: the method raises.
    """
    declared = getattr(workload_class, method, None)
    if declared is None:
        return None
    with usage_errors(f"{method}() of the workload"):
        return declared(settings)
