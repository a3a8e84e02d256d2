"""What a health check finds, and how often it names or drains a healthy node.

    python -m benchmarks.simulations.detection -o raybench/health/detection.json [--jobs 2]

Made-up values of all compared tests of the suite go through the real `judge`. The floor of a test
is the noise of healthy devices: a device keeps half of the variance in all passes, and each pass
adds the other half. Where the model has references, all devices of a check share a further
deviation, as wide as the starts in the reference scatter over hosts and days. The model is NVIDIA
H200 with its shipped references, or one without references.

A slow device lacks the same share of its speed in each product and in its memory, and in no other
test. It is found if a finding about it is suspect or bad.

full: all stages in three passes. quick: the tests in `QUICK_TESTS` in one pass; a test with a slow
device runs a second time, and a device fails if it is slow in both. drains: a device is bad in a
full check, or fails in a quick one, and is clearly slow (`is_clearly_slow`). alarms: something is
suspect or bad.
"""

from __future__ import annotations

import itertools
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import options, write_result
from benchmarks.made_up import devices as made_up_devices
from raybench.analysis.references import SHIPPED, Entry, Quantity
from raybench.health.nodes import is_clearly_slow
from raybench.health.quick.selection import QUICK_TESTS
from raybench.health.readings import Reading
from raybench.health.references import limit_elsewhere
from raybench.health.suite import SUITE, HealthTest, device_subjects
from raybench.health.verdicts import Judgement, judge
from raybench.records.detection import CheckMode, DetectionLimit
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import Subject
from raybench.stats.outliers import (
    FEW_FLOORS,
    FEW_SHARE,
    LEAST_ALIKE,
    SLOW_SHARE,
    SLOW_SIGMAS,
)

Values = NDArray[np.float64]

FOUND_SHARE = 0.99
PASSES = 3
# Of tests whose pace the host sets: `launch` and `launch and wait` of two H200s in the four checks
# of which results/examples and tests/unit/health/test_verdicts.py keep the values. The floor of
# these tests is the largest difference that was seen.
HOST_NOISE = 0.17
# Share of a limit from which on a verdict is made.
NEAR = 0.85
BATCH = 1_000
GRID = tuple(round(0.01 * step, 2) for step in range(1, 91))
MODEL, UNKNOWN_MODEL = "NVIDIA H200", "a model without references"
# Typical values, for tests without a reference; only ratios count.
TYPICAL = 100.0


