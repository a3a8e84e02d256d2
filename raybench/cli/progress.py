"""Progress of a sweep on stderr: a line per finished point; on a terminal also what runs now.

The lines stay: they are the trace of the night that the report does not replace.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from raybench.analysis.rows import MAIN_RATES
from raybench.job.plan import Plan, varying_settings
from raybench.job.point import Point
from raybench.records import Record, Status
from raybench.report import formatting, plain_text
from raybench.results.metrics.rates import rate_columns
from raybench.results.metrics.steps import mean_step_ms, typical_step_ms
from raybench.sweep.loop import (
    Event,
    PointAdded,
    PointFinished,
    PointRetried,
    PointStarted,
    RoundStarted,
)
from raybench.sweep.messages import Progress

_STYLES = {Status.OK: "green", Status.SKIPPED: "yellow"}
_REASON_CHARS = 300

# How a point is called.
NameOf = Callable[[Point], str]


def make_progress(
    plan: Plan,
    console: Console,
    trials: int | None = None,
    name_of: NameOf | None = None,
) -> Progress:
    """Make the kind of progress that suits the stream.

    plan: the points that this sweep is to run. trials: how often it is to run one, over all rounds;
    each once where that is not given. name_of: how a point is called; by the settings that vary in
    the plan where that is not given.
    """
    kind = LiveProgress if console.is_interactive else LineProgress
    count = len(plan.points) if trials is None else trials
    return kind(plan, console, count, name_of)


class LineProgress:
    """One plain line per finished point, numbered in the order in which they finish."""

    def __init__(
        self, plan: Plan, console: Console, trials: int, name_of: NameOf | None = None
    ) -> None:
        self._console = console
        self._count = _Count(trials)
        self._wording = _Wording(plan, name_of)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: Event) -> None:
        """Print the line of an event that has one."""
        line = _line_of(event, self._count, self._wording)
        if line is not None:
            left = self._count.left() if isinstance(event, PointFinished) else ""
            self._console.print(Text(f"{line}  {left}".rstrip()), soft_wrap=True)


class LiveProgress:
    """A line per finished point, which stays, above the points that are running.

    What is redrawn is never wrapped and fits on the screen: anything taller could not be wiped
    off it again.
    """

    def __init__(
        self, plan: Plan, console: Console, trials: int, name_of: NameOf | None = None
    ) -> None:
        self._console = console
        self._count = _Count(trials)
        self._wording = _Wording(plan, name_of)
        # The thread that draws reads it, so a change replaces it.
        self._running: dict[int, tuple[PointStarted, float]] = {}
        self._live = Live(
            console=console, refresh_per_second=2, get_renderable=self._picture, transient=True
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        # The report follows on the same screen.
        self._console.print()

    def show(self, event: Event) -> None:
        """Print the line of an event that has one; draw what runs now."""
        if isinstance(event, PointStarted):
            self._running = {**self._running, event.index: (event, time.monotonic())}
        elif not isinstance(event, RoundStarted):
            self._running = {i: one for i, one in self._running.items() if i != event.index}
        line = _line_of(event, self._count, self._wording)
        if line is not None:
            self._console.print(Text(line, style=_style(event)), soft_wrap=True)

    def _picture(self) -> RenderableType:
        running = list(self._running.values())
        most = max(1, self._console.height - 4)
        lines = [self._line(event, since_s) for event, since_s in running[:most]]
        if len(running) > most:
            lines.append(f"and {len(running) - most} more are running")
        lines.append(f"{self._count.done} of {self._count.total} points  {self._count.left()}")
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))

    def _line(self, event: PointStarted, since_s: float) -> str:
        running = f"{time.monotonic() - since_s:.0f} s"
        indent = " " * len(self._count.number())
        return "  ".join([indent, f"{'runs':<7}", self._wording.settings(event.point), running])


def _line_of(event: Event, count: _Count, wording_of: _Wording) -> str | None:
    """Count an event; the line that stays of it, if there is one."""
    if isinstance(event, PointAdded):
        count.total += 1
        return None
    if isinstance(event, PointStarted):
        return None
    if isinstance(event, RoundStarted):
        count.total = count.done + len(event.trials) + event.later
        return f"round {event.round} of {event.rounds}" if event.trials else None
    if isinstance(event, PointRetried):
        return f"{count.number()}  {wording_of.retried(event.record)}"
    line = f"{count.number()}  {wording_of.finished(event.record)}"
    count.finished(event.record)
    return line


def _style(event: Event) -> str:
    if isinstance(event, PointFinished):
        return _STYLES.get(event.record.status, "red")
    return "" if isinstance(event, RoundStarted) else "yellow"


class _Count:
    """How many points are done, and the time left by the pace of those that were really run."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._run = 0
        self._since_s = time.monotonic()
        self._pace_s = 0.0

    def number(self) -> str:
        """Return the number of the point that finishes next, as `[3/12]`."""
        return f"[{self.done + 1:>{len(str(self.total))}}/{self.total}]"

    def finished(self, record: Record) -> None:
        self.done += 1
        if record.status is not Status.SKIPPED:
            self._run += 1
            self._pace_s = (time.monotonic() - self._since_s) / self._run

    def left(self) -> str:
        left_s = (self.total - self.done) * self._pace_s
        if left_s < 1:
            return ""
        duration = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
        return f"about {duration} left"


class _Wording:
    """Points in words: their number and the settings that vary in the plan."""

    def __init__(self, plan: Plan, name_of: NameOf | None) -> None:
        self._name_of = name_of
        self._varying = varying_settings(plan.points)
        if plan.batch_search and "batch_size" not in self._varying:
            self._varying.append("batch_size")
        self._widths = {
            name: max(len(_show_setting(point, name)) for point in plan.points)
            for name in self._varying
        }

    def finished(self, record: Record) -> str:
        """Status, settings and the step time or the reason."""
        if record.status is Status.OK:
            outcome = _outcome(record)
        else:
            message = record.error_message or ""
            told = formatting.failure(record.status, record.error_type, message)
            outcome = plain_text.shorten(told, _REASON_CHARS)
        outcome += " (control)" if record.control_of else ""
        return "  ".join([f"{record.status.value:<7}", self.settings(record.point), outcome])

    def retried(self, record: Record) -> str:
        return f"{self.finished(record)} (tried once more)"

    def settings(self, point: Point) -> str:
        if self._name_of is not None:
            return self._name_of(point)
        cells = (f"{_show_setting(point, name):<{self._widths[name]}}" for name in self._varying)
        return " ".join(cells) or point.point_id


def _outcome(record: Record) -> str:
    """Show the step time as the report will have it, and what it comes to."""
    reached = rate_columns(record, mean_step_ms(record))
    known = [(m, value) for m in MAIN_RATES if (value := getattr(reached, m.name)) is not None]
    rate = formatting.rate(*known[0]) if known else ""
    return f"{formatting.duration(typical_step_ms(record)):>9}  {rate}".rstrip()


def _show_setting(point: Point, name: str) -> str:
    value = point.settings.get(name, "none")
    label = {"world_size": "ws", "batch_size": "batch", "global_batch_size": "global batch"}
    if name in point.env:
        return f"{name}={plain_text.plain(point.env[name])}"
    # A precision or a preset speaks for itself; a number does not.
    if isinstance(value, str):
        return plain_text.plain(value)
    return f"{label.get(name, formatting.heading(name))} {formatting.setting(name, value)}"
