"""What a scaling report says, whatever its format: header, tables, failures and warnings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import pandas as pd

from raybench.analysis.scaling import scaling, setting, setting_order
from raybench.records import Run
from raybench.report import wording
from raybench.report.findings import findings

_SETTINGS = ("precision", "batch", "world_size")
# Points that differ in these alone say the same.
_FIGURES = re.compile(r"\d+(?:[.,]\d+)*")
_MEASURED = ("step ms", "samples/s", "speed-up", "efficiency", "GiB")


Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The points of one workload, one set of parameters and one kind of scaling.

    params: those of the workload's parameters that are not the same in all points of the run.
    columns: settings first, `settings` of them, then what was measured. A setting is blank
    where it and all before it are as in the row above.
    """

    workload: str
    params: Mapping[str, str]
    kind: str
    columns: tuple[str, ...]
    settings: int
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What `count` points say; where only the figures vary, with the range of each."""

    text: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run, reported.

    versions: software of the driver, and of the devices where they tell more.
    shared: the workload's parameters that are the same in all points.
    findings: what is compared with the baseline, and its speed-ups in short.
    scaling: the frame that the tables show, for pictures and machines.
    """

    run: Run
    machine: str
    versions: Mapping[str, str]
    shared: Mapping[str, str]
    counts: str
    findings: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]
    failures: tuple[Said, ...]
    without_speed_up: tuple[Said, ...]
    warnings: tuple[Said, ...]
    explanation: str
    scaling: pd.DataFrame


def summarize(run: Run, devices: pd.DataFrame, points: pd.DataFrame) -> Summary:
    """The report of one run: its rows of `devices` and `points`, as `raybench.load` gives them."""
    frame = scaling(points, run.baseline)
    rows: list[Row] = [{str(k): v for k, v in row.items()} for row in frame.to_dict("records")]
    ranks = ranks_word(rows if devices.empty else [{"device_type": devices["kind"].iloc[0]}])
    shared = _shared(rows)
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(_table_key(row, shared, run.baseline), []).append(row)
    tables = tuple(_table(group, shared, run.baseline, ranks) for group in groups.values())
    return Summary(
        run=run,
        machine=_machine(run, devices),
        versions=_versions(run, devices),
        shared=shared,
        counts=wording.counts(run, [row["status"] for row in rows]),
        findings=findings(rows, run.baseline, ranks),
        tables=tables,
        failures=_said(_failure(row) for row in rows if row["status"] != "ok"),
        without_speed_up=_said(row["why"] for row in rows if wording.known(row["why"])),
        warnings=_said(text for row in rows for text in _texts(row["warnings"])),
        explanation=_explanation(run.baseline, ranks, {c for t in tables for c in t.columns}),
        scaling=frame,
    )


def ranks_word(rows: Iterable[Row]) -> str:
    """What a rank runs on."""
    kinds = {row["device_type"] for row in rows if wording.known(row["device_type"])}
    return "workers" if kinds == {"cpu"} else "GPUs"


def _machine(run: Run, devices: pd.DataFrame) -> str:
    if devices.empty:
        return wording.plain(run.cluster)
    names = Counter(wording.plain(name) for name in devices["name"])
    models = ", ".join(f"{count} x {name}" for name, count in names.items())
    nodes = devices["node_id"].nunique()
    return f"{models} on {nodes} {'node' if nodes == 1 else 'nodes'}"


def _versions(run: Run, devices: pd.DataFrame) -> dict[str, str]:
    if devices.empty:
        return dict(run.versions)
    first = devices.iloc[0]
    driver = first["driver_version"]
    return {
        **run.versions,
        **dict(first["versions"]),
        **({"driver": driver} if wording.known(driver) else {}),
    }


def _shared(rows: Sequence[Row]) -> dict[str, str]:
    if not rows:
        return {}
    first = rows[0]["params"]
    return {k: v for k, v in first.items() if all(row["params"].get(k) == v for row in rows)}


def _table_key(row: Row, shared: Mapping[str, str], baseline: Mapping[str, Any]) -> tuple[Any, ...]:
    apart = (k for k in sorted(row["params"]) if k not in baseline and k not in shared)
    return (row["workload"], row["scaling"], *((k, row["params"][k]) for k in apart))


