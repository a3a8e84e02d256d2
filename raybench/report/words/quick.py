"""What a quick check of one node says, in words."""

from __future__ import annotations

from collections.abc import Sequence

from raybench.records.devices import Finding
from raybench.records.node_report import (
    DrainKind,
    DrainReason,
    NodeReport,
    NodeState,
    UntestedKind,
    UntestedReason,
)
from raybench.records.node_use import CpuLoad, DeviceUse, TroubleKind
from raybench.report.formatting import counted, some
from raybench.report.words.health import program_name


def use(device: str, use: DeviceUse) -> str:
    """Return which programs use a device, and how busy the device was before the tests."""
    users = some([*map(program_name, use.programs)], 2) or "a program that is not visible from here"
    text = f"{users} uses {device}"
    if use.is_active:
        text += f", which was busy {use.utilization_pct} % of the time before the tests"
    return text


def load(load: CpuLoad) -> str:
    """Return how many cores other programs kept busy, and which programs."""
    text = f"other programs kept {load.cores:.1f} of {counted(load.processors, 'core')} busy"
    if not load.programs:
        return text
    users = [f"{program_name(program)}: {program.busy_cores:.1f}" for program in load.programs]
    return f"{text}: {some(users, 2)}"


# Tests whose names stand in their reasons already.
_NAMED_BY_REASON = ("other programs", "throttling", "load", "niceness")


def note(finding: Finding) -> str:
    """Return what may disturb the tests, as a sentence."""
    name = "" if finding.test in _NAMED_BY_REASON else f"{finding.test}: "
    return f"Note: {name}{finding.reason}."


def throttled(reasons: Sequence[str]) -> str:
    """Return why clocks were limited during the tests."""
    return f"clocks were limited during the tests: {', '.join(reasons)}"


_PHASES = {
    "import": "while it imported torch",
    "start": "while it took the device",
    "store": "before the first collective",
}
_TROUBLES = {
    TroubleKind.STUCK: "hangs in a call of the driver",
    TroubleKind.STOPPED: "was stopped from outside",
    TroubleKind.KILLED: "was killed from outside",
    TroubleKind.LATE: "gave no answer in time",
    TroubleKind.CRASHED: "ended without an answer",
    TroubleKind.NO_START: "could not take the device",
    TroubleKind.FULL: "found the memory of the device full",
}


def trouble(kind: TroubleKind, device: str, phase: str, detail: str) -> str:
    """Return why the process of a device gave no answer.

    Args:
        phase: "import", "start", "store" or the name of a test.
        detail: such as an error message.
    """
    when = _PHASES.get(phase, f"in the test {phase}")
    # The sentences of these kinds say themselves when the trouble came.
    if kind in (TroubleKind.NO_START, TroubleKind.FULL):
        when = ""
    text = " ".join(filter(None, (f"the process of {device}", _TROUBLES[kind], when)))
    if kind is TroubleKind.STUCK:
        text += ", and those of the others finished"
    return f"{text}: {detail}" if detail else text


def process_state(state: str, kernel_wait: str) -> str:
    """Return what the kernel says of a process."""
    return f"state {state}" + (f", waits in {kernel_wait}" if kernel_wait else "")


def exit_status(exit_code: int) -> str:
    """Return how a process ended."""
    return f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"


def skipped(tests: Sequence[str]) -> str:
    """Return which tests did not run."""
    return f"no time was left for {some(tests)}"


def no_comparison() -> str:
    """Return why the speeds of a device were not judged."""
    return "nothing is known of what this model reaches, and no other device is alike"


def slow_beside(subject: str, tests: Sequence[str], programs: Sequence[str]) -> str:
    """Return which tests were slow beside which programs."""
    return f"{subject} was slow in {some(tests, 2)} beside {some(programs, 2)}"


def untested_test(finding: Finding) -> str:
    """Return why one test of a subject says nothing."""
    return f"{finding.test} of {finding.subject.name}: {finding.reason}"


