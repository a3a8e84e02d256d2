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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from raybench.analysis.references import SHIPPED, References, peak_of
from raybench.health import causes
from raybench.health.causes import Cause, Circumstances
from raybench.health.readings import Group, Reading, devices_by_uuid, group_readings
from raybench.health.references import LEAST_PAST_CHECKS, Elsewhere, excess
from raybench.health.suite import COMPUTE_TEST, WAIT_TEST, HealthTest, device_subjects
from raybench.records.device import Device
from raybench.records.devices import Action, Finding, Stage, Subject, SubjectKind, Verdict
from raybench.records.judgement import (
    Blame,
    Command,
    CommandKind,
    Expected,
    PeerValue,
    ProblemKind,
    Reason,
    ReasonKind,
)
from raybench.report.words import health as words
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
_BURN_IN = Command(kind=CommandKind.BURN_IN)
_LEAST_PARTNERS = 2
# A rank is late where the others wait for it for more than this share of a step, and for more than
# so many floors of the test, in each pass.
_WAIT_SHARE, _WAIT_FLOORS = 0.1, 2

# Two devices or two nodes; what to do, and the commands for it.
_Edge = frozenset[str]
_Advice = tuple[Action, Sequence[Command]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The result of one test for one subject, in kinds and numbers.

    Fields as of `Finding`, which has them in words.
    """

    test: HealthTest
    subject: Subject
    passes: int
    # Passes in which the subject was too slow or wrong, or failed by itself.
    failed_passes: int = 0
    value: float | None = None
    expected: tuple[Expected, ...] = ()
    link: str = ""
    ratio: float | None = None
    verdict: Verdict
    reason: Reason | None = None
    evidence: tuple[Reason, ...] = ()
    culprit: Subject | None = None
    # Of a path between two nodes, which has no devices of its own: the uuids at both ends.
    ends: tuple[str, ...] = ()
    action: Action | None = None
    commands: tuple[Command, ...] = ()

    @property
    def stage(self) -> Stage:
        """Return the stage of the test."""
        return self.test.stage

    @property
    def finding(self) -> Finding:
        """Return the row of the table `health`, with words."""
        return Finding(
            test=self.test.name,
            stage=self.test.stage,
            subject=self.subject,
            passes=self.passes,
            value=self.value,
            unit=self.test.unit,
            expected=words.expected(self.expected, self.test.unit),
            link=self.link,
            ratio=self.ratio,
            verdict=self.verdict,
            reason=words.reason(self.reason) if self.reason else "",
            evidence="; ".join(map(words.reason, self.evidence)),
            culprit=self.culprit.name if self.culprit else "",
            action=self.action,
            command="\n".join(map(words.command_words, self.commands)),
        )


def judge(
    readings: Iterable[Reading],
    devices: Sequence[Device],
    past: Sequence[tuple[str, Finding]] = (),
    references: References = SHIPPED,
) -> tuple[Judgement, ...]:
    """Return a judgement for each subject in each test; unhealthy ones have a culprit or an action.

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
    findings: list[Judgement] = []
    for group in groups:
        findings += _findings(group, next(remaining) if group.test.is_compared else None, elsewhere)
    by_model: dict[str, list[Group]] = {}
    for one in compared:
        by_model.setdefault(one.group.model, []).append(one.group)
    for model, own in by_model.items():
        # What a drift should be is known of any model.
        if not any(elsewhere.of_model(group) for group in own if group.test.unit != "x"):
            unknown = Judgement(
                test=HealthTest(
                    name=EXPECTED_TEST,
                    stage=own[0].test.stage,
                    unit="",
                    floor=0.0,
                    is_compared=False,
                ),
                subject=Subject(kind="cluster", uuids=(), name=f"all {model}", model=model),
                passes=0,
                verdict=Verdict.UNKNOWN,
                reason=Reason(
                    kind=ReasonKind.NO_FIGURES,
                    model=model,
                    value=LEAST_PAST_CHECKS,
                    limit=max(map(elsewhere.count_checks, own)),
                ),
                commands=(
                    Command(kind=CommandKind.CHECK_AGAIN),
                    Command(kind=CommandKind.EXPORT_REFERENCES),
                ),
            )
            findings.append(unknown)
    findings += _other_programs(readings, devices)
    findings = _explain_waiting(_explain_pairs(findings, known), groups)
    beside = Circumstances(readings=readings, known=known)
    return tuple(_with_action(finding, beside, references) for finding in findings)


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
) -> Iterator[Judgement]:
    """Yield the judgement of each subject of a group, in order.

    Last one about all of them, where all are slower than their model elsewhere. compared: None for
    a test without comparison, where only a problem is wrong; a subject without one and without a
    value is unknown there.
    """
    alike = _all_slow(compared, elsewhere) if compared else None
    passes = (~np.isnan(group.values)).sum(axis=0).tolist()
    for column, subject in enumerate(group.subjects):
        has_value = passes[column] > 0
        has_ratio = compared and np.isfinite(compared.ratios[column]) and len(passes) > 1
        plain = Judgement(
            test=group.test,
            subject=subject,
            passes=passes[column],
            value=float(group.typical[column]) if has_value else None,
            expected=_peer_values(compared) if compared else (),
            link=str(group.link),
            ratio=float(compared.ratios[column]) if compared and has_ratio else None,
            verdict=Verdict.HEALTHY,
        )
        judged = plain
        if compared is None and not has_value:
            reason = Reason(kind=ReasonKind.NOT_REPORTED)
            judged = replace(plain, verdict=Verdict.UNKNOWN, reason=reason)
        elif compared and compared.is_slow[column]:
            judged = _beside_peers(plain, compared)
        elif compared and compared.peers is None and alike is None and has_value:
            judged = _against_elsewhere(plain, group, column, elsewhere)
        if column in group.problems or (compared and not has_value):
            failed = replace(plain, ratio=None, failed_passes=group.faulty_passes.get(column, 0))
            judged = _with_problem(judged, failed, group, column)
        yield judged
    if alike is not None:
        yield alike


