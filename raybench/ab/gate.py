"""Measure both sides in turns until each point is decided, and resume interrupted gates."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from raybench.ab.checkout import (
    Checkout,
    SideError,
    check_out,
    files_from_elsewhere,
    last_line,
    remove_worktrees,
    resolve_revisions,
)
from raybench.ab.decision import CONFIRMING_PAIRS, LOOKS
from raybench.ab.plan import (
    WORKTREE,
    Gate,
    Settings,
    Side,
    Version,
    find_gate,
    folder_of,
    lock_gate,
    new_gate,
    read_gate,
    write_gate,
)
from raybench.ab.starts import (
    MOST_FAILURES,
    PAIR_TAG,
    SIDE_TAG,
    PairedPoint,
    PairedStarts,
    Start,
    devices_of,
    read_starts,
)
from raybench.ab.verdict import (
    GateVerdict,
    OpenReason,
    WhyOpen,
    decisions_of,
    open_points,
    verdict_of,
)
from raybench.records.devices import write_device_list

# Upper bound of the pairs: up to the last look, fresh pairs, and pairs in which a point failed.
_MOST_PAIRS = LOOKS[-1] + CONFIRMING_PAIRS + 2 * MOST_FAILURES
# An interrupted pair is completed if its first start is younger than this. An older pair is
# measured again, because the machine may have changed.
_FRESH_S = 1800.0
# How long an interrupted sweep may take to write its rows.
_CLOSE_S = 30.0
_POLL_S = 1.0
# Exit codes of a sweep that wrote a row for each of its points.
_CODES_WITH_ALL_ROWS = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An earlier gate was killed, and its sweep still runs."""

    run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingUp:
    """The set-up command of a side begins."""

    side: Side
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A side is checked out and set up."""

    side: Side
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A start begins."""

    side: Side
    pair: int
    # Number of points to measure; None: all points, in the first pair.
    points: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The verdict so far, after another pair."""

    verdict: GateVerdict
    # Number of points that need another pair.
    open: int


Event = Waiting | SettingUp | Prepared | Begun | Looked
Listener = Callable[[Event], None]


def run_gate(
    job: Path,
    old: Version,
    new: Version,
    settings: Settings,
    *,
    output: Path,
    listener: Listener,
) -> GateVerdict:
    """Measure two versions in turns until each point of a job is decided.

    Args:
        old, new: without any revision both sides measure the current folder; a single revision is
            compared with WORKTREE.
        output: the results folder; the gate has a folder `ab/<gate id>` of its own in it.
        listener: is called with each event.

    Raises:
        UsageError: a revision, a job file or a setting is wrong.
        JobError: a job file is no YAML.
        KeyboardInterrupt: `resume_gate` can resume the gate.
    """
    if old.revision or new.revision:
        old = replace(old, revision=old.revision or WORKTREE)
        new = replace(new, revision=new.revision or WORKTREE)
    gate = resolve_revisions(new_gate(job, old, new, settings), output)
    folder = folder_of(output, gate)
    write_gate(folder, gate)
    return _run(gate, folder, listener)


def resume_gate(
    gate: str, *, output: Path, max_minutes: float | None, listener: Listener
) -> GateVerdict:
    """Resume a gate that was interrupted, or is not decided.

    Args:
        gate: its id, the beginning of its id, its folder, or `latest`.
        output: the results folder.
        max_minutes: limit of this call; None: the limit of the gate.
        listener: is called with each event.

    Raises:
        ResultsError: there is no such gate, or another process measures it.
    """
    folder = find_gate(output, gate)
    stored_gate = read_gate(folder)
    if max_minutes is not None:
        settings = replace(stored_gate.settings, max_minutes=max_minutes)
        stored_gate = replace(stored_gate, settings=settings)
    return _run(stored_gate, folder, listener)


def _run(gate: Gate, folder: Path, listener: Listener) -> GateVerdict:
    """Measure pairs until each point is decided or no further pair fits the time."""
    with lock_gate(folder):
        runner = _Runner(gate=gate, folder=folder, listener=listener)
        verdict = runner.run()
        # A gate that stopped early can be resumed, which needs the worktrees.
        if verdict.stopped is None:
            remove_worktrees(gate, folder)
        return verdict


class _Runner:
    """Runs the pairs of a gate."""

    def __init__(self, *, gate: Gate, folder: Path, listener: Listener) -> None:
        self._gate, self._folder, self._notify = gate, folder, listener
        self._checkouts: dict[Side, Checkout] = {}

    def run(self) -> GateVerdict:
        """Measure pairs until no point is open or the time is up; return the verdict."""
        limit_s = 60 * (self._gate.settings.max_minutes or float("inf"))
        began_s, last_pair_s = time.monotonic(), 0.0
        while True:
            starts = self._ended_starts()
            pairs = PairedStarts(starts=[start for start in starts if start.is_finished])
            # None: the first pair measures all points, because nothing is decided yet.
            points: Sequence[PairedPoint] | None = None
            verdict = self._verdict(pairs)
            if pairs.complete_pairs:
                points = open_points(pairs, decisions_of(pairs, self._gate))
                self._notify(Looked(verdict=verdict, open=len(points)))
                if not points or len(pairs.complete_pairs) >= _MOST_PAIRS:
                    return verdict
            elapsed_s = time.monotonic() - began_s
            # Assume that the next pair takes as long as the last pair.
            if last_pair_s and elapsed_s + last_pair_s > limit_s:
                return self._verdict(pairs, OpenReason(kind=WhyOpen.TIME))
            try:
                # Set up both sides first, so that a build that fails wastes no measured start.
                for side in Side:
                    self._checkout(side)
                pair_began_s = time.monotonic()
                self._measure_pair(starts, pairs, points)
            except SideError as error:
                pairs = PairedStarts(starts=[s for s in read_starts(self._folder) if s.is_finished])
                reason = OpenReason(
                    kind=WhyOpen.STOPPED, side=error.side, text=error.reason, log=error.log
                )
                return self._verdict(pairs, reason)
            last_pair_s = time.monotonic() - pair_began_s

    def _ended_starts(self) -> list[Start]:
        """Return all starts, after waiting for a start that a killed gate left running."""
        is_told = False
        while True:
            starts = read_starts(self._folder)
            running = [start for start in starts if start.is_running_here]
            if not running:
                return starts
            if not is_told:
                self._notify(Waiting(run_id=running[0].run.run_id))
                is_told = True
            time.sleep(_POLL_S)

    def _verdict(self, pairs: PairedStarts, stopped: OpenReason | None = None) -> GateVerdict:
        """Return the verdict after these pairs; `stopped` says why measuring ends early."""
        devices = devices_of(self._folder, pairs.starts[-1]) if pairs.starts else []
        host_count = len({device.host for device in devices})
        return verdict_of(self._gate, self._folder, pairs, host_count, stopped)

    def _measure_pair(
        self, starts: Sequence[Start], pairs: PairedStarts, points: Sequence[PairedPoint] | None
    ) -> None:
        """Complete the last pair if it was interrupted; otherwise measure a new pair.

        Args:
            starts: all starts, also those that were interrupted.
            pairs: the finished starts.
            points: points to measure; None: all points of the job.
        """
        pair = max((start.pair for start in starts), default=1)
        starts_of_pair = {start.side: start for start in starts if start.pair == pair}
        is_complete = len(pairs.by_pair.get(pair, {})) == len(Side)
        if is_complete or any(start.age_s > _FRESH_S for start in starts_of_pair.values()):
            # Begin a new pair. In an old pair, the machine may have changed since its first start.
            pair, starts_of_pair = pair + 1, {}
        for side in self._gate.order(pair):
            start = starts_of_pair.get(side)
            if start is not None and start.is_finished:
                continue
            point_count = None if points is None else len(points)
            self._notify(Begun(side=side, pair=pair, points=point_count))
            filter_words: list[str] = []
            if points is not None and len(points) < len(pairs.points):
                ids = ", ".join(repr(point.ids[side]) for point in points)
                filter_words = ["--filter", f"point_id in ({ids},)"]
            self._measure(side, pair, filter_words, start)

    def _measure(
        self, side: Side, pair: int, filter_words: Sequence[str], interrupted: Start | None
    ) -> None:
        """Measure points on one side in a new start, or resume an interrupted start."""
        checkout = self._checkout(side)
        words = [*self._command(side, checkout), *filter_words]
        if interrupted is None:
            words += ["--tag", f"{SIDE_TAG}={side}", "--tag", f"{PAIR_TAG}={pair}"]
        else:
            words += ["--resume", interrupted.run.run_id]
        log = self._folder / "logs" / f"pair-{pair:02}-{side}.log"
        try:
            code = run_sweep(words, checkout, log)
        except OSError as error:
            reason = f"{words[0]}: cannot be started: {error.strerror}"
            raise SideError(side, reason) from error
        if code not in _CODES_WITH_ALL_ROWS:
            last_words = last_line(log.read_text(errors="replace"))
            raise SideError(side, f"the sweep ended with exit code {code}: {last_words}", log)
        finished = [start for start in read_starts(self._folder) if start.is_finished]
        of_this_sweep = [start for start in finished if (start.side, start.pair) == (side, pair)]
        if not of_this_sweep:
            last_words = last_line(log.read_text(errors="replace"))
            raise SideError(side, f"the sweep left no finished run: {last_words}", log)
        start = of_this_sweep[-1]
        # Only a gate with commits has worktrees, from which the files must come.
        files = start.run.workload_files if self._gate.commits else {}
        foreign_files = files_from_elsewhere(checkout, files) if files else []
        if foreign_files:
            raise SideError(
                side,
                f"{foreign_files[0]} was imported from outside of the worktree, where another "
                "version is installed; build each side with --setup, and name its --python",
            )
        self._use_same_devices_later(start)

    def _checkout(self, side: Side) -> Checkout:
        """Check out a side once in this process."""
        if side not in self._checkouts:
            if command := self._gate.settings.setup:
                self._notify(SettingUp(side=side, command=command))
            self._checkouts[side] = check_out(self._gate, side, self._folder)
            self._notify(Prepared(side=side, folder=self._checkouts[side].folder))
        return self._checkouts[side]

    def _command(self, side: Side, checkout: Checkout) -> list[str]:
        """Return the command line of a sweep of one side, without the choice of points."""
        settings, version = self._gate.settings, self._gate.version(side)
        words = [checkout.python, "-m", "raybench", "sweep", str(checkout.job)]
        words += ["-o", str(self._folder)]
        # A gate compares whole steps, so it needs no breakdown.
        overrides = ["measure.breakdown=false", *settings.overrides, *version.overrides]
        for override in (*overrides, "measure.rounds=1"):
            words += ["--set", override]
        words += ["--address", settings.address, "--device", settings.device]
        words += ["--wait", f"{settings.wait_s:g}"]
        if settings.devices_file:
            words += ["--devices", str(self._gate.cwd / settings.devices_file)]
        elif self._devices_file.exists():
            words += ["--devices", str(self._devices_file)]
        return words

    @property
    def _devices_file(self) -> Path:
        return self._folder / "devices.txt"

    def _use_same_devices_later(self, start: Start) -> None:
        """Store the devices of the first start; all later starts use the same devices."""
        if not self._devices_file.exists():
            devices = devices_of(self._folder, start)
            write_device_list(self._devices_file, devices, f"devices of {start.run.run_id}")


def run_sweep(words: Sequence[str], checkout: Checkout, log: Path) -> int:
    """Run a sweep, with its output in the log, and return its exit code; an interrupt ends it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        # A new session, because otherwise the terminal would send Ctrl-C to the sweep too.
        process = subprocess.Popen(
            words,
            cwd=checkout.folder,
            env=dict(checkout.env),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
