"""What a run found, as values: speed-ups, losses, bandwidths, the largest batch that fits. Pure.

Each insight is computed once. `insight_text` writes the lead of a report, its findings and its
large figures from them, and JSON holds them as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raybench.analysis.losses import LOSSES
from raybench.analysis.rows import ScaledRow
from raybench.analysis.scaling import BestSettings
from raybench.analysis.settings import OPTIONAL, setting, setting_order, varying
from raybench.hardware.peaks import memory_peak_gb_s
from raybench.report import formatting
from raybench.report.tables import marks
from raybench.results.metrics.parts import is_slowed_by_one_rank
from raybench.sweep.batch_search import is_found

Kind = Literal[
    "largest_batch",
    "speed_up",
    "efficiency",
    "memory_ratio",
    "serial_fraction",
    "loss",
    "main_loss",
    "best",
    "throughput",
    "bandwidth",
    "of_datasheet",
    "latency",
    "tflops",
]

CAUSES = {
    "lost_comm": "exposed communication",
    "lost_compute": "slower compute",
    "lost_wait": "waiting for the slowest rank",
    "lost_data": "waiting for data",
    "lost_host": "waiting for the host",
    "lost_unexplained": "unexplained",
}
_DOUBTS = {
    "u": "unsteady",
    "w": "wide",
    "h": "host-bound",
    "t": "throttled",
    "s": "slowed by one rank",
    "c": "sharing cores",
    "n": "not alone",
    "q": "quick",
    "b": "without a breakdown",
}
SIZE = "size_bytes"
_TFLOPS = "achieved_tflops_per_device"
# A loss below this share of the step in every point is not worth a line.
_MIN_SHARE = 0.01
# A burst that is faster by less is no other figure.
_MIN_BURST = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value of one point.

    low, high: its 95 % interval; None where it is not known. where: the settings that tell the
    point from the others, in words. doubts: what makes the value doubtful, in words.
    """

    value: float
    low: float | None = None
    high: float | None = None
    where: str = ""
    doubts: tuple[str, ...] = ()
    point_id: str = ""

    @property
    def half_width(self) -> float | None:
        """Return half of the interval over the value; None where it is not known."""
        if self.low is None or self.high is None:
            return None
        return (self.high - self.low) / 2 / self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Insight:
    """Something that a run found.

    kind: what is told. subject: of which devices, setting, cause or message it is told, in words.
    unit: `times`, `share`, `samples/s`, `GB/s`, `TFLOP/s`, `ms` or empty for a count.
    least, most: the ends over `points` points; the same where there is one.
    over: the settings of the baseline that a ratio is over; empty for what is no ratio.
    devices: the number of devices it holds for; 0 where they differ.
    note: what else is known of it, in words.
    """

    kind: Kind
    subject: str
    unit: str
    least: Value
    most: Value
    points: int = 1
    over: str = ""
    devices: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch per device that fits, found by a search.

    settings: those that tell its series from the others. ran_out: the smallest batch size that
    does not fit. peak_mem_allocated_bytes: of the largest batch that fits, on the rank that needs
    most; None on a CPU.
    """

    settings: Mapping[str, Any]
    batch_size: int
    ran_out: int
    peak_mem_allocated_bytes: int | None


def find_insights(
    rows: Sequence[ScaledRow],
    baseline: Mapping[str, Any],
    ranks: str,
    *,
    best: Sequence[BestSettings] = (),
    over_fp32: Sequence[ScaledRow] = (),
) -> list[Insight]:
    """Return all that the points tell, in the order of a report.

    rows: of `raybench.analysis.scaling.scaling`. best: of its `best_settings`. over_fp32: rows
    scaled with precision=fp32 for a baseline.
    """
    measured = [row for row in rows if row.status == "ok"]
    return [
        *_largest(largest_batches(rows), ranks),
        *_speed_ups(rows, baseline, ranks),
        *_losses(rows, baseline, ranks),
        *_best(best, ranks),
        *_speed_ups(over_fp32, {"precision": "fp32"}, ranks),
        *_throughput(measured, ranks),
        *_bandwidths(measured, ranks),
        *_tflops(measured, ranks),
    ]


def value_of(row: ScaledRow, name: str, where: str = "", *, scale: float = 1.0) -> Value:
    """Return a column of a point times `scale`, with its interval and the point's doubts."""
    low, high = (getattr(row, f"{name}_{end}", None) for end in ("low", "high"))
    return Value(
        value=float(getattr(row, name)) * scale,
        low=None if low is None else low * scale,
        high=None if high is None else high * scale,
        where=where,
        doubts=_doubts(row),
        point_id=str(row.point_id),
    )


