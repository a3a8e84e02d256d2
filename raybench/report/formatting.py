"""Numbers, statuses, settings and commands in words, everywhere the same; texts made printable."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from raybench.conversion import GIB
from raybench.records.metrics import Metric
from raybench.records.status import Status
from raybench.records.text import plain as plain
from raybench.records.text import printable as printable

if TYPE_CHECKING:
    from raybench.results.point_row import PointRow
    from raybench.results.tables import Run


# All that `str.splitlines` takes for the end of a line, and tabs.
_BREAKS = re.compile("[\t\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")


def one_line(text: str) -> str:
    """Return the text on one line, `printable`; line breaks and tabs in a row become one blank."""
    return text if text.isprintable() else printable(_BREAKS.sub(" ", text))


def plain_lines(text: str) -> list[str]:
    """Return the lines of a text, `printable`, tabs as blanks; blanks at the end of a line go."""
    return [printable(line.expandtabs()).rstrip() for line in text.splitlines()]


def shorten(text: str, most: int) -> str:
    """Return at most `most` characters (1 or more) of a text; the last is `…` where it was cut."""
    return text if len(text) <= most else text[: most - 1] + "…"


def shorten_middle(text: str, most: int) -> str:
    """Return at most `most` characters (3 or more) of a text; `…` stands for a part before its end.

    What to do about a failure stands at the end of its text.
    """
    start = (most - 1) // 3
    return text if len(text) <= most else f"{text[:start]}…{text[start + 1 - most :]}"


def counted(count: int, noun: str) -> str:
    """Return `1 point`, `4 points` for a noun without the s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span(*texts: str) -> str:
    """Return texts in the order given, as `57.2% to 87.0%`; equal ones once; "" for none."""
    return " to ".join(dict.fromkeys(texts))


def share_words(low: float, high: float | None = None, digits: int = 0) -> str:
    """Return shares as percentages for a sentence: `73 %`, `73 to 78 %`, never `-0 %`."""
    shares = (low,) if high is None else (low, high)
    return span(*(f"{100 * share:z.{digits}f}" for share in shares)) + " %"


def interval_words(share: float) -> str:
    """Return half of an interval, a share of its middle, for a sentence: `±2.9 %`."""
    if share >= 1:
        return "more than ±100 %"
    return f"±{100 * share:.{1 if share >= 0.01 else 2}f} %"


T = TypeVar("T")

STATUS_WORDS = {status.value: status.label for status in Status}


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of time, and how many of it make a millisecond."""

    name: str
    per_ms: float


MILLISECONDS = Unit("ms", 1.0)
MICROSECONDS = Unit("µs", 1000.0)


def has_value(value: T | None) -> TypeGuard[T]:
    """Return whether a value is known: not None, NaN or NaT. Not for NA of pandas or arrays."""
    return value is not None and value == value


def number(value: float | None, digits: int = 4) -> str:
    """Return a number as 1,234 or 5.000, nearer to 0 than 0.00001 as 3.11e-08; "" for None and NaN.

    digits: significant ones, but all before the point and at most six decimals; 0 is `0`.
    """
    if not has_value(value):
        return ""
    if value == 0 or math.isinf(value):
        return f"{value:z.0f}"
    if abs(value) < 1e-5:  # six decimals would show one digit, or none
        return f"{value:.2e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def step_time(row: PointRow) -> str:
    """Return the step time of a point as `9.635 µs`, then ` ±1.2%` if known; "" for None."""
    value = row.step_ms_p50
    return f"{duration(value)}{_precision(row)}" if value is not None else ""


def duration(time_ms: float) -> str:
    """Return a time with its unit, as `9.635 µs`: in µs below 0.1 ms, else in ms."""
    return f"{number(time_ms * 1000)} µs" if is_short(time_ms) else f"{number(time_ms)} ms"


def step_in(unit: Unit, row: PointRow) -> str:
    """Return `step_time` in `unit`, which is not named: `9.635 ±1.2%`; "" for None."""
    return f"{time_in(unit, row.step_ms_p50)}{_precision(row)}"


def time_in(unit: Unit, time_ms: float | None) -> str:
    """Return a time in `unit`, without its name; "" for None."""
    return number(time_ms * unit.per_ms) if has_value(time_ms) else ""


def unit_of(rows: Iterable[PointRow]) -> Unit:
    """Return the unit for all step times of the points: µs if one is below 0.1 ms, else ms."""
    return unit_of_times(row.step_ms_p50 for row in rows)


def unit_of_times(times_ms: Iterable[float | None]) -> Unit:
    """Return the unit for all these times: µs if one is below 0.1 ms, else ms."""
    return MICROSECONDS if any(map(is_short, times_ms)) else MILLISECONDS


def is_short(time_ms: float | None) -> bool:
    """Return whether a time reads better in µs: below 0.1 ms; False for None."""
    return time_ms is not None and time_ms < 0.1


def step_uncertainty(row: PointRow) -> float | None:
    """Return half of the step's 95 % interval as a share; None unless a ScaledRow of 2+ rounds."""
    low, high = getattr(row, "step_ms_low", None), getattr(row, "step_ms_high", None)
    value = row.step_ms_p50
    return None if low is None or high is None or not value else (high - low) / 2 / value