@dataclass(frozen=True)  # no slots: it keeps what it has computed
class Cell:
    """The checks of one row."""

    mode: CheckMode
    kind: DeviceKind
    count: int
    has_references: bool

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices: eight a node, of one model."""
        made = made_up_devices(-(-self.count // 8))[: self.count]
        model = MODEL if self.has_references else UNKNOWN_MODEL
        return tuple(
            replace(device, kind=self.kind, name=model, topology="NVLink x18", environment={})
            for device in made
        )

    @cached_property
    def cells(self) -> list[tuple[HealthTest, tuple[Subject, ...], float, float]]:
        """Return (test, subjects, typical value, shared deviation) of each compared test."""
        names: set[str] = set()
        cells = []
        for test in SUITE[self.kind]:
            is_asked = self.mode == "full" or test.name in QUICK_TESTS[self.kind]
            subjects = tuple(self._subjects(test))
            # Both directions of a pair are one test.
            if test.is_compared and is_asked and subjects and test.name not in names:
                names.add(test.name)
                cells.append((test, subjects, *self._typical(test)))
        return cells

    def _subjects(self, test: HealthTest) -> Iterator[Subject]:
        """Yield the subjects of a test; a group of all devices has no peer and is left out."""
        subjects = device_subjects(self.devices)
        nodes = [subjects[start : start + 8] for start in range(0, self.count, 8)]
        if test.stage == "burn-in" or test.subjects == "cluster":
            return
        if test.subjects == "device":
            yield from subjects
        for node in nodes if self.count > 1 else ():
            if test.subjects == "pair":
                for start, end in itertools.permutations(node, 2):
                    name = f"{start.name} to {end.name}"
                    uuids = (*start.uuids, *end.uuids)
                    yield Subject(kind="pair", uuids=uuids, name=name, model=start.model)
            elif test.subjects == "node":
                uuids = tuple(subject.uuids[0] for subject in node)
                yield Subject(kind="node", uuids=uuids, name=node[0].name, model=node[0].model)

    def entry(self, test: HealthTest) -> Entry | None:
        """Return the reference of a test."""
        where = {"device": "device", "pair": "pair on a node"}.get(
            test.subjects, f"{min(8, self.count)} on a node"
        )
        fabric = "" if test.subjects == "device" else "NVLink x18"
        of = {"test": test.name, "where": where}
        quantity = Quantity(of=of, metric="value", unit=test.unit, fabric=fabric)
        return SHIPPED.find(self.devices[0].name, quantity)

    def _typical(self, test: HealthTest) -> tuple[float, float]:
        """Return the typical value of a test, and the deviation that all devices share."""
        entry = self.entry(test)
        if entry is None:
            return TYPICAL, 0.0
        starts: list[float] = []
        for starts_by_devices in entry.measured.values():
            for values in starts_by_devices.values():
                starts += values
        deviation = float(np.std(np.log(starts), ddof=1)) if len(starts) > 1 else 0.0
        return entry.value, float(np.sqrt(max(0.0, deviation**2 - test.floor**2)))

    def is_slowed(self, test: HealthTest) -> bool:
        """Whether a slow device is slow in this test."""
        return test.stage == "alone" and test.workload in ("gemm", "same_bits", "memory")


@dataclass(frozen=True, slots=True)
class Batch:
    """Simulated checks: of each test the values [checks, passes, subjects]."""

    cell: Cell
    values: Sequence[Values]

    def readings(
        self, check: int, passes: Iterable[int], names: frozenset[str] | None = None
    ) -> Iterator[Reading]:
        """Yield the readings of one check; names: of the tests, None for all."""
        for (test, subjects, _, _), values in zip(self.cell.cells, self.values, strict=True):
            if names is not None and test.name not in names:
                continue
            for number, place in enumerate(passes, 1):
                of_pass = values[check, place].tolist()
                for subject, value in zip(subjects, of_pass, strict=True):
                    yield Reading(test=test, subject=subject, pass_number=number, value=value)

    @property
    def may_alarm(self) -> NDArray[np.bool_]:
        """Whether a value of a check is near a limit, by check; the others need no verdict.

        A subject is slow only beyond the limit in each pass, or beyond that of its reference in
        their median. `NEAR` of the limits is far enough: a test compares both ways.
        """
        found = np.zeros(len(self.values[0]), dtype=np.bool_)
        for (test, subjects, _, _), values in zip(self.cell.cells, self.values, strict=True):
            times = values if test.is_time else 1.0 / values
            if len(subjects) >= LEAST_ALIKE:
                limit = NEAR * max(SLOW_SHARE, SLOW_SIGMAS * test.floor)
                beyond = times / np.median(times, axis=2, keepdims=True) - 1 > limit
                # Both groups of a divided fleet have two subjects or more.
                for of_pass in np.moveaxis(np.sort(times, axis=2), 1, 0):
                    gaps = of_pass[:, 2:-1] / of_pass[:, 1:-2] - 1
                    found |= (gaps > limit).any(axis=1)
            else:
                limit = NEAR * min(test.bad_ratio - 1, max(FEW_SHARE, FEW_FLOORS * test.floor))
                beyond = times / times.min(axis=2, keepdims=True) - 1 > limit
            found |= beyond.all(axis=1).any(axis=1)
            entry = self.cell.entry(test)
            if entry is not None:
                low, high = entry.observed
                usual = high if test.is_time else 1.0 / low
                limit = NEAR * (limit_elsewhere(test) - 1)
                found |= (np.median(times, axis=1) > (1 + limit) * usual).any(axis=1)
        return found


def noise_of(test: HealthTest, kind: DeviceKind) -> float:
    """Return the standard deviation between healthy devices, as a share of the value."""
    is_of_host = kind == "cuda" and test.is_paced_by_host
    return HOST_NOISE if is_of_host else test.floor


def draw(rng: np.random.Generator, cell: Cell, slowdown: float, checks: int) -> Batch:
    """Draw the values of checks; slowdown: of device 0, 0 for healthy devices."""
    passes = PASSES if cell.mode == "full" else 2
    batch = []
    for test, subjects, typical, shared in cell.cells:
        share = noise_of(test, cell.kind) / np.sqrt(2)
        own = share * rng.standard_normal((checks, 1, len(subjects)))
        level = np.exp(own + shared * rng.standard_normal((checks, 1, 1)))
        if slowdown and cell.is_slowed(test):
            level[:, :, 0] *= 1 - slowdown
        noise = share * rng.standard_normal((checks, passes, len(subjects)))
        speed = level * np.exp(noise)
        batch.append(typical / speed if test.is_time else typical * speed)
    return Batch(cell, batch)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check said: whether it named device 0, anything, and whether it drains the node."""

    is_found: bool = False
    is_alarm: bool = False
    is_drained: bool = False


def outcome(batch: Batch, check: int) -> Outcome:
    """Judge one check."""
    cell = batch.cell
    if cell.mode == "full":
        slow = unhealthy(judge(list(batch.readings(check, range(PASSES))), cell.devices))
        bad = [one for one in slow if one.verdict == "bad" and one.subject.kind != "pair"]
        is_drained = any(map(is_clearly_slow, bad))
    else:
        slow = failed_twice(batch, check)
        is_drained = any(one.subject.kind == "device" and is_clearly_slow(one) for one in slow)
    first = cell.devices[0].uuid if cell.kind == "cuda" else f"{cell.devices[0].host}/0"
    return Outcome(
        is_found=any(one.subject.uuids == (first,) for one in slow),
        is_alarm=bool(slow),
        is_drained=is_drained,
    )


