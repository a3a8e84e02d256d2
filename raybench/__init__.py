"""raybench: multi-node GPU benchmark sweeps on Ray.

frame = raybench.load("results", "points")     # a pandas DataFrame
raybench.units("points")["step_ms_p50"]        # "ms"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raybench.version import __version__

if TYPE_CHECKING:
    from raybench.tables import load, units

__all__ = ["__version__", "load", "units"]


def __getattr__(name: str) -> Any:
    """`load` and `units` come with the tables; without them `import raybench` stays light."""
    if name in ("load", "units"):
        from raybench import tables

        return getattr(tables, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