def _beside_peers(plain: Judgement, compared: _Comparison) -> Judgement:
    """Return the judgement of a subject that is slow beside similar ones."""
    ratio = plain.ratio or 0.0
    evidence = []
    if plain.passes > 1:
        evidence.append(Reason(kind=ReasonKind.IN_EACH_PASS, value=plain.passes))
    if compared.peers is not None:
        evidence.append(Reason(kind=ReasonKind.SPREAD, value=compared.peers.sigma))
        if compared.peers.is_divided:
            slow = int(compared.is_slow.sum())
            others = len(compared.is_slow) - slow
            evidence.append(Reason(kind=ReasonKind.ONE_OF_SLOW, value=slow, limit=others))
    return replace(
        plain,
        verdict=Verdict.BAD if ratio > plain.test.bad_ratio else Verdict.SUSPECT,
        # A subject that is slow beside its peers is slow in each pass.
        failed_passes=plain.passes,
        ratio=ratio,
        reason=Reason(kind=ReasonKind.SLOWER_THAN_PEERS, value=ratio),
        evidence=tuple(evidence),
    )


def _peer_values(one: _Comparison) -> tuple[PeerValue, ...]:
    """Return what the values of a group are compared with.

    Empty where fewer than two subjects have a value.
    """
    typical = one.group.typical
    count = int((~np.isnan(typical)).sum())
    if count < 2:
        return ()
    if one.peers is None:
        best = np.nanmin(typical) if one.group.test.is_time else np.nanmax(typical)
        return (PeerValue(value=float(best), count=count, is_best=True),)
    among = one.peers.is_reference & ~np.isnan(typical)
    fastest = int(among.sum()) if one.peers.is_divided else 0
    middle = float(np.median(typical[among]))
    return (PeerValue(value=middle, count=count, fastest=fastest),)


def _with_problem(judged: Judgement, plain: Judgement, group: Group, column: int) -> Judgement:
    """Return the judgement of a subject with a problem or no value.

    Bad where it had a fault, or failed in all passes while others did not; suspect where it failed
    in some, and where another one may be the wrong one; untested where it has no value for another
    reason. Only more evidence where another subject made some passes fail, and where it failed in
    some and is slow in the others. judged: by its values. plain: healthy. column: of the subject.
    """
    problems = group.problems.get(column, ())
    own = [one for one in problems if one.effect != "not read"]
    reason = Reason(kind=ReasonKind.NOT_READ)
    if problems:
        reason = Reason(kind=ReasonKind.PROBLEMS, problems=tuple(own or problems))
    effects = {one.effect for one in own}
    if effects == {"failed"} and plain.value is not None:
        # It ran in the other passes: that happens to good devices too.
        reason = replace(reason, value=group.failed_passes[column], limit=group.pass_count)
        if judged.verdict.is_suspect_or_bad:
            return replace(judged, evidence=(*judged.evidence, reason))
        return replace(plain, verdict=Verdict.SUSPECT, reason=reason)
    culprits = sum(
        any(one.effect != "not read" for one in found) for found in group.problems.values()
    )
    action = None
    if "fault" in effects:
        verdict, action = Verdict.BAD, Action.REPLACE
    elif "disputed" in effects:
        verdict, action = Verdict.SUSPECT, Action.WATCH
    elif own and culprits < len(group.subjects):
        verdict = Verdict.BAD
    elif plain.value is not None and not own:
        # Another subject made a pass fail; the other passes say enough.
        return replace(judged, evidence=(*judged.evidence, reason))
    else:
        verdict = Verdict.UNTESTED
    if group.test.action in (Action.WATCH, Action.SETTING):
        verdict = Verdict.SUSPECT
    return replace(plain, verdict=verdict, reason=reason, action=action)


