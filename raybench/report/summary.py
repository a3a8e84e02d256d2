"""What a scaling report says, whatever its format: header, tables, failures and warnings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from raybench.analysis.rounds import Trials, latest_trials, without_controls
from raybench.analysis.rows import ScaledRow, typed_rows
from raybench.analysis.scaling import best_settings, scaling
from raybench.analysis.settings import OPTIONAL, batch_column
from raybench.analysis.step_times import regions_by_point
from raybench.analysis.uneven import Fleet, fleets
from raybench.job.point import RUN_SETTINGS
from raybench.records import Cause, TrialKey, by_point
from raybench.report import formatting, plain_text
from raybench.report.document import Block, Line, Listing, MessageGroup, Messages, Table
from raybench.report.findings import (
    BEST_TITLE,
    LARGEST_TITLE,
    ONE_START,
    LargestBatch,
    MoreRounds,
    bests,
    drift_warnings,
    findings,
    has_one_start,
    largest_batches,
    list_largest,
    losses,
    meaning_of_plus_minus,
    more_rounds,
)
from raybench.report.headline import headline
from raybench.report.rank_steps import WALL_TITLE, wall_clock_lines
from raybench.report.scopes import TITLE, scope_findings, scope_tables
from raybench.report.tables import Layout, explain, make_tables, rank_tables, region_tables
from raybench.report.uneven import uneven_lead, uneven_listings, uneven_tables
from raybench.report.what_ran import kernels_of
from raybench.results.point_row import PointRow
from raybench.results.run import Run
from raybench.results.tables import RegionRow

Row = Any

_OVER_FP32 = {"precision": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run, reported.

    versions: software of the driver, and of the devices where they tell more.
    lost_nodes: hosts that were lost during an attempt, also where the point was measured later.
    lead: one sentence, what the run found; empty where nothing was measured.
    shared: the workload's parameters that are the same in all points.
    findings: what is compared with the baseline, and its speed-ups in short.
    losses: on how many ranks, and what their steps lose to not being alone.
    best: on how many ranks, and the precision and batch with the most samples/s or per watt.
    precision: what is gained over fp32, where the findings do not say it already.
    largest_batches: where the run has searched for them.
    ranks: what a rank runs on.
    scopes, scope_tables: where points differ in scope, what a module and the whole gain.
    fleets: scenarios of devices of different speed, where the run has any; uneven_tables: the same
    to be read.
    rank_tables: what each rank does, where one slows the others. wall_clock: what time.time() says
    of a step, by how it is used.
    regions: of the step of each point, by its id; region_tables: the same to be read.
    plus_minus: a sentence, what ± holds over.
    more_rounds: what further rounds would cost and give; None where the run has enough.
    scaling: the rows that the tables show, for pictures and machines.
    """

    run: Run
    machine: str
    versions: Mapping[str, str]
    lost_nodes: tuple[str, ...]
    shared: Mapping[str, str]
    counts: str
    lead: str
    findings: tuple[tuple[str, str], ...]
    losses: tuple[tuple[str, str], ...]
    best: tuple[tuple[str, str], ...]
    precision: tuple[tuple[str, str], ...]
    largest_batches: tuple[LargestBatch, ...]
    ranks: str
    tables: tuple[Table, ...]
    scopes: tuple[tuple[str, str], ...]
    scope_tables: tuple[Table, ...]
    fleets: Sequence[Fleet]
    uneven_tables: tuple[Table, ...]
    rank_tables: tuple[Table, ...]
    wall_clock: tuple[tuple[str, str], ...]
    regions: Mapping[str, Sequence[Row]]
    region_tables: tuple[Table, ...]
    failures: tuple[MessageGroup, ...]
    without_speed_up: tuple[MessageGroup, ...]
    warnings: tuple[MessageGroup, ...]
    plus_minus: str
    more_rounds: MoreRounds | None
    scaling: Sequence[ScaledRow]

    @property
    def sections(self) -> list[Listing]:
        """What was found, in the order of every format; none without lines."""
        baseline = self.run.baseline
        found = (
            (LARGEST_TITLE, list_largest(self.largest_batches, self.ranks)),
            (formatting.over(baseline), self.findings),
            (formatting.loss_title(baseline), self.losses),
            (f"{TITLE}, gains over {formatting.settings(baseline)}", self.scopes),
            (WALL_TITLE, self.wall_clock),
            (BEST_TITLE, self.best),
            (formatting.over(_OVER_FP32), self.precision),
        )
        listings = [Listing(title=title, lines=lines) for title, lines in found if lines]
        return [*uneven_listings(self.fleets, self.ranks), *listings]

    @property
    def messages(self) -> list[Messages]:
        """What went wrong, is missing or is doubtful."""
        found = (
            ("Failed and skipped points", self.failures),
            ("Without speed-up", self.without_speed_up),
            ("Warnings", self.warnings),
        )
        return [Messages(title=title, groups=groups) for title, groups in found if groups]

    @property
    def course(self) -> str:
        """When the run was, and how long it took."""
        return f"{formatting.when(self.run.started_at)}, {formatting.course(self.run)}"

    @property
    def all_tables(self) -> tuple[Table, ...]:
        """The tables of a text, in order."""
        return (
            *self.uneven_tables,
            *self.tables,
            *self.rank_tables,
            *self.scope_tables,
            *self.region_tables,
        )

    def body(self, tables: Sequence[Table], notes: Sequence[str] = ()) -> list[Block]:
        """List what follows the head, with the tables as they are shown. notes: on how they are."""
        none = Line(text="No point has been finished yet.", is_apart=True)
        texts = [*self.explain(tables), *notes] if tables else []
        shown: Sequence[Block] = tables or [none]
        return [
            *self.sections,
            *shown,
            *(Line(text=text, tone="aside", is_apart=True) for text in texts),
            *self.messages,
        ]

    def explain(self, tables: Sequence[Table]) -> tuple[str, ...]:
        """Say in paragraphs what the columns of these tables mean."""
        return explain(tables, self.run.baseline, self.ranks, self.plus_minus)