def _doubts(row: ScaledRow) -> tuple[str, ...]:
    """Return what makes the numbers of a point doubtful, in words."""
    found = marks(row)
    words = [_DOUBTS[mark] for mark in found]
    if row.is_base_unsteady and "u" not in found:
        words.append("against an unsteady point")
    if ratio := formatting.ratio(row.clock_ratio):
        words.append(f"at {ratio} times the clocks")
    return tuple(words)


def _range(
    kind: Kind,
    subject: str,
    unit: str,
    rows: Sequence[ScaledRow],
    name: str,
    where: Callable[[ScaledRow], str] = lambda _: "",
    *,
    scale: float = 1.0,
    over: str = "",
    devices: int = 0,
    note: str = "",
) -> Iterator[Insight]:
    """Yield the range of a column over those of the points that have it; nothing without any."""
    known = [row for row in rows if getattr(row, name) is not None]
    if known:
        least, most = (choose(known, key=lambda row: getattr(row, name)) for choose in (min, max))
        ends = [value_of(row, name, where(row), scale=scale) for row in (least, most)]
        yield Insight(
            kind=kind,
            subject=subject,
            unit=unit,
            least=ends[0],
            most=ends[1],
            points=len(known),
            over=over,
            devices=devices,
            note=note,
        )


def rows_compared(rows: Sequence[ScaledRow]) -> list[ScaledRow]:
    """Return the points that have a speed-up, without the baseline points."""
    return [r for r in rows if r.speed_up is not None and not r.is_baseline]


def with_most_ranks(rows: Sequence[ScaledRow]) -> list[ScaledRow]:
    """Return the points that are compared on the largest number of ranks."""
    compared = rows_compared(rows)
    most = max((row.world_size for row in compared), default=0)
    return [row for row in compared if row.world_size == most]


def has_causes(row: ScaledRow) -> bool:
    """Whether any part of what a step loses is known."""
    return any(getattr(row, name) is not None for name in LOSSES[:-1])


def plus_minus(row: ScaledRow) -> float | None:
    """Return half of the interval of a speed-up over it; None where it is not known."""
    return value_of(row, "speed_up").half_width


def _speed_ups(
    rows: Sequence[ScaledRow], baseline: Mapping[str, Any], ranks: str
) -> Iterator[Insight]:
    """Yield speed-up, efficiency, serial fraction and memory for each value of what is compared."""
    groups: dict[tuple[Any, ...], list[ScaledRow]] = {}
    for row in rows_compared(rows):
        groups.setdefault(tuple(setting(row, name) for name in baseline), []).append(row)
    compared = [row for members in groups.values() for row in members]
    usual = [name for name in ("precision", "batch") if name not in baseline]
    apart = varying(compared, baseline) or usual
    over = formatting.settings(baseline)
    for values in sorted(groups, key=lambda values: [setting_order(one) for one in values]):
        members = groups[values]
        settings = dict(zip(baseline, values, strict=True))
        devices = int(members[0].world_size) if "world_size" in baseline else 0
        subject = ", ".join(
            formatting.setting_words(name, value, ranks) for name, value in settings.items()
        )

        def where(row: ScaledRow) -> str:
            return formatting.settings_words(row, apart, ranks)

        yield from _range(
            "speed_up", subject, "times", members, "speed_up", where, over=over, devices=devices
        )
        if devices and devices != int(baseline["world_size"]):
            for name in ("efficiency", "serial_fraction"):
                yield from _range(
                    name,
                    subject,
                    "share",
                    members,
                    name,
                    where,
                    over=over,
                    devices=devices,
                )
        elif not devices:
            yield from _range(
                "memory_ratio", subject, "share", members, "memory_ratio", where, over=over
            )


def _losses(
    rows: Sequence[ScaledRow], baseline: Mapping[str, Any], ranks: str
) -> Iterator[Insight]:
    """Yield what steps on the most ranks lose to each cause, and which cause takes most of it."""
    found = with_most_ranks(rows) if "world_size" in baseline else []
    if not found or found[0].world_size == baseline["world_size"]:
        return
    devices = int(found[0].world_size)
    over = formatting.settings(baseline)
    slowest = {row.slowest_rank for row in found if is_slowed_by_one_rank(row)}
    waiting = f"waiting for rank {slowest.pop():.0f}" if len(slowest) == 1 else CAUSES["lost_wait"]
    if any(map(has_causes, found)):
        for name in LOSSES:
            cause = waiting if name == "lost_wait" else CAUSES[name]
            for one in _range("loss", cause, "share", found, name, over=over, devices=devices):
                if max(abs(one.least.value), abs(one.most.value)) >= _MIN_SHARE:
                    yield one
    yield from _main_loss(found, devices, over)


