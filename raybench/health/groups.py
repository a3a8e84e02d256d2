"""Readings of one test of subjects alike, as a table of passes and subjects. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raybench.health.suite import device_subjects
from raybench.records import Device
from raybench.records.health import (
    COMM_TEST,
    NOT_READ,
    WAIT_TEST,
    WRONG_RESULT,
    HealthTest,
    Reading,
    Subject,
)
from raybench.stats.fleet import Floats

DEVICE = "device"


@dataclass(frozen=True, kw_only=True)
class Group:
    """What was read of subjects alike.

    where: how they work together, as in hardware/expected.yaml. topology: of one of their devices.
    values: [passes, subjects], NaN where there is none. problems: of each subject, in any pass.
    failures: of each subject, why a pass came to no result by its own fault, for each such pass.
    pass_count: with the passes in which nothing was read.
    """

    test: HealthTest
    where: str
    topology: str
    subjects: Sequence[Subject]
    values: Floats
    problems: Mapping[int, Sequence[str]]
    failures: Mapping[int, Sequence[str]]
    pass_count: int

    @property
    def model(self) -> str:
        """Of the devices."""
        return self.subjects[0].model

    @property
    def is_compared(self) -> bool:
        """Whether the values say how fast a subject is; others are facts, or what it waits."""
        is_figure = self.test.unit != "" and self.test.stage != "facts"
        return is_figure and self.test.name not in (WAIT_TEST, COMM_TEST)


def devices_by_uuid(devices: Sequence[Device]) -> dict[str, Device]:
    """Find the device of each subject by the identity that the subject has of it."""
    subjects = device_subjects(devices)
    return {subject.uuids[0]: device for subject, device in zip(subjects, devices, strict=True)}


def group_readings(readings: Iterable[Reading], known: Mapping[str, Device]) -> list[Group]:
    """Put together what may be held against each other, in the order of the tests."""
    cells: dict[tuple[str, str, str], list[Reading]] = {}
    places: dict[Subject, str] = {}
    for reading in readings:
        subject = reading.subject
        place = DEVICE
        if subject.kind != "device":
            if subject not in places:
                places[subject] = _where(subject, known)
            place = places[subject]
        cells.setdefault((reading.test.name, subject.model, place), []).append(reading)
    return [_group(found, place, known) for (_, _, place), found in cells.items()]


def _group(readings: Sequence[Reading], place: str, known: Mapping[str, Device]) -> Group:
    subjects = list({reading.subject.uuids: reading.subject for reading in readings}.values())
    columns = {subject.uuids: column for column, subject in enumerate(subjects)}
    numbers = sorted({reading.pass_number for reading in readings})
    lines = {number: line for line, number in enumerate(numbers)}
    values = np.full((len(numbers), len(subjects)), np.nan)
    problems: dict[int, list[str]] = {}
    failures: dict[int, list[str]] = {}
    for reading in readings:
        column = columns[reading.subject.uuids]
        if reading.value is not None:
            values[lines[reading.pass_number], column] = reading.value
        if reading.problem and reading.problem not in problems.setdefault(column, []):
            problems[column].append(reading.problem)
        is_own = not (reading.problem or "").startswith((NOT_READ, WRONG_RESULT))
        if reading.problem and reading.value is None and is_own:
            failures.setdefault(column, []).append(reading.problem)
    # Of a pass of fewer than half of the subjects the median would be that of few.
    counts = (~np.isnan(values)).sum(axis=1)
    first = known.get(subjects[0].uuids[0]) if subjects[0].uuids else None
    return Group(
        test=readings[0].test,
        where=place.split(" by ")[0],
        topology=(first.topology or "") if first else "",
        subjects=subjects,
        values=values[2 * counts >= counts.max()] if counts.any() else values,
        problems=problems,
        failures=failures,
        pass_count=len(numbers),
    )


def _where(subject: Subject, known: Mapping[str, Device]) -> str:
    """Say how the devices of a subject are connected, in words that alike subjects share."""
    devices = [known[uuid] for uuid in subject.uuids if uuid in known]
    nodes = len({device.node_id for device in devices})
    if subject.kind == "pair":
        if nodes > 1 or len(devices) < 2:
            return "pair of nodes"
        level = re.search(rf"\b{devices[1].index}:(\w+)", devices[0].topology or "")
        return f"pair on a node by {level[1]}" if level else "pair on a node"
    return f"{len(devices)} on {'a node' if nodes < 2 else f'{nodes} nodes'}"
