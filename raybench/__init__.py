"""raybench: multi-node GPU benchmark sweeps on Ray.

`sweep` runs a job and returns its run, `open_run` an earlier one, `measure` times a function, and
`ab` measures two versions in turns; docs/how-to/python.md explains them. A run of the checkout:

>>> import raybench
>>> run = raybench.open_run("ddp_scaling-20261122", "results/examples")
>>> largest = run.table("scaling").query("precision == 'fp32' and batch_size == 1024")
>>> largest["world_size"].to_list(), largest["speed_up"].round(2).to_list()
([1, 2, 4], [1.0, 1.78, 3.47])

`load` and `units` read the tables of all runs. `Workload` is the base of what is timed; `Context`,
`Metric`, `Answer`, `DdpOptions` and `WrongResultError` belong to it, and
docs/how-to/own-workload.md explains them. `Field`, `NonNegativeInt`, `PositiveFloat` and
`PositiveInt` are types of pydantic for parameters. Errors that a user can cause are in `errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raybench.version import __version__

if TYPE_CHECKING:
    from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

    from raybench import errors
    from raybench.analysis.frames import load, units
    from raybench.api.gates import GateResult, ab
    from raybench.api.run_comparison import RunComparison
    from raybench.api.run_result import Picture, RunResult, open_run
    from raybench.api.step_timing import StepTiming, measure
    from raybench.api.sweeps import sweep
    from raybench.job.answer import Answer
    from raybench.records.metrics import Metric
    from raybench.workloads.base import Context, DdpOptions, Workload, WrongResultError

__all__ = [
    "Answer",
    "Context",
    "DdpOptions",
    "Field",
    "GateResult",
    "Metric",
    "NonNegativeInt",
    "Picture",
    "PositiveFloat",
    "PositiveInt",
    "RunComparison",
    "RunResult",
    "StepTiming",
    "Workload",
    "WrongResultError",
    "__version__",
    "ab",
    "errors",
    "load",
    "measure",
    "open_run",
    "sweep",
    "units",
]

_HOMES = {
    "raybench.analysis.frames": ("load", "units"),
    "raybench.api.gates": ("GateResult", "ab"),
    "raybench.api.run_comparison": ("RunComparison",),
    "raybench.api.run_result": ("Picture", "RunResult", "open_run"),
    "raybench.api.step_timing": ("StepTiming", "measure"),
    "raybench.api.sweeps": ("sweep",),
    "raybench.job.answer": ("Answer",),
    "raybench.records.metrics": ("Metric",),
    "raybench.workloads.base": ("Context", "DdpOptions", "Workload", "WrongResultError"),
    # Types for the parameters of a workload.
    "pydantic": ("Field", "NonNegativeInt", "PositiveFloat", "PositiveInt"),
}

# Three rooms have the names of functions. Python binds the name of a module here when it is first
# imported; import these now and unbind them, so that `__getattr__` answers from now on.
for _room in ("ab", "measure", "sweep"):
    import_module(f"{__name__}.{_room}")
    globals().pop(_room, None)


def __dir__() -> list[str]:
    """Return the public names, so that notebooks complete them before they are loaded."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use: `import raybench` stays fast."""
    if name == "errors":
        return import_module("raybench.errors")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