def summarize(
    run: Run,
    devices: pd.DataFrame,
    points: Sequence[PointRow],
    regions: pd.DataFrame | None = None,
) -> Summary:
    """Make the report of one run: its rows of `devices` and `points`, as `load` gives them.

    regions: its rows of that table.
    """
    rows, trials = scaling(points, run.baseline), Trials(points)
    attempts = without_controls(latest_trials(points))
    ranks = ranks_word(rows if devices.empty else [{"device_type": devices["kind"].iloc[0]}])
    layout = _layout(run, rows, ranks)
    of_points = (
        {} if regions is None or regions.empty else regions_by_point(typed_rows(regions, RegionRow))
    )
    uneven = fleets(rows)
    largest = largest_batches(rows)
    lead = uneven_lead(uneven, ranks) or headline(rows, run.baseline, ranks, largest)
    if lead and not largest and has_one_start(rows):
        lead += f"; {ONE_START}"
    rounds = max((row["rounds"] for row in rows), default=1)
    over_fp32 = () if dict(run.baseline) == _OVER_FP32 else scaling(points, _OVER_FP32)
    return Summary(
        run=run,
        machine=_machine(run, devices, rows),
        versions=_versions(run, devices),
        lost_nodes=lost_nodes((row.error_type, row.error_host) for row in points),
        shared=layout.shared,
        counts=formatting.counts(run, _statuses(attempts))
        + (f"; {rounds} rounds" if rounds > 1 else ""),
        lead=lead,
        findings=findings(rows, run.baseline, ranks),
        losses=losses(rows, run.baseline, ranks),
        best=bests(best_settings(rows), ranks),
        precision=findings(over_fp32, _OVER_FP32, ranks),
        largest_batches=largest,
        ranks=ranks,
        tables=make_tables(rows, layout),
        scopes=scope_findings(rows, ranks),
        scope_tables=scope_tables(rows, layout),
        fleets=uneven,
        uneven_tables=uneven_tables(uneven),
        # Tables of uneven shares have their own.
        rank_tables=() if uneven else rank_tables(rows, layout),
        wall_clock=wall_clock_lines(rows, ranks),
        regions=of_points,
        region_tables=region_tables(rows, of_points, layout),
        failures=failures(attempts),
        without_speed_up=group_messages(_whys(rows)),
        warnings=group_messages([*drift_warnings(trials, ranks), *_warnings(rows)]),
        plus_minus=meaning_of_plus_minus(rows),
        more_rounds=more_rounds(rows, trials),
        scaling=rows,
    )


def _layout(run: Run, rows: Sequence[Row], ranks: str) -> Layout:
    return Layout(
        shared=_common_settings(rows),
        compared=tuple(run.baseline),
        ranks=ranks,
        has_throughput=_has_throughput(rows),
        unit=formatting.unit_of(rows),
    )


