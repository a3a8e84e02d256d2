"""Health checks and references: what a check supports, and how its figures stand against them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raybench.analysis.references import ReferenceFile, References
from raybench.health.groups import placement_of
from raybench.records import Device
from raybench.records.health import Finding, Verdict
from raybench.report.formatting import some
from raybench.report.references import Standing, reference_file
from raybench.results.columns import from_row
from raybench.results.run import Run

METRIC = "value"
_STAGES = ("alone", "host-links", "pairs", "together")
# Figures that say little of a device: what all of a host reach at once depends on how many they
# are, a library may do a small product by another kernel in its next version, and products that
# are compared by their bits are timed elsewhere.
_LEFT_OUT = re.compile(r"all at once|same bits|gemm \w+ (256|512|1024)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """How the figures of a device, or of all devices of a node, stand against the references."""

    subject: str
    standings: Sequence[Standing]

    @property
    def text(self) -> str:
        """Return `within reference on 11 of 12 quantities; h2d alone 92%`."""
        outside = [one for one in self.standings if not one.is_within]
        count = len(self.standings)
        named = some([f"{one.name} {one.share:.0%}" for one in outside])
        inside = f"within reference on {count - len(outside)} of {count} quantities"
        return "; ".join(filter(None, (inside, named)))

    @property
    def members(self) -> dict[str, Any]:
        """Return the members of the JSON object."""
        return {
            "subject": self.subject,
            "within": sum(one.is_within for one in self.standings),
            "of": len(self.standings),
            "text": self.text,
            "standings": [one.members for one in self.standings],
        }


def _figures(
    findings: Iterable[Finding], known: Mapping[str, Device]
) -> Iterator[tuple[Finding, dict[str, str], str]]:
    """Yield findings with a figure that a model can have, what it is of, and the topology."""
    for one in findings:
        is_figure = one.stage in _STAGES and one.value and not _LEFT_OUT.search(one.test)
        uuids = one.subject.uuids
        if not is_figure or not uuids or not set(uuids) <= set(known):
            continue
        where = str(placement_of(one.subject, known))
        topology = "" if one.subject.kind == "device" else known[uuids[0]].topology or ""
        yield one, {"test": one.test, "where": where}, topology


def devices_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, Device]:
    """Return the GPUs among the rows of the table `devices`, by UUID."""
    return {row["uuid"]: from_row(Device, row) for row in rows if row["uuid"]}


def grades(
    findings: Sequence[Finding], known: Mapping[str, Device], references: References
) -> list[Grade]:
    """Return a grade for each device, then for each node of several; none without a reference."""
    by_subject: dict[str, list[Standing]] = {}
    hosts: dict[str, set[str]] = {}
    for one, of, topology in _figures(findings, known):
        entry = references.find(one.subject.model, of, METRIC, topology)
        if entry is None or one.value is None:
            continue
        host, *others = {known[uuid].host for uuid in one.subject.uuids}
        standing = Standing(name=one.test, model=one.subject.model, value=one.value, entry=entry)
        if one.subject.kind == "device":
            by_subject.setdefault(one.subject.name, []).append(standing)
        if not others:
            hosts.setdefault(host, set()).update(one.subject.uuids)
            by_subject.setdefault(f"node {host}", []).append(standing)
    alone = {f"node {host}" for host, uuids in hosts.items() if len(uuids) == 1}
    found = [
        Grade(subject=name, standings=own) for name, own in by_subject.items() if name not in alone
    ]
    return sorted(found, key=lambda grade: grade.subject.startswith("node "))


def health_references(
    run: Run, findings: Iterable[Finding], rows: Sequence[Mapping[str, Any]]
) -> list[ReferenceFile]:
    """Return the entries that a check supports, one file per model; bad figures are left out.

    rows: of the table `devices`.
    """
    known = devices_of(rows)
    by_model: dict[str, list[tuple[tuple[Mapping[str, str], str, str, str, str], float]]] = {}
    for one, of, topology in _figures(findings, known):
        if one.verdict not in (Verdict.HEALTHY, Verdict.UNKNOWN) or one.value is None:
            continue
        quantity = (of, METRIC, one.unit, topology.split(", ")[0], "+".join(one.subject.uuids))
        by_model.setdefault(one.subject.model, []).append((quantity, one.value))
    return [
        reference_file(model, run, rows, [q for q, _ in own], [[value] for _, value in own])
        for model, own in by_model.items()
    ]
