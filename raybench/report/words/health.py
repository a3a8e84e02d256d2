"""What a health check says, in words: one function for each kind of statement."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence

from raybench.analysis.references import NARROW
from raybench.conversion import GIB
from raybench.records.detection import DetectionLimit
from raybench.records.device import DeviceKind
from raybench.records.devices import Action, DevicePlace, Finding, Verdict
from raybench.records.judgement import (
    Blame,
    Command,
    CommandKind,
    Expected,
    PeerValue,
    Problem,
    ProblemKind,
    Reason,
    ReasonKind,
    ValueRange,
)
from raybench.records.other_program import OtherProgram
from raybench.report.formatting import counted, number, share_words, some, span
from raybench.report.words import environment


def question(kind: DeviceKind) -> str:
    """Return the question that a check answers."""
    devices = "GPUs, links or nodes" if kind == "cuda" else "workers or nodes"
    return f"Which {devices} are slower than they should be?"


def basis(*, has_peers: bool, references: int, wide: int) -> str:
    """Return what the values of a check are compared with; "" for nothing.

    Args:
        has_peers: whether devices are compared with each other.
        references: number of values that have a reference.
        wide: number of values whose reference has too wide a range.
    """
    sentences = ["devices are compared with each other in this run."] if has_peers else []
    if references:
        have = "has" if references == 1 else "have"
        text = f"{counted(references, 'value')} {have} a reference"
        if wide:
            text += f"; {wide} of them cannot be judged by the reference, because its normal "
            text += f"range is wider than ±{share_words(NARROW)}"
        sentences.append(f"{text}.")
    return f"Certainty: {' '.join(sentences)}" if sentences else ""


def blind_spot(*, has_peers: bool, has_references: bool, is_own: bool) -> str:
    """Return a sentence on the slowdowns that a check cannot see; "" if there are none.

    Args:
        has_peers: whether devices are compared with each other.
        has_references: whether values are compared with references.
        is_own: whether the references include this run.
    """
    if is_own:
        return "Caveat: the reference values include this run and may hide a common slowdown."
    if has_peers and not has_references:
        return "Caveat: without reference values, the check cannot see a common slowdown."
    return ""


def detection(limit: DetectionLimit) -> str:
    """Return which slow device a check finds, and how seldom it drains a healthy node."""
    noun = "GPU" if limit.kind == "cuda" else "CPU worker"
    if limit.slowdown is None:
        return f"Cannot find a slow {noun}: a single {noun} is compared with nothing here."
    checks_per_drain = _rounded_down(1 / limit.drain_share)
    return (
        f"Finds a {noun} that is {share_words(limit.slowdown)} slow in 99 % of checks; drains a "
        f"healthy node in fewer than 1 of {checks_per_drain:,} (simulated)."
    )


def _rounded_down(count: float) -> int:
    """Return the count with all digits but the first set to 0: 4700 becomes 4000."""
    digits = len(str(int(count)))
    scale: int = 10 ** (digits - 1)
    return int(count) // scale * scale


def device_advice(name: str, *, is_bad: bool, action: Action | None) -> str:
    """Return what to do first about an unhealthy device."""
    if action is Action.WAIT:
        return f"check {name} again without the other programs"
    must_be_repaired = is_bad and action is not Action.WATCH
    return f"leave {name} out until it is repaired" if must_be_repaired else f"look at {name} first"


# Start of the name of a test -> meaning.
_TESTS = {
    "gemm ": "gemm 2048: product of two matrices of 2048 x 2048",
    "memory ": "memory 500 MB: a = b + 3 c with arrays of 500 MB",
    "launch and wait": "launch and wait: start a kernel and wait for its end",
    "launch": "launch: start a kernel",
    "same bits": "same bits 2048: a product that must be the same on all devices of one "
    "device model, bit for bit",
    "h2d": "h2d: host to device",
    "d2h": "d2h: device to host",
    "both": "both: both directions at the same time",
    "smoke": "smoke 784-256-10: a training step with DDP of a small network with these widths",
    "step compute": "step compute: computation in a step",
    "step wait": "step wait: waiting for the slowest device",
    "step communication": "step communication: communication in a step",
}


def meaning_of_tests(tests: Iterable[str]) -> str:
    """Return a sentence on the meanings of tests; "" if no name needs an explanation."""
    explained = set()
    for name in tests:
        matching = [start for start in _TESTS if name.startswith(start)]
        if matching:
            explained.add(max(matching, key=len))
    meanings = [text for start, text in _TESTS.items() if start in explained]
    return f"{'; '.join(meanings)}." if meanings else ""


def device_name(place: DevicePlace) -> str:
    """Return the name of a device: "node7 GPU 3", "node7 worker 3"."""
    return f"{place.host} {short_device_name(place)}"


def short_device_name(place: DevicePlace) -> str:
    """Return the name of a device on its host: "GPU 3", "worker 3"."""
    return f"{'GPU' if place.kind == 'cuda' else 'worker'} {place.number}"


def path_name(start: str, end: str) -> str:
    """Return the name of a pair of devices, or of the path between two nodes."""
    return f"{start} to {end}"


def short_names(subjects: Sequence[Sequence[DevicePlace]]) -> list[str] | None:
    """Return the names of devices and pairs without their host; None for several hosts.

    A single subject keeps its host, so the result is None too.

    Args:
        subjects: places of the device, or of both devices of a pair.
    """
    hosts = {place.host for places in subjects for place in places}
    has_one_host = len(hosts) == 1
    if len(subjects) < 2 or not has_one_host:
        return None
    return [" to ".join(map(short_device_name, places)) for places in subjects]


def problem(problem: Problem) -> str:
    """Return what is wrong with a subject."""
    return _PROBLEMS[problem.kind](problem)


def _wrong_bits(text: str) -> str:
    return f"wrong bits: {text}"


def _message(problem: Problem) -> str:
    return problem.detail or (problem.status.clause if problem.status else "")


def _failed(problem: Problem) -> str:
    return f"{problem.status.label if problem.status else 'failed'}: {_message(problem)}"


def _other_failed(problem: Problem) -> str:
    failed_device = problem.names[0]
    return f"not read: {failed_device} {problem.status.clause if problem.status else 'failed'}"


def _no_room(problem: Problem) -> str:
    free_gib, needed_gib = problem.value / GIB, problem.limit / GIB
    return f"no room: {free_gib:.1f} GiB of its memory are free, the test needs {needed_gib:.1f}"


def _memory_errors(problem: Problem) -> str:
    """Return the number of uncorrected errors, and how many of them are new."""
    during_check, since_start = problem.value, problem.limit
    when = " since the driver was loaded"
    if during_check:
        when = f", {during_check} of them during the check"
    return f"{counted(since_start, 'uncorrected memory error')}{when}"


def _link_errors(problem: Problem) -> str:
    """Return the errors of each NVLink during the check."""
    links = (
        f"NVLink {error.link}: {counted(error.count, f'{error.kind} error')}"
        for error in problem.link_errors
    )
    return f"{', '.join(links)} during the check"


def _numbers(problem: Problem) -> str:
    return ", ".join(map(str, dict.fromkeys(problem.numbers)))


_WHICH_IS_WRONG = "a check with a third device would tell which is wrong"
_PROBLEMS: Mapping[ProblemKind, Callable[[Problem], str]] = {
    ProblemKind.CHANGED_BITS: lambda _: _wrong_bits(
        "its product changed from one check to the next"
    ),
    ProblemKind.OTHER_BITS: lambda problem: _wrong_bits(
        f"its product differs from that of {problem.value} devices of its model"
    ),
    ProblemKind.MISPLACED_BITS: lambda _: _wrong_bits(
        "its product differs from the other's, and from itself when rows move"
    ),
    ProblemKind.DISPUTED_BITS: lambda problem: _wrong_bits(
        f"the same product differs between {' and '.join(problem.names)}; {_WHICH_IS_WRONG}"
    ),
    ProblemKind.WRONG_RESULT: lambda problem: f"wrong result: {_message(problem)}",
    ProblemKind.DISPUTED_RESULT: lambda problem: (
        f"wrong result: {_message(problem)}; {_WHICH_IS_WRONG}"
    ),
    ProblemKind.FAILED: _failed,
    ProblemKind.NOT_STARTED: lambda problem: f"not read: {_message(problem)}",
    ProblemKind.OTHER_FAILED: _other_failed,
    ProblemKind.NO_COLLECTIVE: environment.no_collective,
    ProblemKind.NO_ROOM: _no_room,
    ProblemKind.WORKER_LOST: lambda _: "lost: no worker could be started on it any more",
    ProblemKind.DEVICE_UNREAD: lambda problem: problem.detail,
    ProblemKind.MEMORY_ERRORS: _memory_errors,
    ProblemKind.ROW_PENDING: lambda _: "a row of memory is to be remapped at the next reset",
    ProblemKind.BAD_ROWS: lambda problem: (
        f"{counted(problem.value, 'row')} of memory went bad during the check"
    ),
    ProblemKind.PAGE_PENDING: lambda _: "a page of memory is to be retired at the next reset",
    ProblemKind.BAD_PAGES: lambda problem: (
        f"{counted(problem.value, 'page')} of memory went bad during the check"
    ),
    ProblemKind.NO_SPARE_ROW: lambda _: "no spare row is left",
    ProblemKind.NEW_XIDS: lambda problem: (
        f"the driver reported Xid {_numbers(problem)} during the check"
    ),
    ProblemKind.OLD_XIDS: lambda problem: f"Xid {_numbers(problem)} in the kernel's log",
    ProblemKind.PCIE_REPLAYS: lambda problem: (
        f"{problem.value} packets were sent again over PCIe during the check"
    ),
    ProblemKind.FEW_LANES: lambda problem: (
        f"{problem.value} of {problem.limit} PCIe lanes are in use"
    ),
    ProblemKind.LINKS_DOWN: lambda problem: f"NVLink {_numbers(problem)} is down",
    ProblemKind.LINK_ERRORS: _link_errors,
    ProblemKind.FABRIC: lambda problem: ", ".join(problem.names),
}


def reason(reason: Reason) -> str:
    """Return why a subject has its verdict."""
    text = _REASONS[reason.kind](reason)
    return f"{text}: {_BLAME[reason.blame]}" if reason.blame else text


def _times(ratio: float | None) -> str:
    """Return a ratio as `1.60 times`, or as `over 100 times`."""
    ratio = ratio or 0.0
    return f"{ratio:.2f} times" if ratio < 100 else "over 100 times"


def _problems(reason: Reason) -> str:
    text = "; ".join(map(problem, reason.problems))
    if not reason.limit:  # no pass had a result
        return text
    return f"{text} (in {reason.value:.0f} of {reason.limit:.0f} passes)"


def _nothing_known(reason: Reason) -> str:
    placement = f", {reason.placement}," if reason.placement else ""
    datasheet = ""
    if reason.value:
        datasheet = f"; its datasheet says {number(reason.value, 3)} {reason.unit}"
    return f"nothing is known of what {reason.model}{placement} reaches{datasheet}"


def _slow_with_partners(reason: Reason) -> str:
    partners = f"{reason.value:.0f} partners that are fast with others"
    return f"slow with {partners}: the {reason.subject} is to blame"


def program(program: OtherProgram) -> str:
    """Return `alpha: python (process 42 of bob, since 2026-11-30 11:02 UTC) keeps 1 core busy`."""
    text = f"{program.host}: {program_name(program)}"
    if program.busy_cores is None:
        return text
    return f"{text} keeps {counted_cores(program.busy_cores)} busy"


def program_name(program: OtherProgram) -> str:
    """Return `python (process 42 of bob, since 2026-11-30 11:02 UTC)`."""
    if not program.process_id:
        return "a program that is not visible from here"
    name = program.name or "a program of another container"
    details = [f"process {program.process_id}"]
    if program.user:
        details[0] += f" of {program.user}"
    if program.since:
        details.append(f"since {program.since:%Y-%m-%d %H:%M} UTC")
    return f"{name} ({', '.join(details)})"


def counted_cores(cores: float) -> str:
    """Return `1 core` or `1.5 cores`."""
    return "1 core" if f"{cores:.1f}" == "1.0" else f"{cores:.1f} cores"


# NVML's reason for limited clocks -> words.
_LIMITS = {
    "power_cap": "the power limit",
    "thermal_sw": "heat (software limit)",
    "thermal_hw": "heat (hardware limit)",
    "power_brake": "the power brake of the host",
    "hw_slowdown": "a hardware slowdown",
}


# Connection of two devices in `nvidia-smi topo -m` -> what is between them.
_LEVELS = {
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "a host bridge",
    "NODE": "the host bridges of a NUMA node",
    "SYS": "the link between CPU sockets",
}


def _on_pcie(reason: Reason) -> str:
    """Return `PCIe gen5 x16 carries the data, across one PCIe switch`."""
    link, *levels = reason.names  # one level or none
    level = "".join(levels)
    across = f", across {_LEVELS.get(level, level)}" if level else ""
    return f"PCIe {link} carries the data{across}"


def _throttled(reason: Reason) -> str:
    limits = " and ".join(_LIMITS.get(name, name) for name in reason.names)
    since = f"since pass {reason.value:.0f}" if reason.value else "already before any work"
    return f"clocks are limited by {limits}, {since}"


def _no_figures(reason: Reason) -> str:
    """Return why a common slowdown cannot be seen, and how a comparison becomes possible."""
    needed_checks, earlier_checks = reason.value or 0.0, reason.limit or 0.0
    lacking = needed_checks - earlier_checks
    checks = "one more check" if lacking == 1 else f"{lacking:.0f} more checks"
    return (
        f"nothing is known of {reason.model} elsewhere, so the check cannot see whether all are "
        f"slow; make a comparison by {checks} with the same --output (`raybench health`), or by "
        "reference values from a check that you trust (`raybench export RUN --format reference`)"
    )


_PATH = "the path between the two is to blame"
_BLAME: Mapping[Blame, str] = {
    "path": _PATH,
    "path or end": "the path or one of the two is to blame",
}
_REASONS: Mapping[ReasonKind, Callable[[Reason], str]] = {
    ReasonKind.NOT_REPORTED: lambda _: "nothing here tells it",
    ReasonKind.NOT_READ: lambda _: "it was not read",
    ReasonKind.PROBLEMS: _problems,
    ReasonKind.SLOWER_THAN_PEERS: lambda reason: (
        f"takes {_times(reason.value)} as long as those alike"
    ),
    ReasonKind.SLOWER_THAN_USUAL: lambda reason: (
        f"takes {_times(reason.value)} as long as it should"
    ),
    ReasonKind.ALL_SLOW: lambda reason: (
        f"all are slow alike: {_times(reason.value)} as long as they should take"
    ),
    ReasonKind.NOTHING_KNOWN: _nothing_known,
    ReasonKind.NO_FIGURES: _no_figures,
    ReasonKind.OTHER_PROGRAMS: lambda reason: (
        f"used by other programs in {reason.value:.0f} of {reason.limit:.0f} points"
    ),
    ReasonKind.SLOW_WITH_PARTNERS: _slow_with_partners,
    ReasonKind.SLOW_PATH: lambda reason: (
        f"slow for {reason.value:.0f} of {reason.limit:.0f} pairs: {_PATH}"
    ),
    ReasonKind.LATE: lambda reason: (
        f"the others wait {number(reason.value, 3)} of {number(reason.limit, 3)} ms a step for it"
    ),
    ReasonKind.CONDITION: environment.condition,
    ReasonKind.FACTS: environment.facts,
    ReasonKind.IN_EACH_PASS: lambda reason: f"in each of {reason.value:.0f} passes",
    ReasonKind.SPREAD: lambda reason: f"the others spread by {reason.value:.1%}",
    ReasonKind.ONE_OF_SLOW: lambda reason: (
        f"one of {reason.value:.0f} that are slower than the other {reason.limit:.0f}"
    ),
    ReasonKind.NONE_STANDS_OUT: lambda _: (
        "none stands out, so what they share is likelier than a fault of each"
    ),
    ReasonKind.PROGRAMS: lambda reason: "; ".join(
        list(map(program, reason.programs)) or reason.names
    ),
    ReasonKind.THROTTLED: _throttled,
    ReasonKind.TEMPERATURE: lambda reason: f"the GPU is at {reason.value:.0f} °C",
    ReasonKind.POWER_LIMIT: lambda reason: (
        f"the power limit is {reason.value:.0f} W, and {reason.limit:.0f} W by default"
    ),
    ReasonKind.ON_NVLINK: lambda reason: f"NVLink x{reason.value:.0f} carries the data",
    ReasonKind.ON_PCIE: _on_pcie,
    ReasonKind.ON_NETWORK: lambda reason: f"the data goes through {' and '.join(reason.names)}",
    ReasonKind.VARIABLES: lambda reason: (
        f"{some(reason.names)} {'is' if len(reason.names) == 1 else 'are'} set"
    ),
    ReasonKind.DRIVER: lambda reason: (
        f"the driver is {some(reason.names)}; the reference values are of {some(reason.others)}"
    ),
    ReasonKind.PACED_BY_HOST: lambda _: (
        "the host sets the pace of this test: look at the CPU load, and at what slows the worker"
    ),
    ReasonKind.CANNOT_TELL: lambda _: (
        "power limits, clocks, variables and driver do not explain it: the cause cannot be told"
    ),
    ReasonKind.FAST_WITH_OTHERS: lambda _: "both are fast with other partners",
    ReasonKind.ONE_ILL_ALONE: lambda _: "one of the two is not healthy alone",
    ReasonKind.PARTNERS: lambda reason: f"slow with {some(reason.names)}",
    ReasonKind.WAITS: lambda reason: f"waits {number(reason.value, 3)} ms of each step for it",
    ReasonKind.SLOW_ALONE: lambda _: "its device is slow alone too",
    ReasonKind.SLOW_LINK: lambda _: "its link to the host or to others is slow too",
    ReasonKind.CPU_OR_DATA: lambda _: (
        "its device and links are as fast as others': look at its CPU and its data"
    ),
}


def expected(expectations: Sequence[Expected], unit: str) -> str:
    """Return what a value was compared with; "" if nothing is known."""
    texts = []
    for expectation in expectations:
        if isinstance(expectation, PeerValue):
            texts.append(_peer_value(expectation, unit))
        else:
            texts.append(_value_range(expectation, unit))
    return "; ".join(texts)


def _peer_value(peers: PeerValue, unit: str) -> str:
    """Return `750 TFLOP/s, the best of 2 alike`."""
    value = f"{number(peers.value, 3)} {unit}"
    if peers.is_best:
        return f"{value}, the best of {peers.count} alike"
    fastest = f"the {peers.fastest} fastest of " if peers.fastest else ""
    return f"{value}, the median of {fastest}{peers.count} alike"


def _value_range(interval: ValueRange, unit: str) -> str:
    """Return `671 to 782 TFLOP/s (source of the range)`; if low equals high, a single number."""
    source = {
        # A burn-in is compared with its own beginning.
        "start": "as at its beginning",
        "own checks": f"its earlier checks, {interval.checks} of them",
        "checks of model": f"earlier checks of this model, {interval.checks} of them",
        "reference": interval.provenance,
    }[interval.source]
    return f"{span(number(interval.low, 3), number(interval.high, 3))} {unit} ({source})"


def command_words(command: Command) -> str:
    """Return a command for a shell; a comment names the hosts on which to run the command."""
    hosts = [shlex.quote(host) for host in command.hosts]
    text = _COMMANDS[command.kind].format(
        uuid=command.uuid,
        value=command.value,
        names=" ".join(command.names),
        numbers=",".join(map(str, command.numbers)),
        host=hosts[0] if hosts else "",
    )
    if command.kind not in _ON_HOSTS:
        return text
    comment = f"on {' and on '.join(command.hosts)}{_AFTER_HOSTS.get(command.kind, '')}"
    return f"{text}  # {comment}"


_CPU_LOAD = "ps -eo pcpu,psr,pid,{}comm --sort=-pcpu | head"
_COMMANDS: Mapping[CommandKind, str] = {
    CommandKind.RESET_GPU: "nvidia-smi --gpu-reset -i {uuid}",
    CommandKind.SHOW_GPU: "nvidia-smi -q -i {uuid}",
    CommandKind.SHOW_HOST_LINK: "nvidia-smi -q -i {uuid}",
    CommandKind.SHOW_GPU_PROCESSES: "nvidia-smi -q -d PIDS -i {uuid}",
    CommandKind.SET_POWER_LIMIT: "nvidia-smi --power-limit={value:g} -i {uuid}",
    CommandKind.SHOW_PROCESS: "ps -o pid,stat,pcpu,wchan:20,comm -p {value:.0f}",
    CommandKind.SHOW_PROGRAMS: "ps -o pid,user,lstart,pcpu,comm -p {numbers}",
    CommandKind.SHOW_TEMPERATURE: "nvidia-smi -q -d TEMPERATURE,PERFORMANCE -i {uuid}",
    CommandKind.SHOW_POWER: "nvidia-smi -q -d POWER,PERFORMANCE -i {uuid}",
    CommandKind.SET_POWER_LIMITS: "nvidia-smi --power-limit={value:g}",
    CommandKind.SHOW_INTERFACE: "ip -s link show {names}; tc qdisc show dev {names}",
    CommandKind.DRAIN_SLURM: "scontrol update nodename={host} state=drain reason='raybench health'",
    CommandKind.CORDON: "kubectl cordon {host}",
    CommandKind.SHOW_CPU_LOAD: _CPU_LOAD.format(""),
    CommandKind.SHOW_HOST_TOPOLOGY: "nvidia-smi topo -m; numactl --hardware; lscpu",
    CommandKind.SHOW_NVLINKS: "nvidia-smi topo -m; nvidia-smi nvlink --status",
    CommandKind.SHOW_NETWORK: "ip -s link; tc qdisc show",
    CommandKind.SHOW_ALL_CPU_LOAD: _CPU_LOAD.format("user,"),
    CommandKind.SHOW_ALL_GPU_PROCESSES: "nvidia-smi -q -d PIDS",
    CommandKind.UNSET: "unset {names}",
    CommandKind.CHECK_ENVIRONMENT: "raybench health --only environment",
    CommandKind.CHECK_AGAIN: "raybench health",
    CommandKind.EXPORT_REFERENCES: "raybench export RUN --format reference",
    CommandKind.BURN_IN: "raybench health --only alone --burn-in 10m",
    **environment.COMMANDS,
}
# Commands for the hosts that the comment names; other commands run anywhere.
_ON_HOSTS = _COMMANDS.keys() - {
    *(CommandKind.DRAIN_SLURM, CommandKind.CORDON),
    *(CommandKind.UNSET, CommandKind.CHECK_ENVIRONMENT, CommandKind.BURN_IN),
    *(CommandKind.CHECK_AGAIN, CommandKind.EXPORT_REFERENCES),
    *environment.ANYWHERE,
}
# Command -> where to look in its output, for the end of the comment.
_AFTER_HOSTS = {CommandKind.SHOW_HOST_LINK: ", GPU Link Info"}


_ACTIONS: Mapping[Action, str] = {
    Action.REPLACE: "replace it: keep jobs off it until then",
    Action.RESET: "reset it; where that does not help, replace it",
    Action.SUPPLY: "check its power supply and its cables",
    Action.COOL: "cool it: check fans, air flow and the temperature of the room",
    Action.SETTING: "change a setting",
    Action.WAIT: "wait until the other programs have ended, or end them, and check again",
    Action.WATCH: "look at it, and watch it",
}


def action(action: Action | None) -> str:
    """Return what to do about a subject; "" without an action."""
    return _ACTIONS[action] if action else ""


def reason_with_value(finding: Finding) -> str:
    """Return `TEST: REASON (VALUE, against EXPECTED)`; unknown parts are left out."""
    text = f"{finding.test}: {finding.reason}"
    # A finding on a whole cluster may be compared without a ratio.
    is_compared = finding.ratio is not None or finding.subject.kind == "cluster"
    if not is_compared or not finding.expected:
        return text
    if finding.value is None:
        return f"{text} ({finding.expected})"
    value = f"{number(finding.value, 3)} {finding.unit}".strip()
    return f"{text} ({value}, against {finding.expected})"


def blamed(finding: Finding) -> str:
    """Return the culprit that makes the subject of a finding slow; "" without a culprit."""
    return f"because of {finding.culprit}" if finding.culprit else ""


def further(finding: Finding, *, is_reverse: bool) -> str:
    """Return `TEST (1.60x the time)`, for a finding that is not the worst of its subject.

    Args:
        finding: the finding.
        is_reverse: whether it is about the other direction of a pair.
    """
    if finding.ratio:
        result = f"{finding.ratio:.2f}x the time"
    else:
        result = "not tested" if finding.verdict is Verdict.UNTESTED else finding.reason
    direction = " the other way" if is_reverse else ""
    return f"{finding.test}{direction} ({result})"


def both_or_all(count: int) -> str:
    """Return `both` or `all 4`, for a plural noun."""
    return "both" if count == 2 else f"all {count}"


def devices_name(count: int, kind: DeviceKind) -> str:
    """Return the name of all devices of a check: `the GPU`, `both CPU workers`."""
    noun = "GPU" if kind == "cuda" else "CPU worker"
    return f"the {noun}" if count == 1 else f"{both_or_all(count)} {noun}s"