def _precision(row: PointRow) -> str:
    """Write ` ±1.2%` of the step time; empty where its interval is not known."""
    share = step_uncertainty(row)
    return "" if share is None else f" {half_width(share)}"


def half_width(share: float) -> str:
    """Return half of an interval, a share of its middle: `±1.2%`, `±0.85%`; `±>100%` from 1 on."""
    return "±>100%" if share >= 1 else f"±{share:.{1 if share >= 0.01 else 2}%}"


def part(value_ms: float | None, unit: Unit) -> str:
    """Return a part of a step in `unit`, unnamed: 0.123, 12.3, 123 or 1,234; "" for None."""
    if not has_value(value_ms):
        return ""
    value = value_ms * unit.per_ms
    return f"{value:z.3f}" if 0 < abs(value) < 1 else number(value, digits=3)


def ratio(value: float | None) -> str:
    """Return a speed-up, `1.25`, without the x; below 0.1 two significant digits; "" for None."""
    if not has_value(value):
        return ""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def percent(value: float | None) -> str:
    """Return a share as a percentage, `12.3%`, never `-0.0%`; "" for None."""
    return f"{value:z.1%}" if has_value(value) else ""


def gib(value: float | None) -> str:
    """Return bytes in GiB with two decimals, without the unit; "" for None."""
    return f"{value / GIB:.2f}" if has_value(value) else ""


def metric(shown: Metric, value: Any, unit: Unit = MILLISECONDS) -> str:
    """Return a value by `shown.format`, no unit but %; "" if unknown. unit: for time and part."""
    if shown.format == "choices":
        # What NCCL ran, without the collectives and their sizes: RING LL, 8 channels.
        return "; ".join(dict.fromkeys(text.partition(": ")[2] for text in value or ()))
    if not has_value(value):
        return ""
    if shown.format in ("part", "time"):
        return part(value, unit) if shown.format == "part" else time_in(unit, value)
    return _FORMATS[shown.format](value)


def rate(shown: Metric, value: float) -> str:
    """Return a rate as `    750.0 GB/s busbw`: number (9 characters or more), unit, title."""
    noun = shown.title.removesuffix(shown.unit)
    return f"{metric(shown, value):>9} {shown.unit} {noun}".rstrip()


_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "number": number,
    "ratio": ratio,
    "share": percent,
    "percent": lambda value: percent(value / 100),
    "gib": gib,
}


def amount(count: int) -> str:
    """Return a number of parameters: 1,025, from 999,500 on in three digits: 134 M, 1.5 B."""
    for unit, of_unit in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= 0.9995 * of_unit:  # else 999,600,000 would be 1e+03 M
            return f"{count / of_unit:.3g} {unit}"
    return f"{count:,}"


def size(count: float | None) -> str:
    """Return bytes in B, KiB up to TiB, in four digits: 1000 B, 4 KiB, 1.5 MiB; "" for None."""
    if not has_value(count):
        return ""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(0, int(count).bit_length() - 1) // 10, len(units) - 1)
    return f"{count / 2 ** (10 * power):.4g} {units[power]}"


def setting(name: str, value: Any) -> str:
    """Return `str(value)`; True as `true`, 4096 or "4096" of `*_bytes` as `4 KiB`, None as ""."""
    digits = "" if value is None else str(value)
    if name.endswith("_bytes") and digits.isdecimal():
        return size(int(digits))
    return digits.lower() if isinstance(value, bool) else digits


def heading(name: str) -> str:
    """Return the name of a setting as the head of a column: without `_bytes`."""
    return name.removesuffix("_bytes")


def setting_words(name: str, value: Any, ranks: str) -> str:
    """Return a setting with a value for a sentence: `4 GPUs`, `batch 64`, `bf16`, `hidden=8`.

    value: not None. ranks: as for `ranks_words`. A `batch_size` is written as other names are.
    """
    if name == "world_size":
        return ranks_words(int(value), ranks)
    text = setting(name, value)
    if name == "batch":
        return f"batch {int(text):,}" if text.isdecimal() else f"batch {text}"
    is_clear = name in ("workload", "precision", "operation", "size_bytes")
    return text if is_clear else f"{heading(name)}={text}"


def words_of_settings(values: Mapping[str, Any], ranks: str) -> str:
    """Return settings for a sentence: `bf16, batch 64, 4 GPUs`. ranks: as for `ranks_words`."""
    return ", ".join(setting_words(name, value, ranks) for name, value in values.items())


