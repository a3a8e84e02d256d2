"""Measure both sides in turns until each point is decided, and go on with a gate that was cut."""

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
    hold_gate,
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
from raybench.errors import ResultsError
from raybench.records.devices import write_device_list

# Upper bound of the pairs; a point that fails is measured in more pairs than the last look needs.
_MOST_PAIRS = LOOKS[-1] + CONFIRMING_PAIRS + 2 * MOST_FAILURES
# The second start of a pair that was cut is measured if the first start is younger. The machine
# would have changed meanwhile, so an older pair is measured again.
_FRESH_S = 1800.0
# How long an interrupted sweep may take to write its rows.
_CLOSE_S = 30.0
_POLL_S = 1.0
# Exit codes of a sweep whose points all have a row.
_ALL_ENDED = (0, 1)


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
    """The points after another pair."""

    verdict: GateVerdict
    # Number of points that need another pair.
    open: int


Listener = Callable[[Prepared | Begun | Looked], None]


def ab(
    job: str | Path,
    old: str | Version = "",
    new: str | Version = "",
    settings: Settings | None = None,
    *,
    output: str | Path = "results",
    listener: Listener | None = None,
) -> GateVerdict:
    """Measure two versions in turns until each point of a job is decided.

    Args:
        old, new: a git revision, WORKTREE, or a `Version`. Without any revision both sides measure
            the current folder; a single revision is compared with WORKTREE.
        settings: threshold, limits, set-up command, devices.
        output: the results folder; the gate has a folder `ab/<gate id>` of its own in it.
        listener: gets what happens.

    Raises:
        UsageError: a revision, a job file or a setting is wrong.
        KeyboardInterrupt: `resume_ab` goes on.
    """
    versions = [
        side if isinstance(side, Version) else Version(revision=side) for side in (old, new)
    ]
    if any(version.revision for version in versions):
        versions = [replace(version, revision=version.revision or WORKTREE) for version in versions]
    gate = new_gate(Path(job), versions[0], versions[1], settings or Settings())
    gate = resolve_revisions(gate, Path(output))
    folder = folder_of(Path(output), gate)
    write_gate(folder, gate)
    return _run(gate, folder, listener)


def resume_ab(
    gate: str = "latest",
    *,
    output: str | Path = "results",
    max_minutes: float | None = None,
    listener: Listener | None = None,
) -> GateVerdict:
    """Go on with a gate that was interrupted, or is not decided.

    Args:
        gate: its id, the beginning of its id, its folder, or `latest`.
        output: the results folder.
        max_minutes: in place of the limit of the gate.
        listener: gets what happens.

    Raises:
        ResultsError: there is no such gate, or another process goes on with it.
    """
    folder = find_gate(Path(output), gate)
    found = read_gate(folder)
    if max_minutes is not None:
        found = replace(found, settings=replace(found.settings, max_minutes=max_minutes))
    return _run(found, folder, listener)


def _run(gate: Gate, folder: Path, listener: Listener | None) -> GateVerdict:
    """Measure pairs until each point is decided or no further pair fits the time."""
    tell = listener or (lambda _: None)
    with hold_gate(folder):
        runner = _Runner(gate=gate, folder=folder, tell=tell)
        verdict = runner.run()
        if verdict.stopped is None:
            remove_worktrees(gate, folder)
        return verdict


