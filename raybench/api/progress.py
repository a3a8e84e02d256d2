"""Progress of a sweep: a line per finished point, and on a terminal the points that run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from raybench.analysis.rows import MAIN_RATES
from raybench.job.plan import Plan, varying_settings
from raybench.job.point import Point
from raybench.records.record import Record
from raybench.records.status import Status
from raybench.report import formatting
from raybench.report.console import say
from raybench.report.words.failures import failure_of_record
from raybench.report.words.hangs import hang
from raybench.results.metrics import mean_step_ms, rate_columns, typical_step_ms
from raybench.sweep.loop import (
    Event,
    PointAdded,
    PointFinished,
    PointHangs,
    PointRetried,
    PointStarted,
    RoundStarted,
)

_STYLES = {Status.OK: "green", Status.SKIPPED: "yellow"}


@contextmanager
def show_phase(console: Console, what: str) -> Iterator[None]:
    """Show a plain text while the block runs: a spinner on a terminal, a line elsewhere."""
    if not console.is_interactive:
        say(console, what)
    with console.status(Text(what)):
        yield


class ConsoleListener:
    """Shows messages, spinners and progress on a console."""

    def __init__(
        self,
        console: Console,
        # Returns the name of a point; by default the settings that vary name the point.
        name_of: Callable[[Point], str] | None = None,
        # Estimated duration of all trials.
        trials_s: float | None = None,
    ) -> None:
        self._console = console
        self._name_of = name_of
        self._trials_s = trials_s

    def tell(self, line: str) -> None:
        """Print one line, neither wrapped nor coloured; any thread may call it."""
        say(self._console, line)

    def waiting(self, what: str) -> AbstractContextManager[object]:
        """Show what the user waits for: a spinner on a terminal, a line elsewhere."""
        return show_phase(self._console, what)

    def progress(self, plan: Plan, trials: int) -> PointProgress:
        """Return a context whose `show` takes each event of a sweep."""
        return PointProgress(plan, self._console, trials, self._name_of, self._trials_s)

    def show_cursor(self) -> None:
        """Show the cursor again, which a spinner hides."""
        self._console.show_cursor()


class PointProgress:
    """Prints a line per finished point; on a terminal it also redraws the points that run.

    The redrawn lines fit on the screen and never wrap, because rich could not erase more lines.

    Args:
        plan: the points to run.
        console: where to print.
        trials: number of trials over all rounds; by default one for each point.
        name_of: returns the name of a point; by default the settings that vary name it.
        trials_s: estimated duration of all trials, to show the time left before the first end.
    """

    def __init__(
        self,
        plan: Plan,
        console: Console,
        trials: int | None = None,
        name_of: Callable[[Point], str] | None = None,
        trials_s: float | None = None,
    ) -> None:
        self._console = console
        self._name_of = name_of
        self._varying = varying_settings(plan.points)
        if plan.batch_search and "batch_size" not in self._varying:
            self._varying.append("batch_size")
        self._widths: dict[str, int] = {}
        for name in self._varying:
            self._widths[name] = max(len(_show_setting(point, name)) for point in plan.points)
        self._total = len(plan.points) if trials is None else trials
        self._done = 0
        # Without skipped points: they take no time, so the pace ignores them.
        self._measured = 0
        self._began_s = time.monotonic()
        # Seconds per point. In the mean pace, the estimate counts as one measured point.
        self._estimated_s = (trials_s or 0.0) / max(1, self._total)
        self._pace_s = self._estimated_s
        # Attempts in flight with their start times. The dict is replaced and never mutated, because
        # another thread draws it.
        self._running: dict[int, tuple[PointStarted, float]] = {}
        self._live = (
            Live(console=console, refresh_per_second=2, get_renderable=self.picture, transient=True)
            if console.is_interactive
            else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()
            # An empty line separates the report, which follows on the same screen.
            self._console.print()

    def show(self, event: Event) -> None:
        """Count an event; print a line for a point that ended or hangs, and for a new round."""
        if isinstance(event, PointAdded):
            self._total += 1
        elif isinstance(event, PointStarted):
            self._running = {**self._running, event.index: (event, time.monotonic())}
            if event.heat_s:
                devices = formatting.counted(len(event.devices), "device")
                self._print(f"heating {devices} for {event.heat_s:g} s", "")
        elif isinstance(event, PointHangs):
            line = f"{self._counter()}  {'hangs':<7}  {self._label(event.point)}"
            self._print(f"{line}  {formatting.plain(hang(event.verdict))}", "yellow")
        elif isinstance(event, RoundStarted):
            # The trials of this round, and of the rounds after this round.
            self._total = self._done + len(event.trials) + event.later
            if event.trials:
                self._print(f"round {event.round} of {event.rounds}", "")
        else:
            self._show_end(event)

    def _show_end(self, event: PointFinished | PointRetried) -> None:
        """Count the end of an attempt and print its outcome."""
        self._running = {
            index: started for index, started in self._running.items() if index != event.index
        }
        record = event.record
        line = f"{self._counter()}  {self._outcome(record)}"
        if isinstance(event, PointRetried):
            self._print(f"{line} (tried once more)", "yellow")
            return
        self._done += 1
        if record.status is not Status.SKIPPED:
            self._measured += 1
            passed_s = time.monotonic() - self._began_s
            # The estimated seconds of a point count as one more measured point.
            points = self._measured + 1 if self._estimated_s else self._measured
            self._pace_s = (passed_s + self._estimated_s) / points
        # On a terminal, the redrawn lines show the time left.
        time_left = "" if self._live else self._time_left()
        self._print(f"{line}  {time_left}".rstrip(), _STYLES.get(record.status, "red"))

    def _print(self, line: str, style: str) -> None:
        """Print a line that stays; only a terminal shows the style."""
        self._console.print(Text(line, style=style if self._live else ""), soft_wrap=True)

    def picture(self) -> RenderableType:
        """Return the redrawn lines: as many running points as fit, and the counts."""
        running = list(self._running.values())
        # Leave room on the screen for the counts and for printed lines.
        most_lines = max(1, self._console.height - 4)
        indent = " " * len(self._counter())
        lines = []
        for event, started_s in running[:most_lines]:
            duration_s = time.monotonic() - started_s
            label = self._label(event.point)
            lines.append(f"{indent}  {'runs':<7}  {label}  {duration_s:.0f} s")
        if len(running) > most_lines:
            lines.append(f"and {len(running) - most_lines} more are running")
        lines.append(f"{self._done} of {self._total} points  {self._time_left()}")
        return Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in lines))

    def line(self) -> str:
        """Return the progress as one line: the counts, a running point and the time left."""
        counts = f"{self._done} of {self._total} points"
        labels = [self._label(event.point) for event, _ in self._running.values()]
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        running = f"{labels[0]}{more} runs" if labels else ""
        return "; ".join(filter(None, (counts, running, self._time_left())))

    def _counter(self) -> str:
        """Return the number of the point that finishes next, as `[3/12]`."""
        return f"[{self._done + 1:>{len(str(self._total))}}/{self._total}]"

    def _time_left(self) -> str:
        """Return `about 4 min left`; "" below a second."""
        left_s = (self._total - self._done) * self._pace_s
        if left_s < 1:
            return ""
        duration = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
        return f"about {duration} left"

    def _label(self, point: Point) -> str:
        """Return the settings of a point that vary, padded to columns; its id if none varies."""
        if self._name_of is not None:
            return self._name_of(point)
        cells = (f"{_show_setting(point, name):<{self._widths[name]}}" for name in self._varying)
        return " ".join(cells) or point.point_id

    def _outcome(self, record: Record) -> str:
        """Return status and settings, then step time and rate, or the reason of the failure."""
        if record.status is Status.OK:
            columns = rate_columns(record, mean_step_ms(record))
            rate_text = ""
            # Show the first rate that the workload has, such as TFLOP/s or samples/s.
            for metric in MAIN_RATES:
                if value := getattr(columns, metric.name):
                    rate_text = formatting.rate(metric, value)
                    break
            outcome = f"{formatting.duration(typical_step_ms(record)):>9}  {rate_text}".rstrip()
        else:
            failure = formatting.plain(failure_of_record(record))
            outcome = formatting.cut_middle(failure, 300)
        outcome += " (control)" if record.control_of else ""
        return "  ".join([f"{record.status.value:<7}", self._label(record.point), outcome])


def _show_setting(point: Point, name: str) -> str:
    """Return a setting as text, such as `ws 4`, `NAME=value` or `bf16`."""
    value = point.settings.get(name, "none")
    if name in point.env:
        return f"{name}={formatting.plain(point.env[name])}"
    # A text such as a precision needs no label; a number does.
    if isinstance(value, str):
        return formatting.plain(value)
    short_labels = {"world_size": "ws", "batch_size": "batch", "global_batch_size": "global batch"}
    label = short_labels.get(name, formatting.heading(name))
    return f"{label} {formatting.setting(name, value)}"
