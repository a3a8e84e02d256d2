"""What a quick check says of its node: drain, suspect, untested or healthy. Pure.

A node is drained for a test or process that failed twice, for a device whose process is stuck in
the driver while other devices finish, and for an error that the driver reports. A slow device is
excused if another program uses it, or if a setting explains the slowness.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from raybench.health.nodes import EXCUSES, is_clearly_slow, kind_of_environment
from raybench.health.quick.children import Death, Silence
from raybench.health.quick.messages import NotStarted
from raybench.health.readings import HARDWARE_XIDS, PCIE_LANES
from raybench.health.suite import HealthTest
from raybench.health.verdicts import OTHER_PROGRAMS_TEST, Judgement
from raybench.records.device import DeviceKind
from raybench.records.devices import Action, Finding, Subject, Verdict
from raybench.records.judgement import Problem, ProblemKind, Reason, ReasonKind
from raybench.records.node_report import (
    DrainKind,
    DrainReason,
    NodeState,
    UntestedKind,
    UntestedReason,
)
from raybench.records.node_use import CpuLoad, DeviceUse, TroubleKind
from raybench.records.other_program import OtherProgram
from raybench.records.status import Status
from raybench.report.words import quick as words
from raybench.report.words.health import program_name

# A process that was silent for less time may only be slow.
_STUCK_S = 5.0
# Share of all cores that other programs use. Above the first share they may have slowed a CPU
# worker; above the second share the node is not tested.
_LOADED_SHARE, _CROWDED_SHARE = 0.1, 0.5
# With fewer busy cores other programs are not mentioned.
_LEAST_CORES = 0.2
# Exit codes of crashes: SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV. Other signals come from outside.
_CRASHES = frozenset({-4, -6, -7, -8, -11})
# Facts on how a device is connected or set, and not on errors.
_NO_ERRORS = frozenset({PCIE_LANES})
IMPORT, START, STORE = "import", "start", "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A device's process that gave no answer."""

    # Name of the device in findings.
    device: str
    # IMPORT, START, STORE or the name of a test.
    phase: str
    cause: Death | Silence | NotStarted
    # Whether processes of other devices have answered in the same phase.
    have_others_answered: bool
    # Whether a new process of the device ran all tests afterwards.
    is_resolved: bool = False

    def kind(self, device_kind: DeviceKind) -> TroubleKind:
        """Return why there was no answer."""
        match self.cause:
            case NotStarted(is_out_of_memory=is_full):
                return TroubleKind.FULL if is_full else TroubleKind.NO_START
            case Death(exit_code=code):
                is_signal = code < 0 and code not in _CRASHES
                return TroubleKind.KILLED if is_signal else TroubleKind.CRASHED
            case Silence(facts=facts, waited_s=waited_s):
                if facts.is_stopped:
                    return TroubleKind.STOPPED
                uses_driver = device_kind == "cuda" and self.phase != IMPORT
                is_alone = uses_driver and self.have_others_answered
                is_stuck = is_alone and waited_s >= _STUCK_S
                if self.phase == START and facts.state != "D":
                    # Imports end at different times, so this process may be on its way.
                    is_stuck = False
                return TroubleKind.STUCK if is_stuck else TroubleKind.LATE

    @property
    def detail(self) -> str:
        """The error, or what the kernel said of the process."""
        match self.cause:
            case NotStarted(message=message):
                return message
            case Death(exit_code=code, last_line=line):
                status = words.exit_status(code)
                return f"{status}: {line}" if line else status
            case Silence(facts=facts):
                return words.process_state(facts.state, facts.kernel_wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickEvidence:
    """All that a quick check has found."""

    host: str
    kind: DeviceKind
    # Names of all devices, as in findings.
    devices: tuple[str, ...]
    # Judgements of the first run of all tests, and of the second run of doubtful tests.
    first: tuple[Judgement, ...] = ()
    second: tuple[Judgement, ...] = ()
    # Judgements of the stage `environment`.
    environment: tuple[Judgement, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    # Name of a device -> its use by other programs.
    uses: Mapping[str, DeviceUse] = field(default_factory=dict)
    load: CpuLoad | None = None
    # Name of a device -> why its clocks were limited during the tests.
    throttled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Names of tests that did not run for lack of time.
    skipped: tuple[str, ...] = ()
    # Whether the process that looks at the node has answered each time. Otherwise other programs
    # and errors of the driver are unknown.
    is_observed: bool = True
    # Why the devices could not be tested at all.
    untested: UntestedReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDecision:
    """The state of the node, and what supports it."""

    state: NodeState
    drain: tuple[DrainReason, ...]
    untested: tuple[UntestedReason, ...]
    findings: tuple[Finding, ...]


def is_doubtful(judgement: Judgement) -> bool:
    """Return whether a test must run a second time because of this judgement."""
    is_test = judgement.test.workload != "" and judgement.subject.kind != "cluster"
    return is_test and judgement.verdict in (Verdict.BAD, Verdict.SUSPECT)


def decide(evidence: QuickEvidence) -> NodeDecision:
    """Return the state of the node with its reasons."""
    settled = [
        _excuse(judgement, evidence) for judgement in settle(evidence.first, evidence.second)
    ]
    repeated = {
        (judgement.test.name, judgement.subject)
        for judgement in evidence.second
        if is_doubtful(judgement)
    }
    drain = [
        *_driver_errors(settled),
        *_stuck_devices(evidence),
        *_failures(settled, repeated, evidence),
    ]
    untested = tuple(dict.fromkeys(_untested(settled, evidence)))
    findings = (
        *_trouble_findings(evidence),
        *_environment_findings(evidence),
        *(judgement.finding for judgement in evidence.environment),
        *(judgement.finding for judgement in settled),
    )
    has_doubts = any(judgement.verdict in (Verdict.BAD, Verdict.SUSPECT) for judgement in settled)
    has_doubts |= any(_is_own_fault(trouble, evidence) for trouble in evidence.troubles)
    if drain:
        state = NodeState.DRAIN
    elif has_doubts:
        state = NodeState.SUSPECT
    else:
        state = NodeState.UNTESTED if untested else NodeState.HEALTHY
    return NodeDecision(
        state=state,
        drain=tuple(dict.fromkeys(drain)),
        untested=untested,
        findings=findings,
    )


def settle(first: Sequence[Judgement], second: Sequence[Judgement]) -> list[Judgement]:
    """Merge the judgements of two runs.

    A device that was slow only once is healthy. A result that was wrong only once is suspect.
    Without a second run nothing is bad.
    """
    of_second = {(judgement.test.name, judgement.subject): judgement for judgement in second}
    of_first = {(judgement.test.name, judgement.subject) for judgement in first}
    settled = []
    for judgement in first:
        repeat = of_second.get((judgement.test.name, judgement.subject))
        if not is_doubtful(judgement):
            settled.append(judgement if repeat is None else _settle_healthy(judgement, repeat))
        elif repeat is None or repeat.verdict is Verdict.UNTESTED:
            settled.append(replace(judgement, verdict=Verdict.SUSPECT))
        elif is_doubtful(repeat) or judgement.ratio is not None:
            settled.append(repeat)
        else:
            settled.append(replace(judgement, verdict=Verdict.SUSPECT))
    # Subjects whose first process gave no answer.
    for judgement in second:
        if (judgement.test.name, judgement.subject) not in of_first:
            settled.append(_at_most_suspect(judgement))
    return settled


def _settle_healthy(judgement: Judgement, repeat: Judgement) -> Judgement:
    """Return the judgement of a subject whose test was only repeated because of other subjects."""
    if judgement.verdict in (Verdict.UNTESTED, Verdict.UNKNOWN):
        return _at_most_suspect(repeat)
    return judgement


def _at_most_suspect(judgement: Judgement) -> Judgement:
    """Turn bad into suspect, because the judgement rests on a single run."""
    is_bad = judgement.verdict is Verdict.BAD
    return replace(judgement, verdict=Verdict.SUSPECT) if is_bad else judgement


def _excuse(judgement: Judgement, evidence: QuickEvidence) -> Judgement:
    """Make a subject untested if other programs may have slowed it, or have taken its memory."""
    subject = judgement.subject
    if not judgement.verdict.is_suspect_or_bad:
        return judgement
    problems = judgement.reason.problems if judgement.reason else ()
    if problems and all(map(_is_lack_of_memory, problems)):
        return replace(judgement, verdict=Verdict.UNTESTED)
    if judgement.ratio is None:
        return judgement
    programs: list[OtherProgram] = []
    for device in [subject.name] if subject.kind == "device" else evidence.devices:
        programs += programs_beside(device, evidence)
    if not programs:
        return judgement
    names = tuple(dict.fromkeys(map(program_name, programs)))
    return replace(
        judgement,
        verdict=Verdict.UNTESTED,
        evidence=(*judgement.evidence, Reason(kind=ReasonKind.PROGRAMS, names=names)),
        action=None,
        commands=(),
    )


def programs_beside(device: str, evidence: QuickEvidence) -> Iterator[OtherProgram]:
    """Yield the other programs that may have slowed a device."""
    use = evidence.uses.get(device)
    if use is not None and use.is_used:
        yield from use.programs or (OtherProgram(host=evidence.host, process_id=0),)
    load = evidence.load
    if load is None or load.cores < _LEAST_CORES:
        return
    share = _LOADED_SHARE if evidence.kind == "cpu" else 1 - _LOADED_SHARE
    if load.cores > share * load.processors:
        yield from load.programs or (OtherProgram(host=evidence.host, process_id=0),)


def _driver_errors(judgements: Iterable[Judgement]) -> Iterator[DrainReason]:
    for judgement in judgements:
        device, test = judgement.subject.name, judgement.test.name
        is_error = judgement.stage == "facts" and judgement.verdict is Verdict.BAD
        if is_error and test not in _NO_ERRORS and _is_of_hardware(judgement):
            yield DrainReason(kind=DrainKind.DRIVER_ERROR, device=device, test=test)


def _is_of_hardware(judgement: Judgement) -> bool:
    """Return whether the hardware causes the error; False for Xids that programs cause.

    Earlier Xids do not count, because they stay in the kernel's log after a repair.
    """
    problems = judgement.reason.problems if judgement.reason else ()
    kinds = {problem.kind for problem in problems}
    if kinds.isdisjoint((ProblemKind.NEW_XIDS, ProblemKind.OLD_XIDS)):
        return True
    new_xids = [problem for problem in problems if problem.kind is ProblemKind.NEW_XIDS]
    return any(not HARDWARE_XIDS.isdisjoint(problem.numbers) for problem in new_xids)


def _stuck_devices(evidence: QuickEvidence) -> Iterator[DrainReason]:
    for trouble in evidence.troubles:
        is_stuck = trouble.kind(evidence.kind) is TroubleKind.STUCK
        if is_stuck and _is_own_fault(trouble, evidence):
            yield DrainReason(kind=DrainKind.STUCK, device=trouble.device, test=trouble.phase)


def _failures(
    settled: Iterable[Judgement], repeated: Iterable[tuple[str, object]], evidence: QuickEvidence
) -> Iterator[DrainReason]:
    """Yield the tests and the processes of devices that failed twice."""
    doubtful_again = set(repeated)
    for judgement in settled:
        test, subject = judgement.test.name, judgement.subject
        if (test, subject) not in doubtful_again or not is_doubtful(judgement):
            continue
        is_slow = judgement.ratio is not None
        # A slow node, or a slowness that a setting explains, is no fault of a device.
        if is_slow and (subject.kind != "device" or judgement.action in EXCUSES):
            continue
        # Another program may have slowed the device.
        if is_slow and not evidence.is_observed:
            continue
        if is_slow and not is_clearly_slow(judgement):
            continue
        yield DrainReason(kind=DrainKind.FAILED_TWICE, device=subject.name, test=test)
    failed: set[tuple[str, str]] = set()
    for trouble in evidence.troubles:
        key = trouble.device, trouble.phase
        is_silence = isinstance(trouble.cause, Silence)
        if is_silence or not _is_own_fault(trouble, evidence):
            continue
        if key in failed:
            yield DrainReason(
                kind=DrainKind.FAILED_TWICE, device=trouble.device, test=trouble.phase
            )
        failed.add(key)


_UNTESTED_BY: Mapping[TroubleKind, UntestedKind] = {
    TroubleKind.FULL: UntestedKind.BUSY,
    TroubleKind.NO_START: UntestedKind.BROKEN_INSTALLATION,
    TroubleKind.CRASHED: UntestedKind.BROKEN_INSTALLATION,
    TroubleKind.STOPPED: UntestedKind.DISTURBED,
    TroubleKind.KILLED: UntestedKind.DISTURBED,
    TroubleKind.LATE: UntestedKind.OUT_OF_TIME,
    # A stuck device is only untested beside other programs.
    TroubleKind.STUCK: UntestedKind.BUSY,
}


def _is_own_fault(trouble: Trouble, evidence: QuickEvidence) -> bool:
    """Return whether a process failed in a phase that the processes of other devices passed."""
    faults = (TroubleKind.CRASHED, TroubleKind.NO_START, TroubleKind.STUCK)
    is_of_device = trouble.have_others_answered and trouble.phase != IMPORT
    if not is_of_device or trouble.kind(evidence.kind) not in faults:
        return False
    # A device that other programs use may answer late.
    return not list(programs_beside(trouble.device, evidence))


def _is_beside_programs(trouble: Trouble, evidence: QuickEvidence) -> bool:
    """Return whether other programs may have delayed the answer of a device."""
    if trouble.phase == IMPORT and evidence.kind == "cuda":
        return False  # an import uses no GPU
    # If no device has answered, any of them may have delayed the others.
    devices = [trouble.device] if trouble.have_others_answered else evidence.devices
    return any(list(programs_beside(device, evidence)) for device in devices)


def _untested(settled: Sequence[Judgement], evidence: QuickEvidence) -> Iterator[UntestedReason]:
    """Yield why the node was not tested, or not in full."""
    if evidence.untested is not None:
        yield evidence.untested
    elif not evidence.is_observed:
        yield UntestedReason(kind=UntestedKind.OUT_OF_TIME, detail=words.not_observed())
    tested = {
        judgement.subject.name
        for judgement in settled
        if judgement.value is not None and judgement.test.workload
    }
    for trouble in evidence.troubles:
        if not trouble.is_resolved and not _is_own_fault(trouble, evidence):
            kind = _UNTESTED_BY[trouble.kind(evidence.kind)]
            if kind is UntestedKind.OUT_OF_TIME and _is_beside_programs(trouble, evidence):
                kind = UntestedKind.BUSY
            yield UntestedReason(kind=kind, detail=_trouble_words(trouble, evidence.kind))
    for device, use in evidence.uses.items():
        if use.is_active:
            yield UntestedReason(kind=UntestedKind.BUSY, detail=words.use(device, use))
    load = evidence.load
    is_cpu = evidence.kind == "cpu"
    if load is not None and is_cpu and load.cores > _CROWDED_SHARE * load.processors:
        yield UntestedReason(kind=UntestedKind.BUSY, detail=words.load(load))
    yield from _environment_reasons(evidence)
    yield from _slow_beside_programs(settled)
    for judgement in settled:
        if (
            judgement.verdict is Verdict.UNTESTED
            and judgement.test.workload
            and judgement.ratio is None
        ):
            yield from _untested_test(judgement)
    if evidence.skipped:
        yield UntestedReason(kind=UntestedKind.OUT_OF_TIME, detail=words.skipped(evidence.skipped))
    is_compared = any(
        judgement.verdict is not Verdict.UNKNOWN and judgement.test.workload
        for judgement in settled
    )
    if tested and not is_compared and not evidence.troubles:
        yield UntestedReason(kind=UntestedKind.NO_COMPARISON, detail=words.no_comparison())


def _environment_reasons(evidence: QuickEvidence) -> Iterator[UntestedReason]:
    """Yield the settings and the state of the node that spoil the tests."""
    for judgement in evidence.environment:
        if judgement.verdict is not Verdict.BAD:
            continue
        subject, kind = judgement.subject, kind_of_environment(judgement)
        # The work of another program may limit the clocks of its device.
        if subject.kind == "device" and list(programs_beside(subject.name, evidence)):
            kind = UntestedKind.BUSY
        detail = f"{judgement.test.name}: {judgement.finding.reason}"
        yield UntestedReason(kind=kind, detail=detail)


def _slow_beside_programs(settled: Iterable[Judgement]) -> Iterator[UntestedReason]:
    """Yield one reason for each subject that was slow beside other programs."""
    slow: dict[str, list[Judgement]] = {}
    for judgement in settled:
        if judgement.verdict is Verdict.UNTESTED and judgement.ratio is not None:
            slow.setdefault(judgement.subject.name, []).append(judgement)
    for name, judgements in slow.items():
        tests = tuple(dict.fromkeys(judgement.test.name for judgement in judgements))
        # The last evidence is the one that `_excuse` has added.
        programs = judgements[0].evidence[-1].names
        detail = words.slow_beside(name, tests, programs)
        yield UntestedReason(kind=UntestedKind.BUSY, detail=detail)


def _untested_test(judgement: Judgement) -> Iterator[UntestedReason]:
    """Yield why one test of a subject says nothing."""
    problems = judgement.reason.problems if judgement.reason else ()
    text = words.untested_test(judgement.finding)
    if any(map(_is_lack_of_memory, problems)):
        yield UntestedReason(kind=UntestedKind.BUSY, detail=text)
    elif problems:
        yield UntestedReason(kind=UntestedKind.BROKEN_INSTALLATION, detail=text)


def _is_lack_of_memory(problem: Problem) -> bool:
    return problem.kind is ProblemKind.NO_ROOM or problem.status is Status.OOM


def _trouble_words(trouble: Trouble, kind: DeviceKind) -> str:
    return words.trouble(trouble.kind(kind), trouble.device, trouble.phase, trouble.detail)


_PROCESS = HealthTest(name="process", stage="environment", unit="", floor=0.0, is_compared=False)
_OTHERS = replace(_PROCESS, name=OTHER_PROGRAMS_TEST)
_THROTTLING = replace(_PROCESS, name="throttling")


def _trouble_findings(evidence: QuickEvidence) -> Iterator[Finding]:
    """Yield a finding for each process that gave no answer."""
    for trouble in evidence.troubles:
        kind = trouble.kind(evidence.kind)
        verdict = Verdict.UNTESTED
        if trouble.is_resolved:
            verdict = Verdict.NOTE
        elif _is_own_fault(trouble, evidence):
            verdict = Verdict.BAD if kind is TroubleKind.STUCK else Verdict.SUSPECT
        text = _trouble_words(trouble, evidence.kind)
        finding = _note(_PROCESS, evidence, trouble.device, text, verdict)
        yield replace(finding, action=Action.RESET) if verdict is Verdict.BAD else finding


def _environment_findings(evidence: QuickEvidence) -> Iterator[Finding]:
    """Yield what may have slowed the tests."""
    load = evidence.load
    if load is not None and load.cores >= _LEAST_CORES:
        finding = _note(_OTHERS, evidence, "", words.load(load))
        yield replace(finding, value=load.cores, unit="cores")
    for device, use in evidence.uses.items():
        if use.is_used:
            verdict = Verdict.UNTESTED if use.is_active else Verdict.NOTE
            yield _note(_OTHERS, evidence, device, words.use(device, use), verdict)
    for device, reasons in evidence.throttled.items():
        if reasons:
            yield _note(_THROTTLING, evidence, device, words.throttled(reasons))


def _note(
    test: HealthTest,
    evidence: QuickEvidence,
    device: str,
    reason: str,
    verdict: Verdict = Verdict.NOTE,
) -> Finding:
    """Return a finding about a device, or about the node if `device` is empty."""
    subjects = {judgement.subject.name: judgement.subject for judgement in evidence.first}
    subject = subjects.get(device) or Subject(
        kind="device" if device else "node", name=device or evidence.host, model="", uuids=()
    )
    return Finding(
        test=test.name,
        stage=test.stage,
        subject=subject,
        passes=1,
        verdict=verdict,
        reason=reason,
        action=None if verdict is Verdict.NOTE else Action.WATCH,
    )