def not_observed() -> str:
    """Return that other programs and errors of the driver are unknown."""
    return (
        "the process that looks for other programs and errors of the driver ended or gave no answer"
    )


def no_nvml() -> str:
    """Return that the driver's library does not answer."""
    return "the driver's library (NVML) does not answer"


_UNTESTED = {
    UntestedKind.BUSY: "other programs use it",
    UntestedKind.BROKEN_INSTALLATION: "the installation is broken",
    UntestedKind.LIMITED_CLOCKS: "clocks are limited",
    UntestedKind.OUT_OF_TIME: "the time was over",
    UntestedKind.DISTURBED: "its processes were disturbed",
    UntestedKind.NO_COMPARISON: "there is nothing to compare it with",
}
_DRAIN = {
    DrainKind.FAILED_TWICE: "failed twice in {test}",
    DrainKind.STUCK: "hangs in the driver in {test}",
    DrainKind.DRIVER_ERROR: "has errors by the driver: {test}",
}
_ADVICE = {
    UntestedKind.BUSY: "end the other program, or check again later",
    UntestedKind.BROKEN_INSTALLATION: "repair the installation; this is no fault of a device",
    UntestedKind.LIMITED_CLOCKS: "look at cooling and power supply: nvidia-smi -q -d PERFORMANCE",
    UntestedKind.OUT_OF_TIME: "check again; if it stays so, look for load and slow file systems",
    UntestedKind.DISTURBED: "check again",
    UntestedKind.NO_COMPARISON: "`raybench health`, then `raybench export latest --format "
    "reference -o site.yaml`, and give it to --references",
}


def headline(report: NodeReport, suspects: Sequence[str]) -> str:
    """Return the verdict in one line.

    Args:
        suspects: names of subjects that are suspect.
    """
    match report.state:
        case NodeState.DRAIN:
            reasons = [drain(reason, report.host) for reason in report.drain]
            return f"Drain {report.host}: {some(reasons, 2)}."
        case NodeState.SUSPECT:
            return f"Suspect: {some(suspects)} of {report.host}."
        case NodeState.UNTESTED:
            different_reasons = dict.fromkeys(map(_why_untested, report.untested))
            return f"Not tested: {report.host}: {'; '.join(different_reasons)}."
        case NodeState.HEALTHY:
            return f"Healthy: {_devices(report)} of {report.host}."


def _devices(report: NodeReport) -> str:
    """Return `8 GPUs` or `2 CPU workers`: a GPU node without its driver tests its CPU workers."""
    noun = "GPU" if report.device_kind == "cuda" else "CPU worker"
    return counted(len(report.devices), noun)


def drain(reason: DrainReason, host: str) -> str:
    """Return why a device of this host must not be used."""
    test = "its start" if reason.test == "start" else reason.test
    return f"{short_name(reason.device, host)} {_DRAIN[reason.kind].format(test=test)}"


def short_name(device: str, host: str) -> str:
    """Return the name of a device without its host."""
    return device.removeprefix(f"{host} ")


def untested(reason: UntestedReason) -> str:
    """Return why a node was not tested."""
    return f"{reason.detail or _why_untested(reason)}."


def untested_advice(kind: UntestedKind) -> str:
    """Return what to do about a node that was not tested."""
    return f"Do: {_ADVICE.get(kind, 'check again')}."


def _why_untested(reason: UntestedReason) -> str:
    return _UNTESTED.get(reason.kind, reason.kind.value)


def took(report: NodeReport) -> str:
    """Return how long the check took, and which devices were checked."""
    checked = f", {_devices(report)}" if report.devices else ""
    return f"{report.seconds:.1f} s{checked}."


def progress(*, devices: int = 0, test: str = "", again: bool = False) -> str:
    """Return what the check does now."""
    if test:
        return f"{test}, again" if again else test
    return f"starting {counted(devices, 'worker')}" if devices else "looking for GPUs"