def _against_elsewhere(
    plain: Judgement, group: Group, column: int, elsewhere: Elsewhere
) -> Judgement:
    """Return the judgement of a subject with fewer than four peers.

    It is compared with its own earlier checks and with its model elsewhere: bad or suspect where it
    is slower, unknown where there is neither these nor a peer. column: of the subject.
    """
    value, test = plain.value or 0.0, group.test
    ranges = [elsewhere.of_subject(plain.subject, test), elsewhere.of_model(group)]
    known = [found for found in ranges if found]
    for found in known:
        if ratio := excess(found, value, test):
            measured = group.values[:, column].tolist()
            slow = [one for one in measured if np.isfinite(one) and excess(found, one, test)]
            return replace(
                plain,
                verdict=Verdict.BAD if ratio > test.bad_ratio else Verdict.SUSPECT,
                failed_passes=len(slow),
                expected=(found,),
                reason=Reason(kind=ReasonKind.SLOWER_THAN_USUAL, value=ratio),
                ratio=ratio,
            )
    if expected := (*plain.expected, *known[:1]):
        return replace(plain, expected=expected)
    reason = Reason(
        kind=ReasonKind.NOTHING_KNOWN,
        model=group.model,
        placement="" if group.placement.kind == "device" else str(group.placement),
        value=peak_of(group.model, {"test": test.name}),
        unit=test.unit,
    )
    return replace(plain, verdict=Verdict.UNKNOWN, reason=reason)


def _all_slow(one: _Comparison, elsewhere: Elsewhere) -> Judgement | None:
    """Return the judgement that all subjects of a group are slower than their model elsewhere.

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
    ratio = excess(found, best if one.peers is None else middle, test)
    if ratio is None:
        return None
    noun = "pairs of " if test.subjects == "pair" else ""
    return Judgement(
        test=test,
        subject=Subject(
            kind="cluster",
            uuids=tuple(dict.fromkeys(uuid for one in group.subjects for uuid in one.uuids)),
            name=f"{words.both_or_all(len(group.subjects))} {noun}{group.model}",
            model=group.model,
        ),
        passes=group.values.shape[0],
        value=middle,
        expected=(found,),
        ratio=ratio,
        verdict=Verdict.SUSPECT,
        reason=Reason(kind=ReasonKind.ALL_SLOW, value=ratio),
        evidence=(Reason(kind=ReasonKind.NONE_STANDS_OUT),),
    )


def _other_programs(readings: Iterable[Reading], devices: Sequence[Device]) -> Iterator[Judgement]:
    """Yield one finding if other programs used the devices in half of the points or more.

    Comparing devices shows only a neighbour that slows one of them by more than the noise.
    """
    points = {(one.point_id, one.pass_number): one for one in readings if one.point_id is not None}
    disturbed = [one for one in points.values() if one.other_programs]
    if not disturbed or len(disturbed) < _LEAST_DISTURBED * len(points):
        return
    kind = CommandKind.SHOW_ALL_CPU_LOAD
    if devices[0].kind == "cuda":
        kind = CommandKind.SHOW_ALL_GPU_PROCESSES
    show = Command(kind=kind, hosts=_hosts(devices))
    texts = dict.fromkeys(text for one in disturbed for text in one.other_programs)
    beside = Circumstances(readings=disturbed, known=devices_by_uuid(devices))
    programs = beside.programs_on(devices)
    evidence = Reason(
        kind=ReasonKind.PROGRAMS, names=tuple(texts)[:_MOST_PROGRAMS], programs=programs
    )
    cause = causes.of_programs(programs)
    yield Judgement(
        test=HealthTest(
            name=OTHER_PROGRAMS_TEST,
            stage=disturbed[0].test.stage,
            unit="% of points",
            floor=0.0,
            is_compared=False,
        ),
        subject=Subject(
            kind="cluster",
            uuids=tuple(subject.uuids[0] for subject in device_subjects(devices)),
            name=words.devices_name(len(devices), devices[0].kind),
            model="",
        ),
        passes=max(one.pass_number for one in disturbed),
        value=100 * len(disturbed) / len(points),
        verdict=Verdict.SUSPECT,
        reason=Reason(kind=ReasonKind.OTHER_PROGRAMS, value=len(disturbed), limit=len(points)),
        evidence=(evidence,),
        action=Action.WAIT,
        commands=cause.commands if cause else (show,),
    )


def _hosts(devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the hosts of the devices, without repeats."""
    return tuple(dict.fromkeys(device.host for device in devices))


