"""Root causes: the device, node or path that makes pairs slow, and the late rank. Pure.

A device is the root cause of slow pairs when it is slow with two partners or more that are fast
with others, and with more than half of its partners; otherwise the path between the two devices is.
Nodes come before devices: a node whose devices are all slow with other nodes is one root cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from statistics import median
from typing import Literal

import numpy as np

from raybench.health.readings import Group
from raybench.health.suite import COMPUTE_TEST, WAIT_TEST, device_subjects
from raybench.records import Device
from raybench.records.health import Finding, Subject, Verdict
from raybench.report.formatting import some

_LEAST_PARTNERS = 2
# A rank is late where the others wait for it for more than this share of a step, and for more than
# so many floors of the test, in each pass.
_WAIT_SHARE, _WAIT_FLOORS = 0.1, 2
_PATH = "the path between the two is to blame"

# Two devices or two nodes.
_Edge = frozenset[str]
# The slow pairs that a root cause explains, and the finding about it.
_Cause = tuple[Sequence[Finding], Finding]


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
