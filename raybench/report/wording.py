"""Numbers and statuses in words, the same in every report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from raybench.records import Run, RunStatus

STATUS_WORDS = {
    "ok": "ok",
    "oom": "out of memory",
    "error": "error",
    "timeout": "timed out",
    "lost": "worker lost",
    "skipped": "skipped",
    "cancelled": "cancelled",
}
_GIB = 2**30


def known(value: Any) -> bool:
    """Whether a cell of a table holds a value: None, NaN and NaT are none."""
    return value is not None and value == value


def plain(value: Any) -> str:
    """Text from results as one harmless line: no control characters, no line breaks."""
    one_line = " ".join(str(value).split())
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in one_line)


def shortened(text: str, most: int) -> str:
    """At most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def number(value: float) -> str:
    """Four significant digits, thousands apart: 1,234 12.34 0.001234."""
    if not known(value):
        return ""
    if value == 0:
        return "0"
    decimals = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 6)}f}"


def step_ms(row: Mapping[str, Any]) -> str:
    """Step time in milliseconds and half its interval, relative."""
    value, low, high = (row[f"step_ms_{name}"] for name in ("p50", "ci_low", "ci_high"))
    if not known(value):
        return ""
    if not known(low) or not known(high):
        return number(value)
    half_width = (high - low) / 2 / value
    if half_width > 1:
        return f"{number(value)} ±>100%"
    return f"{number(value)} ±{half_width:.{1 if half_width >= 0.01 else 2}%}"


def ratio(value: float) -> str:
    """A speed-up; of a tiny one, two digits."""
    if not known(value):
        return ""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def percent(value: float) -> str:
    """An efficiency."""
    return f"{value:.1%}" if known(value) else ""


def gib(value: float) -> str:
    """Bytes in GiB."""
    return f"{value / _GIB:.2f}" if known(value) else ""


def when(time: datetime) -> str:
    """A time, always in UTC."""
    return f"{time:%Y-%m-%d %H:%M} UTC"


def lasted(run: Run) -> str:
    """How long a run took."""
    if run.finished_at is None:
        return "unfinished"
    seconds = round((run.finished_at - run.started_at).total_seconds())
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (seconds, "s"))
    return " ".join(f"{count} {unit}" for count, unit in parts if count) or "0 s"


def title(run: Run) -> str:
    """The job and the run's id, which usually begins with the job."""
    job = "" if run.run_id.startswith(run.job_name) else f"{plain(run.job_name)}  "
    return job + plain(run.run_id)


def course(run: Run) -> str:
    """How long a run took, and whether it came to its end."""
    word = "interrupted after " if run.status is RunStatus.INTERRUPTED else ""
    return word + lasted(run)


def counts(run: Run, statuses: Sequence[str]) -> str:
    """How the points of a run ended, as far as they have: the run's row may lag behind them."""
    ok, skipped, cancelled = map(statuses.count, ("ok", "skipped", "cancelled"))
    failed, missing = len(statuses) - ok - skipped - cancelled, run.points_total - len(statuses)
    text = f"{run.points_total} points: {ok} ok, {failed} failed, {skipped} skipped"
    more = ((cancelled, "cancelled"), (missing, "not run"))
    return text + "".join(f", {count} {word}" for count, word in more if count > 0)


def versions(found: Mapping[str, str]) -> str:
    """Names and versions of software."""
    return ", ".join(f"{plain(name)} {plain(version)}" for name, version in found.items())


def settings(values: Mapping[str, Any]) -> str:
    """Settings as name=value, in the order given."""
    return " ".join(f"{name}={plain(value)}" for name, value in values.items())


def over(baseline: Mapping[str, Any]) -> str:
    """The title of what a report found."""
    named = " and efficiency" if "world_size" in baseline else ""
    return f"Speed-up{named} over {settings(baseline)}"