def _explain_pairs(findings: Sequence[Judgement], known: Mapping[str, Device]) -> list[Judgement]:
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
    by_test: dict[str, list[Judgement]] = {}
    for one in findings:
        if one.subject.kind == "pair":
            by_test.setdefault(one.test.name, []).append(one)
    explained: dict[tuple[str, Subject], Judgement] = {}
    causes: list[Judgement] = []
    for test, pairs in by_test.items():
        healthy = [one for one in pairs if one.verdict is Verdict.HEALTHY]
        fast_with = _partners(_edge(one, itself) for one in healthy)
        for pair in filter(_is_slow, pairs):
            two = set(pair.subject.uuids)
            blame: Blame = "path or end"
            evidence = pair.evidence
            if all(fast_with.get(uuid, set()) - two for uuid in two):
                blame = "path"
                evidence = (*evidence, Reason(kind=ReasonKind.FAST_WITH_OTHERS))
            elif two & ill_alone:
                evidence = (*evidence, Reason(kind=ReasonKind.ONE_ILL_ALONE))
            reason = pair.reason and replace(pair.reason, blame=blame)
            explained[test, pair.subject] = replace(pair, reason=reason, evidence=evidence)
        between = [one for one in pairs if len(_edge(one, node_of)) == 2]
        within = [one for one in pairs if len(_edge(one, node_of)) == 1]
        with_culprit: set[Subject] = set()
        for own, ends in ((between, node_of), (between, itself), (within, itself)):
            left = [one for one in own if one.subject not in with_culprit]
            for slow, cause in _causes(left, ends, names):
                causes.append(cause)
                for one in slow:
                    with_culprit.add(one.subject)
                    explained[test, one.subject] = replace(one, culprit=cause.subject)
    return [*(explained.get((one.test.name, one.subject), one) for one in findings), *causes]


def _edge(pair: Judgement, ends: Mapping[str, str]) -> _Edge:
    """Return what `ends` has for the two devices of a pair: their nodes, or the devices."""
    return frozenset(ends.get(uuid, uuid) for uuid in pair.subject.uuids)


def _is_slow(finding: Judgement) -> bool:
    """Return whether a figure is too slow: not where it only failed, or came out wrong."""
    return finding.verdict.is_suspect_or_bad and finding.ratio is not None


