"""The verdict of each subject in each test: healthy, suspect, bad, untested or unknown. Pure.

A subject is compared with similar subjects (peers) in the same passes; see
`raybench.stats.outliers`. With fewer than four peers, the spread is unknown, and the subject is
compared with the fastest peer, with its own earlier checks, and with its model elsewhere (reference
values or earlier checks). A group whose subjects are all slow shows only beside its model
elsewhere.

A device is the culprit of slow pairs if it is slow with at least two partners that are fast with
other partners, and if these are more than the partners with which it is fast. Otherwise the path or
either end is to blame. Nodes are blamed before devices: two nodes are slow together if most pairs
of their devices are slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from statistics import median

import numpy as np

from raybench.analysis.references import SHIPPED, References, peak_of
from raybench.health import causes
from raybench.health.causes import Circumstances, Diagnosis
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
    Problem,
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
# Other programs are a finding if they disturbed this share of the points.
_LEAST_DISTURBED = 0.5
_MOST_PROGRAMS = 2
# Variables that slow tests with NCCL, and tests that launch kernels. NCCL_NVLS_ENABLE=0 is not one
# of them, because the reference values are without NVLS.
_SLOWING_NCCL = (
    *("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"),
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"),
)
_SLOWING_KERNELS = ("CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE")
_BURN_IN = Command(kind=CommandKind.BURN_IN)
_LEAST_PARTNERS = 2
# A rank is late if the other ranks wait for it in each pass for more than this share of a step, and
# for more than this number of floors of the test.
_WAIT_SHARE, _WAIT_FLOORS = 0.1, 2

# The ends of a pair: two devices, or their nodes. One element if both devices are on one node.
_Edge = frozenset[str]
_Advice = tuple[Action, Sequence[Command]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The result of one test for one subject, in kinds and numbers; see `Finding` for the words."""

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
    # For a path between two nodes, whose subject has no uuids: uuids of a device at each end.
    ends: tuple[str, ...] = ()
    action: Action | None = None
    commands: tuple[Command, ...] = ()

    @property
    def stage(self) -> Stage:
        """The stage of the test."""
        return self.test.stage

    @property
    def finding(self) -> Finding:
        """The row of the table `health`, with words."""
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
    """Return a judgement for each subject in each test; see docs/explanation/health.md.

    There are further judgements: of groups that are slow as a whole, of models without anything to
    compare with, of other programs, and of devices, nodes and paths that slow pairs. Unhealthy
    subjects have a culprit or an action.

    Args:
        devices: all devices of the check, by rank.
        past: (run id, finding) of earlier checks.
    """
    readings = list(readings)
    by_uuid = devices_by_uuid(devices)
    groups = group_readings(readings, by_uuid)
    elsewhere = Elsewhere(past, references)
    comparisons = _compare([group for group in groups if group.test.is_compared])
    # `comparisons` has the compared groups in the order of `groups`.
    remaining = iter(comparisons)
    judged: list[Judgement] = []
    for group in groups:
        comparison = next(remaining) if group.test.is_compared else None
        judged += _judge_group(group, comparison, elsewhere)
    by_model: dict[str, list[Group]] = {}
    for comparison in comparisons:
        by_model.setdefault(comparison.group.model, []).append(comparison.group)
    for model, of_model in by_model.items():
        # The expected drift, a ratio of 1, is known for every model.
        if not any(elsewhere.of_model(group) for group in of_model if group.test.unit != "x"):
            unknown = Judgement(
                test=HealthTest(
                    name=EXPECTED_TEST,
                    stage=of_model[0].test.stage,
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
                    limit=max(map(elsewhere.count_checks, of_model)),
                ),
                commands=(
                    Command(kind=CommandKind.CHECK_AGAIN),
                    Command(kind=CommandKind.EXPORT_REFERENCES),
                ),
            )
            judged.append(unknown)
    judged += _other_programs(readings, devices)
    judged = _explain_waiting(_explain_pairs(judged, by_uuid), groups)
    beside = Circumstances(readings=readings, by_uuid=by_uuid)
    return tuple(_with_action(judgement, beside, references) for judgement in judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """A group whose subjects are compared with each other."""

    group: Group
    # Time of each subject over the time of its peers.
    ratios: Floats
    is_slow: Bools
    # None if fewer than four subjects have values.
    peers: Peers | None


def _compare(groups: Sequence[Group]) -> list[_Comparison]:
    """Compare the subjects of each group; `find_slow` limits the false alarms of all groups."""
    peers_of_groups: list[Peers | None] = []
    for group in groups:
        has_spread = (~np.isnan(group.typical)).sum() >= LEAST_ALIKE
        is_time, floor = group.test.is_time, group.test.floor
        peers_of_groups.append(
            compare_peers(group.values, is_time=is_time, floor=floor) if has_spread else None
        )
    slow = iter(find_slow([peers for peers in peers_of_groups if peers]))
    comparisons = []
    for group, peers in zip(groups, peers_of_groups, strict=True):
        test = group.test
        if peers:
            ratios, is_slow = peers.ratios, next(slow)
        else:
            ratios, is_slow = compare_few(
                group.values, is_time=test.is_time, floor=test.floor, bad_ratio=test.bad_ratio
            )
        comparisons.append(_Comparison(group=group, ratios=ratios, is_slow=is_slow, peers=peers))
    return comparisons


def _judge_group(
    group: Group, compared: _Comparison | None, elsewhere: Elsewhere
) -> Iterator[Judgement]:
    """Yield the judgement of each subject of a group, and of all subjects if all are slow.

    Without a comparison a subject is healthy unless it has a problem, and unknown without a value.
    """
    all_slow = _all_slow(compared, elsewhere) if compared else None
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
        elif compared and compared.peers is None and all_slow is None and has_value:
            judged = _against_elsewhere(plain, group, column, elsewhere)
        if column in group.problems or (compared and not has_value):
            failed = replace(plain, ratio=None, failed_passes=group.faulty_passes.get(column, 0))
            judged = _with_problem(judged, failed, group, column)
        yield judged
    if all_slow is not None:
        yield all_slow


def _beside_peers(plain: Judgement, compared: _Comparison) -> Judgement:
    """Return the judgement of a subject that is slower than its peers."""
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
        # Only a subject that is slow in each pass is slower than its peers.
        failed_passes=plain.passes,
        ratio=ratio,
        reason=Reason(kind=ReasonKind.SLOWER_THAN_PEERS, value=ratio),
        evidence=tuple(evidence),
    )