class _Runner:
    """Runs the pairs of a gate."""

    def __init__(self, *, gate: Gate, folder: Path, tell: Listener) -> None:
        self._gate, self._folder, self._tell = gate, folder, tell
        self._checkouts: dict[Side, Checkout] = {}

    def run(self) -> GateVerdict:
        """Return the verdict after as many pairs as are needed and allowed."""
        limit_s = 60 * (self._gate.settings.max_minutes or float("inf"))
        began_s, pair_s = time.monotonic(), 0.0
        while True:
            starts = self._ended_starts()
            pairs = PairedStarts(starts=[start for start in starts if start.is_finished])
            # Before the first pair is complete, it is unknown which points both sides have.
            todo = open_points(pairs, decisions_of(pairs, self._gate)) if pairs.complete else []
            verdict = self._verdict(pairs)
            if pairs.complete:
                self._tell(Looked(verdict=verdict, open=len(todo)))
                if not todo or len(pairs.complete) >= _MOST_PAIRS:
                    return verdict
            elapsed_s = time.monotonic() - began_s
            if pair_s and elapsed_s + pair_s > limit_s:
                return self._verdict(pairs, OpenReason(kind=WhyOpen.TIME))
            try:
                # Both before any start: a build that fails costs no measuring.
                for side in Side:
                    self._checkout(side)
                pair_began_s = time.monotonic()
                self._measure_pair(starts, pairs, todo)
            except SideError as error:
                pairs = PairedStarts(starts=[s for s in read_starts(self._folder) if s.is_finished])
                reason = OpenReason(kind=WhyOpen.STOPPED, side=error.side, text=error.reason)
                return self._verdict(pairs, reason)
            pair_s = time.monotonic() - pair_began_s

    def _ended_starts(self) -> list[Start]:
        """Return all starts; wait for a start that a killed gate has left running."""
        while True:
            starts = read_starts(self._folder)
            if not any(start.is_running_here for start in starts):
                return starts
            time.sleep(_POLL_S)

    def _verdict(self, pairs: PairedStarts, stopped: OpenReason | None = None) -> GateVerdict:
        devices = devices_of(self._folder, pairs.starts[-1]) if pairs.starts else []
        hosts = len({device.host for device in devices})
        return verdict_of(self._gate, self._folder, pairs, hosts, stopped)

    def _measure_pair(
        self, starts: Sequence[Start], pairs: PairedStarts, todo: Sequence[PairedPoint]
    ) -> None:
        """Measure the open points on both sides, or on the sides that the last pair lacks."""
        last = max((start.pair for start in starts), default=0)
        of_last = {start.side: start for start in starts if start.pair == last}
        is_complete = len(pairs.by_pair.get(last, {})) == len(Side)
        if is_complete or any(start.age_s > _FRESH_S for start in of_last.values()):
            last, of_last = last + 1, {}
        for side in self._gate.order(max(last, 1)):
            start = of_last.get(side)
            if start is None or not start.is_finished:
                is_part = 0 < len(todo) < len(pairs.points)
                self._measure(side, max(last, 1), todo, is_part, start)

    def _measure(
        self,
        side: Side,
        pair: int,
        todo: Sequence[PairedPoint],
        is_part: bool,
        cut: Start | None,
    ) -> None:
        """Run the sweep of one side; `cut`: a start to go on with."""
        checkout = self._checkout(side)
        self._tell(Begun(side=side, pair=pair, points=len(todo) if todo else None))
        words = self._words(side, checkout)
        if is_part:
            ids = ", ".join(repr(point.ids[side]) for point in todo)
            words += ["--filter", f"point_id in ({ids},)"]
        if cut is None:
            words += ["--tag", f"{SIDE_TAG}={side}", "--tag", f"{PAIR_TAG}={pair}"]
        else:
            words += ["--resume", cut.run.run_id]
        log = self._folder / "logs" / f"pair-{pair:02}-{side}.log"
        code = run_sweep(words, checkout, log)
        if code not in _ALL_ENDED:
            raise SideError(side, f"the sweep ended with exit code {code}: {_said(log)}; see {log}")
        starts = read_starts(self._folder)
        of_side = [s for s in starts if s.is_finished and (s.side, s.pair) == (side, pair)]
        if not of_side:
            raise SideError(side, f"the sweep left no finished run; see {log}")
        start = of_side[-1]
        if self._gate.commits and (
            names := files_from_elsewhere(checkout, start.run.workload_files)
        ):
            raise SideError(
                side,
                f"{names[0]} was imported from outside of the worktree, where another version is "
                "installed; build each side with --setup, and name its --python",
            )
        self._keep_devices(start)

    def _checkout(self, side: Side) -> Checkout:
        """Check out a side once in this process."""
        if side not in self._checkouts:
            self._checkouts[side] = check_out(self._gate, side, self._folder)
            self._tell(Prepared(side=side, folder=self._checkouts[side].folder))
        return self._checkouts[side]

    def _words(self, side: Side, checkout: Checkout) -> list[str]:
        """Return the command of a sweep of one side, without the choice of points."""
        settings, version = self._gate.settings, self._gate.version(side)
        words = [checkout.python, "-m", "raybench", "sweep", str(checkout.job)]
        words += ["-o", str(self._folder)]
        # The parts of the step are not compared.
        texts = ["measure.breakdown=false", *settings.overrides, *version.overrides]
        for text in (*texts, "measure.rounds=1"):
            words += ["--set", text]
        words += ["--address", settings.address, "--device", settings.device]
        words += ["--wait", f"{settings.wait_s:g}"]
        file = settings.devices_file or self._devices_file
        if file.exists():
            words += ["--devices", str(self._gate.cwd / file)]
        return words

    @property
    def _devices_file(self) -> Path:
        return self._folder / "devices.txt"

    def _keep_devices(self, start: Start) -> None:
        """Make all later starts use the devices of the first one."""
        if not self._devices_file.exists():
            devices = devices_of(self._folder, start)
            write_device_list(self._devices_file, devices, f"devices of {start.run.run_id}")


def run_sweep(words: Sequence[str], checkout: Checkout, log: Path) -> int:
    """Run a sweep with its output in the log; an interrupt ends it first."""
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with log.open("wb") as file:
            # A session of its own, or the terminal would also send its Ctrl-C to the sweep.
            process = subprocess.Popen(
                words,
                cwd=checkout.folder,
                env=dict(checkout.env),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise ResultsError(f"{words[0]}: cannot be started: {error.strerror}") from error
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _said(log: Path) -> str:
    """Return the last line of a log."""
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no message")
