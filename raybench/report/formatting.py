"""Numbers, statuses, settings and commands as text, the same everywhere; printable texts."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from raybench.conversion import GIB
from raybench.records.metrics import Metric
from raybench.records.status import Status
from raybench.records.text import plain as plain
from raybench.records.text import printable as printable

if TYPE_CHECKING:
    from raybench.results.point_row import PointRow
    from raybench.results.tables import Run


# The line breaks of `str.splitlines`, and tabs.
_BREAKS = re.compile("[\t\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]+")


def one_line(text: str) -> str:
    """Return the text printable and on one line; line breaks and tabs become blanks."""
    return text if text.isprintable() else printable(_BREAKS.sub(" ", text))


def plain_lines(text: str) -> list[str]:
    """Return the printable lines of a text, without blanks at their ends."""
    return [printable(line.expandtabs()).rstrip() for line in text.splitlines()]


def cut_end(text: str, most: int) -> str:
    """Return a text of at most `most` characters; `…` replaces the rest."""
    return text if len(text) <= most else text[: most - 1] + "…"


def cut_middle(text: str, most: int) -> str:
    """Return a text of at most `most` characters (3 or more); `…` replaces its middle."""
    if len(text) <= most:
        return text
    # The end of an error message, which says what to do, keeps two thirds of the room.
    start_chars = (most - 1) // 3
    end_chars = most - 1 - start_chars
    return f"{text[:start_chars]}…{text[-end_chars:]}"


def counted(count: int, noun: str) -> str:
    """Return `1 point` or `4 points`; `noun` is singular."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span(*texts: str) -> str:
    """Return `57.2% to 87.0%`; equal texts once."""
    return " to ".join(dict.fromkeys(texts))


def share_words(low: float, high: float | None = None, digits: int = 0) -> str:
    """Return one share or a range as percentages for a sentence: `73 %`, `73 to 78 %`."""
    shares = (low,) if high is None else (low, high)
    percentages = [f"{100 * share:z.{digits}f}" for share in shares]
    return f"{span(*percentages)} %"


def interval_words(share: float) -> str:
    """Return half of an interval, as a share of its middle, for a sentence: `±2.9 %`."""
    if share >= 1:
        return "more than ±100 %"
    digits = 1 if share >= 0.01 else 2
    return f"±{100 * share:.{digits}f} %"


T = TypeVar("T")