def ranks_words(count: int, ranks: str) -> str:
    """Return `1 GPU`, `4 GPUs`. ranks: in the plural, `GPUs` or `workers`."""
    return counted(count, ranks.removesuffix("s"))


def some(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` (1 or more) names as `a, b and 3 more`; "" for none."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def cases_words(count: int, total: int, names: Sequence[str]) -> str:
    """Return `in 3 of 4 combinations of k and m`, or `for 3 of 4 values of k`.

    Args:
        names: the settings that make the cases.
    """
    heads = [heading(name) for name in names]
    *others, last = heads or ["the other settings"]
    settings_ = f"{', '.join(others)} and {last}" if others else last
    share = f"all {total}" if count == total > 1 else f"{count} of {total}"
    if others or not names:
        return f"in {share} combinations of {settings_}"
    return f"for {share} values of {settings_}"


def when(time: datetime) -> str:
    """Return a time as `2026-11-26 01:16 UTC`. time: in UTC."""
    return f"{time:%Y-%m-%d %H:%M} UTC"


def run_time(run: Run) -> str:
    """Return a run's time without pauses, `2 min 3 s`; or `unfinished`; `unknown` if negative."""
    if run.finished_at is None:
        return "unfinished"
    total_s = (run.finished_at - run.started_at).total_seconds() - (run.paused_s or 0.0)
    return long_time(total_s) if total_s >= 0 else "unknown"


def long_time(total_s: float) -> str:
    """Return seconds, 0 or more, rounded, as `1 h 2 min 3 s`; parts of 0 are left out; or `0 s`."""
    minutes, seconds = divmod(round(total_s), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (seconds, "s"))
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def sentence(text: str) -> str:
    """Return a text (not empty) with a full stop, a capital if its first word is all letters."""
    is_word = text.partition(" ")[0].isalpha()
    return (text[:1].upper() + text[1:] if is_word else text).removesuffix(".") + "."


def title(run: Run) -> str:
    """Return the id of a run, after the name of its job where the id does not begin with it."""
    job = "" if run.run_id.startswith(run.job_name) else f"{run.job_name}  "
    return job + run.run_id


def course(run: Run) -> str:
    """Return `took`, after `interrupted after ` if the run was interrupted."""
    word = "interrupted after " if run.status == "interrupted" else ""
    return word + took(run)


def took(run: Run) -> str:
    """Return `run_time` and all pauses: `5 min, resumed after 1 h`."""
    pause = f", resumed after {long_time(run.paused_s)}" if run.paused_s else ""
    return run_time(run) + pause


def machine(devices: Sequence[Mapping[str, Any]], node_count: int | None = None) -> str:
    """Return the devices: `4 x NVIDIA H200 on 1 node`, `2 workers on 1 x Intel Xeon (2 cores)`.

    devices: rows of table `devices`, 1 or more. node_count: of GPUs; None or 0 counts node ids.
    """
    if all(device["kind"] == "cpu" for device in devices):
        # The processors of each host once, however many workers are on it.
        hosts = {(one["host"], one["address"]): one for one in devices}
        processors = Counter((str(one["name"]), int(one["cpu_count"])) for one in hosts.values())
        text = ", ".join(
            f"{count} x {name} ({counted(cores, 'core')}{' each' * (count > 1)})"
            for (name, cores), count in processors.items()
        )
        return f"{counted(len(devices), 'worker')} on {text}"
    count = node_count or len({device["node_id"] for device in devices})
    return f"{models(devices)} on {counted(count, 'node')}"


def models(devices: Sequence[Mapping[str, Any]]) -> str:
    """Return the devices without their nodes: `4 x NVIDIA H200`."""
    names = Counter(device["name"] for device in devices)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def versions(found: Mapping[str, str]) -> str:
    """Return names and versions of software: `torch 2.11, nccl 2.28`."""
    return ", ".join(f"{name} {version}" for name, version in found.items())


def settings(values: Mapping[str, Any]) -> str:
    """Return settings as `name=value` with blanks between; a bool as `true`, all else by `str`."""
    words = {name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in values.items()}
    return " ".join(f"{name}={word}" for name, word in words.items())


def program() -> str:
    """Return how this process was called: `raybench` or `python -m raybench`."""
    is_module = bool(sys.argv) and Path(sys.argv[0]).parts[-2:] == ("raybench", "__main__.py")
    return "python -m raybench" if is_module else "raybench"


def name_program(text: str) -> str:
    """Return a text in which commands in backticks, as `raybench show`, begin with `program()`."""
    return text.replace("`raybench ", f"`{program()} ")


def quoted(*words: str) -> str:
    """Return words quoted for a shell; unprintable characters become `?`."""
    return "".join(c if c.isprintable() else "?" for c in shlex.join(words))


def command(*words: str) -> str:
    """Return `program()` and these words, `quoted`."""
    return f"{program()} {quoted(*words)}"
