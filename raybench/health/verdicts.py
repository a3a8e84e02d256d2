"""The verdict of each subject in each test: healthy, suspect, bad, untested or unknown. Pure.

A subject is compared with similar ones in the same passes (`raybench.stats.outliers`). Where fewer
than four are similar there is no spread: then it is compared with the fastest of them, with its own
past, and with what its model reaches elsewhere. No such comparison sees what makes all of them
slow: for that all together are compared with what their model reaches elsewhere.

A device is the root cause of slow pairs when it is slow with two partners or more that are fast
with others, and with more of these than it is fast with; otherwise the path is, or one of the two.
Nodes come before devices: two nodes are slow together where most pairs of their devices are.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from raybench.analysis.references import SHIPPED, References, peak_of
from raybench.health.readings import ACTIONS, Group, Reading, devices_by_uuid, group_readings
from raybench.health.references import Elsewhere
from raybench.health.suite import COMPUTE_TEST, WAIT_TEST, HealthTest, device_subjects
from raybench.records import Device
from raybench.records.devices import Action, Finding, Subject, SubjectKind, Verdict
from raybench.report.formatting import number, some
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
_BURN_IN = "raybench health --only alone --burn-in 10m"
_LEAST_PARTNERS = 2
# A rank is late where the others wait for it for more than this share of a step, and for more than
# so many floors of the test, in each pass.
_WAIT_SHARE, _WAIT_FLOORS = 0.1, 2
_PATH = "the path between the two is to blame"

# Two devices or two nodes; what to do, and the commands for it.
_Edge = frozenset[str]
_Advice = tuple[Action, Sequence[str]]


def judge(
    readings: Iterable[Reading],
    devices: Sequence[Device],
    past: Sequence[tuple[str, Finding]] = (),
    references: References = SHIPPED,
) -> tuple[Finding, ...]:
    """Return a finding for each subject in each test; unhealthy ones have a culprit or an action.

    Group by group (`group_readings`), each with one about its model if all are slow alike. Then for
    each model without figures (no reference, under three earlier checks), for other programs, and
    for each device, node or path that slows pairs. Rules: docs/explanation/health.md. devices: all
    that were checked, by rank. past: (run id, finding) of earlier checks; only healthy ones count.
    """
    readings = list(readings)
    known = devices_by_uuid(devices)
    groups = group_readings(readings, known)
    elsewhere = Elsewhere(past, references)
    compared = _compare([group for group in groups if group.test.is_compared])
    remaining = iter(compared)
    findings: list[Finding] = []
    for group in groups:
        findings += _findings(group, next(remaining) if group.test.is_compared else None, elsewhere)
    by_model: dict[str, list[Group]] = {}
    for one in compared:
        by_model.setdefault(one.group.model, []).append(one.group)
    for model, own in by_model.items():
        # What a drift should be is known of any model.
        if not any(elsewhere.of_model(group) for group in own if group.test.unit != "x"):
            unknown = Finding(
                test=EXPECTED_TEST,
                stage=own[0].test.stage,
                subject=Subject(kind="cluster", uuids=(), name=f"all {model}", model=model),
                passes=0,
                verdict=Verdict.UNKNOWN,
                reason=f"no figures of {model} are known here: that all are slow would not be seen",
            )
            findings.append(unknown)
    findings += _other_programs(readings, devices)
    findings = _explain_waiting(_explain_pairs(findings, known), groups)
    tests = {group.test.name: group.test for group in groups}
    return tuple(_with_action(finding, known, tests.get(finding.test)) for finding in findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """A group of readings compared with its peers.

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


