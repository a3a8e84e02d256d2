"""Readings of one test of similar subjects, as a table of passes and subjects. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raybench.health.readings import Problem, Reading
from raybench.health.suite import HealthTest, device_subjects
from raybench.records import Device
from raybench.records.health import Subject, SubjectKind
from raybench.stats.outliers import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How many devices a subject has, and on how many nodes; only equal placements are compared.

    level: for a pair on a node how the driver names its connection, as "NV18" or "PHB".
    """

    kind: SubjectKind = "device"
    devices: int = 1
    nodes: int = 1
    level: str = ""

    def __str__(self) -> str:
        """Return how references say it: "device", "pair on a node", "4 on 2 nodes"."""
        if self.kind == "device":
            return "device"
        if self.kind == "pair":
            return "pair on a node" if self.nodes == 1 and self.devices == 2 else "pair of nodes"
        return f"{self.devices} on {'a node' if self.nodes < 2 else f'{self.nodes} nodes'}"


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class Group:
    """The readings of one test of subjects of one model and placement.

    topology: of one of their devices. values: [passes, subjects], NaN where there is none; passes
    that fewer than half of the subjects have are left out.
    problems: by the column of the subject, of all passes, without repeats. pass_count: of all
    passes.
    """

    test: HealthTest
    placement: Placement
    topology: str
    subjects: Sequence[Subject]
    values: Floats
    problems: Mapping[int, Sequence[Problem]]
    failed_passes: Mapping[int, int]
    pass_count: int

    @cached_property
    def typical(self) -> Floats:
        """Return the median over the passes of each subject; NaN where none has a value."""
        known = ~np.isnan(self.values).all(axis=0)
        found = np.full(self.values.shape[1], np.nan)
        found[known] = np.nanmedian(self.values[:, known], axis=0)
        return found

    @property
    def model(self) -> str:
        """Return the model of the devices."""
        return self.subjects[0].model


def devices_by_uuid(devices: Sequence[Device]) -> dict[str, Device]:
    """Return each device by the identity that its subject has."""
    subjects = device_subjects(devices)
    return {subject.uuids[0]: device for subject, device in zip(subjects, devices, strict=True)}


def group_readings(readings: Iterable[Reading], known: Mapping[str, Device]) -> list[Group]:
    """Return the groups within which subjects are compared, in the order of the tests."""
    cells: dict[tuple[str, str, Placement], list[Reading]] = {}
    placements: dict[Subject, Placement] = {}
    for reading in readings:
        subject = reading.subject
        if subject not in placements:
            placements[subject] = placement_of(subject, known)
        placement = placements[subject]
        cells.setdefault((reading.test.name, subject.model, placement), []).append(reading)
    return [_group(found, placement, known) for (_, _, placement), found in cells.items()]


def _group(readings: Sequence[Reading], placement: Placement, known: Mapping[str, Device]) -> Group:
    """Return the group of readings of one test, model and placement."""
    subjects = list({reading.subject.uuids: reading.subject for reading in readings}.values())
    columns = {subject.uuids: column for column, subject in enumerate(subjects)}
    numbers = sorted({reading.pass_number for reading in readings})
    lines = {number: line for line, number in enumerate(numbers)}
    values = np.full((len(numbers), len(subjects)), np.nan)
    problems: dict[int, list[Problem]] = {}
    failed_passes: dict[int, int] = {}
    for reading in readings:
        column = columns[reading.subject.uuids]
        if reading.value is not None:
            values[lines[reading.pass_number], column] = reading.value
        if reading.problem and reading.problem not in problems.setdefault(column, []):
            problems[column].append(reading.problem)
        if reading.problem and reading.problem.kind == "failed":
            failed_passes[column] = failed_passes.get(column, 0) + 1
    # In a pass of fewer than half of the subjects the median would be that of few.
    counts = (~np.isnan(values)).sum(axis=1)
    first = known.get(subjects[0].uuids[0]) if subjects[0].uuids else None
    return Group(
        test=readings[0].test,
        placement=placement,
        topology=(first.topology or "") if first else "",
        subjects=subjects,
        values=values[2 * counts >= counts.max()] if counts.any() else values,
        problems=problems,
        failed_passes=failed_passes,
        pass_count=len(numbers),
    )


def placement_of(subject: Subject, known: Mapping[str, Device]) -> Placement:
    """Return how many devices the subject has, and where. known: devices by UUID."""
    if subject.kind == "device":
        return Placement()
    devices = [known[uuid] for uuid in subject.uuids if uuid in known]
    nodes = len({device.node_id for device in devices})
    if subject.kind != "pair":
        # A half of the cluster may be a node.
        kind: SubjectKind = "node" if nodes < 2 else "cluster"
        return Placement(kind=kind, devices=len(devices), nodes=nodes)
    level = None
    if len(devices) == 2 and nodes == 1:
        level = re.search(rf"\b{devices[1].index}:(\w+)", devices[0].topology or "")
    return Placement(
        kind="pair", devices=len(devices), nodes=nodes, level=level[1] if level else ""
    )