def _statuses(trials: Sequence[Row]) -> list[str]:
    """How each point ended over its rounds."""
    ended = {
        TrialKey(
            row["point_id"], int(row["round"]) if formatting.has_value(row["round"]) else 1
        ): str(row["status"])
        for row in trials
    }
    return list(by_point(ended).values())


def ranks_word(rows: Iterable[Row]) -> str:
    """Name what a rank runs on."""
    kinds = {row["device_type"] for row in rows if formatting.has_value(row["device_type"])}
    return "workers" if kinds == {"cpu"} else "GPUs"


def _has_throughput(rows: Sequence[Row]) -> bool:
    """Whether the points finish samples; where none is ok, those with a batch size would."""
    if any(row["status"] == "ok" for row in rows):
        return any(formatting.has_value(row["throughput"]) for row in rows)
    return any(batch_column(row) for row in rows)


def _machine(run: Run, devices: pd.DataFrame, rows: Sequence[Row]) -> str:
    """Name the devices of the run. After `--resume` elsewhere no point may have had them all."""
    if devices.empty:
        return plain_text.plain(run.cluster)
    most = max(
        (int(r["node_count"]) for r in rows if formatting.has_value(r["node_count"])), default=0
    )
    nodes = _node_count(devices, most)
    text = formatting.machine(
        [{str(name): value for name, value in row.items()} for row in devices.to_dict("records")],
        nodes,
    )
    if 0 < most < nodes:
        text += f", at most {plain_text.counted(most, 'node')} in a point"
    if run.only_devices:
        text += ", only those that --devices named"
    told = [row["transports"] for row in rows if formatting.has_entries(row["transports"])]
    ways = {plain_text.plain(way) for of_point in told for way in of_point}
    return f"{text}; {formatting.some(sorted(ways))}" if ways else text


def _node_count(devices: pd.DataFrame, most: int) -> int:
    """Count nodes. A Ray that was started anew gives the same host another id.

    Hosts may be called alike; one has a device of each number once. most: nodes that a point had.
    """
    alike = devices.groupby(["host", "address", "index"]).size()
    hosts = int(alike.groupby(level=["host", "address"]).max().sum())
    return hosts if 0 < most <= hosts else int(devices["node_id"].nunique())


def _versions(run: Run, devices: pd.DataFrame) -> dict[str, str]:
    if devices.empty:
        return dict(run.versions)
    first = devices.iloc[0]
    driver = first["driver_version"]
    return {
        **run.versions,
        **dict(first["versions"]),
        **({"driver": driver} if formatting.has_value(driver) else {}),
    }


def _common_settings(rows: Sequence[Row]) -> dict[str, str]:
    if not rows:
        return {}
    first = rows[0]["params"]
    same = {k: v for k, v in first.items() if all(row["params"].get(k) == v for row in rows)}
    options = {name: {row[name] for row in rows} for name in OPTIONAL}
    alike = {name: values.pop() for name, values in options.items() if len(values) == 1}
    set_ones = {
        name: value
        for name, value in alike.items()
        if formatting.has_value(value) and value != RUN_SETTINGS[name].default
    }
    return same | {n: formatting.setting(n, v) for n, v in set_ones.items()}


def _whys(rows: Sequence[Row]) -> list[str]:
    """Why points have no speed-up. A baseline is compared with nothing, so it does not count."""
    without = [row for row in rows if formatting.has_value(row["why"])]
    others = [row for row in without if not row["is_baseline"]]
    return [row["why"] for row in others or without]


def _warnings(rows: Sequence[Row]) -> Iterator[str]:
    """Find the warnings of points, but for those that say why there is no speed-up."""
    bases = {row["series"]: row for row in rows if row["is_baseline"]}
    for row in rows:
        texts = map(plain_text.plain, () if row["warnings"] is None else row["warnings"])
        yield from (text for text in texts if text != row["why"])
        if formatting.has_value(ratio := row["clock_ratio"]):
            yield (
                f"SM clocks are {formatting.ratio(ratio)} times those of the baseline point, by "
                "the power cap; at most so much of the speed-up is due to them"
            )
        yield from _other_attention(row, bases.get(row["series"], row))