def _peer_values(comparison: _Comparison) -> tuple[PeerValue, ...]:
    """Return what the values of a group are compared with; empty for fewer than two values."""
    typical, peers = comparison.group.typical, comparison.peers
    count = int((~np.isnan(typical)).sum())
    if count < 2:
        return ()
    if peers is None:
        best = np.nanmin(typical) if comparison.group.test.is_time else np.nanmax(typical)
        return (PeerValue(value=float(best), count=count, is_best=True),)
    is_used = peers.is_reference & ~np.isnan(typical)
    fastest = int(is_used.sum()) if peers.is_divided else 0
    middle = float(np.median(typical[is_used]))
    return (PeerValue(value=middle, count=count, fastest=fastest),)


def _with_problem(judged: Judgement, plain: Judgement, group: Group, column: int) -> Judgement:
    """Return the judgement of a subject with a problem or no value.

    Args:
        judged: by the values of the subject.
        plain: healthy, to be changed.
        group: the group of the subject.
        column: of the subject.
    """
    problems = group.problems.get(column, ())
    own_problems = _own_problems(problems)
    reason = Reason(kind=ReasonKind.NOT_READ)
    if problems:
        reason = Reason(kind=ReasonKind.PROBLEMS, problems=tuple(own_problems or problems))
    effects = {problem.effect for problem in own_problems}
    if effects == {"failed"} and plain.value is not None:
        # Good devices too fail now and then, so a subject that ran in other passes is not bad.
        reason = replace(reason, value=group.failed_passes[column], limit=group.pass_count)
        if judged.verdict.is_suspect_or_bad:
            return replace(judged, evidence=(*judged.evidence, reason))
        return replace(plain, verdict=Verdict.SUSPECT, reason=reason)
    count_at_fault = sum(bool(_own_problems(each)) for each in group.problems.values())
    action = None
    if "fault" in effects:
        verdict, action = Verdict.BAD, Action.REPLACE
    elif "disputed" in effects:
        verdict, action = Verdict.SUSPECT, Action.WATCH
    # If all subjects fail, the cause may lie outside of the devices.
    elif own_problems and count_at_fault < len(group.subjects):
        verdict = Verdict.BAD
    elif plain.value is not None and not own_problems:
        # Another subject made some passes fail; the other passes judge this subject.
        return replace(judged, evidence=(*judged.evidence, reason))
    else:
        verdict = Verdict.UNTESTED
    # A fact with such an action is no fault that needs a repair.
    if group.test.action in (Action.WATCH, Action.SETTING):
        verdict = Verdict.SUSPECT
    return replace(plain, verdict=verdict, reason=reason, action=action)