STATUS_WORDS = {status.value: status.label for status in Status}


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of time."""

    name: str
    # Number of units in a millisecond.
    per_ms: float


MILLISECONDS = Unit("ms", 1.0)
MICROSECONDS = Unit("µs", 1000.0)


def has_value(value: T | None) -> TypeGuard[T]:
    """Return whether a value is not None, NaN or NaT; do not pass arrays, or NA of pandas."""
    return value is not None and value == value


def number(value: float | None, digits: int = 4) -> str:
    """Return a number as 1,234, 5.000 or 3.11e-08; "" for None and NaN.

    Args:
        value: the number.
        digits: significant digits. All digits before the point are kept, and at most six after it.
    """
    if not has_value(value):
        return ""
    if value == 0 or math.isinf(value):
        return f"{value:z.0f}"
    if abs(value) < 1e-5:  # six decimals would show at most one digit
        return f"{value:.2e}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def step_time(row: PointRow) -> str:
    """Return the step time of a point as `9.635 µs ±1.2%`; "" for None."""
    value = row.step_ms_p50
    return f"{duration(value)}{_plus_minus(row)}" if value is not None else ""


def duration(time_ms: float) -> str:
    """Return a time as `9.635 µs`: in µs below 0.1 ms, otherwise in ms."""
    return f"{number(time_ms * 1000)} µs" if is_short(time_ms) else f"{number(time_ms)} ms"


def step_in(unit: Unit, row: PointRow) -> str:
    """Return the step time in `unit` as `9.635 ±1.2%`; "" for None."""
    return f"{time_in(unit, row.step_ms_p50)}{_plus_minus(row)}"


def time_in(unit: Unit, time_ms: float | None) -> str:
    """Return a time in `unit` as a number; "" for None."""
    return number(time_ms * unit.per_ms) if has_value(time_ms) else ""


def unit_of(rows: Iterable[PointRow]) -> Unit:
    """Return the unit of all step times of the points: µs if any is below 0.1 ms."""
    return unit_of_times(row.step_ms_p50 for row in rows)


def unit_of_times(times_ms: Iterable[float | None]) -> Unit:
    """Return µs if any of the times is below 0.1 ms, otherwise ms."""
    return MICROSECONDS if any(map(is_short, times_ms)) else MILLISECONDS


def is_short(time_ms: float | None) -> bool:
    """Return whether a time is below 0.1 ms; False for None."""
    return time_ms is not None and time_ms < 0.1


def step_uncertainty(row: PointRow) -> float | None:
    """Return half of the 95 % interval of the step as a share; None for fewer than two rounds."""
    # Points of a single round lack these columns.
    low, high = getattr(row, "step_ms_low", None), getattr(row, "step_ms_high", None)
    step_ms = row.step_ms_p50
    if low is None or high is None or not step_ms:
        return None
    half_width_ms: float = (high - low) / 2
    return half_width_ms / step_ms


def _plus_minus(row: PointRow) -> str:
    """Return ` ±1.2%`, with the blank; "" for a point without an interval."""
    share = step_uncertainty(row)
    return "" if share is None else f" {half_width(share)}"


def half_width(share: float) -> str:
    """Return half of an interval, relative to its middle: `±1.2%`, `±0.85%` or `±>100%`."""
    if share >= 1:
        return "±>100%"
    digits = 1 if share >= 0.01 else 2
    return f"±{share:.{digits}%}"


def part(value_ms: float | None, unit: Unit) -> str:
    """Return a part of a step in `unit`: 0.123, 12.3, 123 or 1,234; "" for None."""
    if not has_value(value_ms):
        return ""
    value = value_ms * unit.per_ms
    return f"{value:z.3f}" if 0 < abs(value) < 1 else number(value, digits=3)


def ratio(value: float | None) -> str:
    """Return a speed-up as `1.25`, below 0.1 with two significant digits; "" for None."""
    if not has_value(value):
        return ""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def percent(value: float | None) -> str:
    """Return a share as a percentage, `12.3%`, never `-0.0%`; "" for None."""
    return f"{value:z.1%}" if has_value(value) else ""


def gib(value: float | None) -> str:
    """Return bytes in GiB with two decimals; "" for None."""
    return f"{value / GIB:.2f}" if has_value(value) else ""


def metric(shown: Metric, value: Any, unit: Unit = MILLISECONDS) -> str:
    """Return the value of a metric in its format; "" if the value is unknown.

    Args:
        shown: the metric.
        value: value of the metric.
        unit: unit of a time; other formats ignore it.
    """
    if shown.format == "choices":
        # `AllReduce 4096 B: RING LL, 8 channels` without the collective and the size.
        return "; ".join(dict.fromkeys(text.partition(": ")[2] for text in value or ()))
    if not has_value(value):
        return ""
    if shown.format == "part":
        return part(value, unit)
    if shown.format == "time":
        return time_in(unit, value)
    return _TEXT_OF_FORMAT[shown.format](value)


def rate(shown: Metric, value: float) -> str:
    """Return a rate as `    750.0 GB/s busbw`; the number has at least 9 characters."""
    noun = shown.title.removesuffix(shown.unit)
    return f"{metric(shown, value):>9} {shown.unit} {noun}".rstrip()


# Format of a metric -> function that writes a value.
_TEXT_OF_FORMAT: Mapping[str, Callable[[Any], str]] = {
    "number": number,
    "ratio": ratio,
    "share": percent,
    "percent": lambda value: percent(value / 100),
    "gib": gib,
}


def amount(count: int) -> str:
    """Return a number of parameters: 1,025, 134 M or 1.5 B."""
    for unit, unit_count in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if count >= 0.9995 * unit_count:  # otherwise 999,600,000 would be 1e+03 M
            return f"{count / unit_count:.3g} {unit}"
    return f"{count:,}"


def size(count: float | None) -> str:
    """Return bytes with a binary unit: 1000 B, 4 KiB, 1.5 MiB; "" for None."""
    if not has_value(count):
        return ""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    # Each unit is 2**10 of the unit before.
    highest_bit = max(0, int(count).bit_length() - 1)
    power = min(highest_bit // 10, len(units) - 1)
    return f"{count / 2 ** (10 * power):.4g} {units[power]}"


def setting(name: str, value: Any) -> str:
    """Return the value of a setting as text: `true`, `4 KiB` for `*_bytes`, "" for None."""
    text = "" if value is None else str(value)
    if name.endswith("_bytes") and text.isdecimal():
        return size(int(text))
    return text.lower() if isinstance(value, bool) else text


def heading(name: str) -> str:
    """Return the name of a setting without `_bytes`, as the head of a column."""
    return name.removesuffix("_bytes")


def setting_words(name: str, value: Any, ranks_noun: str) -> str:
    """Return a setting for a sentence: `4 GPUs`, `batch 64`, `bf16` or `hidden=8`.

    Args:
        name: name of the setting.
        value: not None.
        ranks_noun: `GPUs` or `workers`.
    """
    if name == "world_size":
        return ranks_words(int(value), ranks_noun)
    text = setting(name, value)
    if name == "batch":
        return f"batch {int(text):,}" if text.isdecimal() else f"batch {text}"
    needs_no_name = name in ("workload", "precision", "operation", "size_bytes")
    return text if needs_no_name else f"{heading(name)}={text}"


def words_of_settings(values: Mapping[str, Any], ranks_noun: str) -> str:
    """Return settings for a sentence: `bf16, batch 64, 4 GPUs`."""
    return ", ".join(setting_words(name, value, ranks_noun) for name, value in values.items())


def ranks_words(count: int, ranks_noun: str) -> str:
    """Return `1 GPU` or `4 GPUs`; `ranks_noun` is the plural, `GPUs` or `workers`."""
    return counted(count, ranks_noun.removesuffix("s"))


def some(names: Sequence[str], most: int = 4) -> str:
    """Return the first `most` names and the number of the others: `a, b and 3 more`."""
    others = len(names) - most
    return ", ".join(names[:most]) + (f" and {others} more" if others > 0 else "")


def cases_words(count: int, total: int, names: Sequence[str]) -> str:
    """Return `in 3 of 4 combinations of k and m`, or `for 3 of 4 values of k`.

    Args:
        count: number of the cases that a sentence is about.
        total: number of all cases.
        names: the settings whose combinations are cases.
    """
    *others, last = [heading(name) for name in names] or ["the other settings"]
    listed = f"{', '.join(others)} and {last}" if others else last
    which = f"all {total}" if count == total > 1 else f"{count} of {total}"
    has_one_setting = len(names) == 1
    if not has_one_setting:
        return f"in {which} combinations of {listed}"
    return f"for {which} values of {listed}"


def when(time: datetime) -> str:
    """Return a time in UTC as `2026-11-26 01:16 UTC`."""
    return f"{time:%Y-%m-%d %H:%M} UTC"


def run_time(run: Run) -> str:
    """Return the duration of a run without pauses, `2 min 3 s`; `unfinished` if it has no end."""
    if run.finished_at is None:
        return "unfinished"
    total_s = (run.finished_at - run.started_at).total_seconds() - (run.paused_s or 0.0)
    return long_time(total_s) if total_s >= 0 else "unknown"


def long_time(total_s: float) -> str:
    """Return seconds as `1 h 2 min 3 s`, without parts that are 0."""
    minutes, seconds = divmod(round(total_s), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (seconds, "s"))
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def sentence(text: str) -> str:
    """Return a text with a full stop, and with a capital if its first word has only letters."""
    if text.partition(" ")[0].isalpha():
        text = text[:1].upper() + text[1:]
    return text.removesuffix(".") + "."


def run_title(run: Run) -> str:
    """Return the id of a run, after the name of its job unless the id begins with the name."""
    job_prefix = "" if run.run_id.startswith(run.job_name) else f"{run.job_name}  "
    return job_prefix + run.run_id


def course(run: Run) -> str:
    """Return the duration of a run and its end: `interrupted after 5 min, resumed after 1 h`."""
    end = "interrupted after " if run.status == "interrupted" else ""
    return end + took(run)


def took(run: Run) -> str:
    """Return the duration of a run and its pauses: `5 min, resumed after 1 h`."""
    pause = f", resumed after {long_time(run.paused_s)}" if run.paused_s else ""
    return run_time(run) + pause


def machine(devices: Sequence[Mapping[str, Any]], node_count: int | None = None) -> str:
    """Return `4 x NVIDIA H200 on 1 node`, or `2 workers on 1 x Intel Xeon (2 cores)`.

    Args:
        devices: at least one row of the table `devices`.
        node_count: number of nodes; None counts the nodes of the devices. CPUs ignore it.
    """
    if all(device["kind"] == "cpu" for device in devices):
        return f"{counted(len(devices), 'worker')} on {_processors(devices)}"
    count = node_count or len({device["node_id"] for device in devices})
    return f"{models(devices)} on {counted(count, 'node')}"


def _processors(workers: Sequence[Mapping[str, Any]]) -> str:
    """Return the processors of the hosts of CPU workers: `2 x Intel Xeon (8 cores each)`."""
    # The processor of a host counts once, whatever the number of its workers.
    hosts = {(worker["host"], worker["address"]): worker for worker in workers}
    processors = Counter((str(row["name"]), int(row["cpu_count"])) for row in hosts.values())
    texts = []
    for (name, cores), count in processors.items():
        each = " each" if count > 1 else ""
        texts.append(f"{count} x {name} ({counted(cores, 'core')}{each})")
    return ", ".join(texts)


def models(devices: Sequence[Mapping[str, Any]]) -> str:
    """Return the number of devices of each model: `4 x NVIDIA H200`."""
    names = Counter(device["name"] for device in devices)
    return ", ".join(f"{count} x {name}" for name, count in names.items())


def versions(version_of: Mapping[str, str]) -> str:
    """Return names and versions of software: `torch 2.11, nccl 2.28`."""
    return ", ".join(f"{name} {version}" for name, version in version_of.items())


def settings(values: Mapping[str, Any]) -> str:
    """Return settings as `name=value name=value`; True is `true`."""
    words = []
    for name, value in values.items():
        text = str(value)
        words.append(f"{name}={text.lower() if isinstance(value, bool) else text}")
    return " ".join(words)


def program() -> str:
    """Return how this process was called: `raybench` or `python -m raybench`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return "python -m raybench" if spec and spec.name == "raybench.__main__" else "raybench"


def name_program(text: str) -> str:
    """Return the text; commands in backticks, as `raybench show`, begin with `program()`."""
    return text.replace("`raybench ", f"`{program()} ")


def quoted(*words: str) -> str:
    """Return words quoted for a shell; unprintable characters become `?`."""
    return "".join(c if c.isprintable() else "?" for c in shlex.join(words))


def command(*words: str) -> str:
    """Return a command of raybench, quoted for a shell."""
    return f"{program()} {quoted(*words)}"