def _findings(
    group: Group, compared: _Comparison | None, elsewhere: Elsewhere
) -> Iterator[Finding]:
    """Yield the finding of each subject of a group, in order.

    Last one about all of them, where all are slower than their model elsewhere. compared: None for
    a test without comparison, where only a problem is wrong; a subject without one and without a
    value is unknown there.
    """
    test = group.test
    alike = _all_slow(compared, elsewhere) if compared else None
    passes = (~np.isnan(group.values)).sum(axis=0).tolist()
    for column, subject in enumerate(group.subjects):
        has_value = passes[column] > 0
        finding = Finding(
            test=test.name,
            stage=test.stage,
            subject=subject,
            passes=passes[column],
            value=float(group.typical[column]) if has_value else None,
            unit=test.unit,
            expected=_expected_words(compared) if compared else "",
            link=str(group.link),
            ratio=float(compared.ratios[column])
            if compared and np.isfinite(compared.ratios[column]) and len(passes) > 1
            else None,
            verdict=Verdict.HEALTHY,
        )
        changes: dict[str, Any] = {}
        problem: dict[str, Any] = {}
        if compared is None and not has_value:
            changes = {"verdict": Verdict.UNKNOWN, "reason": "nothing here tells it"}
        elif compared and compared.is_slow[column]:
            ratio = finding.ratio or 0.0
            evidence = [f"in each of {finding.passes} passes"] if finding.passes > 1 else []
            if compared.peers is not None:
                evidence.append(f"the others spread by {compared.peers.sigma:.1%}")
                if compared.peers.is_divided:
                    slow, count = int(compared.is_slow.sum()), len(compared.is_slow)
                    evidence.append(f"one of {slow} that are slower than the other {count - slow}")
            changes = {
                "verdict": Verdict.BAD if ratio > test.bad_ratio else Verdict.SUSPECT,
                "ratio": ratio,
                "reason": f"takes {_times(ratio)} as long as those alike",
                "evidence": "; ".join(evidence),
            }
        elif compared and compared.peers is None and alike is None and has_value:
            changes = _against_elsewhere(finding, group, elsewhere)
        if column in group.problems or (compared and not has_value):
            problem = _with_problem(group, column, finding.value, "ratio" in changes)
        if "verdict" in problem:
            changes = {**problem, "ratio": None}
            if not compared and ACTIONS.get(test.name) in (Action.WATCH, Action.SETTING):
                changes["verdict"] = Verdict.SUSPECT
        told = filter(None, (changes.get("evidence"), problem.get("evidence")))
        yield replace(finding, **changes | {"evidence": "; ".join(told)})
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
        return f"{number(float(best), 3)} {unit}, the best of {count} alike"
    among = one.peers.is_reference & ~np.isnan(typical)
    fastest = f"the {int(among.sum())} fastest of " if one.peers.is_divided else ""
    middle = number(float(np.median(typical[among])), 3)
    return f"{middle} {unit}, the median of {fastest}{count} alike"


def _with_problem(group: Group, column: int, value: float | None, is_slow: bool) -> dict[str, Any]:
    """Return the fields, for `replace`, of the finding of a subject with a problem or no value.

    column: of the subject. value: of its finding. Bad where it had a fault, or failed in all
    passes while others did not; suspect where it failed in some, and where another one may be the
    wrong one; untested where it has no value for another reason. Only the evidence where another
    subject made some passes fail, and where it failed in some and is slow in the others.
    """
    problems = group.problems.get(column, ())
    own = [one for one in problems if one.kind != "not read"]
    reason = "; ".join(one.text for one in own or problems) or "it was not read"
    kinds = {one.kind for one in own}
    if kinds == {"failed"} and value is not None:
        # It ran in the other passes: that happens to good devices too.
        count = f"{group.failed_passes[column]} of {group.pass_count} passes"
        told = f"{reason} (in {count})"
        return {"evidence": told} if is_slow else {"verdict": Verdict.SUSPECT, "reason": told}
    if "fault" in kinds:
        return {"verdict": Verdict.BAD, "reason": reason, "action": Action.REPLACE}
    if "disputed" in kinds:
        return {"verdict": Verdict.SUSPECT, "reason": reason, "action": Action.WATCH}
    culprits = sum(
        any(one.kind != "not read" for one in found) for found in group.problems.values()
    )
    if own and culprits < len(group.subjects):
        return {"verdict": Verdict.BAD, "reason": reason}
    if value is not None and not own:
        # Another subject made a pass fail; the other passes say enough.
        return {"evidence": reason}
    return {"verdict": Verdict.UNTESTED, "reason": reason}