def _own_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems that no other subject or program causes."""
    return [problem for problem in problems if problem.effect != "not read"]


def _against_elsewhere(
    plain: Judgement, group: Group, column: int, elsewhere: Elsewhere
) -> Judgement:
    """Return the judgement of a subject by its earlier checks and by its model elsewhere."""
    value, test = plain.value or 0.0, group.test
    ranges = [elsewhere.of_subject(plain.subject, test), elsewhere.of_model(group)]
    usual_ranges = [usual for usual in ranges if usual]
    for usual in usual_ranges:
        if ratio := excess(usual, value, test):
            of_passes = group.values[:, column]
            slow = [
                figure
                for figure in of_passes[np.isfinite(of_passes)].tolist()
                if excess(usual, figure, test)
            ]
            return replace(
                plain,
                verdict=Verdict.BAD if ratio > test.bad_ratio else Verdict.SUSPECT,
                failed_passes=len(slow),
                expected=(usual,),
                reason=Reason(kind=ReasonKind.SLOWER_THAN_USUAL, value=ratio),
                ratio=ratio,
            )
    if expected := (*plain.expected, *usual_ranges[:1]):
        return replace(plain, expected=expected)
    reason = Reason(
        kind=ReasonKind.NOTHING_KNOWN,
        model=group.model,
        placement="" if group.placement.kind == "device" else str(group.placement),
        value=peak_of(group.model, {"test": test.name}),
        unit=test.unit,
    )
    return replace(plain, verdict=Verdict.UNKNOWN, reason=reason)


def _all_slow(comparison: _Comparison, elsewhere: Elsewhere) -> Judgement | None:
    """Return the judgement that all subjects of a group are slower than their model elsewhere.

    None if they are not, if nothing is known of the model, and for a single subject.
    """
    group, test = comparison.group, comparison.group.test
    # A subject that is slower than its peers has its own judgement.
    sound = group.typical[~np.isnan(group.typical) & ~comparison.is_slow]
    usual = elsewhere.of_model(group)
    if len(group.subjects) < 2 or usual is None or not len(sound):
        return None
    best = float(sound.min() if test.is_time else sound.max())
    middle = float(np.median(sound))
    ratio = excess(usual, best if comparison.peers is None else middle, test)
    if ratio is None:
        return None
    noun = "pairs of " if test.subjects == "pair" else ""
    uuids = chain.from_iterable(subject.uuids for subject in group.subjects)
    return Judgement(
        test=test,
        subject=Subject(
            kind="cluster",
            uuids=tuple(dict.fromkeys(uuids)),
            name=f"{words.both_or_all(len(group.subjects))} {noun}{group.model}",
            model=group.model,
        ),
        passes=group.values.shape[0],
        value=middle,
        expected=(usual,),
        ratio=ratio,
        verdict=Verdict.SUSPECT,
        reason=Reason(kind=ReasonKind.ALL_SLOW, value=ratio),
        evidence=(Reason(kind=ReasonKind.NONE_STANDS_OUT),),
    )


def _other_programs(readings: Iterable[Reading], devices: Sequence[Device]) -> Iterator[Judgement]:
    """Yield a judgement if other programs used the devices in at least half of the points.

    They may slow all devices alike, which comparing devices does not show.
    """
    # One reading of each point, because all readings of a point name the same programs.
    reading_of = {}
    for reading in readings:
        if reading.point_id is not None:
            reading_of[reading.point_id, reading.pass_number] = reading
    disturbed = [reading for reading in reading_of.values() if reading.other_programs]
    if not disturbed or len(disturbed) < _LEAST_DISTURBED * len(reading_of):
        return
    kind = CommandKind.SHOW_ALL_CPU_LOAD
    if devices[0].kind == "cuda":
        kind = CommandKind.SHOW_ALL_GPU_PROCESSES
    show = Command(kind=kind, hosts=_hosts(devices))
    texts = dict.fromkeys(chain.from_iterable(reading.other_programs for reading in disturbed))
    beside = Circumstances(readings=disturbed, by_uuid=devices_by_uuid(devices))
    programs = beside.programs_on(devices)
    evidence = Reason(
        kind=ReasonKind.PROGRAMS, names=tuple(texts)[:_MOST_PROGRAMS], programs=programs
    )
    diagnosis = causes.of_programs(programs)
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
        passes=max(reading.pass_number for reading in disturbed),
        value=100 * len(disturbed) / len(reading_of),
        verdict=Verdict.SUSPECT,
        reason=Reason(kind=ReasonKind.OTHER_PROGRAMS, value=len(disturbed), limit=len(reading_of)),
        evidence=(evidence,),
        action=Action.WAIT,
        commands=diagnosis.commands if diagnosis else (show,),
    )


def _hosts(devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the hosts of the devices, without repeats."""
    return tuple(dict.fromkeys(device.host for device in devices))


