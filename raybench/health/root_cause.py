"""Which device, node or path makes pairs slow, and which rank the others wait for. Pure.

A device is the root cause of slow pairs when it is slow with two partners or more that are fast
with others, and with more than half of its partners; otherwise the path between the two devices is.
Nodes come before devices: a node whose devices are all slow with other nodes is one root cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Literal

import numpy as np

from raybench.health.groups import Group
from raybench.health.suite import COMPUTE_TEST, WAIT_TEST, device_subjects
from raybench.records import Device
from raybench.records.health import Finding, Subject, Verdict
from raybench.stats.fleet import Floats

_LEAST_PARTNERS = 2
_MOST_NAMES = 4
# A rank is late where the others wait for it for more than this share of a step, and for more than
# so many floors of the test, in each pass.
_WAIT_SHARE, _WAIT_FLOORS = 0.1, 2
_PATH = "the path between the two is to blame"

# Two devices or two nodes.
_Edge = frozenset[str]


def find_root_causes(
    findings: Sequence[Finding], groups: Sequence[Group], known: Mapping[str, Device]
) -> list[Finding]:
    """Return the findings, with new ones about the devices, nodes and paths that make pairs slow.

    The finding of a slow pair, or of a waiting rank, gets the name of its culprit.
    """
    found = list(findings)
    for test in dict.fromkeys(one.test for one in findings if one.subject.kind == "pair"):
        found = _explain_slow_pairs(found, test, known)
    return _explain_waiting(found, groups)


def _explain_slow_pairs(
    findings: Sequence[Finding], test: str, known: Mapping[str, Device]
) -> list[Finding]:
    """Look for nodes, then for devices, then for paths that explain the slow pairs of one test."""
    own = [one for one in findings if one.test == test and one.subject.kind == "pair"]
    if not any(one.verdict.is_slow for one in own):
        return list(findings)
    node_of = {uuid: device.node_id for uuid, device in known.items()}
    hosts = {device.node_id: device.host for device in known.values()}
    itself = {uuid: uuid for uuid in known}
    names = {one.uuids[0]: one.name for one in device_subjects(list(known.values()))}
    between = [one for one in own if len(set(_ends(one, node_of))) == 2]
    within = [one for one in own if len(set(_ends(one, node_of))) == 1]
    causes = _Causes()
    causes.find_culprits(between, node_of, hosts, "node")
    causes.find_paths_of_nodes(between, node_of, hosts)
    causes.find_culprits(between, itself, names, "device")
    causes.find_culprits(within, itself, names, "device")
    slow = {one.subject: one for one in own if one.verdict.is_slow}
    explained = {
        subject: replace(slow[subject], culprit=culprit)
        for subject, culprit in causes.culprits.items()
    }
    left = [one for subject, one in slow.items() if subject not in explained]
    explained |= _explain_rest(left, own, findings)
    return [
        *(explained.get(one.subject, one) if one.test == test else one for one in findings),
        *causes.findings,
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Causes:
    """Root causes so far. culprits: the name of the culprit of each slow pair."""

    culprits: dict[Subject, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def find_culprits(
        self,
        pairs: Sequence[Finding],
        ends: Mapping[str, str],
        names: Mapping[str, str],
        kind: Literal["node", "device"],
    ) -> None:
        """Add the nodes or devices that explain those of the pairs that nothing explains yet.

        ends: the node of each device, or the device itself. names: of these.
        """
        left = [one for one in pairs if one.subject not in self.culprits]
        for name, partners in _culprits(*_paths(left, ends)).items():
            slow = [one for one in left if name in _ends(one, ends) and one.verdict.is_slow]
            good = sorted(names.get(one, one) for one in partners)
            more = f" and {len(good) - _MOST_NAMES} more" if len(good) > _MOST_NAMES else ""
            subject = Subject(
                kind=kind,
                uuids=tuple(uuid for uuid, owner in ends.items() if owner == name),
                name=names.get(name, name),
                model=slow[0].subject.model,
            )
            self._add(
                slow,
                subject,
                f"slow with {len(good)} partners that are fast with others: the {kind} is to blame",
                f"slow with {', '.join(good[:_MOST_NAMES])}{more}",
            )

    def find_paths_of_nodes(
        self, pairs: Sequence[Finding], ends: Mapping[str, str], names: Mapping[str, str]
    ) -> None:
        """Add the paths between two nodes on which several pairs, and most of them, are slow."""
        by_path: dict[_Edge, list[Finding]] = {}
        for one in pairs:
            if one.subject not in self.culprits and one.value is not None:
                by_path.setdefault(frozenset(_ends(one, ends)), []).append(one)
        for edge, own in by_path.items():
            slow = [one for one in own if one.verdict.is_slow]
            if len({frozenset(one.subject.uuids) for one in own}) < 2 or 2 * len(slow) <= len(own):
                continue
            first, second = sorted(names.get(node, node) for node in edge)
            subject = Subject(
                kind="pair", uuids=(), name=f"{first} to {second}", model=own[0].subject.model
            )
            self._add(slow, subject, f"slow for {len(slow)} of {len(own)} pairs: {_PATH}", "")

    def _add(self, slow: Sequence[Finding], subject: Subject, reason: str, evidence: str) -> None:
        """Add a subject as the root cause of slow pairs."""
        ratios = [one.ratio for one in slow if one.ratio is not None]
        is_bad = any(one.verdict is Verdict.BAD for one in slow)
        self.culprits.update((one.subject, subject.name) for one in slow)
        self.findings.append(
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


def _ends(pair: Finding, ends: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(ends.get(uuid, uuid) for uuid in pair.subject.uuids)


def _paths(pairs: Sequence[Finding], ends: Mapping[str, str]) -> tuple[set[_Edge], set[_Edge]]:
    """Return the slow and the fast paths between devices, or between nodes.

    A path between devices is slow where one direction is, one between nodes where most pairs are.
    """
    marks: dict[_Edge, list[bool]] = {}
    for one in pairs:
        if one.value is not None:
            marks.setdefault(frozenset(_ends(one, ends)), []).append(one.verdict.is_slow)
    is_of_devices = len(set(ends.values())) == len(ends)
    slow = {
        edge
        for edge, found in marks.items()
        if (any(found) if is_of_devices else 2 * sum(found) > len(found))
    }
    return slow, marks.keys() - slow


def _culprits(slow: Iterable[_Edge], fast: Iterable[_Edge]) -> dict[str, set[str]]:
    """Return who is slow with two partners or more that are fast with others, with these partners.

    The worst one first; a partner that a culprit explains does not count against others.
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
    """Return the partners of each end."""
    found: dict[str, set[str]] = {}
    for edge in edges:
        if len(edge) == 2:
            first, second = edge
            found.setdefault(first, set()).add(second)
            found.setdefault(second, set()).add(first)
    return found