def _against_elsewhere(finding: Finding, group: Group, elsewhere: Elsewhere) -> dict[str, Any]:
    """Return the fields, for `replace`, of the finding of a subject with fewer than four peers.

    It is compared with its own earlier checks and with its model elsewhere: bad or suspect where it
    is slower, unknown where there is neither these nor a peer.
    """
    value, test = finding.value or 0.0, group.test
    ranges = [elsewhere.of_subject(finding.subject, test), elsewhere.of_model(group)]
    known = [found for found in ranges if found]
    for found in known:
        if ratio := found.excess(value, test):
            return {
                "verdict": Verdict.BAD if ratio > test.bad_ratio else Verdict.SUSPECT,
                "expected": found.words(test.unit),
                "reason": f"takes {_times(ratio)} as long as it should",
                "ratio": ratio,
            }
    words = [finding.expected, *(found.words(test.unit) for found in known[:1])]
    if expected := "; ".join(filter(None, words)):
        return {"expected": expected}
    peak = peak_of(group.model, {"test": test.name})
    note = f"; its datasheet says {number(peak, 3)} {test.unit}" if peak else ""
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
    group, test = one.group, one.group.test
    sound = group.typical[~np.isnan(group.typical) & ~one.is_slow]
    found = elsewhere.of_model(group)
    if len(group.subjects) < 2 or found is None or not len(sound):
        return None
    best = float(sound.min() if test.is_time else sound.max())
    middle = float(np.median(sound))
    ratio = found.excess(best if one.peers is None else middle, test)
    if ratio is None:
        return None
    noun = "pairs of " if test.subjects == "pair" else ""
    return Finding(
        test=test.name,
        stage=test.stage,
        subject=Subject(
            kind="cluster",
            uuids=tuple(dict.fromkeys(uuid for one in group.subjects for uuid in one.uuids)),
            name=f"{_both_or_all(len(group.subjects))} {noun}{group.model}",
            model=group.model,
        ),
        passes=group.values.shape[0],
        value=middle,
        unit=test.unit,
        expected=found.words(test.unit),
        ratio=ratio,
        verdict=Verdict.SUSPECT,
        reason=f"all are slow alike: {_times(ratio)} as long as they should take",
        evidence="none stands out, so what they share is likelier than a fault of each",
    )


def _both_or_all(count: int) -> str:
    """Return "both", or `all 4`, to stand before a plural."""
    return "both" if count == 2 else f"all {count}"


def _times(ratio: float) -> str:
    """Return a ratio as `1.60 times`; from 100 on as "over 100 times"."""
    return f"{ratio:.2f} times" if ratio < 100 else "over 100 times"


def _other_programs(readings: Iterable[Reading], devices: Sequence[Device]) -> Iterator[Finding]:
    """Yield one finding if other programs used the devices in half of the points or more.

    Comparing devices shows only a neighbour that slows one of them by more than the noise.
    """
    points = {(one.point_id, one.pass_number): one for one in readings if one.point_id is not None}
    disturbed = [one for one in points.values() if one.other_programs]
    if not disturbed or len(disturbed) < _LEAST_DISTURBED * len(points):
        return
    programs = dict.fromkeys(text for one in disturbed for text in one.other_programs)
    noun, command = "CPU worker", "ps -eo pcpu,psr,pid,user,comm --sort=-pcpu | head"
    if devices[0].kind == "cuda":
        noun, command = "GPU", "nvidia-smi -q -d PIDS"
    count = len(devices)
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
        evidence="; ".join(list(programs)[:_MOST_PROGRAMS]),
        action=Action.SETTING,
        command=f"{command}  # on {_hosts(devices)}",
    )


def _hosts(devices: Sequence[Device]) -> str:
    """Return the hosts of the devices as `alpha and on beta`, to follow "on"."""
    return " and on ".join(dict.fromkeys(device.host for device in devices))