def _explain_pairs(judged: Sequence[Judgement], by_uuid: Mapping[str, Device]) -> list[Judgement]:
    """Blame a culprit, or the path, for each slow pair; append a judgement of each culprit."""
    node_of = {uuid: device.node_id for uuid, device in by_uuid.items()}
    device_of = {uuid: uuid for uuid in by_uuid}
    # Id of a node, or uuid -> name for people.
    names = {device.node_id: device.host for device in by_uuid.values()}
    names |= {device.uuids[0]: device.name for device in device_subjects(list(by_uuid.values()))}
    unhealthy_alone: set[str] = set()
    pairs_by_test: dict[str, list[Judgement]] = {}
    for judgement in judged:
        subject = judgement.subject
        is_alone = judgement.stage == "alone" and len(subject.uuids) == 1
        if is_alone and judgement.verdict.is_unhealthy:
            unhealthy_alone.add(subject.uuids[0])
        if subject.kind == "pair":
            pairs_by_test.setdefault(judgement.test.name, []).append(judgement)
    # (name of a test, pair) -> judgement with a blame or a culprit.
    explained: dict[tuple[str, Subject], Judgement] = {}
    culprits: list[Judgement] = []
    for test, pairs in pairs_by_test.items():
        healthy = [pair for pair in pairs if pair.verdict is Verdict.HEALTHY]
        fast_with = _partners(_edge(pair, device_of) for pair in healthy)
        for pair in filter(_is_slow, pairs):
            explained[test, pair.subject] = _with_blame(pair, fast_with, unhealthy_alone)
        between_nodes = [pair for pair in pairs if len(_edge(pair, node_of)) == 2]
        on_a_node = [pair for pair in pairs if len(_edge(pair, node_of)) == 1]
        # Nodes come first, so that a device is blamed only for pairs that no node explains.
        searches = (
            (between_nodes, node_of),
            (between_nodes, device_of),
            (on_a_node, device_of),
        )
        with_culprit: set[Subject] = set()
        for candidates, end_of in searches:
            unexplained = [pair for pair in candidates if pair.subject not in with_culprit]
            for slow, culprit in _culprits(unexplained, end_of, names):
                culprits.append(culprit)
                for pair in slow:
                    with_culprit.add(pair.subject)
                    # A culprit replaces the blame.
                    explained[test, pair.subject] = replace(pair, culprit=culprit.subject)
    results = []
    for judgement in judged:
        results.append(explained.get((judgement.test.name, judgement.subject), judgement))
    return results + culprits


def _with_blame(
    pair: Judgement,
    fast_with: Mapping[str, Set[str]],  # Uuid -> uuids of the partners with which it is fast.
    unhealthy_alone: Set[str],  # Uuids of devices.
) -> Judgement:
    """Return a slow pair that blames its path, or else its path or one of its devices."""
    uuids = set(pair.subject.uuids)
    blame: Blame = "path or end"
    evidence = pair.evidence
    if all(fast_with.get(uuid, set()) - uuids for uuid in uuids):
        blame = "path"
        evidence = (*evidence, Reason(kind=ReasonKind.FAST_WITH_OTHERS))
    elif uuids & unhealthy_alone:
        evidence = (*evidence, Reason(kind=ReasonKind.ONE_ILL_ALONE))
    reason = replace(pair.reason, blame=blame) if pair.reason else None
    return replace(pair, reason=reason, evidence=evidence)


