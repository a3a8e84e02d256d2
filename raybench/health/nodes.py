"""Which nodes of a check may run jobs: a report for each node. Pure.

A node is drained only for a test that a device failed in two passes or more, and for an error that
the driver reports. Faults that software, settings or other programs may cause do not drain a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from raybench.health.readings import HARDWARE_XIDS
from raybench.health.suite import device_subjects
from raybench.health.verdicts import OTHER_PROGRAMS_TEST, Judgement
from raybench.records.conditions import Condition
from raybench.records.device import Device
from raybench.records.devices import Action, Subject, Verdict
from raybench.records.judgement import Problem, ProblemKind, ReasonKind
from raybench.records.node_report import (
    DrainKind,
    DrainReason,
    NodeReport,
    NodeState,
    UntestedKind,
    UntestedReason,
)
from raybench.records.status import Status
from raybench.stats.outliers import FEW_FLOORS, FEW_SHARE
from raybench.version import __version__

_LEAST_FAILED_PASSES = 2
# A slow device drains its node only if it is slower than its peers by this share, and by this
# number of floors: a quarter above the limits for few devices. benchmarks/simulations/detection.py
# counts the healthy nodes that would still be drained.
_DRAIN_SHARE, _DRAIN_FLOORS = 1.25 * FEW_SHARE, 1.25 * FEW_FLOORS
# Errors of the device that the driver counts or reports. Earlier Xids are left out, because they
# stay in the kernel's log after a repair. Fewer PCIe lanes are a state and no error.
_DRIVER_ERRORS = frozenset(
    {
        *(ProblemKind.MEMORY_ERRORS, ProblemKind.ROW_PENDING, ProblemKind.BAD_ROWS),
        *(ProblemKind.PAGE_PENDING, ProblemKind.BAD_PAGES, ProblemKind.NO_SPARE_ROW),
        *(ProblemKind.LINKS_DOWN, ProblemKind.FABRIC),
    }
)
# Wrong results that no software explains.
_OWN_FAULTS = frozenset(
    {ProblemKind.CHANGED_BITS, ProblemKind.MISPLACED_BITS, ProblemKind.WRONG_RESULT}
)
# Ends of a test that the device itself may cause. Running out of memory and killed workers have
# other causes.
_DEVICE_FAILURES = frozenset({Status.ERROR, Status.TIMEOUT})
_SLOW = frozenset(
    {
        *(ReasonKind.SLOWER_THAN_PEERS, ReasonKind.SLOWER_THAN_USUAL),
        *(ReasonKind.SLOW_WITH_PARTNERS, ReasonKind.LATE),
    }
)
# A whole node is drained only if other nodes of the same check are faster.
_SLOW_NODE = frozenset({ReasonKind.SLOWER_THAN_PEERS, ReasonKind.SLOW_WITH_PARTNERS})
# Actions of a slow subject whose hardware is sound.
EXCUSES = frozenset({Action.SETTING, Action.WAIT})
_UNTESTED_KINDS: Mapping[ProblemKind, UntestedKind] = {ProblemKind.NO_ROOM: UntestedKind.BUSY}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCourse:
    """When a check ran, and whether it came to its end."""

    # ISO 8601, with the time zone.
    began: str
    seconds: float
    is_whole: bool


def node_reports(
    judgements: Sequence[Judgement], devices: Sequence[Device], course: CheckCourse
) -> tuple[NodeReport, ...]:
    """Return a report for each node of a check, in the order of its devices.

    Args:
        judgements: as `judge` returns them.
        devices: all devices that were checked, by rank.
        course: when the check ran.
    """
    by_host: dict[str, list[Subject]] = {}
    for subject, device in zip(device_subjects(devices), devices, strict=True):
        by_host.setdefault(device.host, []).append(subject)
    reports = []
    for host, subjects in by_host.items():
        uuids = {subject.uuids[0] for subject in subjects}
        of_node = [judgement for judgement in judgements if uuids & set(judgement.subject.uuids)]
        names = tuple(subject.name for subject in subjects)
        # All devices of a check are of one kind.
        report = _node_report(host, names, of_node, course)
        reports.append(replace(report, device_kind=devices[0].kind))
    return tuple(reports)


def _node_report(
    host: str, devices: tuple[str, ...], judgements: Sequence[Judgement], course: CheckCourse
) -> NodeReport:
    """Return the report of one node; `judgements` are those about its devices."""
    untested = tuple(dict.fromkeys(_untested_reasons(devices, judgements, course)))
    is_busy = any(reason.kind is UntestedKind.BUSY for reason in untested)
    drain = tuple(_drain_reasons(judgements, is_busy=is_busy))
    is_suspect = any(
        judgement.verdict.is_suspect_or_bad
        and not judgement.culprit
        and judgement.stage != "environment"
        and judgement.test.name != OTHER_PROGRAMS_TEST
        and not (is_busy and _is_slow(judgement))
        for judgement in judgements
    )
    state = NodeState.HEALTHY
    if drain:
        state = NodeState.DRAIN
    elif is_suspect:
        state = NodeState.SUSPECT
    elif untested:
        state = NodeState.UNTESTED
    return NodeReport(
        host=host,
        state=state,
        began=course.began,
        seconds=course.seconds,
        raybench_version=__version__,
        devices=devices,
        drain=drain,
        untested=untested,
        findings=tuple(judgement.finding for judgement in judgements),
    )


def _drain_reasons(judgements: Sequence[Judgement], *, is_busy: bool) -> Iterator[DrainReason]:
    """Yield why devices of a node, or its network, must not be used."""
    # Test -> subjects of the node that passed it, so that the software of the node is sound.
    passed: dict[str, set[str]] = {}
    for judgement in judgements:
        if judgement.verdict is Verdict.HEALTHY and judgement.value is not None:
            passed.setdefault(judgement.test.name, set()).add(judgement.subject.name)
    for judgement in judgements:
        subject, test = judgement.subject, judgement.test
        is_own = subject.kind in ("device", "node")
        is_excused = judgement.action in EXCUSES
        if judgement.verdict is not Verdict.BAD or judgement.culprit or is_excused or not is_own:
            continue
        kind = None
        if test.stage == "facts":
            kind = DrainKind.DRIVER_ERROR if _is_driver_error(judgement) else None
        elif test.stage == "environment" or judgement.failed_passes < _LEAST_FAILED_PASSES:
            continue
        elif _is_slow(judgement):
            # What slows the host may be software.
            may_be_software = is_busy or test.blames_host
            is_fault = is_clearly_slow(judgement) and not may_be_software
            if subject.kind == "node":
                is_fault &= _reason_kind(judgement) in _SLOW_NODE
            kind = DrainKind.FAILED_TWICE if is_fault else None
        elif subject.kind == "device":
            others = passed.get(test.name, set()) - {subject.name}
            if _is_device_fault(_problems(judgement), does_work_beside=bool(others)):
                kind = DrainKind.FAILED_TWICE
        if kind:
            yield DrainReason(kind=kind, device=subject.name, test=test.name)


def is_clearly_slow(judgement: Judgement) -> bool:
    """Return whether a subject is so slow that chance hardly explains it."""
    least = max(_DRAIN_SHARE, _DRAIN_FLOORS * judgement.test.floor)
    if judgement.stage == "host-links":
        # Copies depend on the host and its other guests.
        least = max(least, judgement.test.bad_ratio - 1)
    return judgement.ratio is not None and judgement.ratio > 1 + least


def _reason_kind(judgement: Judgement) -> ReasonKind | None:
    return judgement.reason.kind if judgement.reason else None


def _problems(judgement: Judgement) -> tuple[Problem, ...]:
    return judgement.reason.problems if judgement.reason else ()


def _is_slow(judgement: Judgement) -> bool:
    return _reason_kind(judgement) in _SLOW


def _is_driver_error(judgement: Judgement) -> bool:
    """Return whether a fact is an error of the device, and not of a program that used it."""
    return any(
        problem.kind in _DRIVER_ERRORS
        or (problem.kind is ProblemKind.NEW_XIDS and bool(HARDWARE_XIDS & set(problem.numbers)))
        for problem in _problems(judgement)
    )


def _is_device_fault(problems: Iterable[Problem], *, does_work_beside: bool) -> bool:
    """Return whether the device is at fault, and not its software.

    Args:
        problems: what was wrong in the passes.
        does_work_beside: whether the test is healthy on another device of the node.
    """
    for problem in problems:
        if problem.kind in _OWN_FAULTS:
            return True
        # Nodes with other versions of a library get other bits.
        may_be_device = problem.kind is ProblemKind.OTHER_BITS or (
            problem.kind is ProblemKind.FAILED and problem.status in _DEVICE_FAILURES
        )
        if may_be_device and does_work_beside:
            return True
    return False


def kind_of_environment(judgement: Judgement) -> UntestedKind:
    """Return why a bad fact of the environment leaves a node untested."""
    condition = judgement.reason.condition if judgement.reason else None
    is_throttled = condition is Condition.THROTTLED
    return UntestedKind.LIMITED_CLOCKS if is_throttled else UntestedKind.BROKEN_INSTALLATION


def _is_of_others(judgement: Judgement, devices: Sequence[str]) -> bool:
    """Return whether devices of other nodes kept the test from having a result."""
    problems = _problems(judgement)
    return bool(problems) and all(
        problem.kind is ProblemKind.OTHER_FAILED and not set(problem.names) & set(devices)
        for problem in problems
    )


def _untested_reasons(
    devices: Sequence[str], judgements: Sequence[Judgement], course: CheckCourse
) -> Iterator[UntestedReason]:
    """Yield why a node was not tested, or not in full."""
    if not course.is_whole:
        yield UntestedReason(kind=UntestedKind.OUT_OF_TIME)
    for judgement in judgements:
        if judgement.test.name == OTHER_PROGRAMS_TEST:
            programs = [name for reason in judgement.evidence for name in reason.names]
            yield UntestedReason(kind=UntestedKind.BUSY, detail="; ".join(programs))
        elif judgement.stage == "environment" and judgement.verdict is Verdict.BAD:
            detail = f"{judgement.test.name}: {judgement.finding.reason}"
            yield UntestedReason(kind=kind_of_environment(judgement), detail=detail)
        elif judgement.verdict is Verdict.UNTESTED and not _is_of_others(judgement, devices):
            kind = UntestedKind.NO_RESULT
            if problems := _problems(judgement):
                kind = _UNTESTED_KINDS.get(problems[0].kind, kind)
            detail = f"{judgement.subject.name}, {judgement.test.name}: {judgement.finding.reason}"
            yield UntestedReason(kind=kind, detail=detail)
    compared = {judgement.verdict for judgement in judgements} - {Verdict.UNKNOWN, Verdict.NOTE}
    if course.is_whole and not compared:
        kind = UntestedKind.NO_COMPARISON if judgements else UntestedKind.NO_RESULT
        yield UntestedReason(kind=kind)
