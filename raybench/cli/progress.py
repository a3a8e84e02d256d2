"""Progress of a sweep on stderr: a live table on a terminal, one line per point elsewhere."""

from __future__ import annotations

import time
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raybench.measure import stats
from raybench.plan import Plan, Point, varying_settings
from raybench.records import Record, Status
from raybench.sweep import Event, PointFinished, PointStarted

_SHOWN_POINTS = 12
_STYLES = {Status.OK: "green", Status.SKIPPED: "yellow"}


class Progress(Protocol):
    """Shows the events of a sweep while they come; used as a context manager."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, event: Event) -> None: ...


def make_progress(plan: Plan, console: Console) -> Progress:
    """The kind of progress that suits the stream."""
    return LiveProgress(plan, console) if console.is_terminal else LineProgress(plan, console)


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
            line = "  ".join(self._wording.finished(event.index, event.record))
            left = f"  {self._clock.left()}" if self._clock.left() else ""
            self._console.print(
                f"{line}{left}", markup=False, highlight=False, soft_wrap=True, emoji=False
            )


class LiveProgress:
    """The latest points, the one that is running, and the time left."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self._clock = _Clock(len(plan.points))
        self._wording = _Wording(plan)
        self._finished: list[PointFinished] = []
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

    def show(self, event: Event) -> None:
        if isinstance(event, PointStarted):
            self._running, self._running_since_s = event, time.monotonic()
            return
        self._running = None
        self._clock.finished(event.record)
        self._finished.append(event)

    def _picture(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for event in self._finished[-_SHOWN_POINTS:]:
            style = _STYLES.get(event.record.status, "red")
            cells = self._wording.finished(event.index, event.record)
            table.add_row(*(Text(cell, style=style) for cell in cells))
        if self._running is not None:
            running_s = time.monotonic() - self._running_since_s
            number = self._wording.number(self._running.index)
            what = self._wording.settings(self._running.point)
            table.add_row(number, "runs", what, Text(f"{running_s:.0f} s", justify="right"))
        done = len(self._finished)
        return Group(table, Text(f"{done} of {self._clock.total} points  {self._clock.left()}"))


class _Clock:
    """The time left, from how long the points took that were really run."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._done = 0
        self._durations_s: list[float] = []

    def finished(self, record: Record) -> None:
        self._done += 1
        if record.status is not Status.SKIPPED:
            self._durations_s.append(record.duration_s)

    def left(self) -> str:
        missing = self.total - self._done
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

    def finished(self, index: int, record: Record) -> list[str]:
        """Number, status, settings and the step time or the reason."""
        outcome = record.error_message or ""
        if record.status is Status.OK:
            outcome = f"{stats.slowest_rank_step_ns(record.measurements) / 1e6:10.3f} ms"
        return [
            self.number(index),
            f"{record.status.value:<7}",
            self.settings(record.point),
            outcome,
        ]

    def number(self, index: int) -> str:
        return f"[{index + 1:>{len(str(self._total))}}/{self._total}]"

    def settings(self, point: Point) -> str:
        cells = (f"{_shown(point, name):<{self._widths[name]}}" for name in self._varying)
        return " ".join(cells) or point.point_id


def _shown(point: Point, name: str) -> str:
    value = point.settings.get(name, "none")
    label = {"world_size": "ws", "batch_size": "batch", "global_batch_size": "global batch"}
    # A precision or a preset speaks for itself; a number does not.
    return value if isinstance(value, str) else f"{label.get(name, name)} {value}"