def _edge(pair: Judgement, end_of: Mapping[str, str]) -> _Edge:
    """Return the ends of a pair: its devices, or their nodes if `end_of` maps uuids to nodes."""
    return frozenset(end_of.get(uuid, uuid) for uuid in pair.subject.uuids)


def _is_slow(judgement: Judgement) -> bool:
    """Return whether a figure is too slow; False for failures and wrong results."""
    return judgement.verdict.is_suspect_or_bad and judgement.ratio is not None


def _culprits(
    pairs: Sequence[Judgement], end_of: Mapping[str, str], names: Mapping[str, str]
) -> Iterator[tuple[Sequence[Judgement], Judgement]]:
    """Yield (slow pairs, judgement of the node, path or device that slows them), the worst first.

    Args:
        pairs: of one test.
        end_of: uuid of a device -> id of its node, or the uuid itself.
        names: node id or uuid -> name for people.
    """
    is_device = all(uuid == end for uuid, end in end_of.items())
    by_edge: dict[_Edge, list[Judgement]] = {}
    for pair in pairs:
        if pair.value is not None:
            by_edge.setdefault(_edge(pair, end_of), []).append(pair)
    # Two devices are slow if one direction is slow; two nodes are slow if most of their pairs are.
    slow_edges: dict[_Edge, list[Judgement]] = {}
    for edge, of_edge in by_edge.items():
        slow = list(filter(_is_slow, of_edge))
        if slow and (is_device or 2 * len(slow) > len(of_edge)):
            slow_edges[edge] = slow
    kind: SubjectKind = "device" if is_device else "node"
    slow_ends = _slow_ends(slow_edges, by_edge.keys() - slow_edges)
    for end, partners in slow_ends.items():
        slow = [pair for pair in pairs if end in _edge(pair, end_of) and _is_slow(pair)]
        uuids = tuple(uuid for uuid, owner in end_of.items() if owner == end)
        subject = replace(slow[0].subject, kind=kind, uuids=uuids, name=names.get(end, end))
        reason = Reason(kind=ReasonKind.SLOW_WITH_PARTNERS, value=len(partners), subject=kind)
        partner_names = tuple(sorted(names.get(partner, partner) for partner in partners))
        evidence = (Reason(kind=ReasonKind.PARTNERS, names=partner_names),)
        culprit = _summary(slow)
        yield slow, replace(culprit, subject=subject, reason=reason, evidence=evidence)
    for edge, slow in slow_edges.items():
        of_edge = by_edge[edge]
        device_pairs = {_edge(pair, {}) for pair in of_edge}
        # A single pair of devices says nothing of the path between its nodes.
        if is_device or edge & slow_ends.keys() or len(device_pairs) < 2:
            continue
        name = words.path_name(*sorted(names.get(node, node) for node in edge))
        subject = replace(slow[0].subject, uuids=(), name=name)
        reason = Reason(kind=ReasonKind.SLOW_PATH, value=len(slow), limit=len(of_edge))
        path = replace(_summary(slow), ends=slow[0].subject.uuids)
        yield slow, replace(path, subject=subject, reason=reason, evidence=())


def _summary(slow: Sequence[Judgement]) -> Judgement:
    """Return the worst judgement, with the medians of all values and ratios."""
    return replace(
        min(slow, key=lambda pair: list(Verdict).index(pair.verdict)),
        value=median(pair.value or 0.0 for pair in slow),
        ratio=median(pair.ratio or 0.0 for pair in slow),
    )


def _slow_ends(slow: Iterable[_Edge], fast: Iterable[_Edge]) -> dict[str, set[str]]:
    """Return culprit -> good partners with which it is slow, the worst culprit first.

    A partner is good if it is fast with another end. A culprit has more good partners than partners
    with which it is fast. Each culprit is removed before the next one is found.
    """
    slow_with, fast_with = _partners(slow), _partners(fast)
    culprits: dict[str, set[str]] = {}
    while True:
        good_partners = {}
        for end, partners in slow_with.items():
            good = {partner for partner in partners if fast_with.get(partner, set()) - {end}}
            good_partners[end] = good
        worst = max(good_partners, key=lambda end: (len(good_partners[end]), end), default="")
        partners = good_partners.get(worst, set())
        if len(partners) < max(_LEAST_PARTNERS, len(fast_with.get(worst, ())) + 1):
            return culprits
        culprits[worst] = partners
        del slow_with[worst]
        for others in slow_with.values():
            others.discard(worst)


