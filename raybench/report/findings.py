"""What a scaling report comes to: per compared setting the least and the most speed-up, and what
the steps of the most ranks lose to not being alone.

Pure, over the rows of `raybench.analysis.scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raybench.analysis.scaling import setting, setting_order
from raybench.doubts import is_slowed_by_one_rank
from raybench.report import wording

_SETTINGS = ("workload", "scaling", "precision", "cuda_graph", "batch", "world_size")
# The values of these speak for themselves; those of other settings come with their names.
_WITHOUT_NAME = ("workload", "precision")

# Less than this share of a step in every point is not worth a line.
_LEAST_SHARE = 0.01

Row = Mapping[str, Any]


def findings(
    rows: Sequence[Row], baseline: Mapping[str, Any], ranks: str
) -> tuple[tuple[str, str], ...]:
    """(what is compared with the baseline, its speed-ups), in the order of what is compared."""
    compared: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if wording.known(row["speed_up"]) and not row["is_baseline"]:
            compared.setdefault(tuple(setting(row, name) for name in baseline), []).append(row)
    varying = _varying([row for members in compared.values() for row in members], baseline)
    ordered = sorted(compared, key=lambda values: [setting_order(value) for value in values])
    return tuple(
        (_label(dict(zip(baseline, values, strict=True)), ranks), _range(compared[values], varying))
        for values in ordered
    )


def losses(
    rows: Sequence[Row], baseline: Mapping[str, Any], ranks: str
) -> tuple[tuple[str, str], ...]:
    """(the most ranks, what their steps lose to communication, waiting and the host), from the
    parts that were measured; empty where the baseline does not name world_size.
    """
    if "world_size" not in baseline:
        return ()
    bases = {row["series"]: row for row in rows if row["is_baseline"]}
    compared = [r for r in rows if wording.known(r["speed_up"]) and not r["is_baseline"]]
    most = max((row["world_size"] for row in compared), default=0)
    pairs = [(row, bases[row["series"]]) for row in compared if row["world_size"] == most]
    parts = (
        ("exposed communication", [_share(row["comm_exposed_ms"], row) for row, _ in pairs]),
        (_whom(pairs), [_share(row["wait_ms"], row) for row, _ in pairs]),
        ("waiting for the host", [_growth("host_gap_ms", row, base) for row, base in pairs]),
        ("waiting for data", [_growth("data_ms", row, base) for row, base in pairs]),
    )
    told = [f"{span} {name}" for name, shares in parts if (span := _span(shares))]
    return ((f"{most} {ranks}", ", ".join(told)),) if told else ()


def _whom(pairs: Sequence[tuple[Row, Row]]) -> str:
    slowest = {row["slowest_rank"] for row, _ in pairs if is_slowed_by_one_rank(row)}
    return f"waiting for rank {slowest.pop():.0f}" if len(slowest) == 1 else "waiting for a rank"


def _share(part_ms: float, row: Row) -> float | None:
    return part_ms / row["step_ms_p50"] if wording.known(part_ms) else None


def _growth(name: str, row: Row, base: Row) -> float | None:
    """What a part takes more of the step than in the baseline point."""
    if not wording.known(row[name]) or not wording.known(base[name]):
        return None
    return _share(row[name] - base[name], row)


def _span(shares: Sequence[float | None]) -> str:
    known = [share for share in shares if share is not None]
    if not known or max(known) < _LEAST_SHARE:
        return ""
    least, most = (wording.percent(max(0.0, choose(known))) for choose in (min, max))
    return most if least == most else f"{least} to {most}"


def _varying(rows: Sequence[Row], baseline: Mapping[str, Any]) -> list[str]:
    """The settings that tell one series from another."""
    params = dict.fromkeys(name for row in rows for name in row["params"])
    names = [name for name in (*_SETTINGS, *params) if name not in baseline]
    return [name for name in names if len({str(setting(row, name)) for row in rows}) > 1]


def _label(settings: Mapping[str, Any], ranks: str) -> str:
    if tuple(settings) == ("world_size",):
        return f"{settings['world_size']} {ranks}"
    return wording.settings(settings)


def _range(rows: Sequence[Row], varying: Sequence[str]) -> str:
    least, most = (choose(rows, key=lambda row: row["speed_up"]) for choose in (min, max))
    if len(rows) == 1:
        return _speed_up(most, varying)
    return f"{_speed_up(least, varying)} to {_speed_up(most, varying)}"


def _speed_up(row: Row, varying: Sequence[str]) -> str:
    efficiency = wording.percent(row["efficiency"])
    told = wording.ratio(row["speed_up"]) + (f", {efficiency}" if efficiency else "")
    where = " ".join(
        wording.plain(setting(row, name))
        if name in _WITHOUT_NAME
        else f"{name}={wording.plain(setting(row, name))}"
        for name in varying
    )
    return f"{told} ({where})" if where else told