def _causes(
    pairs: Sequence[Judgement], ends: Mapping[str, str], names: Mapping[str, str]
) -> Iterator[tuple[Sequence[Judgement], Judgement]]:
    """Yield the nodes, paths between nodes or devices that explain slow pairs, the worst end first.

    Each as (the slow pairs that it explains, the finding about it with the worst verdict of these,
    and the medians of their values and ratios). ends: by the uuid of a device the id of its node,
    or the uuid itself. names: for people, of nodes and devices.
    """
    is_device = all(uuid == end for uuid, end in ends.items())
    by_edge: dict[_Edge, list[Judgement]] = {}
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
    found: list[tuple[list[Judgement], Subject, Reason, tuple[Reason, ...]]] = []
    ends_of_path: dict[Subject, tuple[str, ...]] = {}
    culprits = _culprits(slow_edges, by_edge.keys() - slow_edges)
    for end, partners in culprits.items():
        slow = [one for one in pairs if end in _edge(one, ends) and _is_slow(one)]
        uuids = tuple(uuid for uuid, owner in ends.items() if owner == end)
        subject = replace(slow[0].subject, kind=kind, uuids=uuids, name=names.get(end, end))
        reason = Reason(kind=ReasonKind.SLOW_WITH_PARTNERS, value=len(partners), subject=kind)
        good = tuple(sorted(names.get(one, one) for one in partners))
        found.append((slow, subject, reason, (Reason(kind=ReasonKind.PARTNERS, names=good),)))
    for edge, slow in slow_edges.items():
        own = by_edge[edge]
        # The path between two nodes, by several pairs of devices.
        if is_device or edge & culprits.keys() or len({_edge(one, {}) for one in own}) < 2:
            continue
        name = words.path_name(*sorted(names.get(node, node) for node in edge))
        subject = replace(slow[0].subject, uuids=(), name=name)
        ends_of_path[subject] = slow[0].subject.uuids
        reason = Reason(kind=ReasonKind.SLOW_PATH, value=len(slow), limit=len(own))
        found.append((slow, subject, reason, ()))
    for slow, subject, reason, evidence in found:
        cause = replace(
            min(slow, key=lambda one: list(Verdict).index(one.verdict)),
            subject=subject,
            value=median(one.value or 0.0 for one in slow),
            ratio=median(one.ratio or 0.0 for one in slow),
            reason=reason,
            evidence=evidence,
            ends=ends_of_path.get(subject, ()),
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


def _explain_waiting(findings: Sequence[Judgement], groups: Sequence[Group]) -> list[Judgement]:
    """Return the findings, with each rank that those of its model wait for in each pass a suspect.

    The others' findings of that test name the latest such rank as their culprit. A model is left
    out if it has one rank, or a pass does not tell how long each rank waits.
    """
    judged = {one.subject: one for one in findings if one.test.name == WAIT_TEST}
    changed: dict[Subject, Judgement] = {}
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
        if not late:
            continue
        latest = waits.subjects[max(late, key=lambda rank: typical_ms[rank])]
        for rank, subject in enumerate(waits.subjects):
            evidence = Reason(kind=ReasonKind.WAITS, value=float(waits.typical[rank]))
            changed[subject] = replace(judged[subject], culprit=latest, evidence=(evidence,))
        for rank in late:
            subject = waits.subjects[rank]
            own = {one.stage for one in findings if one.subject == subject and _is_slow(one)}
            kind = ReasonKind.CPU_OR_DATA
            if "alone" in own:
                kind = ReasonKind.SLOW_ALONE
            elif {"host-links", "pairs"} & own:
                kind = ReasonKind.SLOW_LINK
            changed[subject] = replace(
                judged[subject],
                verdict=Verdict.SUSPECT,
                reason=Reason(
                    kind=ReasonKind.LATE,
                    value=float(typical_ms[rank]),
                    limit=float(np.median(step_ms)),
                ),
                evidence=(Reason(kind=kind),),
            )
    return [
        changed.get(one.subject, one) if one.test.name == WAIT_TEST else one for one in findings
    ]


def _with_action(finding: Judgement, beside: Circumstances, references: References) -> Judgement:
    """Return the judgement with its cause, an action and commands.

    Unchanged where it is healthy or unknown, has a culprit, or has commands already.
    """
    if not finding.verdict.is_unhealthy or finding.culprit or finding.commands:
        return finding
    known = beside.known
    uuids = finding.subject.uuids or finding.ends
    devices = [known[uuid] for uuid in uuids if uuid in known]
    cause = _cause(finding, devices, beside, references)
    evidence = (*finding.evidence, *cause.evidence) if cause else finding.evidence
    if cause and cause.action:
        action, commands = cause.action, cause.commands
    else:
        action, proposed = _advise(finding, devices)
        commands = tuple(proposed)
    return replace(finding, evidence=evidence, action=action, commands=commands)


def _cause(
    finding: Judgement, devices: Sequence[Device], beside: Circumstances, references: References
) -> Cause | None:
    """Return what made the subject slow, or kept it from its test; None if that is unknown."""
    kind, test = finding.subject.kind, finding.test
    problems = {one.kind for one in finding.reason.problems} if finding.reason else set()
    if ProblemKind.NO_ROOM in problems:
        return causes.of_programs(beside.programs_on(devices))
    if not _is_slow(finding) or test.name == WAIT_TEST or not devices:
        return None
    if kind == "device":
        return causes.of_device(test, finding.subject.uuids[0], beside)
    if kind == "pair":
        return causes.of_link(test, finding.subject.uuids or finding.ends, beside)
    if kind == "node" and finding.reason and finding.reason.kind is ReasonKind.SLOW_WITH_PARTNERS:
        return causes.of_network(devices)
    if kind != "cluster":
        return None
    is_reference = any(getattr(one, "source", "") == "reference" for one in finding.expected)
    drivers = references.drivers(finding.subject.model) if is_reference else ()
    return causes.of_all(test, devices, _slowing_variables(test, devices), drivers, beside)


def _slowing_variables(test: HealthTest, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the variables that are set on a device and slow such a test down."""
    slowing = _SLOWING_KERNELS if test.stage != "host-links" else ()
    slowing = (*(_SLOWING_NCCL if test.uses_nccl else ()), *slowing)
    are_set = set()
    for device in devices:
        are_set |= {name for name, value in device.environment.items() if value not in ("", "0")}
    return tuple(name for name in slowing if name in are_set)


def _advise(finding: Judgement, devices: Sequence[Device]) -> _Advice:
    """Return the action for a finding of which no cause is known, and commands to type.

    devices: of its subject, as far as they are known.
    """
    kind, stage, test = finding.subject.kind, finding.stage, finding.test
    action = test.action or Action.WATCH
    is_watched = finding.verdict is Verdict.UNTESTED or test.name == WAIT_TEST
    if stage == "facts" or is_watched or not devices:
        return action, _commands(action, devices)
    hosts = (devices[0].host,)
    names = _slowing_variables(test, devices)
    if kind in ("node", "cluster") and names and _is_slow(finding):
        return Action.SETTING, [Command(kind=CommandKind.UNSET, names=names)]
    if kind == "cluster":
        # What all devices share.
        if stage == "host-links":
            return action, [Command(kind=CommandKind.SHOW_HOST_TOPOLOGY, hosts=hosts)]
        return action, [Command(kind=CommandKind.CHECK_ENVIRONMENT)]
    if kind != "device":
        if len({device.node_id for device in devices}) == 1 and devices[0].kind == "cuda":
            return action, [Command(kind=CommandKind.SHOW_NVLINKS, hosts=hosts)]
        return action, [Command(kind=CommandKind.SHOW_NETWORK, hosts=_hosts(devices))]
    if _is_slow(finding) or (finding.value is None and not finding.action):
        return _about_slow(finding, devices[0])
    # Wrong results, of it or of another one; or some passes failed.
    if finding.action is Action.WATCH:
        return finding.action, [_BURN_IN]
    action = finding.action or Action.WATCH
    return action, _commands(action, devices)


def _about_slow(finding: Judgement, device: Device) -> _Advice:
    """Return action and commands for a slow device of which no cause is known."""
    hosts, is_bad = (device.host,), finding.verdict is Verdict.BAD
    if device.kind == "cpu":
        return Action.WATCH, [Command(kind=CommandKind.SHOW_CPU_LOAD, hosts=hosts)]
    if finding.stage == "host-links":
        show = Command(kind=CommandKind.SHOW_HOST_LINK, uuid=device.uuid, hosts=hosts)
        return Action.RESET if is_bad else Action.WATCH, [show]
    if device.other_processes:
        show = Command(kind=CommandKind.SHOW_GPU_PROCESSES, uuid=device.uuid, hosts=hosts)
        return Action.WAIT, [show]
    if not is_bad:
        return Action.WATCH, [_BURN_IN]
    return Action.RESET, _commands(Action.RESET, [device])


def _commands(action: Action, devices: Sequence[Device]) -> list[Command]:
    """Return the commands that reset the devices, or keep jobs off their nodes (REPLACE).

    For another action the command that shows the first device.
    """
    if action is Action.RESET:
        kind = CommandKind.RESET_GPU
        return [Command(kind=kind, uuid=one.uuid, hosts=(one.host,)) for one in devices]
    if action is Action.REPLACE:
        kinds = (CommandKind.DRAIN_SLURM, CommandKind.CORDON)
        return [Command(kind=kind, hosts=(host,)) for host in _hosts(devices) for kind in kinds]
    if not devices:
        return []
    first = devices[0]
    if first.kind == "cuda":
        return [Command(kind=CommandKind.SHOW_GPU, uuid=first.uuid, hosts=(first.host,))]
    kind = CommandKind.SHOW_PROCESS
    return [Command(kind=kind, hosts=(first.host,), value=first.process_id)]
