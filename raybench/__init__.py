"""raybench: multi-node GPU benchmark sweeps on Ray.

frame = raybench.load("results", "points")     # a pandas DataFrame
raybench.load("results", "scaling")            # speed-up and efficiency of each point
raybench.units("points")["step_ms_p50"]        # "ms"

class Mine(raybench.Workload): ...             # what is timed: docs/how-to/own-workload.md
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raybench.version import __version__

if TYPE_CHECKING:
    from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

    from raybench.analysis.frames import load, units
    from raybench.job.answer import Answer
    from raybench.records.metrics import Metric
    from raybench.workloads.base import Context, DdpOptions, Workload, WrongResultError

__all__ = [
    "Answer",
    "Context",
    "DdpOptions",
    "Field",
    "Metric",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Workload",
    "WrongResultError",
    "__version__",
    "load",
    "units",
]

_HOMES = {
    "raybench.analysis.frames": ("load", "units"),
    "raybench.job.answer": ("Answer",),
    "raybench.records.metrics": ("Metric",),
    "raybench.workloads.base": ("Context", "DdpOptions", "Workload", "WrongResultError"),
    # For the parameters of a workload.
    "pydantic": ("Field", "NonNegativeInt", "PositiveFloat", "PositiveInt"),
}


def __dir__() -> list[str]:
    """Return the public names: a notebook completes them before they are loaded."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Return a public name; its module is imported now: `import raybench` stays light."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