def _explain_pairs(findings: Sequence[Finding], known: Mapping[str, Device]) -> list[Finding]:
    """Return the findings in order, and new ones about devices, nodes and paths that slow pairs.

    The finding of a slow pair gets the name of its culprit, which is one at most; without one its
    reason says whether the path or one of the two is to blame. known: devices as of
    `devices_by_uuid`.
    """
    node_of = {uuid: device.node_id for uuid, device in known.items()}
    itself = {uuid: uuid for uuid in known}
    names = {device.node_id: device.host for device in known.values()}
    names |= {one.uuids[0]: one.name for one in device_subjects(list(known.values()))}
    alone = [one for one in findings if one.stage == "alone" and len(one.subject.uuids) == 1]
    ill_alone = {one.subject.uuids[0] for one in alone if one.verdict.is_unhealthy}
    by_test: dict[str, list[Finding]] = {}
    for one in findings:
        if one.subject.kind == "pair":
            by_test.setdefault(one.test, []).append(one)
    explained: dict[tuple[str, Subject], Finding] = {}
    causes: list[Finding] = []
    for test, pairs in by_test.items():
        healthy = [one for one in pairs if one.verdict is Verdict.HEALTHY]
        fast_with = _partners(_edge(one, itself) for one in healthy)
        for pair in filter(_is_slow, pairs):
            two = set(pair.subject.uuids)
            blamed, evidence = "the path or one of the two is to blame", ""
            if all(fast_with.get(uuid, set()) - two for uuid in two):
                blamed, evidence = _PATH, "both are fast with other partners"
            elif two & ill_alone:
                evidence = "one of the two is not healthy alone"
            explained[test, pair.subject] = replace(
                pair,
                reason=f"{pair.reason}: {blamed}",
                evidence="; ".join(filter(None, (pair.evidence, evidence))),
            )
        between = [one for one in pairs if len(_edge(one, node_of)) == 2]
        within = [one for one in pairs if len(_edge(one, node_of)) == 1]
        with_culprit: set[Subject] = set()
        for own, ends in ((between, node_of), (between, itself), (within, itself)):
            left = [one for one in own if one.subject not in with_culprit]
            for slow, cause in _causes(left, ends, names):
                causes.append(cause)
                for one in slow:
                    with_culprit.add(one.subject)
                    explained[test, one.subject] = replace(one, culprit=cause.subject.name)
    return [*(explained.get((one.test, one.subject), one) for one in findings), *causes]


def _edge(pair: Finding, ends: Mapping[str, str]) -> _Edge:
    """Return what `ends` has for the two devices of a pair: their nodes, or the devices."""
    return frozenset(ends.get(uuid, uuid) for uuid in pair.subject.uuids)


def _is_slow(finding: Finding) -> bool:
    """Return whether a figure is too slow: not where it only failed, or came out wrong."""
    return finding.verdict.is_suspect_or_bad and finding.ratio is not None


def _causes(
    pairs: Sequence[Finding], ends: Mapping[str, str], names: Mapping[str, str]
) -> Iterator[tuple[Sequence[Finding], Finding]]:
    """Yield the nodes, paths between nodes or devices that explain slow pairs, the worst end first.

    Each as (the slow pairs that it explains, the finding about it with the worst verdict of these,
    and the medians of their values and ratios). ends: by the uuid of a device the id of its node,
    or the uuid itself. names: for people, of nodes and devices.
    """
    is_device = all(uuid == end for uuid, end in ends.items())
    by_edge: dict[_Edge, list[Finding]] = {}
    for one in pairs:
        if one.value is not None:
            by_edge.setdefault(_edge(one, ends), []).append(one)
    # Two devices are slow where one direction is, two nodes where most of their pairs are.
    slow_edges = {
        edge: slow
        for edge, own in by_edge.items()
        if (slow := list(filter(_is_slow, own))) and (is_device or 2 * len(slow) > len(own))
    }
    kind: SubjectKind = "device" if is_device else "node"
    found: list[tuple[list[Finding], Subject, str, str]] = []
    culprits = _culprits(slow_edges, by_edge.keys() - slow_edges)
    for end, partners in culprits.items():
        slow = [one for one in pairs if end in _edge(one, ends) and _is_slow(one)]
        uuids = tuple(uuid for uuid, owner in ends.items() if owner == end)
        subject = replace(slow[0].subject, kind=kind, uuids=uuids, name=names.get(end, end))
        to_blame = f"partners that are fast with others: the {kind} is to blame"
        good = some(sorted(names.get(one, one) for one in partners))
        found.append((slow, subject, f"slow with {len(partners)} {to_blame}", f"slow with {good}"))
    for edge, slow in slow_edges.items():
        own = by_edge[edge]
        # The path between two nodes, by several pairs of devices.
        if is_device or edge & culprits.keys() or len({_edge(one, {}) for one in own}) < 2:
            continue
        name = " to ".join(sorted(names.get(node, node) for node in edge))
        subject = replace(slow[0].subject, uuids=(), name=name)
        found.append((slow, subject, f"slow for {len(slow)} of {len(own)} pairs: {_PATH}", ""))
    for slow, subject, reason, evidence in found:
        cause = replace(
            min(slow, key=lambda one: list(Verdict).index(one.verdict)),
            subject=subject,
            value=median(one.value or 0.0 for one in slow),
            ratio=median(one.ratio or 0.0 for one in slow),
            reason=reason,
            evidence=evidence,
        )
        yield slow, cause


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