def _partners(edges: Iterable[_Edge]) -> dict[str, set[str]]:
    """Return the partners of each end; self-edges are ignored."""
    partners: dict[str, set[str]] = {}
    for edge in edges:
        if len(edge) == 2:
            first, second = edge
            partners.setdefault(first, set()).add(second)
            partners.setdefault(second, set()).add(first)
    return partners


def _explain_waiting(judged: Sequence[Judgement], groups: Sequence[Group]) -> list[Judgement]:
    """Make late ranks suspects, and the latest rank the culprit of the waits of other ranks.

    A rank is late if the other ranks of its model wait for it in each pass.
    """
    by_subject = {wait.subject: wait for wait in judged if wait.test.name == WAIT_TEST}
    # Subject -> its new judgement of waits.
    changed: dict[Subject, Judgement] = {}
    compute_groups = {}
    for group in groups:
        if group.test.name == COMPUTE_TEST:
            compute_groups[tuple(group.subjects)] = group
    for waits in groups:
        if waits.test.name != WAIT_TEST:
            continue
        compute, count = compute_groups.get(tuple(waits.subjects)), len(waits.subjects)
        # The shapes differ if a pass has no wait times.
        if compute is None or count < 2 or waits.values.shape != compute.values.shape:
            continue
        others = [np.delete(waits.values, rank, axis=1) for rank in range(count)]
        median_waits_ms = np.stack([np.median(waits_ms, axis=1) for waits_ms in others], axis=1)
        # How long the other ranks wait for each rank, [passes, ranks]: a late rank hardly waits.
        waited_ms = median_waits_ms - waits.values
        # [passes]
        step_ms = np.median(waits.values + compute.values, axis=1)
        least = max(_WAIT_SHARE, _WAIT_FLOORS * waits.test.floor)
        late = np.flatnonzero((waited_ms / step_ms[:, None] > least).all(axis=0)).tolist()
        typical_ms = np.median(waited_ms, axis=0)
        if not late:
            continue
        latest = waits.subjects[max(late, key=lambda rank: typical_ms[rank])]
        for rank, subject in enumerate(waits.subjects):
            evidence = Reason(kind=ReasonKind.WAITS, value=float(waits.typical[rank]))
            changed[subject] = replace(by_subject[subject], culprit=latest, evidence=(evidence,))
        for rank in late:
            subject = waits.subjects[rank]
            of_rank = [judgement for judgement in judged if judgement.subject == subject]
            slow_stages = set()
            for judgement in of_rank:
                # Slow launches are a fault of the CPU, not of the device or its link.
                if _is_slow(judgement) and not judgement.test.blames_host:
                    slow_stages.add(judgement.stage)
            kind = ReasonKind.CPU_OR_DATA
            if "alone" in slow_stages:
                kind = ReasonKind.SLOW_ALONE
            elif {"host-links", "pairs"} & slow_stages:
                kind = ReasonKind.SLOW_LINK
            changed[subject] = replace(
                by_subject[subject],
                verdict=Verdict.SUSPECT,
                reason=Reason(
                    kind=ReasonKind.LATE,
                    value=float(typical_ms[rank]),
                    limit=float(np.median(step_ms)),
                ),
                evidence=(Reason(kind=kind),),
            )
    return [changed.get(old.subject, old) if old.test.name == WAIT_TEST else old for old in judged]


def _with_action(judgement: Judgement, beside: Circumstances, references: References) -> Judgement:
    """Return an unhealthy judgement with its cause, an action and commands."""
    if not judgement.verdict.is_unhealthy or judgement.culprit or judgement.commands:
        return judgement
    by_uuid = beside.by_uuid
    uuids = judgement.subject.uuids or judgement.ends
    devices = [by_uuid[uuid] for uuid in uuids if uuid in by_uuid]
    diagnosis = _diagnose(judgement, devices, beside, references)
    evidence = (*judgement.evidence, *diagnosis.evidence) if diagnosis else judgement.evidence
    if diagnosis and diagnosis.action:
        action, commands = diagnosis.action, diagnosis.commands
    else:
        action, proposed = _advise(judgement, devices)
        commands = tuple(proposed)
    return replace(judgement, evidence=evidence, action=action, commands=commands)