def _other_attention(row: Row, base: Row) -> Iterator[str]:
    """Say which kernel a point ran that its baseline point did not, asked for the same."""
    own, others = kernels_of(row), kernels_of(base)
    is_asked = row["params"].get("attention") != base["params"].get("attention")
    if own and others and own != others and not is_asked:
        yield (
            f"attention by {plain_text.plain(', '.join(own))}, at the baseline point by "
            f"{plain_text.plain(', '.join(others))}: speed-ups are of the kernels too"
        )


# Points that differ in these alone say the same. The rank that a sentence begins with is none of
# them: rank 1 and rank 3 are not "rank 1 to 3".
_FIGURES = re.compile(r"±?(?<!\d)(?<!^rank )\d+(?:[.,]\d+)*(?: (?:[KMGT]iB|bytes)\b|%)?")
_BYTES = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_MOST_RANKS = 4


def group_messages(texts: Iterable[str]) -> tuple[MessageGroup, ...]:
    """Each text once, whatever figures it holds, in the order of the first ones."""
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(_FIGURES.sub("#", text), []).append(text)
    return tuple(MessageGroup(text=_ranges(found), count=len(found)) for found in alike.values())


def failures(rows: Iterable[Row]) -> tuple[MessageGroup, ...]:
    """How the points that are not ok ended, and why; rows of `points`."""
    alike: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] != "ok":
            alike.setdefault(_FIGURES.sub("#", _reason(row)), []).append(row)
    return tuple(
        MessageGroup(
            text=_ranges([_reason(row) for row in members]),
            count=len(members),
            where=_where(members),
        )
        for members in alike.values()
    )


def lost_nodes(failed: Iterable[tuple[Any, Any]]) -> tuple[str, ...]:
    """Name the hosts of nodes that were lost, of (error_type, error_host), in the order given."""
    hosts = (host for error_type, host in failed if error_type == Cause.NODE_LOST)
    return tuple(
        dict.fromkeys(plain_text.plain(host) for host in hosts if formatting.has_value(host))
    )


def _reason(row: Row) -> str:
    """Status and message, without the place that the message begins with: it has columns."""
    message = (
        row["error_message"] if formatting.has_value(row["error_message"]) else "no reason known"
    )
    if formatting.has_value(row["error_host"]):
        place = f"rank {row['error_rank']} ({row['error_host']}, {row['error_device']}): "
        message = message.removeprefix(place)
    text = formatting.failure(row["status"], row["error_type"], message)
    return f"{formatting.STATUS_WORDS[row['status']]}: {text}"


def _where(rows: Sequence[Row]) -> str:
    known = ("error_rank", "error_host")
    placed = [row for row in rows if all(formatting.has_value(row[name]) for name in known)]
    if not placed:
        return ""
    ranks = sorted({int(row["error_rank"]) for row in placed})
    hosts, devices = (
        list(dict.fromkeys(plain_text.plain(row[name]) for row in placed))
        for name in ("error_host", "error_device")
    )
    if len(ranks) == len(hosts) == len(devices) == 1:
        return f"rank {ranks[0]}, {hosts[0]}, {devices[0]}"
    return f"{_one_rank_each(ranks)} on {formatting.some(hosts)}"


def _one_rank_each(ranks: Sequence[int]) -> str:
    """In each of these points one rank has failed, not always the same one."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MOST_RANKS:
        return f"one rank each, of {ranks[0]} to {ranks[-1]},"
    return f"one rank each, {', '.join(map(str, ranks[:-1]))} or {ranks[-1]},"


def _ranges(texts: Sequence[str]) -> str:
    """Texts that differ in figures only, as one: `tried 1.5 to 4.5 GiB`."""
    columns = zip(*(_FIGURES.findall(text) for text in texts), strict=True)
    ranges = iter([_range(figures) for figures in columns])
    return _FIGURES.sub(lambda _: next(ranges), texts[0])


def _range(figures: Sequence[str]) -> str:
    ordered = sorted(dict.fromkeys(figures), key=_size)
    if len(ordered) == 1:
        return ordered[0]
    lowest, highest = ordered[0], ordered[-1]
    if lowest.partition(" ")[2] == highest.partition(" ")[2]:
        lowest = lowest.partition(" ")[0]
    return f"{lowest} to {highest}"


def _size(figure: str) -> list[float]:
    """Measure a number, in bytes with such a unit; an address or a version part by part."""
    digits, _, unit = figure.replace(",", "").strip("±%").partition(" ")
    parts = digits.split(".") if digits.count(".") > 1 else [digits]
    return [float(part) * _BYTES.get(unit, 1) for part in parts]
