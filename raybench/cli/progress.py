"""Progress of a sweep on stderr: a line per finished point; on a terminal also what runs now.

The lines stay: they are the trace of the night that the report does not replace.
"""

from __future__ import annotations

import time
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from raybench.measure import stats
from raybench.numbers import rates
from raybench.plan import Plan, varying_settings
from raybench.point import Point
from raybench.records import Record, Status
from raybench.report import wording
from raybench.sweep import Event, PointFinished, PointStarted

_STYLES = {Status.OK: "green", Status.SKIPPED: "yellow"}
_REASON_CHARS = 300
# The first that a point has is shown.
_RATES = {
    "throughput": "samples/s",
    "busbw_gb_s": "GB/s busbw",
    "memory_gb_s": "GB/s",
    "achieved_tflops_per_device": "TFLOP/s",
}


class Progress(Protocol):
    """Shows the events of a sweep while they come; used as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None: ...


def make_progress(plan: Plan, console: Console) -> Progress:
    """The kind of progress that suits the stream."""
    return LiveProgress(plan, console) if console.is_interactive else LineProgress(plan, console)


class LineProgress:
    """One plain line per finished point."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._console = console
        self._clock = _Clock(len(plan.points))
        self._wording = _Wording(plan)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: Event) -> None:
        if isinstance(event, PointFinished):
            self._clock.finished(event.record)
            line = self._wording.finished(event.index, event.record)
            left = f"  {self._clock.left()}" if self._clock.left() else ""
            self._console.print(Text(line + left), soft_wrap=True)


class LiveProgress:
    """A line per finished point, which stays, above the point that is running and the time left.

    What is redrawn is two lines, never wrapped: anything taller than the screen could not be
    wiped off it again.
    """

    def __init__(self, plan: Plan, console: Console) -> None:
        self._console = console
        self._clock = _Clock(len(plan.points))
        self._wording = _Wording(plan)
        self._running: PointStarted | None = None
        self._running_since_s = 0.0
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
        if isinstance(event, PointStarted):
            self._running, self._running_since_s = event, time.monotonic()
            return
        self._running = None
        self._clock.finished(event.record)
        line = self._wording.finished(event.index, event.record)
        style = _STYLES.get(event.record.status, "red")
        self._console.print(Text(line, style=style), soft_wrap=True)

    def _picture(self) -> RenderableType:
        lines = [f"{self._clock.done} of {self._clock.total} points  {self._clock.left()}"]
        if self._running is not None:
            running_s = time.monotonic() - self._running_since_s
            cells = self._wording.cells(self._running.index, self._running.point, "runs")
            lines.insert(0, "  ".join([*cells, f"{running_s:.0f} s"]))
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))


class _Clock:
    """The time left, from how long the points took that were really run."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self._durations_s: list[float] = []

    def finished(self, record: Record) -> None:
        self.done += 1
        if record.status is not Status.SKIPPED:
            self._durations_s.append(record.duration_s)

    def left(self) -> str:
        missing = self.total - self.done
        if not self._durations_s or not missing:
            return ""
        left_s = missing * sum(self._durations_s) / len(self._durations_s)
        return f"about {_duration(left_s)} left"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class _Wording:
    """Points in words: their number and the settings that vary in the plan."""

    def __init__(self, plan: Plan) -> None:
        self._total = len(plan.points)
        self._varying = varying_settings(plan.points)
        self._widths = {
            name: max(len(_shown(point, name)) for point in plan.points) for name in self._varying
        }

    def finished(self, index: int, record: Record) -> str:
        """Number, status, settings and the step time or the reason."""
        outcome = wording.shortened(wording.plain(record.error_message or ""), _REASON_CHARS)
        if record.status is Status.OK:
            outcome = _outcome(record)
        return "  ".join([*self.cells(index, record.point, record.status.value), outcome])

    def cells(self, index: int, point: Point, state: str) -> list[str]:
        """What every line begins with: number, state, settings."""
        number = f"[{index + 1:>{len(str(self._total))}}/{self._total}]"
        return [number, f"{state:<7}", self.settings(point)]

    def settings(self, point: Point) -> str:
        cells = (f"{_shown(point, name):<{self._widths[name]}}" for name in self._varying)
        return " ".join(cells) or point.point_id


def _outcome(record: Record) -> str:
    """The step time as the report will have it, and what it comes to."""
    step_ms = stats.slowest_rank_step_ns(record.measurements) / 1e6
    reached = rates(record, step_ms)
    told = ((wording.number(reached[name]), unit) for name, unit in _RATES.items())
    rate = next((f"{figure:>9} {unit}" for figure, unit in told if figure), "")
    return f"{wording.duration(step_ms):>9}  {rate}".rstrip()


def _shown(point: Point, name: str) -> str:
    value = point.settings.get(name, "none")
    label = {"world_size": "ws", "batch_size": "batch", "global_batch_size": "global batch"}
    # A precision or a preset speaks for itself; a number does not.
    if isinstance(value, str):
        return value
    return f"{label.get(name, wording.heading(name))} {wording.setting(name, value)}"
