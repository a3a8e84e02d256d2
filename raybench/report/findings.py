"""What a scaling report comes to, in a line per compared setting: the least and the most speed-up.

Pure, over the rows of `raybench.analysis.scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raybench.analysis.scaling import setting, setting_order
from raybench.report import wording

_SETTINGS = ("workload", "scaling", "precision", "batch", "world_size")
# The values of these speak for themselves; those of other settings come with their names.
_WITHOUT_NAME = ("workload", "precision")

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
