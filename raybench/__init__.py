"""raybench: multi-node GPU benchmark sweeps on Ray.

Results as pandas DataFrames, here the results that are committed in the checkout:

>>> import raybench
>>> scaling = raybench.load("results/examples", "scaling", "ddp_scaling-20261122")
>>> largest = scaling.query("precision == 'fp32' and batch_size == 1024")
>>> largest["world_size"].to_list(), largest["speed_up"].round(2).to_list()
([1, 2, 4], [1.0, 1.78, 3.47])
>>> raybench.units("points")["step_ms_p50"]
'ms'

`load` and `units` read results. `Workload` is the base of what is timed; `Context`, `Metric`,
`Answer`, `DdpOptions` and `WrongResultError` belong to it, and docs/how-to/own-workload.md explains
them. `Field`, `NonNegativeInt`, `PositiveFloat` and `PositiveInt` are types of pydantic for
parameters. Errors that a user can cause are in `raybench.errors`.
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
    # Types for the parameters of a workload.
    "pydantic": ("Field", "NonNegativeInt", "PositiveFloat", "PositiveInt"),
}


def __dir__() -> list[str]:
    """Return the public names, so that notebooks complete them before they are loaded."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use: `import raybench` stays fast."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