def _diagnose(
    judgement: Judgement, devices: Sequence[Device], beside: Circumstances, references: References
) -> Diagnosis | None:
    """Return what made the subject slow, or kept it from its test; None if unknown."""
    kind, test, reason = judgement.subject.kind, judgement.test, judgement.reason
    problems = {problem.kind for problem in reason.problems} if reason else set()
    if ProblemKind.NO_ROOM in problems:
        return causes.of_programs(beside.programs_on(devices))
    if not _is_slow(judgement) or test.name == WAIT_TEST or not devices:
        return None
    if kind == "device":
        return causes.of_device(test, judgement.subject.uuids[0], beside)
    if kind == "pair":
        return causes.of_link(test, judgement.subject.uuids or judgement.ends, beside)
    if kind == "node" and reason and reason.kind is ReasonKind.SLOW_WITH_PARTNERS:
        return causes.of_network(devices)
    if kind != "cluster":
        return None
    sources = {getattr(expected, "source", "") for expected in judgement.expected}
    drivers = references.drivers(judgement.subject.model) if "reference" in sources else ()
    return causes.of_all(test, devices, _slowing_variables(test, devices), drivers, beside)


def _slowing_variables(test: HealthTest, devices: Sequence[Device]) -> tuple[str, ...]:
    """Return the variables that are set on a device and slow such a test down."""
    slowing = _SLOWING_KERNELS if test.stage != "host-links" else ()
    slowing = (*(_SLOWING_NCCL if test.uses_nccl else ()), *slowing)
    are_set = set()
    for device in devices:
        are_set |= {name for name, value in device.environment.items() if value not in ("", "0")}
    return tuple(name for name in slowing if name in are_set)


def _advise(judgement: Judgement, devices: Sequence[Device]) -> _Advice:
    """Return the action for an unhealthy subject without a known cause, and commands to type."""
    kind, stage, test = judgement.subject.kind, judgement.stage, judgement.test
    action = test.action or Action.WATCH
    is_watched = judgement.verdict is Verdict.UNTESTED or test.name == WAIT_TEST
    if stage == "facts" or is_watched or not devices:
        return action, _commands(action, devices)
    hosts = (devices[0].host,)
    names = _slowing_variables(test, devices)
    if kind in ("node", "cluster") and names and _is_slow(judgement):
        return Action.SETTING, [Command(kind=CommandKind.UNSET, names=names)]
    if kind == "cluster":
        # Show what all devices share.
        if stage == "host-links":
            return action, [Command(kind=CommandKind.SHOW_HOST_TOPOLOGY, hosts=hosts)]
        return action, [Command(kind=CommandKind.CHECK_ENVIRONMENT)]
    if kind != "device":
        if len({device.node_id for device in devices}) == 1 and devices[0].kind == "cuda":
            return action, [Command(kind=CommandKind.SHOW_NVLINKS, hosts=hosts)]
        return action, [Command(kind=CommandKind.SHOW_NETWORK, hosts=_hosts(devices))]
    if _is_slow(judgement) or (judgement.value is None and not judgement.action):
        return _advise_for_slow(judgement, devices[0])
    # Results were wrong or disputed, or some passes failed.
    if judgement.action is Action.WATCH:
        return judgement.action, [_BURN_IN]
    action = judgement.action or Action.WATCH
    return action, _commands(action, devices)


def _advise_for_slow(judgement: Judgement, device: Device) -> _Advice:
    """Return action and commands for a device that is slow, or failed, without a known cause."""
    hosts, is_bad = (device.host,), judgement.verdict is Verdict.BAD
    if device.kind == "cpu":
        return Action.WATCH, [Command(kind=CommandKind.SHOW_CPU_LOAD, hosts=hosts)]
    if judgement.stage == "host-links":
        show = Command(kind=CommandKind.SHOW_HOST_LINK, uuid=device.uuid, hosts=hosts)
        return Action.RESET if is_bad else Action.WATCH, [show]
    if device.other_processes:
        show = Command(kind=CommandKind.SHOW_GPU_PROCESSES, uuid=device.uuid, hosts=hosts)
        return Action.WAIT, [show]
    if not is_bad:
        return Action.WATCH, [_BURN_IN]
    return Action.RESET, _commands(Action.RESET, [device])


def _commands(action: Action, devices: Sequence[Device]) -> list[Command]:
    """Return commands that reset devices, keep jobs off their nodes, or show the first device."""
    if action is Action.RESET:
        kind = CommandKind.RESET_GPU
        return [Command(kind=kind, uuid=device.uuid, hosts=(device.host,)) for device in devices]
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
