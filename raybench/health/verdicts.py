"""The verdict of each subject in each test: healthy, suspect, bad, untested or unknown. Pure.

A subject is compared with similar ones in the same passes (`raybench.stats.outliers`). Where fewer
than four are similar there is no spread: then it is compared with the fastest of them, with its own
past, and with what its model reaches elsewhere. No such comparison sees what makes all of them
slow: for that all together are compared with what their model reaches elsewhere.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Literal

import numpy as np

from raybench.analysis.references import SHIPPED, References, peak_of
from raybench.health.readings import ACTIONS, Group, Reading, devices_by_uuid, group_readings
from raybench.health.references import Elsewhere, ValueRange
from raybench.health.suite import COMPUTE_TEST, WAIT_TEST, device_subjects
from raybench.records import Device
from raybench.records.devices import Action, Finding, Subject, Verdict, figure
from raybench.report.formatting import some
from raybench.stats.outliers import (
    LEAST_ALIKE,
    Bools,
    Floats,
    Peers,
    compare_few,
    compare_peers,
    find_slow,
)

EXPECTED_TEST, OTHER_PROGRAMS_TEST = "expected values", "other programs"
# From this share of the points on, programs that used the devices meanwhile are a finding.
_LEAST_DISTURBED = 0.5
_MOST_PROGRAMS = 2
# Variables that make all devices or links slow: in tests that use NCCL, and in those that launch
# kernels. NCCL_NVLS_ENABLE=0 does not: the expected figures are without it.
_SLOWING_NCCL = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"),
)
_SLOWING_KERNELS = ("CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE")
_STAGES_OF_NCCL = ("pairs", "together", "smoke", "straggler", "burn-in")
_OFF = ("", "0")
_LEAST_PARTNERS = 2
# A rank is late where the others wait for it for more than this share of a step, and for more than
# so many floors of the test, in each pass.
_WAIT_SHARE, _WAIT_FLOORS = 0.1, 2
_PATH = "the path between the two is to blame"

# Two devices or two nodes.
_Edge = frozenset[str]
# The slow pairs that a root cause explains, and the finding about it.
_Cause = tuple[Sequence[Finding], Finding]


def judge(
    readings: Iterable[Reading],
    devices: Sequence[Device],
    past: Sequence[tuple[str, Finding]] = (),
    references: References = SHIPPED,
) -> tuple[Finding, ...]:
    """Return a finding for each subject in each test, with its root cause and what to do about it.

    Then findings about what several subjects share: a slow model, a node, a path, other programs.
    devices: those that were checked. past: findings of earlier checks, each with the id of its run;
    only healthy ones with a value count.
    """
    readings = list(readings)
    known = devices_by_uuid(devices)
    groups = group_readings(readings, known)
    elsewhere = Elsewhere(past, references)
    comparisons = _compare([group for group in groups if group.test.is_compared])
    compared = iter(comparisons)
    findings: list[Finding] = []
    for group in groups:
        if group.test.is_compared:
            findings += _compared_findings(next(compared), elsewhere)
        else:
            findings += _fact_findings(group)
    findings += _unknown_models(comparisons, elsewhere)
    findings += _other_programs(readings, devices)
    findings = find_root_causes(findings, groups, known)
    return tuple(_with_action(finding, known) for finding in findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """A group beside its peers.

    ratios, is_slow: of each subject, its time over that of similar ones, and whether that is slow.
    peers: None where fewer than four subjects have values.
    """

    group: Group
    ratios: Floats
    is_slow: Bools
    peers: Peers | None


def _compare(groups: Sequence[Group]) -> list[_Comparison]:
    """Return each group beside its peers, in the order of the groups.

    The false alarms of all groups together are limited (see `find_slow`).
    """
    peers = [
        compare_peers(group.values, is_time=group.test.is_time, floor=group.test.floor)
        if (~np.isnan(group.typical)).sum() >= LEAST_ALIKE
        else None
        for group in groups
    ]
    slow = iter(find_slow([one for one in peers if one]))
    found = []
    for group, one in zip(groups, peers, strict=True):
        test = group.test
        ratios, is_slow = (
            (one.ratios, next(slow))
            if one
            else compare_few(
                group.values, is_time=test.is_time, floor=test.floor, bad_ratio=test.bad_ratio
            )
        )
        found.append(_Comparison(group=group, ratios=ratios, is_slow=is_slow, peers=one))
    return found


def _healthy(group: Group) -> Iterator[Finding]:
    """Yield a healthy finding for each subject of a group, in order, to be changed by the caller.

    With the median of the passes; its value is None where no pass has one.
    """
    passes = (~np.isnan(group.values)).sum(axis=0).tolist()
    for subject, count, value in zip(group.subjects, passes, group.typical.tolist(), strict=True):
        yield Finding(
            test=group.test.name,
            stage=group.test.stage,
            subject=subject,
            passes=count,
            value=value if count else None,
            unit=group.test.unit,
            verdict=Verdict.HEALTHY,
        )


def _compared_findings(one: _Comparison, elsewhere: Elsewhere) -> Iterator[Finding]:
    """Yield the finding of each subject of a group whose values are compared.

    Last one about all of them, where all are slower than their model elsewhere.
    """
    group = one.group
    ratios = one.ratios.tolist()
    expected = _expected_words(one)
    alike = _all_slow(one, elsewhere)
    for column, finding in enumerate(_healthy(group)):
        is_compared = len(group.subjects) > 1 and finding.value is not None
        ratio = ratios[column] if is_compared else None
        finding = replace(finding, expected=expected, ratio=ratio)
        if column in group.problems or finding.value is None:
            yield replace(finding, ratio=None, **_with_problem(group, column, finding.value))
        elif one.is_slow[column]:
            yield replace(finding, **_slow(finding, one))
        elif one.peers is None and alike is None:
            yield replace(finding, **_against_elsewhere(finding, group, elsewhere))
        else:
            yield finding
    if alike is not None:
        yield alike


def _expected_words(one: _Comparison) -> str:
    """Return what the values of a group are compared with, as `750 TFLOP/s, the best of 2 alike`.

    Empty where fewer than two subjects have a value.
    """
    unit, typical = one.group.test.unit, one.group.typical
    count = int((~np.isnan(typical)).sum())
    if count < 2:
        return ""
    if one.peers is None:
        best = np.nanmin(typical) if one.group.test.is_time else np.nanmax(typical)
        return f"{figure(float(best))} {unit}, the best of {count} alike"
    among = one.peers.is_reference & ~np.isnan(typical)
    middle = figure(float(np.median(typical[among])))
    if one.peers.is_divided:
        return f"{middle} {unit}, the median of the {int(among.sum())} fastest of {count} alike"
    return f"{middle} {unit}, the median of {count} alike"


def _slow(finding: Finding, one: _Comparison) -> dict[str, Any]:
    """Return the fields, for `replace`, that make a healthy finding one of a slow subject."""
    ratio = finding.ratio or 0.0
    evidence = [f"in each of {finding.passes} passes"] if finding.passes > 1 else []
    if one.peers is not None:
        evidence.append(f"the others spread by {one.peers.sigma:.1%}")
        if one.peers.is_divided:
            count = int(one.is_slow.sum())
            others = len(one.is_slow) - count
            evidence.append(f"one of {count} that are slower than the other {others}")
    return {
        "verdict": Verdict.BAD if ratio > one.group.test.bad_ratio else Verdict.SUSPECT,
        "reason": f"takes {_times(ratio)} as long as those alike",
        "evidence": "; ".join(evidence),
    }


def _with_problem(group: Group, column: int, value: float | None) -> dict[str, Any]:
    """Return the fields, for `replace`, of the finding of a subject with a problem or no value.

    column: of the subject. value: of its finding. Bad where it had a fault, or failed in all
    passes while others did not; suspect where it failed in some; untested where it has no value for
    another reason. Only the evidence where another subject made some passes fail.
    """
    problems = group.problems.get(column, ())
    own = [one for one in problems if one.kind != "not read"]
    reason = "; ".join(one.text for one in own or problems) or "it was not read"
    if own and value is not None and all(one.kind == "failed" for one in own):
        # It ran in the other passes: that happens to good devices too.
        count = f"{group.failed_passes[column]} of {group.pass_count} passes"
        return {"verdict": Verdict.SUSPECT, "reason": f"{reason} (in {count})"}
    culprits = sum(
        any(one.kind != "not read" for one in found) for found in group.problems.values()
    )
    if own and (value is not None or culprits < len(group.subjects)):
        return {"verdict": Verdict.BAD, "reason": reason}
    if value is not None and not own:
        # Another subject made a pass fail; the other passes say enough.
        return {"evidence": reason}
    return {"verdict": Verdict.UNTESTED, "reason": reason}


def _fact_findings(group: Group) -> Iterator[Finding]:
    """Yield the finding of each subject in a test without comparison: wrong is what has a problem.

    Unknown where there is neither a problem nor a value.
    """
    for column, finding in enumerate(_healthy(group)):
        if column in group.problems:
            changes = _with_problem(group, column, finding.value)
            if ACTIONS.get(group.test.name) in (Action.WATCH, Action.SETTING):
                changes = {**changes, "verdict": Verdict.SUSPECT}
            yield replace(finding, **changes)
        elif finding.value is None:
            yield replace(finding, verdict=Verdict.UNKNOWN, reason="nothing here tells it")
        else:
            yield finding


def _against_elsewhere(finding: Finding, group: Group, elsewhere: Elsewhere) -> dict[str, Any]:
    """Return the fields, for `replace`, of the finding of a subject with fewer than four peers.

    It is compared with its own earlier checks and with its model elsewhere: bad or suspect where it
    is slower, unknown where there is neither these nor a peer.
    """
    value, test = finding.value or 0.0, group.test
    own, others = elsewhere.of_subject(finding.subject, test), elsewhere.of_model(group)
    for found in filter(None, (own, others)):
        if ratio := found.excess(value, test):
            return {
                "verdict": Verdict.BAD if ratio > test.bad_ratio else Verdict.SUSPECT,
                "expected": found.words(test.unit),
                "reason": f"takes {_times(ratio)} as long as it should",
                "ratio": ratio if finding.subject.kind == "device" else finding.ratio,
            }
    best_known: ValueRange | None = own or others
    words = best_known.words(test.unit) if best_known else ""
    expected = "; ".join(filter(None, (finding.expected, words)))
    if expected:
        return {"expected": expected}
    peak = peak_of(group.model, {"test": test.name})
    note = f"; its datasheet says {figure(peak)} {test.unit}" if peak else ""
    where = "" if group.placement.kind == "device" else f", {group.placement},"
    return {
        "verdict": Verdict.UNKNOWN,
        "reason": f"nothing is known of what {group.model}{where} reaches{note}",
    }


def _all_slow(one: _Comparison, elsewhere: Elsewhere) -> Finding | None:
    """Return the finding that all subjects of a group are slower than their model elsewhere.

    None where they are not, for a single subject, and where nothing is known of the model. Subjects
    that are slow beside the others do not count.
    """
    group = one.group
    sound = group.typical[~np.isnan(group.typical) & ~one.is_slow]
    found = elsewhere.of_model(group)
    if len(group.subjects) < 2 or found is None or not len(sound):
        return None
    best = float(sound.min() if group.test.is_time else sound.max())
    middle = float(np.median(sound))
    ratio = found.excess(best if one.peers is None else middle, group.test)
    if ratio is None:
        return None
    noun = "pairs of " if group.test.subjects == "pair" else ""
    uuids = tuple(dict.fromkeys(uuid for subject in group.subjects for uuid in subject.uuids))
    return Finding(
        test=group.test.name,
        stage=group.test.stage,
        subject=Subject(
            kind="cluster",
            uuids=uuids,
            name=f"{_both_or_all(len(group.subjects))} {noun}{group.model}",
            model=group.model,
        ),
        passes=group.values.shape[0],
        value=middle,
        unit=group.test.unit,
        expected=found.words(group.test.unit),
        verdict=Verdict.SUSPECT,
        reason=f"all are slow alike: {_times(ratio)} as long as this model takes elsewhere",
        evidence="none stands out, so what they share is likelier than a fault of each",
    )


def _unknown_models(compared: Iterable[_Comparison], elsewhere: Elsewhere) -> Iterator[Finding]:
    """Yield an unknown finding for each model with neither references nor three earlier checks."""
    groups: dict[str, list[Group]] = {}
    for one in compared:
        groups.setdefault(one.group.model, []).append(one.group)
    for model, own in groups.items():
        if any(elsewhere.of_model(group) for group in own):
            continue
        yield Finding(
            test=EXPECTED_TEST,
            stage=own[0].test.stage,
            subject=Subject(kind="cluster", uuids=(), name=f"all {model}", model=model),
            passes=0,
            verdict=Verdict.UNKNOWN,
            reason=f"no figures of {model} are known here: that all are slow would not be seen",
        )


def _other_programs(readings: Iterable[Reading], devices: Sequence[Device]) -> Iterator[Finding]:
    """Yield one finding if other programs used the devices in half of the points or more.

    Comparing devices shows only a neighbour that slows one of them by more than the noise.
    """
    points = {(one.point_id, one.pass_number): one for one in readings if one.point_id is not None}
    disturbed = [one for one in points.values() if one.other_programs]
    if not disturbed or len(disturbed) < _LEAST_DISTURBED * len(points):
        return
    programs = list(dict.fromkeys(text for one in disturbed for text in one.other_programs))
    noun = "GPU" if devices[0].kind == "cuda" else "CPU worker"
    count = len(devices)
    command = "ps -eo pcpu,psr,pid,user,comm --sort=-pcpu | head"
    if devices[0].kind == "cuda":
        command = "nvidia-smi -q -d PIDS"
    hosts = " and on ".join(dict.fromkeys(device.host for device in devices))
    yield Finding(
        test=OTHER_PROGRAMS_TEST,
        stage=disturbed[0].test.stage,
        subject=Subject(
            kind="cluster",
            uuids=tuple(subject.uuids[0] for subject in device_subjects(devices)),
            name=f"the {noun}" if count == 1 else f"{_both_or_all(count)} {noun}s",
            model="",
        ),
        passes=max(one.pass_number for one in disturbed),
        value=100 * len(disturbed) / len(points),
        unit="% of points",
        verdict=Verdict.SUSPECT,
        reason=f"used by other programs in {len(disturbed)} of {len(points)} points",
        evidence="; ".join(programs[:_MOST_PROGRAMS]),
        action=Action.SETTING,
        command=f"{command}  # on {hosts}",
    )


def _with_action(finding: Finding, known: Mapping[str, Device]) -> Finding:
    """Return the finding with an action and commands.

    Unchanged where it is healthy or unknown, has a culprit, or has an action already.
    """
    if finding.verdict in (Verdict.HEALTHY, Verdict.UNKNOWN) or finding.culprit or finding.action:
        return finding
    action, commands = _advise(finding, known)
    return replace(finding, action=action, command="\n".join(commands))


def _both_or_all(count: int) -> str:
    return "both" if count == 2 else f"all {count}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times" if ratio < 100 else "over 100 times"


def _advise(finding: Finding, known: Mapping[str, Device]) -> tuple[Action, Sequence[str]]:
    """Return the action for a finding that is not healthy, and commands to type, a line each.

    known: devices as of `devices_by_uuid`.
    """
    devices = [known[uuid] for uuid in finding.subject.uuids if uuid in known]
    kind, stage = finding.subject.kind, finding.stage
    action = Action.WATCH
    if stage == "facts":
        action = ACTIONS.get(finding.test, Action.WATCH)
    elif finding.verdict is Verdict.UNTESTED or finding.test == WAIT_TEST or not devices:
        action = Action.WATCH
    elif kind in ("node", "cluster") and (names := _slowing_variables(finding, devices)):
        return Action.SETTING, [f"unset {' '.join(names)}"]
    elif kind == "cluster":
        # What all devices share.
        topology = f"nvidia-smi topo -m; numactl --hardware; lscpu  # on {devices[0].host}"
        return action, [topology if stage == "host-links" else "raybench doctor"]
    elif kind in ("pair", "node"):
        return action, [_look_at_path(devices)]
    elif finding.ratio is not None or finding.value is None:
        return _about_slow(finding, devices[0])
    elif finding.verdict is not Verdict.SUSPECT:
        # Wrong results; suspect is a device of which some passes failed.
        action = Action.REPLACE
    return action, _commands(action, devices)


def _about_slow(finding: Finding, device: Device) -> tuple[Action, Sequence[str]]:
    """Return action and commands for a slow device: other programs, a power limit, or itself."""
    if device.kind == "cpu":
        return Action.WATCH, [f"ps -eo pcpu,psr,pid,comm --sort=-pcpu | head  # on {device.host}"]
    at = f"-i {device.index}  # on {device.host}"
    is_bad = finding.verdict is Verdict.BAD
    if finding.stage == "host-links":
        return Action.RESET if is_bad else Action.WATCH, [f"nvidia-smi -q {at}, GPU Link Info"]
    if device.other_processes:
        return Action.SETTING, [f"nvidia-smi -q -d PIDS {at}"]
    cap, default = device.power_cap_w, device.power_cap_default_w
    if cap is not None and default is not None and cap < default:
        return Action.SETTING, [f"nvidia-smi --power-limit={default:g} {at}"]
    if not is_bad:
        return Action.WATCH, ["raybench health --only alone --burn-in 10m"]
    return Action.RESET, _commands(Action.RESET, [device])


def _commands(action: Action, devices: Iterable[Device]) -> Sequence[str]:
    """Return the commands that reset the devices, or keep jobs off their nodes (REPLACE).

    For another action the command that shows the first device.
    """
    if action is Action.RESET:
        return [f"nvidia-smi --gpu-reset -i {one.index}  # on {one.host}" for one in devices]
    if action is Action.REPLACE:
        hosts = [shlex.quote(host) for host in dict.fromkeys(device.host for device in devices)]
        slurm = "scontrol update nodename={} state=drain reason='raybench health'"
        return [line.format(host) for host in hosts for line in (slurm, "kubectl cordon {}")]
    return [
        f"nvidia-smi -q -i {device.index}  # on {device.host}"
        if device.kind == "cuda"
        else f"ps -o pid,stat,pcpu,wchan:20,comm -p {device.process_id}  # on {device.host}"
        for device in devices
    ][:1]


def _look_at_path(devices: Sequence[Device]) -> str:
    """Return the command that shows the links between these devices."""
    hosts = dict.fromkeys(device.host for device in devices)
    if len({device.node_id for device in devices}) == 1 and devices[0].kind == "cuda":
        return f"nvidia-smi topo -m; nvidia-smi nvlink --status  # on {devices[0].host}"
    return f"ip -s link; tc qdisc show  # on {' and on '.join(hosts)}"


def _slowing_variables(finding: Finding, devices: Sequence[Device]) -> list[str]:
    """Return the variables that are set on any device and are known to make such a test slow."""
    is_of_nccl = finding.stage in _STAGES_OF_NCCL and not finding.test.startswith("copy ")
    names = (_SLOWING_NCCL if is_of_nccl else ()) + (
        _SLOWING_KERNELS if finding.stage != "host-links" else ()
    )
    return [
        name
        for name in names
        if any(device.environment.get(name, "") not in _OFF for device in devices)
    ]


def find_root_causes(
    findings: Sequence[Finding], groups: Sequence[Group], known: Mapping[str, Device]
) -> list[Finding]:
    """Return the findings in order, and new ones about devices, nodes and paths that slow pairs.

    The finding of a slow pair, or of a waiting rank, gets the name of its culprit. The rank that
    all others wait for becomes suspect. groups: of all tests. known: devices as of
    `devices_by_uuid`.
    """
    alone = [one for one in findings if one.stage == "alone" and len(one.subject.uuids) == 1]
    slow_alone = {one.subject.uuids[0] for one in alone if one.verdict is not Verdict.HEALTHY}
    found = list(findings)
    for test in dict.fromkeys(one.test for one in findings if one.subject.kind == "pair"):
        own = [one for one in findings if one.test == test and one.subject.kind == "pair"]
        causes = _causes(own, known)
        explained = {
            one.subject: replace(one, culprit=cause.subject.name)
            for slow, cause in causes
            for one in slow
        }
        explained = _explain_rest(own, slow_alone) | explained
        found = [explained.get(one.subject, one) if one.test == test else one for one in found]
        found += [cause for _, cause in causes]
    return _explain_waiting(found, groups)


def _causes(pairs: Sequence[Finding], known: Mapping[str, Device]) -> list[_Cause]:
    """Return the nodes, then the paths between nodes, then the devices that explain slow pairs.

    Each as (the pairs that it explains, the finding about it); a pair has one root cause at most.
    pairs: all of one test.
    """
    node_of = {uuid: device.node_id for uuid, device in known.items()}
    itself = {uuid: uuid for uuid in known}
    names = {device.node_id: device.host for device in known.values()}
    names |= {one.uuids[0]: one.name for one in device_subjects(list(known.values()))}
    between = [one for one in pairs if len(set(_ends(one, node_of))) == 2]
    within = [one for one in pairs if len(set(_ends(one, node_of))) == 1]
    found: list[_Cause] = []
    for kind, own in (
        ("node", between),
        ("path", between),
        ("device", between),
        ("device", within),
    ):
        explained = {one.subject for slow, _ in found for one in slow}
        left = [one for one in own if one.subject not in explained]
        if kind == "path":
            found += _slow_paths(left, node_of, names)
        elif kind == "node":
            found += _slow_ends(left, "node", node_of, names)
        else:
            found += _slow_ends(left, "device", itself, names)
    return found


def _slow_ends(
    pairs: Sequence[Finding],
    kind: Literal["node", "device"],
    ends: Mapping[str, str],
    names: Mapping[str, str],
) -> Iterator[_Cause]:
    """Yield the nodes or devices that are slow with partners that are fast with others.

    ends: by the uuid of a device the id of its node, or the uuid itself, by `kind`. names: for
    people, of nodes and devices.
    """
    slow_ways: dict[_Edge, list[bool]] = {}
    for one in pairs:
        if one.value is not None:
            slow_ways.setdefault(frozenset(_ends(one, ends)), []).append(one.verdict.is_slow)
    # Two devices are slow where one direction is, two nodes where most of their pairs are.
    slow_edges = {
        edge
        for edge, ways in slow_ways.items()
        if (any(ways) if kind == "device" else 2 * sum(ways) > len(ways))
    }
    for end, partners in _culprits(slow_edges, slow_ways.keys() - slow_edges).items():
        slow = [one for one in pairs if end in _ends(one, ends) and one.verdict.is_slow]
        subject = Subject(
            kind=kind,
            uuids=tuple(uuid for uuid, owner in ends.items() if owner == end),
            name=names.get(end, end),
            model=slow[0].subject.model,
        )
        count = len(partners)
        reason = f"slow with {count} partners that are fast with others: the {kind} is to blame"
        good = some(sorted(names.get(one, one) for one in partners))
        yield slow, _cause(slow, subject, reason, f"slow with {good}")


def _slow_paths(
    pairs: Sequence[Finding], node_of: Mapping[str, str], names: Mapping[str, str]
) -> Iterator[_Cause]:
    """Yield the paths between two nodes on which several pairs, and most of them, are slow.

    node_of: node ids by the uuid of a device. names: of nodes, for people.
    """
    by_path: dict[_Edge, list[Finding]] = {}
    for one in pairs:
        if one.value is not None:
            by_path.setdefault(frozenset(_ends(one, node_of)), []).append(one)
    for edge, own in by_path.items():
        slow = [one for one in own if one.verdict.is_slow]
        if len({frozenset(one.subject.uuids) for one in own}) < 2 or 2 * len(slow) <= len(own):
            continue
        name = " to ".join(sorted(names.get(node, node) for node in edge))
        subject = Subject(kind="pair", uuids=(), name=name, model=own[0].subject.model)
        yield slow, _cause(slow, subject, f"slow for {len(slow)} of {len(own)} pairs: {_PATH}", "")


def _cause(slow: Sequence[Finding], subject: Subject, reason: str, evidence: str) -> Finding:
    """Return the finding about a root cause, with the worst verdict of the slow pairs.

    Its value and ratio are their medians; the ratio is None where no pair has one.
    """
    ratios = [one.ratio for one in slow if one.ratio is not None]
    is_bad = any(one.verdict is Verdict.BAD for one in slow)
    return replace(
        slow[0],
        subject=subject,
        value=median(one.value for one in slow if one.value is not None),
        ratio=median(ratios) if ratios else None,
        verdict=Verdict.BAD if is_bad else Verdict.SUSPECT,
        reason=reason,
        evidence=evidence,
    )


def _ends(pair: Finding, ends: Mapping[str, str]) -> tuple[str, ...]:
    """Return what `ends` has for the two devices of a pair: their nodes, or the devices."""
    return tuple(ends.get(uuid, uuid) for uuid in pair.subject.uuids)


def _culprits(slow: Iterable[_Edge], fast: Iterable[_Edge]) -> dict[str, set[str]]:
    """Return the ends that are slow with two partners or more that are fast with others.

    By each such end its partners, the worst end first. An end must have more of these partners than
    partners that it is fast with; a partner that is itself returned does not count against others.
    """
    slow_with, fast_with = _partners(slow), _partners(fast)
    found: dict[str, set[str]] = {}
    while True:
        good = {
            name: {one for one in partners if fast_with.get(one, set()) - {name}}
            for name, partners in slow_with.items()
        }
        name = max(good, key=lambda one: (len(good[one]), one), default="")
        partners = good.get(name, set())
        if len(partners) < max(_LEAST_PARTNERS, len(fast_with.get(name, ())) + 1):
            return found
        found[name] = partners
        del slow_with[name]
        for others in slow_with.values():
            others.discard(name)


def _partners(edges: Iterable[_Edge]) -> dict[str, set[str]]:
    """Return the partners of each end; an edge from an end to itself counts for nothing."""
    found: dict[str, set[str]] = {}
    for first, second in (edge for edge in edges if len(edge) == 2):
        found.setdefault(first, set()).add(second)
        found.setdefault(second, set()).add(first)
    return found


def _explain_rest(pairs: Sequence[Finding], slow_alone: Set[str]) -> dict[Subject, Finding]:
    """Return the findings of the slow pairs by subject; their reason now says what is to blame.

    That is the path where both devices are fast with other partners; else the path or one of the
    two. pairs: all of one test. slow_alone: uuids of devices that are not healthy alone.
    """
    healthy = [one for one in pairs if one.verdict is Verdict.HEALTHY]
    fast_with = _partners(frozenset(one.subject.uuids) for one in healthy)
    found = {}
    for pair in pairs:
        if not pair.verdict.is_slow:
            continue
        ends = set(pair.subject.uuids)
        cause, evidence = "the path or one of the two is to blame", ""
        if all(fast_with.get(uuid, set()) - ends for uuid in ends):
            cause, evidence = _PATH, "both are fast with other partners"
        elif ends & slow_alone:
            evidence = "one of the two is not healthy alone"
        found[pair.subject] = replace(
            pair,
            reason=f"{pair.reason}: {cause}",
            evidence="; ".join(filter(None, (pair.evidence, evidence))),
        )
    return found


def _explain_waiting(findings: Sequence[Finding], groups: Sequence[Group]) -> list[Finding]:
    """Return the findings, with the rank that the others wait for in each pass as a suspect.

    The others' findings of that test name it as their culprit. Unchanged where there is no such
    rank, or where a pass does not tell how long each rank waits.
    """
    waits = next((group for group in groups if group.test.name == WAIT_TEST), None)
    steps = next((group for group in groups if group.test.name == COMPUTE_TEST), None)
    if waits is None or steps is None or len(waits.subjects) < 2:
        return list(findings)
    if waits.subjects != steps.subjects or waits.values.shape != steps.values.shape:
        return list(findings)
    # The median wait of the others less the rank's own [passes, ranks], and steps [passes].
    others = [np.delete(waits.values, rank, axis=1) for rank in range(waits.values.shape[1])]
    typical_ms = np.stack([np.median(one, axis=1) for one in others], axis=1)
    waited_ms = typical_ms - waits.values
    step_ms = np.median(waits.values + steps.values, axis=1)
    least = max(_WAIT_SHARE, _WAIT_FLOORS * waits.test.floor)
    late = np.flatnonzero((waited_ms / step_ms[:, None] > least).all(axis=0))
    if not len(late):
        return list(findings)
    culprit = waits.subjects[int(late[0])]
    reason = (
        f"in a step of {np.median(step_ms):.3g} ms each of the others waits "
        f"{np.median(waited_ms[:, int(late[0])]):.3g} ms for it"
    )
    stages = {one.stage for one in findings if one.subject == culprit and one.verdict.is_slow}
    evidence = "its device and its links are as fast as the others': look at its CPU and its data"
    if "alone" in stages:
        evidence = "its device is slow alone too"
    elif {"host-links", "pairs"} & stages:
        evidence = "its link to the host or to others is slow too"
    found = []
    for one in findings:
        if one.test == WAIT_TEST and one.subject == culprit:
            one = replace(one, verdict=Verdict.SUSPECT, reason=reason, evidence=evidence)
        elif one.test == WAIT_TEST:
            wait = f"waits {one.value or 0.0:.3g} ms of each step for it"
            one = replace(one, culprit=culprit.name, evidence=wait)
        found.append(one)
    return found
