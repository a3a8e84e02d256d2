"""What a scaling report comes to, in words.

The least and the most speed-up of each compared setting, what the steps of the most ranks lose to
not being alone, the best precision and batch size, the largest batch that fits, and what the rounds
of the run tell. Pure, over the rows of `raybench.analysis.scaling`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.analysis.losses import LOSSES
from raybench.analysis.rounds import LARGEST_DRIFT, Trials
from raybench.analysis.scaling import BestSettings
from raybench.analysis.settings import setting, setting_order, varying
from raybench.report import formatting
from raybench.report.plain_text import span
from raybench.results.metrics.parts import is_slowed_by_one_rank
from raybench.sweep.batch_search import is_found
from raybench.sweep.rounds import BETWEEN_ROUNDS_S, WORTHWHILE

CAUSES = {
    "lost_comm": "exposed communication",
    "lost_compute": "slower compute",
    "lost_wait": "waiting for the slowest rank",
    "lost_data": "waiting for data",
    "lost_host": "waiting for the host",
    "lost_unexplained": "unexplained",
}

# Less than this share of a step in every point is not worth a line.
_LEAST_SHARE = 0.01

Row = Any


def findings(
    rows: Sequence[Row], baseline: Mapping[str, Any], ranks: str
) -> tuple[tuple[str, str], ...]:
    """List (what is compared with the baseline, its speed-ups), ordered by what is compared."""
    compared: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows_compared(rows):
        compared.setdefault(tuple(setting(row, name) for name in baseline), []).append(row)
    apart = varying([row for members in compared.values() for row in members], baseline)
    ordered = sorted(compared, key=lambda values: [setting_order(value) for value in values])
    labels = (
        f"{values[0]} {ranks}"
        if tuple(baseline) == ("world_size",)
        else formatting.settings(dict(zip(baseline, values, strict=True)))
        for values in ordered
    )
    ranges = (_range(compared[values], apart, ranks) for values in ordered)
    return tuple(zip(labels, ranges, strict=True))


def losses(
    rows: Sequence[Row], baseline: Mapping[str, Any], ranks: str
) -> tuple[tuple[str, str], ...]:
    """List (the most ranks, the shares of their steps that are lost, by cause).

    Empty where no cause was measured, and where the baseline does not name world_size.
    """
    found = with_most_ranks(rows) if "world_size" in baseline else []
    if not any(has_causes(row) for row in found):
        return ()
    slowest = {row["slowest_rank"] for row in found if is_slowed_by_one_rank(row)}
    one = f"waiting for rank {slowest.pop():.0f}" if len(slowest) == 1 else CAUSES["lost_wait"]
    spans = ((name, _span([row[name] for row in found])) for name in LOSSES)
    phrases = [
        f"{span} {one if name == 'lost_wait' else CAUSES[name]}" for name, span in spans if span
    ]
    return ((f"{found[0]['world_size']} {ranks}", ", ".join(phrases)),) if phrases else ()


def with_most_ranks(rows: Sequence[Row]) -> list[Row]:
    """Select what is compared on the largest number of ranks."""
    compared = rows_compared(rows)
    most = max((row["world_size"] for row in compared), default=0)
    return [row for row in compared if row["world_size"] == most]


def rows_compared(rows: Sequence[Row]) -> list[Row]:
    """Select what has a speed-up, but for the baseline points."""
    return [r for r in rows if formatting.has_value(r["speed_up"]) and not r["is_baseline"]]


def has_causes(row: Row) -> bool:
    """Whether anything is known of what the step is lost to."""
    return any(formatting.has_value(row[name]) for name in LOSSES[:-1])


def _span(shares: Sequence[float]) -> str:
    known = [share for share in shares if formatting.has_value(share)]
    if not known or max(map(abs, known)) < _LEAST_SHARE:
        return ""
    return span(*(formatting.percent(choose(known)) for choose in (min, max)))


def _range(rows: Sequence[Row], apart: Sequence[str], ranks: str) -> str:
    """Write the range of speed-ups; of a single one with its interval.

    The best of many is best by chance too, so its own interval would promise too much.
    """
    ends = [choose(rows, key=lambda row: row["speed_up"]) for choose in (min, max)]
    chosen = ends[:1] if len(rows) == 1 else ends
    phrases = [_speed_up(row, apart, ranks, with_interval=len(rows) == 1) for row in chosen]
    return " to ".join(phrases) + memory_range(rows)


def memory_range(rows: Sequence[Row]) -> str:
    """`; 71.8% to 96.3% of its memory`, where it is not the number of ranks that is compared."""
    known = [row["memory_ratio"] for row in rows if formatting.has_value(row["memory_ratio"])]
    if not known or any(formatting.has_value(row["efficiency"]) for row in rows):
        return ""
    shares = span(*(formatting.percent(choose(known)) for choose in (min, max)))
    return f"; {shares} of the memory"


def plus_minus(row: Row) -> float | None:
    """Half of the interval of a speed-up, over it; None where it is not known."""
    low, high = row["speed_up_low"], row["speed_up_high"]
    return (high - low) / 2 / row["speed_up"] if formatting.has_value(low) else None


def _speed_up(row: Row, apart: Sequence[str], ranks: str, *, with_interval: bool) -> str:
    sure = plus_minus(row) if with_interval else None
    efficiency, serial = formatting.percent(row["efficiency"]), row["serial_fraction"]
    text = (
        f"{formatting.ratio(row['speed_up'])}x"
        + ("" if sure is None else f" {formatting.half_width(sure)}")
        + clocks(row)
        + (f", {efficiency} efficiency" if efficiency else "")
        + (
            f", {formatting.percent(serial)} serial fraction"
            if formatting.has_value(serial)
            else ""
        )
    )
    where = formatting.settings_words(row, apart, ranks)
    return f"{text} ({where})" if where else text


def clocks(row: Row) -> str:
    """How much of a speed-up higher clocks may be, where a power cap made them differ."""
    ratio = formatting.ratio(row["clock_ratio"])
    return f", of which clocks {ratio}" if ratio else ""


BEST_TITLE = "Best precision and batch size"


def bests(best: Sequence[BestSettings], ranks: str) -> tuple[tuple[str, str], ...]:
    """List (what is sought on the most ranks, the settings that have the most of it).

    best: rows of `raybench.analysis.scaling`.
    """
    most = max((one.row.world_size for one in best), default=0)
    chosen = [one for one in best if one.row.world_size == most]
    apart = varying([one.row for one in chosen], ("precision", "batch"))
    found = []
    for one in chosen:
        where = formatting.settings_words(one.row, apart, ranks)
        criterion = formatting.ranks_words(one.row.world_size, ranks)
        found.append((criterion + (f" with {where}" if where else ""), _choice(one)))
    return tuple(found)


def _choice(one: BestSettings) -> str:
    unit = {"throughput": "samples/s", "samples_per_joule": "samples/s per watt"}[one.by]
    text = f"{_precision_and_batch(one.row)}: {formatting.number(one.value)} {unit}"
    if one.row.stable is False:
        text += " (unsteady)"
    if one.rival is None:
        return text
    return f"{text}; {_precision_and_batch(one.rival)} may be as good"


def _precision_and_batch(row: Row) -> str:
    return formatting.settings_words(row, ("precision", "batch"), "")


LARGEST_TITLE = "Largest batch that fits, per device"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """What a search came to.

    settings: those that tell its series from the others. ran_out: the smallest batch size that
    does not fit. peak_mem_allocated_bytes: of the largest batch that fits, on the rank that needs
    most; None on a CPU.
    """

    settings: Mapping[str, Any]
    batch_size: int
    ran_out: int
    peak_mem_allocated_bytes: int | None


def largest_batches(rows: Sequence[Row]) -> tuple[LargestBatch, ...]:
    """One per series in which a batch ran out of memory just above one that is ok.

    A list of batch sizes in a job leaves a wider gap: there, the largest is not known.
    """
    series: dict[tuple[str, ...], list[Row]] = {}
    names = varying(rows, ("scaling", "batch"), always=("precision", "world_size"))
    for row in rows:
        if row["scaling"] == "weak" and formatting.has_value(row["batch_size"]):
            series.setdefault(tuple(str(setting(row, name)) for name in names), []).append(row)
    found = [_largest(members, names) for members in series.values()]
    known = [one for one in found if one is not None]
    return tuple(sorted(known, key=lambda one: [setting_order(v) for v in one.settings.values()]))


def _largest(rows: Sequence[Row], names: Sequence[str]) -> LargestBatch | None:
    ran_out = min((int(r["batch_size"]) for r in rows if r["status"] == "oom"), default=None)
    if ran_out is None:
        return None
    fits = [row for row in rows if row["status"] == "ok" and row["batch_size"] < ran_out]
    if not fits:
        return None
    row = max(fits, key=lambda row: row["batch_size"])
    if not is_found(int(row["batch_size"]), ran_out):
        return None
    peak = row["peak_mem_allocated_bytes"]
    return LargestBatch(
        settings={name: setting(row, name) for name in names},
        batch_size=int(row["batch_size"]),
        ran_out=ran_out,
        peak_mem_allocated_bytes=int(peak) if formatting.has_value(peak) else None,
    )


def list_largest(found: Sequence[LargestBatch], ranks: str) -> tuple[tuple[str, str], ...]:
    """List (the series, its largest batch) as the formats list it."""
    lines = []
    for one in found:
        peak = one.peak_mem_allocated_bytes
        memory = "" if peak is None else f" ({formatting.gib(peak)} GiB)"
        text = f"{one.batch_size:,}{memory}; {one.ran_out:,} runs out of memory"
        lines.append((batch_label(one.settings, ranks), text))
    return tuple(lines)


def batch_label(settings: Mapping[str, Any], ranks: str) -> str:
    """Write `bf16, 1 GPU`; other settings with their names."""
    return ", ".join(formatting.setting_words(n, value, ranks) for n, value in settings.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreRounds:
    """What it takes to have `rounds` rounds in all: about `seconds` more."""

    rounds: int
    seconds: float

    @property
    def sentence(self) -> str:
        """Write `3 rounds, which give an interval, would take about 2 min 40 s more`."""
        time = formatting.long_time(self.seconds)
        return f"{self.rounds} rounds, which give an interval, would take about {time} more"


ONE_START = f"one start; `--set measure.rounds={WORTHWHILE}` gives an interval"


def has_one_start(rows: Sequence[Row]) -> bool:
    """Whether each ok point was measured in one round, so that no number has an interval."""
    return all(row["rounds"] == 1 for row in rows if row["status"] == "ok")


def meaning_of_plus_minus(rows: Sequence[Row]) -> str:
    """Say what the ± of a report holds over; empty where nothing has one."""
    known = [row["rounds"] for row in rows if formatting.has_value(row["step_ms_low"])]
    if not known:
        return ""
    counts = span(*(str(choose(known)) for choose in (min, max)))
    return f"± is half of the 95 % interval over the {counts} rounds of this run."


def drift_warnings(trials: Trials, ranks: str) -> Iterator[str]:
    """Write a sentence for each control that moved."""
    for number, block, drift in trials.drifts():
        yield (
            f"round {number}: at the end of the block of {block} {ranks} the control took "
            f"{abs(drift):.1%} {'longer' if drift > 0 else 'less'} than at first, more than "
            f"{LARGEST_DRIFT:.0%}: the machine drifts; ratios are taken against the mean of both"
        )


def more_rounds(rows: Sequence[Row], trials: Trials) -> MoreRounds | None:
    """Estimate what WORTHWHILE rounds would take; None where there is nothing to add.

    rows: of the scaling frame.
    """
    measured = [row for row in rows if row["status"] == "ok"]
    done = max((row["rounds"] for row in measured), default=WORTHWHILE)
    if done >= WORTHWHILE:
        return None
    each_s = [
        one["duration_s"]
        for row in measured
        for one in trials.rounds(row).values()
        if formatting.has_value(one["duration_s"])
    ]
    more = WORTHWHILE - done
    return MoreRounds(rounds=WORTHWHILE, seconds=more * (sum(each_s) / done + BETWEEN_ROUNDS_S))