def _explain_waiting(findings: Sequence[Finding], groups: Sequence[Group]) -> list[Finding]:
    """Return the findings, with each rank that those of its model wait for in each pass a suspect.

    The others' findings of that test name the latest such rank as their culprit. A model is left
    out if it has one rank, or a pass does not tell how long each rank waits.
    """
    changes: dict[Subject, dict[str, Any]] = {}
    steps_of = {tuple(one.subjects): one for one in groups if one.test.name == COMPUTE_TEST}
    for waits in (group for group in groups if group.test.name == WAIT_TEST):
        steps, count = steps_of.get(tuple(waits.subjects)), len(waits.subjects)
        if steps is None or count < 2 or waits.values.shape != steps.values.shape:
            continue
        # The median wait of the others less the rank's own [passes, ranks], and steps [passes].
        others = [np.delete(waits.values, rank, axis=1) for rank in range(count)]
        waited_ms = np.stack([np.median(one, axis=1) for one in others], axis=1) - waits.values
        step_ms = np.median(waits.values + steps.values, axis=1)
        least = max(_WAIT_SHARE, _WAIT_FLOORS * waits.test.floor)
        late = np.flatnonzero((waited_ms / step_ms[:, None] > least).all(axis=0)).tolist()
        typical_ms = np.median(waited_ms, axis=0)
        latest = waits.subjects[max(late, key=lambda rank: typical_ms[rank])].name if late else ""
        for rank, subject in enumerate(waits.subjects if late else ()):
            wait = f"waits {number(waits.typical[rank], 3)} ms of each step for it"
            changes[subject] = {"culprit": latest, "evidence": wait}
        for rank, subject in ((rank, waits.subjects[rank]) for rank in late):
            own = {one.stage for one in findings if one.subject == subject and _is_slow(one)}
            evidence = "its device and links are as fast as others': look at its CPU and its data"
            if "alone" in own:
                evidence = "its device is slow alone too"
            elif {"host-links", "pairs"} & own:
                evidence = "its link to the host or to others is slow too"
            waited = f"{number(typical_ms[rank], 3)} of {number(np.median(step_ms), 3)} ms a step"
            reason = f"the others wait {waited} for it"
            changes[subject] = {"verdict": Verdict.SUSPECT, "reason": reason, "evidence": evidence}
    return [
        replace(one, **changes.get(one.subject, {})) if one.test == WAIT_TEST else one
        for one in findings
    ]


def _with_action(finding: Finding, known: Mapping[str, Device], test: HealthTest | None) -> Finding:
    """Return the finding with an action and commands.

    Unchanged where it is healthy or unknown, has a culprit, or has commands already. known:
    devices as of `devices_by_uuid`.
    """
    if not finding.verdict.is_unhealthy or finding.culprit or finding.command:
        return finding
    devices = [known[uuid] for uuid in finding.subject.uuids if uuid in known]
    uses_nccl = test is not None and test.uses_nccl
    action, commands = _advise(finding, devices, known.values(), uses_nccl)
    return replace(finding, action=action, command="\n".join(commands))


