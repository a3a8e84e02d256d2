"""Which precision and batch size get the most out of the devices. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from raybench.analysis.settings import OPTIONAL
from raybench.results.quality import is_imprecise

Row = Mapping[str, Any]

_GROUP = ("run_id", "workload", "scaling", *OPTIONAL, "world_size")
_COLUMNS = (*_GROUP, "params", "by", "point_id", "precision", "batch", "value", "rival_point_id")
# What is sought, and the larger the better.
_SOUGHT = ("throughput", "samples_per_joule")


def best_settings(scaled: pd.DataFrame) -> pd.DataFrame:
    """Per workload, its parameters and number of devices, the best precision and batch size.

    scaled: what `raybench.analysis.scaling.scaling` gives. Only steady points that are known well
    enough are looked at, and only where there are two to choose from.

    Columns: run_id, workload, scaling, cuda_graph, world_size, params, by (throughput in
    samples/s, or samples_per_joule, where energy is known of two points), then of the best point:
    point_id, precision, batch (of the scaling kind), value; and rival_point_id: the next best,
    where the intervals of the two step times leave open which is better (throughput only).
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for record in scaled.to_dict("records"):
        row = {str(name): value for name, value in record.items()}
        is_steady = pd.isna(row["stable"]) or row["stable"]
        if row["status"] == "ok" and is_steady and not is_imprecise(row):
            key = (*(str(row[name]) for name in _GROUP), *sorted(row["params"].items()))
            groups.setdefault(key, []).append(row)
    found = [_best(rows, by) for rows in groups.values() for by in _SOUGHT]
    return pd.DataFrame([one for one in found if one is not None], columns=list(_COLUMNS))


def _best(rows: Sequence[Row], by: str) -> dict[str, Any] | None:
    known = sorted((r for r in rows if not pd.isna(r[by])), key=lambda r: r[by], reverse=True)
    if len(known) < 2:
        return None
    first, second = known[:2]
    is_open = by == "throughput" and _slowest(first) < _fastest(second)
    return {
        **{name: first[name] for name in (*_GROUP, "params", "point_id", "precision", "batch")},
        "by": by,
        "value": first[by],
        "rival_point_id": second["point_id"] if is_open else None,
    }


def _slowest(row: Row) -> float:
    """Compute the throughput at the upper end of the step time's interval, if it has one."""
    return _at(row, "step_ms_high")


def _fastest(row: Row) -> float:
    return _at(row, "step_ms_low")


def _at(row: Row, end: str) -> float:
    step_ms = row["step_ms_p50"]
    return float(row["throughput"] * step_ms / (step_ms if pd.isna(row[end]) else row[end]))