def failed_twice(batch: Batch, check: int) -> list[Judgement]:
    """Return the findings of a quick check that were made in both runs of a test."""
    devices = batch.cell.devices
    once = unhealthy(judge(list(batch.readings(check, (0,))), devices))
    if not once:
        return []
    doubtful = frozenset(one.test.name for one in once)
    again = unhealthy(judge(list(batch.readings(check, (1,), doubtful)), devices))
    named = {(one.test.name, one.subject) for one in once}
    return [one for one in again if (one.test.name, one.subject) in named]


def unhealthy(findings: Iterable[Judgement]) -> list[Judgement]:
    return [one for one in findings if one.verdict.is_suspect_or_bad]


def found_share(cell: Cell, slowdown: float, checks: int, least: float = 0.0) -> float:
    """Return the share of checks that find a device with this slowdown.

    Args:
        least: stop as soon as the share of all checks cannot reach this share; then it is too low.
    """
    batch = draw(seeded(cell, f"{slowdown}"), cell, slowdown, checks)
    missed = 0
    for check in range(checks):
        missed += not outcome(batch, check).is_found
        if missed > (1 - least) * checks:
            return 1 - missed / (check + 1)
    return 1 - missed / checks


def seeded(cell: Cell, purpose: str) -> np.random.Generator:
    text = f"{cell.mode} {cell.kind} {cell.count} {cell.has_references} {purpose}"
    return np.random.default_rng(zlib.crc32(text.encode()))


def row(checks: int, healthy: int, cell: Cell) -> DetectionLimit:
    """Return the row of a cell: search the slowdown, then count alarms of healthy devices."""
    # Few checks find about where the limit is; all checks find it among the steps from there.
    few, place = checks // 5, 0
    end = len(GRID) if found_share(cell, GRID[-1], few, FOUND_SHARE) >= FOUND_SHARE else 0
    while place < end - 1:
        middle = (place + end - 1) // 2
        if found_share(cell, GRID[middle], few, FOUND_SHARE) >= FOUND_SHARE:
            end = middle + 1
        else:
            place = middle + 1
    slowdown, found = None, 0.0
    for step in GRID[max(0, place - 2) :] if end else ():
        found = found_share(cell, step, checks, FOUND_SHARE)
        if found >= FOUND_SHARE:
            slowdown = step
            break
    # Only a device that is 1.5 times as slow is bad in a full check, which also takes longer.
    healthy = healthy // 5 if cell.mode == "full" else healthy
    alarms, drains = count_alarms(cell, healthy)
    return DetectionLimit(
        mode=cell.mode,
        kind=cell.kind,
        devices=cell.count,
        has_references=cell.has_references,
        slowdown=slowdown,
        found_share=found,
        checks=checks,
        healthy_checks=healthy,
        alarms=alarms,
        drains=drains,
    )


def count_alarms(cell: Cell, checks: int) -> tuple[int, int]:
    """Return in how many checks of healthy devices something is named, and a node is drained."""
    rng = seeded(cell, "healthy")
    alarms = drains = 0
    for start in range(0, checks, BATCH):
        batch = draw(rng, cell, 0.0, min(BATCH, checks - start))
        outcomes = [outcome(batch, int(check)) for check in np.flatnonzero(batch.may_alarm)]
        alarms += sum(one.is_alarm for one in outcomes)
        drains += sum(one.is_drained for one in outcomes)
    return alarms, drains


def cells() -> list[Cell]:
    """Return the rows of the file."""
    modes: list[tuple[CheckMode, DeviceKind, bool]] = [
        ("quick", "cuda", True),
        ("quick", "cuda", False),
        ("quick", "cpu", False),
        ("full", "cuda", True),
        ("full", "cuda", False),
        ("full", "cpu", False),
    ]
    found = []
    for mode, kind, references in modes:
        for count in (1, 2, 4, 8):
            found.append(Cell(mode, kind, count, references))
    # The longest first, so that no process works alone at the end.
    return sorted(found, key=lambda cell: cell.count, reverse=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--checks", type=int, default=400, help="of each slowdown")
    parser.add_argument("--healthy", type=int, default=200_000, help="checks of healthy devices")
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    output: Path | None = chosen.output
    with ProcessPoolExecutor(chosen.jobs) as pool:
        rows = []
        for found in pool.map(partial(row, chosen.checks, chosen.healthy), cells()):
            rows.append(found)
            print(found, file=sys.stderr, flush=True)
    rows.sort(key=lambda one: (one.mode, one.kind, one.has_references, one.devices))
    write_result({"rows": [asdict(one) for one in rows]}, output)


if __name__ == "__main__":
    main()