def _advise(
    finding: Finding, devices: Sequence[Device], fleet: Iterable[Device], uses_nccl: bool
) -> _Advice:
    """Return the action for a finding that is not healthy, and commands to type, a line each.

    devices: of its subject, as far as they are known. fleet: all that were checked.
    """
    kind, stage = finding.subject.kind, finding.stage
    action = ACTIONS.get(finding.test, Action.WATCH) if stage == "facts" else Action.WATCH
    is_watched = finding.verdict is Verdict.UNTESTED or finding.test == WAIT_TEST
    if stage == "facts" or is_watched or not devices:
        return action, _commands(action, devices)
    at = f"  # on {devices[0].host}"
    slowing = (*(_SLOWING_NCCL * uses_nccl), *(_SLOWING_KERNELS * (stage != "host-links")))
    are_set = {
        name for one in devices for name, value in one.environment.items() if value not in ("", "0")
    }
    names = [name for name in slowing if name in are_set]
    if kind in ("node", "cluster") and names and _is_slow(finding):
        return Action.SETTING, [f"unset {' '.join(names)}"]
    if kind == "cluster":
        # What all devices share.
        topology = f"nvidia-smi topo -m; numactl --hardware; lscpu{at}"
        return action, [topology if stage == "host-links" else "raybench doctor"]
    if kind != "device":
        if len({device.node_id for device in devices}) == 1 and devices[0].kind == "cuda":
            return action, [f"nvidia-smi topo -m; nvidia-smi nvlink --status{at}"]
        return action, [f"ip -s link; tc qdisc show  # on {_hosts(devices)}"]
    if _is_slow(finding) or (finding.value is None and not finding.action):
        return _about_slow(finding, devices[0], fleet)
    # Wrong results, of it or of another one; or some passes failed.
    if finding.action is Action.WATCH:
        return finding.action, [_BURN_IN]
    action = finding.action or Action.WATCH
    return action, _commands(action, devices)


def _about_slow(finding: Finding, device: Device, fleet: Iterable[Device]) -> _Advice:
    """Return action and commands for a slow device: other programs, a power limit, or itself.

    fleet: all devices; a power limit that others of the model have too is not to blame.
    """
    if device.kind == "cpu":
        return Action.WATCH, [f"ps -eo pcpu,psr,pid,comm --sort=-pcpu | head  # on {device.host}"]
    at = f"-i {device.uuid}  # on {device.host}"
    is_bad = finding.verdict is Verdict.BAD
    if finding.stage == "host-links":
        return Action.RESET if is_bad else Action.WATCH, [f"nvidia-smi -q {at}, GPU Link Info"]
    if device.other_processes:
        return Action.SETTING, [f"nvidia-smi -q -d PIDS {at}"]
    cap, default = device.power_cap_w, device.power_cap_default_w
    alike = [one for one in fleet if one.name == device.name and one != device]
    usual = max((one.power_cap_w or 0.0 for one in alike), default=default or 0.0)
    may_be_power = _is_slow(finding) and finding.stage != "pairs"
    if may_be_power and cap is not None and default is not None and cap < min(usual, default):
        return Action.SETTING, [f"nvidia-smi --power-limit={default:g} {at}"]
    if not is_bad:
        return Action.WATCH, [_BURN_IN]
    return Action.RESET, _commands(Action.RESET, [device])


def _commands(action: Action, devices: Sequence[Device]) -> Sequence[str]:
    """Return the commands that reset the devices, or keep jobs off their nodes (REPLACE).

    For another action the command that shows the first device.
    """
    if action is Action.RESET:
        return [f"nvidia-smi --gpu-reset -i {one.uuid}  # on {one.host}" for one in devices]
    if action is Action.REPLACE:
        hosts = [shlex.quote(host) for host in dict.fromkeys(device.host for device in devices)]
        slurm = "scontrol update nodename={} state=drain reason='raybench health'"
        return [line.format(host) for host in hosts for line in (slurm, "kubectl cordon {}")]
    return [
        f"nvidia-smi -q -i {device.uuid}  # on {device.host}"
        if device.kind == "cuda"
        else f"ps -o pid,stat,pcpu,wchan:20,comm -p {device.process_id}  # on {device.host}"
        for device in devices[:1]
    ]