def _main_loss(rows: Sequence[ScaledRow], devices: int, over: str) -> Iterator[Insight]:
    """Yield which cause takes the largest part of the loss, as a share of it."""
    losing = [
        row
        for row in rows
        if row.efficiency is not None
        and row.efficiency < 1 - _MIN_SHARE
        # What may be ideal has lost nothing for certain.
        and not (row.efficiency_high is not None and row.efficiency_high >= 1)
    ]
    if not losing:
        return
    explained = [row for row in losing if has_causes(row)]
    contradicted = [row for row in losing if row.why_no_breakdown is not None]
    note, cause, shares = "", "", [0.0]
    if not explained and contradicted:
        note = "what the rest is lost to is not known: the parts of the step exceed it"
    elif len(explained) + len(contradicted) < len(losing):
        note = "what the rest is lost to was not measured"
    else:
        cause, count = Counter(map(_largest_cause, explained)).most_common(1)[0]
        if count < len(losing):
            note = f"{CAUSES[cause]} is the largest loss in {count} of {len(losing)} settings"
        else:
            shares = [
                min(1.0, getattr(row, cause) / (1 - (row.efficiency or 0.0))) for row in losing
            ]
    yield Insight(
        kind="main_loss",
        subject=CAUSES.get(cause, ""),
        unit="share",
        least=Value(value=min(shares)),
        most=Value(value=max(shares)),
        points=len(losing),
        over=over,
        devices=devices,
        note=note,
    )


def _largest_cause(row: ScaledRow) -> str:
    """Return the column of the largest loss; one rank is a cause only where it stands out."""
    named = [name for name in LOSSES if name != "lost_wait" or is_slowed_by_one_rank(row)]
    return max(named, key=lambda name: getattr(row, name) or 0.0)


def _best(best: Sequence[BestSettings], ranks: str) -> Iterator[Insight]:
    """Yield the precision and batch with the most samples/s, or per watt, on the most ranks."""
    most = max((one.row.world_size for one in best), default=0)
    chosen = [one for one in best if one.row.world_size == most]
    names = ("precision", "batch")
    apart = varying([one.row for one in chosen], names)
    for one in chosen:
        row, rival = one.row, one.rival
        where = formatting.settings_words(row, apart, ranks)
        value = Value(
            value=one.value,
            where=formatting.settings_words(row, names, ranks),
            doubts=("unsteady",) if "u" in marks(row) else (),
            point_id=row.point_id,
        )
        yield Insight(
            kind="best",
            subject=formatting.ranks_words(most, ranks) + (f" with {where}" if where else ""),
            unit={"throughput": "samples/s", "samples_per_joule": "samples/s per watt"}[one.by],
            least=value,
            most=value,
            devices=most,
            note=f"{formatting.settings_words(rival, names, ranks)} may be as good"
            if rival
            else "",
        )


def largest_batches(rows: Sequence[ScaledRow]) -> tuple[LargestBatch, ...]:
    """Return one for each series in which a batch ran out of memory just above one that is ok.

    A list of batch sizes in a job leaves a wider gap: there, the largest is not known.
    """
    series: dict[tuple[str, ...], list[tuple[int, ScaledRow]]] = {}
    names = varying(rows, ("scaling", "batch"), always=("precision", "world_size"))
    for row in rows:
        if row.scaling == "weak" and row.batch_size is not None:
            key = tuple(str(setting(row, name)) for name in names)
            series.setdefault(key, []).append((row.batch_size, row))
    found = []
    for members in series.values():
        ran_out = min((batch for batch, row in members if row.status == "oom"), default=0)
        fits = [one for one in members if one[1].status == "ok" and one[0] < ran_out]
        if not fits:
            continue
        largest, row = max(fits, key=lambda one: one[0])
        if not is_found(largest, ran_out):
            continue
        found.append(
            LargestBatch(
                settings={name: setting(row, name) for name in names},
                batch_size=largest,
                ran_out=ran_out,
                peak_mem_allocated_bytes=row.peak_mem_allocated_bytes,
            )
        )
    return tuple(sorted(found, key=lambda one: [setting_order(v) for v in one.settings.values()]))


def _largest(found: Sequence[LargestBatch], ranks: str) -> Iterator[Insight]:
    for one in found:
        peak = one.peak_mem_allocated_bytes
        where = ", ".join(
            formatting.setting_words(name, value, ranks) for name, value in one.settings.items()
        )
        value = Value(value=one.batch_size, where=where)
        yield Insight(
            kind="largest_batch",
            subject=where,
            unit="",
            least=value,
            most=value,
            note=("" if peak is None else f"{formatting.gib(peak)} GiB; ")
            + f"{one.ran_out:,} runs out of memory",
        )


def _throughput(measured: Sequence[ScaledRow], ranks: str) -> Iterator[Insight]:
    known = [row for row in measured if row.throughput is not None]
    names = ["precision", "batch", "world_size"]
    names += varying(known, ("workload", *names))
    yield from _range(
        "throughput",
        "",
        "samples/s",
        known,
        "throughput",
        lambda row: formatting.settings_words(row, names, ranks),
    )


