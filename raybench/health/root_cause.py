"""Who is to blame for what is slow between devices. Pure.

A device is to blame for slow pairs when it is slow with two partners or more that are fast with
others, and with more of its partners than not; otherwise the path between the two is. Nodes are
told from devices first: a node whose devices are all slow with other nodes is one subject.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

import numpy as np

from raybench.health.groups import Group
from raybench.records import Device
from raybench.records.health import COMPUTE_TEST, WAIT_TEST, Finding, Subject, Verdict
from raybench.stats.fleet import Floats

_LEAST_PARTNERS = 2
# A rank is late where the others wait for it for more than this share of a step, and for more than
# so many floors of the test, in each pass.
_WAIT_SHARE, _WAIT_FLOORS = 0.1, 2

_Edge = frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Paths:
    """Which of the paths between subjects are slow. slow, fast: partners of each subject."""

    slow: Mapping[str, set[str]] = field(default_factory=dict)
    fast: Mapping[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, slow: Iterable[_Edge], fast: Iterable[_Edge]) -> _Paths:
        """Make them of pairs of names."""
        return cls(slow=_partners(slow), fast=_partners(fast))

    def guilty(self) -> dict[str, set[str]]:
        """Find who is slow with two good partners, each with these partners."""
        slow = {name: set(partners) for name, partners in self.slow.items()}
        found: dict[str, set[str]] = {}
        while True:
            good = {
                name: {one for one in partners if self.fast.get(one, set()) - {name}}
                for name, partners in slow.items()
            }
            name = max(good, key=lambda one: (len(good[one]), one), default="")
            partners = good.get(name, set())
            if len(partners) < max(_LEAST_PARTNERS, len(self.fast.get(name, ())) + 1):
                return found
            found[name] = partners
            del slow[name]
            for others in slow.values():
                others.discard(name)


def _partners(edges: Iterable[_Edge]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for edge in edges:
        if len(edge) == 2:
            first, second = edge
            found.setdefault(first, set()).add(second)
            found.setdefault(second, set()).add(first)
    return found


def name_culprits(
    findings: Sequence[Finding], groups: Sequence[Group], known: Mapping[str, Device]
) -> list[Finding]:
    """Add findings about devices and nodes that make pairs slow, and name them in the victims'."""
    found = list(findings)
    for test in dict.fromkeys(one.test for one in findings if one.subject.kind == "pair"):
        found = _blame_for_pairs(found, test, known)
    return _blame_for_waiting(found, groups)