def _table(
    rows: Sequence[Row], shared: Mapping[str, str], baseline: Mapping[str, Any], ranks: str
) -> Table:
    first = rows[0]
    compared = [name for name in baseline if name in first["params"]]
    # What is compared varies fastest, so that it is read from one line to the next.
    names = sorted([*compared, *_SETTINGS], key=lambda name: _column(name, first) in baseline)
    ordered = sorted(rows, key=lambda row: [setting_order(setting(row, name)) for name in names])
    shown = [[wording.plain(setting(row, name)) for name in names] for row in ordered]
    measured = [_measured(row) for row in ordered]
    # What no row has (memory on a CPU, efficiency of a precision) needs no column.
    kept = [place for place in range(len(_MEASURED)) if any(cells[place] for cells in measured)]
    cells = zip(_without_repeats(shown), measured, strict=True)
    return Table(
        workload=wording.plain(first["workload"]),
        params={k: v for k, v in first["params"].items() if k not in compared and k not in shared},
        kind=_kind(first["scaling"], baseline),
        columns=(
            *(ranks if name == "world_size" else name for name in names),
            *(_MEASURED[place] for place in kept),
        ),
        settings=len(names),
        rows=tuple((*settings, *(found[place] for place in kept)) for settings, found in cells),
    )


def _column(name: str, row: Row) -> str:
    """The setting behind a column of the report."""
    batches = {"weak": "batch_size", "strong": "global_batch_size"}
    return batches[row["scaling"]] if name == "batch" else name


def _kind(scaling_kind: str, baseline: Mapping[str, Any]) -> str:
    batch = "batch per device" if scaling_kind == "weak" else "global batch"
    return f"{scaling_kind} scaling, {batch}" if "world_size" in baseline else batch


def _without_repeats(shown: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Blank what is as in the row above, up to the first setting that differs."""
    rows: list[tuple[str, ...]] = []
    above: Sequence[str] = ()
    for cells in shown:
        same = 0
        while same < len(above) - 1 and cells[same] == above[same]:
            same += 1
        rows.append(("",) * same + tuple(cells[same:]))
        above = cells
    return rows


def _measured(row: Row) -> tuple[str, ...]:
    if row["status"] != "ok":
        return (wording.STATUS_WORDS[row["status"]], "", "", "", "")
    return (
        wording.step_ms(row),
        wording.number(row["throughput"]),
        wording.ratio(row["speed_up"]),
        wording.percent(row["efficiency"]),
        wording.gib(row["peak_mem_allocated_bytes"]),
    )


def _failure(row: Row) -> str:
    reason = row["error_message"] if wording.known(row["error_message"]) else "no reason known"
    return f"{wording.STATUS_WORDS[row['status']]}: {wording.plain(reason)}"


def _texts(warnings: Any) -> Sequence[str]:
    return [] if warnings is None else [wording.plain(text) for text in warnings]


def _said(texts: Iterable[str]) -> tuple[Said, ...]:
    """Each text once, whatever figures it holds, in the order of the first ones."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(_FIGURES.sub("#", text), []).append(text)
    return tuple(Said(text=_ranges(found), count=len(found)) for found in alike.values())


def _ranges(texts: Sequence[str]) -> str:
    """Texts that differ in figures only, as one: `tried 1.5 to 4.5 GiB`."""
    columns = zip(*(_FIGURES.findall(text) for text in texts), strict=True)
    ranges = iter([_range(figures) for figures in columns])
    return _FIGURES.sub(lambda _: next(ranges), texts[0])


def _range(figures: Sequence[str]) -> str:
    ordered = sorted(dict.fromkeys(figures), key=_size)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _size(figure: str) -> list[float]:
    """A number's size; an address or a version counts part by part."""
    digits = figure.replace(",", "")
    return [float(part) for part in (digits.split(".") if digits.count(".") > 1 else [digits])]


def _explanation(baseline: Mapping[str, Any], ranks: str, columns: Set[str]) -> str:
    """What the columns of the tables mean; those that no table has are left out."""
    against = wording.settings(baseline) if baseline else "no baseline in the job"
    meanings = {
        "step ms": "Step ms: median over iterations of the slowest rank's time, ± half its 95 % "
        "interval.",
        "samples/s": f"Samples/s: all {ranks} together.",
        "speed-up": f"Speed-up: samples/s over those of the baseline ({against}).",
        "efficiency": f"Efficiency: speed-up over the ratio of {ranks}.",
        "GiB": "GiB: peak memory allocated on one device.",
    }
    found = meanings if "samples/s" in columns else {}
    return " ".join(text for column, text in found.items() if column in columns)
