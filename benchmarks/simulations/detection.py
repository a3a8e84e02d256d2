"""What a health check finds, and how often it names or drains a healthy node.

    python -m benchmarks.simulations.detection -o raybench/health/detection.json [--jobs 2]

Made-up values of all compared tests of the suite go through the real `judge`. The floor of a test
is the noise of healthy devices: a device keeps half of the variance in all passes, and each pass
adds the other half. Where the model has references, all devices of a check share a further
deviation, as wide as the reference says that hosts and days differ. The model is NVIDIA H200 with
its shipped references, or one without references.

A slow device lacks the same share of its speed in each product and in its memory, and in no other
test. It is found if a finding about it is suspect or bad.

full: all stages in three passes. quick: the tests in `QUICK_TESTS` in one pass; a test with a slow
device runs a second time, and a device fails if it is slow in both. drains: a device is bad in a
full check, or fails in a quick one. alarms: something is suspect or bad.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from benchmarks.common import options, write_result
from benchmarks.made_up import devices as made_up_devices
from raybench.analysis.references import SHIPPED, Quantity
from raybench.health.readings import Reading
from raybench.health.suite import SUITE, HealthTest, device_subjects
from raybench.health.verdicts import Judgement, judge
from raybench.records.detection import CheckMode, DetectionLimit
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import Subject

FOUND_SHARE = 0.99
PASSES = 3
GRID = tuple(round(0.01 * step, 2) for step in range(1, 91))
MODEL, UNKNOWN_MODEL = "NVIDIA H200", "a model without references"
# Half of the width of a 99 % range of a reference / the standard deviation that it stands for.
SIGMAS_OF_A_RANGE = 2.576
# What `raybench health --quick` runs on one node.
QUICK_TESTS = {
    "cuda": (
        *("same bits fp32 2048", "same bits bf16 2048", "memory 1000 MB"),
        *(f"gemm {precision} 8192" for precision in ("fp32", "tf32", "fp16", "bf16")),
        *("h2d alone", "d2h alone", "all_reduce 1 GiB"),
    ),
    "cpu": ("gemm fp32 512", "memory 16 MB", "same bits fp32 256", "all_reduce 1 MiB"),
}
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

    def _typical(self, test: HealthTest) -> tuple[float, float]:
        """Return the typical value of a test, and the deviation that all devices share."""
        where = {"device": "device", "pair": "pair on a node"}.get(
            test.subjects, f"{min(8, self.count)} on a node"
        )
        fabric = "" if test.subjects == "device" else "NVLink x18"
        of = {"test": test.name, "where": where}
        quantity = Quantity(of=of, metric="value", unit=test.unit, fabric=fabric)
        entry = SHIPPED.find(self.devices[0].name, quantity)
        if entry is None:
            return TYPICAL, 0.0
        deviation = entry.half_width / SIGMAS_OF_A_RANGE
        return entry.value, float(np.sqrt(max(0.0, deviation**2 - test.floor**2)))

    def is_slowed(self, test: HealthTest) -> bool:
        """Whether a slow device is slow in this test."""
        return test.stage == "alone" and test.workload in ("gemm", "same_bits", "memory")


class Check:
    """One simulated check; further passes keep what the devices are like."""

    def __init__(self, rng: np.random.Generator, cell: Cell, slowdown: float) -> None:
        self._rng, self._cell = rng, cell
        self._levels = []
        for test, subjects, typical, shared in cell.cells:
            own = test.floor / np.sqrt(2) * rng.standard_normal(len(subjects))
            level = np.exp(shared * rng.standard_normal() + own)
            if slowdown and cell.is_slowed(test):
                level[0] *= 1 - slowdown
            # Values that are times grow as the speed falls.
            self._levels.append(typical / level if test.is_time else typical * level)

    def readings(self, number: int, names: frozenset[str] | None = None) -> Iterator[Reading]:
        """Yield the readings of a pass; names: of the tests, None for all."""
        for (test, subjects, _, _), level in zip(self._cell.cells, self._levels, strict=True):
            if names is not None and test.name not in names:
                continue
            noise = test.floor / np.sqrt(2) * self._rng.standard_normal(len(subjects))
            values = (level * np.exp(noise)).tolist()
            for subject, value in zip(subjects, values, strict=True):
                yield Reading(test=test, subject=subject, pass_number=number, value=value)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a check said: whether it named device 0, anything, and whether it drains the node."""

    is_found: bool
    is_alarm: bool
    is_drained: bool