def _explain_rest(
    slow: Iterable[Finding], pairs: Sequence[Finding], findings: Sequence[Finding]
) -> dict[Subject, Finding]:
    """Return the slow pairs without a culprit, with what is known of the cause, by their subject.

    pairs: of the same test, slow or not. findings: all; those of the stage "alone" tell how each
    device does without partners.
    """
    alone = [one for one in findings if one.stage == "alone" and len(one.subject.uuids) == 1]
    slow_alone = {one.subject.uuids[0] for one in alone if one.verdict is not Verdict.HEALTHY}
    healthy_alone = {one.subject.uuids[0] for one in alone} - slow_alone
    healthy = [one for one in pairs if one.verdict is Verdict.HEALTHY]
    fast_with = _partners(frozenset(one.subject.uuids) for one in healthy)
    tried_with = _partners(frozenset(one.subject.uuids) for one in pairs)
    found = {}
    for pair in slow:
        ends = set(pair.subject.uuids)
        cause, evidence = "the path or one of the two is to blame", [pair.evidence]
        if all(fast_with.get(uuid, set()) - ends for uuid in ends):
            cause = _PATH
            evidence.append("both are fast with other partners")
        else:
            if ends & slow_alone:
                evidence.append("one of the two is not healthy alone")
            elif ends <= healthy_alone:
                evidence.append("both are fast alone")
            if not any(tried_with.get(uuid, set()) - ends for uuid in ends):
                evidence.append("neither has another partner to try")
        found[pair.subject] = replace(
            pair, reason=f"{pair.reason}: {cause}", evidence="; ".join(filter(None, evidence))
        )
    return found


def _explain_waiting(findings: Sequence[Finding], groups: Sequence[Group]) -> list[Finding]:
    """Make the rank that the others wait for in each pass a suspect, and the culprit of the others.

    Unchanged where there is none, or where a pass does not tell how long each rank waits.
    """
    waits = next((group for group in groups if group.test.name == WAIT_TEST), None)
    steps = next((group for group in groups if group.test.name == COMPUTE_TEST), None)
    if waits is None or steps is None or len(waits.subjects) < 2:
        return list(findings)
    if waits.subjects != steps.subjects or waits.values.shape != steps.values.shape:
        return list(findings)
    waited_ms, step_ms = _waited_for(waits, steps)
    least = max(_WAIT_SHARE, _WAIT_FLOORS * waits.test.floor)
    late = np.flatnonzero((waited_ms / step_ms[:, None] > least).all(axis=0))
    if not len(late):
        return list(findings)
    column = int(late[0])
    culprit = waits.subjects[column]
    reason = (
        f"in a step of {np.median(step_ms):.3g} ms each of the others waits "
        f"{np.median(waited_ms[:, column]):.3g} ms for it"
    )
    found = []
    for one in findings:
        if one.test == WAIT_TEST and one.subject == culprit:
            cause = _why_late(culprit, findings)
            one = replace(one, verdict=Verdict.SUSPECT, reason=reason, evidence=cause)
        elif one.test == WAIT_TEST:
            wait = f"waits {one.value or 0.0:.3g} ms of each step for it"
            one = replace(one, culprit=culprit.name, evidence=wait)
        found.append(one)
    return found


def _waited_for(waits: Group, steps: Group) -> tuple[Floats, Floats]:
    """Return how long the others wait for each rank [passes, ranks], and steps [passes], in ms.

    The median wait of the others less the rank's own; NaN where a pass has no value of a rank.
    """
    count = waits.values.shape[1]
    others = [np.delete(waits.values, rank, axis=1) for rank in range(count)]
    typical = np.stack([np.median(one, axis=1) for one in others], axis=1)
    return typical - waits.values, np.median(waits.values + steps.values, axis=1)


def _why_late(culprit: Subject, findings: Sequence[Finding]) -> str:
    """Return where else a late rank is slow: its device, its links, or neither."""
    stages = {one.stage for one in findings if one.subject == culprit and one.verdict.is_slow}
    if "alone" in stages:
        return "its device is slow alone too"
    if {"host-links", "pairs"} & stages:
        return "its link to the host or to others is slow too"
    return "its device and its links are as fast as the others': look at its CPU and its data"
