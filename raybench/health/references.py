"""Figures of health checks beside the references of their devices' models."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from raybench.analysis.references import Measurement, References
from raybench.health.groups import placement_of
from raybench.records import Device
from raybench.records.health import Finding, Verdict
from raybench.report.formatting import some
from raybench.report.sections.references import Standing, count_within, standings

METRIC = "value"
_STAGES = ("alone", "host-links", "pairs", "together")
# Figures that say little of a device: what all of a host reach at once depends on how many they
# are, a library may do a small product by another kernel in its next version, and products that
# are compared by their bits are timed elsewhere.
_LEFT_OUT = re.compile(r"all at once|same bits|gemm \w+ (256|512|1024)$")


def grades(
    findings: Iterable[Finding], known: Mapping[str, Device], references: References
) -> dict[str, list[Standing]]:
    """Return how the values of each device, and of each node of several, stand.

    The names of nodes begin with "node". known: the GPUs of the check by UUID. Devices without a
    reference are left out.
    """
    by_device: dict[str, list[Standing]] = {}
    by_node: dict[str, list[Standing]] = {}
    for finding in findings:
        for standing in standings(_measured(finding, known), references):
            if finding.subject.kind == "device":
                by_device.setdefault(finding.subject.name, []).append(standing)
            host, *others = {known[uuid].host for uuid in finding.subject.uuids}
            if not others:
                by_node.setdefault(host, []).append(standing)
    counts = Counter(device.host for device in known.values())
    return by_device | {f"node {host}": own for host, own in by_node.items() if counts[host] > 1}


def grade_text(graded: Sequence[Standing]) -> str:
    """Return `within reference on 11 of 12 quantities; h2d alone 92%`."""
    outside = [f"{one.entry.of['test']} {one.share:.0%}" for one in graded if not one.is_within]
    return "; ".join(filter(None, (count_within(graded), some(outside))))


def measurements(findings: Iterable[Finding], known: Mapping[str, Device]) -> list[Measurement]:
    """Return the values that references may be made of: those that no test has found bad.

    known: the GPUs of the check by UUID.
    """
    sound = (one for one in findings if one.verdict in (Verdict.HEALTHY, Verdict.UNKNOWN))
    return [measured for one in sound for measured in _measured(one, known)]


def _measured(finding: Finding, known: Mapping[str, Device]) -> Iterator[Measurement]:
    """Yield the value of a finding where a model of GPU has a typical one."""
    subject, value = finding.subject, finding.value
    is_typical = finding.stage in _STAGES and not _LEFT_OUT.search(finding.test)
    if is_typical and value and subject.uuids and set(subject.uuids) <= set(known):
        topology = "" if subject.kind == "device" else known[subject.uuids[0]].topology or ""
        yield Measurement(
            model=subject.model,
            of={"test": finding.test, "where": str(placement_of(subject, known))},
            metric=METRIC,
            unit=finding.unit,
            fabric=topology.split(", ")[0],
            value=value,
            devices="+".join(subject.uuids),
        )