def outcome(rng: np.random.Generator, cell: Cell, slowdown: float) -> Outcome:
    """Simulate and judge one check; slowdown: of device 0, 0 for a healthy fleet."""
    check = Check(rng, cell, slowdown)
    if cell.mode == "full":
        readings: list[Reading] = []
        for number in range(1, PASSES + 1):
            readings += check.readings(number)
        slow = unhealthy(judge(readings, cell.devices))
        is_drained = any(one.verdict == "bad" and one.subject.kind != "pair" for one in slow)
    else:
        slow = failed_twice(check, cell)
        is_drained = any(one.subject.kind == "device" for one in slow)
    first = cell.devices[0].uuid if cell.kind == "cuda" else f"{cell.devices[0].host}/0"
    return Outcome(
        is_found=any(one.subject.uuids == (first,) for one in slow),
        is_alarm=bool(slow),
        is_drained=is_drained,
    )


def failed_twice(check: Check, cell: Cell) -> list[Judgement]:
    """Return the findings of a quick check that were made in both runs of a test."""
    once = unhealthy(judge(list(check.readings(1)), cell.devices))
    if not once:
        return []
    doubtful = frozenset(one.test.name for one in once)
    again = unhealthy(judge(list(check.readings(1, doubtful)), cell.devices))
    named = {(one.test.name, one.subject) for one in once}
    return [one for one in again if (one.test.name, one.subject) in named]


def unhealthy(findings: Iterable[Judgement]) -> list[Judgement]:
    return [one for one in findings if one.verdict.is_suspect_or_bad]


def found_share(cell: Cell, slowdown: float, checks: int) -> float:
    """Return the share of checks that find a device with this slowdown."""
    rng = seeded(cell, f"{slowdown}")
    return sum(outcome(rng, cell, slowdown).is_found for _ in range(checks)) / checks


def seeded(cell: Cell, purpose: str) -> np.random.Generator:
    text = f"{cell.mode} {cell.kind} {cell.count} {cell.has_references} {purpose}"
    return np.random.default_rng(zlib.crc32(text.encode()))


def row(checks: int, healthy: int, cell: Cell) -> DetectionLimit:
    """Return the row of a cell: bisect the slowdown, then count alarms of healthy fleets."""
    low, high, found = 0, len(GRID) - 1, found_share(cell, GRID[-1], checks)
    has_limit = found >= FOUND_SHARE
    while has_limit and low < high:
        middle = (low + high) // 2
        share = found_share(cell, GRID[middle], checks)
        low, high, found = (
            (low, middle, share) if share >= FOUND_SHARE else (middle + 1, high, found)
        )
    alarms, drains = count_alarms(cell, healthy)
    return DetectionLimit(
        mode=cell.mode,
        kind=cell.kind,
        devices=cell.count,
        has_references=cell.has_references,
        slowdown=GRID[high] if has_limit else None,
        found_share=found,
        checks=checks,
        healthy_checks=healthy,
        alarms=alarms,
        drains=drains,
    )


def count_alarms(cell: Cell, checks: int) -> tuple[int, int]:
    """Return in how many checks of healthy devices something is named, and a node is drained."""
    rng = seeded(cell, "healthy")
    outcomes = [outcome(rng, cell, 0.0) for _ in range(checks)]
    return sum(one.is_alarm for one in outcomes), sum(one.is_drained for one in outcomes)


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
        for count in (1, 2, 4, 8, 16) if mode == "full" else (1, 2, 4, 8):
            found.append(Cell(mode, kind, count, references))
    # The longest first, so that no process works alone at the end.
    return sorted(found, key=lambda cell: cell.count, reverse=True)


def measured_row(checks: int, healthy: int, cell: Cell) -> DetectionLimit:
    """Return the row of a cell, with fewer healthy checks for a full check, which takes longer."""
    return row(checks, healthy // (cell.count + 8) if cell.mode == "full" else healthy, cell)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--checks", type=int, default=1_000, help="of each slowdown")
    parser.add_argument("--healthy", type=int, default=32_000, help="checks of healthy devices")
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    output: Path | None = chosen.output
    with ProcessPoolExecutor(chosen.jobs) as pool:
        rows: Sequence[DetectionLimit] = list(
            pool.map(partial(measured_row, chosen.checks, chosen.healthy), cells())
        )
    write_result({"rows": [asdict(one) for one in rows]}, output)


if __name__ == "__main__":
    main()