def size_of(row: ScaledRow) -> int:
    """Return the bytes of a message or an array; 0 where the workload has none."""
    text = str(row.params.get(SIZE, ""))
    return int(text) if text.isdecimal() else 0


def datasheet_gb_s(rows: Sequence[ScaledRow]) -> float | None:
    """Return the datasheet's memory bandwidth of the device that all points ran on, in GB/s.

    None where they ran on several, or on one that is not known.
    """
    peaks = {memory_peak_gb_s(str(row.device_name)) for row in rows}
    return peaks.pop() if len(peaks) == 1 else None


def _bandwidths(measured: Sequence[ScaledRow], ranks: str) -> Iterator[Insight]:
    """Yield the bandwidths of the largest messages on the most ranks, and times of the smallest."""
    for column, what in (("busbw_gb_s", "bus bandwidth"), ("memory_gb_s", "memory bandwidth")):
        known = [row for row in measured if getattr(row, column) is not None]
        if not known or (column == "memory_gb_s" and _has_any(measured, "busbw_gb_s")):
            continue
        most = max(row.world_size for row in known)
        of_most = [row for row in known if row.world_size == most]
        sizes = [name for name in known[0].params if name.endswith("_bytes")]
        chosen = of_most
        for name in sizes:
            largest = max(setting_order(setting(row, name)) for row in chosen)
            chosen = [row for row in chosen if setting_order(setting(row, name)) == largest]
        having = "".join(
            f" with {formatting.setting(name, setting(chosen[0], name))}" for name in sizes
        )
        on = formatting.ranks_words(most, ranks)
        yield from _range(
            "bandwidth", f"{what}{having} on {on}", "GB/s", chosen, column, _named(chosen)
        )
        if column == "memory_gb_s" and (peak := datasheet_gb_s(known)) is not None:
            subject = f"of the datasheet's {peak:,.0f} GB/s"
            named = _named(chosen)
            yield from _range(
                "of_datasheet", subject, "share", chosen, column, named, scale=1 / peak
            )
        sums = [row for row in chosen if row.params.get("operation") == "all_reduce"]
        if sums and len(sums) < len(chosen):
            subject = f"all_reduce{having} on {on}"
            yield from _range("bandwidth", subject, "GB/s", sums, column, _named(sums))
        message_sizes = {size_of(row) for row in of_most if size_of(row)}
        if len(message_sizes) > 1:
            smallest = [row for row in of_most if size_of(row) == min(message_sizes)]
            subject = formatting.size(min(message_sizes))
            yield from _range("latency", subject, "ms", smallest, "step_ms_p50", _named(smallest))


def _has_any(rows: Sequence[ScaledRow], column: str) -> bool:
    return any(getattr(row, column) is not None for row in rows)


def _named(rows: Sequence[ScaledRow]) -> Callable[[ScaledRow], str]:
    """Return a function that names a point by the settings in which these differ."""
    names = varying(rows, ("world_size", *OPTIONAL))
    return lambda row: ", ".join(formatting.setting(name, setting(row, name)) for name in names)


def _tflops(measured: Sequence[ScaledRow], ranks: str) -> Iterator[Insight]:
    """Yield the most operations per second of each precision, the fastest first.

    Only where nothing else is counted: training and collectives have better figures.
    """
    if any(_has_any(measured, name) for name in ("throughput", "busbw_gb_s", "memory_gb_s")):
        return
    known = [row for row in measured if getattr(row, _TFLOPS) is not None]
    names = varying(known, ("precision",))
    best: dict[str, ScaledRow] = {}
    for row in sorted(known, key=lambda row: -getattr(row, _TFLOPS)):
        best.setdefault(row.precision, row)
    for row in best.values():
        where = formatting.settings_words(row, ("precision", *names), ranks)
        value = value_of(row, _TFLOPS, where)
        share = "" if row.mfu_pct is None else formatting.percent(row.mfu_pct / 100)
        burst = row.burst_tflops_per_device
        is_faster = burst is not None and burst >= (1 + _MIN_BURST) * getattr(row, _TFLOPS)
        notes = (
            f"{share} of the datasheet's peak" if share else "",
            f"{formatting.number(burst)} TFLOP/s in its first 30 ms" if is_faster else "",
        )
        yield Insight(
            kind="tflops",
            subject=str(row.precision),
            unit="TFLOP/s",
            least=value,
            most=value,
            note="; ".join(filter(None, notes)),
        )


def of_kind(insights: Iterable[Insight], kind: Kind) -> list[Insight]:
    """Return the insights of one kind, in their order."""
    return [one for one in insights if one.kind == kind]