def _blame_for_pairs(
    findings: Sequence[Finding], test: str, known: Mapping[str, Device]
) -> list[Finding]:
    """Blame nodes, then devices, then paths, for the slow pairs of one test."""
    own = [one for one in findings if one.test == test and one.subject.kind == "pair"]
    if not any(one.verdict.is_slow for one in own):
        return list(findings)
    node_of = {uuid: device.node_id for uuid, device in known.items()}
    hosts = {device.node_id: device.host for device in known.values()}
    self_of = {uuid: uuid for uuid in known}
    names = {uuid: name for one in own for uuid, name in _named_ends(one)}
    across = [one for one in own if len(set(_ends(one, node_of))) == 2]
    inside = [one for one in own if len(set(_ends(one, node_of))) == 1]
    blame = _Blame()
    blame.culprits(across, node_of, hosts, "node")
    blame.paths_of_nodes(across, node_of, hosts)
    blame.culprits(across, self_of, names, "device")
    blame.culprits(inside, self_of, names, "device")
    tried = _Tried.of(own, findings)
    return [
        *(
            _on_its_path(one, blame.names.get(one.subject, ""), tried)
            if one.test == test and one.subject.kind == "pair" and one.verdict.is_slow
            else one
            for one in findings
        ),
        *blame.found,
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blame:
    """Who is to blame so far. names: of the culprit of each slow pair. found: about them."""

    names: dict[Subject, str] = field(default_factory=dict)
    found: list[Finding] = field(default_factory=list)

    def culprits(
        self,
        pairs: Sequence[Finding],
        ends: Mapping[str, str],
        names: Mapping[str, str],
        kind: Literal["node", "device"],
    ) -> None:
        """Blame devices or nodes for those of these pairs that nobody is blamed for yet."""
        left = [one for one in pairs if one.subject not in self.names]
        for name, partners in _paths(left, ends).guilty().items():
            slow = [one for one in left if name in _ends(one, ends) and one.verdict.is_slow]
            uuids = [uuid for uuid, owner in ends.items() if owner == name]
            good = sorted(names.get(one, one) for one in partners)
            reason = (
                f"slow with {len(good)} partners that are fast with others: the {kind} is to blame"
            )
            subject = Subject(
                kind=kind,
                uuids=tuple(uuids),
                name=names.get(name, name),
                model=slow[0].subject.model,
            )
            more = f" and {len(good) - 4} more" if len(good) > 4 else ""
            self._add(slow, subject, reason, f"slow with {', '.join(good[:4])}{more}")

    def paths_of_nodes(
        self, pairs: Sequence[Finding], ends: Mapping[str, str], names: Mapping[str, str]
    ) -> None:
        """Blame the path between two nodes for what is slow between several of their devices."""
        left = [one for one in pairs if one.subject not in self.names]
        found: dict[_Edge, list[Finding]] = {}
        for one in left:
            if one.value is not None:
                found.setdefault(frozenset(_ends(one, ends)), []).append(one)
        for edge, own in found.items():
            slow = [one for one in own if one.verdict.is_slow]
            if len({frozenset(one.subject.uuids) for one in own}) < 2 or 2 * len(slow) <= len(own):
                continue
            first, second = sorted(names.get(node, node) for node in edge)
            subject = Subject(
                kind="pair", uuids=(), name=f"{first} to {second}", model=own[0].subject.model
            )
            reason = (
                f"slow for {len(slow)} of {len(own)} pairs: the path between the two is to blame"
            )
            self._add(slow, subject, reason, "")

    def _add(self, slow: Sequence[Finding], subject: Subject, reason: str, evidence: str) -> None:
        ratios = [one.ratio for one in slow if one.ratio is not None]
        is_bad = any(one.verdict is Verdict.BAD for one in slow)
        self.names.update((one.subject, subject.name) for one in slow)
        self.found.append(
            replace(
                slow[0],
                subject=subject,
                value=median(one.value for one in slow if one.value is not None),
                ratio=median(ratios) if ratios else None,
                verdict=Verdict.BAD if is_bad else Verdict.SUSPECT,
                reason=reason,
                evidence=evidence,
            )
        )


def _paths(pairs: Sequence[Finding], ends: Mapping[str, str]) -> _Paths:
    """Take a path between two nodes as slow when more than half of its pairs are."""
    slow: dict[_Edge, list[bool]] = {}
    for one in pairs:
        if one.value is not None:
            edge = frozenset(_ends(one, ends))
            slow.setdefault(edge, []).append(one.verdict.is_slow)
    is_device = len(set(ends.values())) == len(ends)
    are_slow = {
        edge: any(marks) if is_device else 2 * sum(marks) > len(marks)
        for edge, marks in slow.items()
    }
    return _Paths.of(
        [edge for edge, is_slow in are_slow.items() if is_slow],
        [edge for edge, is_slow in are_slow.items() if not is_slow],
    )


def _ends(finding: Finding, ends: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(ends.get(uuid, uuid) for uuid in finding.subject.uuids)


def _named_ends(pair: Finding) -> Iterator[tuple[str, str]]:
    """Read the names of two devices from that of their pair, "alpha GPU 0 to GPU 3"."""
    first, _, second = pair.subject.name.partition(" to ")
    host = first.split(" ")[0]
    is_whole = len(second.split(" ")) > 2
    yield pair.subject.uuids[0], first
    yield pair.subject.uuids[-1], second if is_whole else f"{host} {second}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """What was tried besides a pair. partners, fast: of each device, all and those it is fast with.

    slow_alone, healthy_alone: devices, by what they do without others.
    """

    partners: Mapping[str, set[str]]
    fast: Mapping[str, set[str]]
    slow_alone: Collection[str]
    healthy_alone: Collection[str]

    @classmethod
    def of(cls, pairs: Sequence[Finding], findings: Sequence[Finding]) -> _Tried:
        """Take it from the pairs of a test, and from what each device does alone."""
        alone = [one for one in findings if one.stage == "alone" and len(one.subject.uuids) == 1]
        slow = {one.subject.uuids[0] for one in alone if one.verdict is not Verdict.HEALTHY}
        fast = [one for one in pairs if one.verdict is Verdict.HEALTHY]
        return cls(
            partners=_partners(frozenset(one.subject.uuids) for one in pairs),
            fast=_partners(frozenset(one.subject.uuids) for one in fast),
            slow_alone=slow,
            healthy_alone={one.subject.uuids[0] for one in alone} - slow,
        )

    def words(self, uuids: Sequence[str]) -> tuple[str, str]:
        """Say what is to blame for a slow pair, as far as that is known, and by what."""
        ends = set(uuids)
        if all(self.fast.get(uuid, set()) - ends for uuid in ends):
            return "the path between the two is to blame", "both are fast with other partners"
        others = [self.partners.get(uuid, set()) - ends for uuid in ends]
        alone = "both are fast alone" if ends <= set(self.healthy_alone) else ""
        if ends & set(self.slow_alone):
            alone = "one of the two is not healthy alone"
        if any(others):
            return "the path or one of the two is to blame", alone
        tried = "neither has another partner to try"
        return "the path or one of the two is to blame", "; ".join(filter(None, (alone, tried)))


def _on_its_path(finding: Finding, culprit: str, tried: _Tried) -> Finding:
    """Name in a slow pair who is to blame: another subject, or the path itself."""
    if culprit:
        return replace(finding, culprit=culprit)
    blamed, evidence = tried.words(finding.subject.uuids)
    return replace(
        finding,
        reason=f"{finding.reason}: {blamed}",
        evidence="; ".join(filter(None, (finding.evidence, evidence))),
    )


def _blame_for_waiting(findings: Sequence[Finding], groups: Sequence[Group]) -> list[Finding]:
    """Name the rank that the others wait for in each pass, and by its other tests why."""
    waits = next((group for group in groups if group.test.name == WAIT_TEST), None)
    steps = next((group for group in groups if group.test.name == COMPUTE_TEST), None)
    if waits is None or steps is None or len(waits.subjects) < 2:
        return list(findings)
    if waits.subjects != steps.subjects or waits.values.shape != steps.values.shape:
        return list(findings)
    wait_ms, step_ms = _late(waits, steps)
    shares = wait_ms / step_ms[:, None]
    least = max(_WAIT_SHARE, _WAIT_FLOORS * waits.test.floor)
    are_late = np.flatnonzero((shares > least).all(axis=0))
    if not len(are_late):
        return list(findings)
    column = int(are_late[0])
    culprit = waits.subjects[column]
    found = _Late(
        culprit=culprit,
        waited_ms=float(np.median(wait_ms[:, column])),
        step_ms=float(np.median(step_ms)),
        cause=_cause(culprit, findings),
    )
    return [_waiting(one, found) if one.test == WAIT_TEST else one for one in findings]


def _late(waits: Group, steps: Group) -> tuple[Floats, Floats]:
    """Compute how long the others wait for each rank [passes, ranks], and the steps [passes].

    By the median of the others' waits, less its own; NaN where a pass does not tell.
    """
    count = waits.values.shape[1]
    others = [np.delete(waits.values, rank, axis=1) for rank in range(count)]
    typical = np.stack([np.median(one, axis=1) for one in others], axis=1)
    return typical - waits.values, np.median(waits.values + steps.values, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    """The rank that the others wait for. cause: what its other tests say of it."""

    culprit: Subject
    waited_ms: float
    step_ms: float
    cause: str


def _cause(culprit: Subject, findings: Sequence[Finding]) -> str:
    """Say where a rank is slow besides: its device, its host or links, or neither."""
    stages = {one.stage for one in findings if one.subject == culprit and one.verdict.is_slow}
    if "alone" in stages:
        return "its device is slow alone too"
    if {"host-links", "pairs"} & stages:
        return "its link to the host or to others is slow too"
    return "its device and its links are as fast as the others': look at its CPU and its data"


def _waiting(finding: Finding, found: _Late) -> Finding:
    if finding.subject == found.culprit:
        waited, step = f"{found.waited_ms:.3g} ms", f"{found.step_ms:.3g} ms"
        return replace(
            finding,
            verdict=Verdict.SUSPECT,
            reason=f"in a step of {step} each of the others waits {waited} for it",
            evidence=found.cause,
        )
    wait = f"waits {finding.value or 0.0:.3g} ms of each step for it"
    return replace(finding, culprit=found.culprit.name, evidence=wait)
