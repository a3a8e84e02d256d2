"""What a value of a health check should be: by references of the model, and by earlier checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Literal

from raybench.analysis.references import (
    MeasuredValue,
    Quantity,
    References,
    Standing,
    standings,
)
from raybench.health.readings import Group, link_of, placement_of
from raybench.health.suite import HealthTest, test_named
from raybench.records.device import Device
from raybench.records.devices import Finding, Subject, Verdict
from raybench.records.judgement import ValueRange
from raybench.report.formatting import some
from raybench.report.words.references import within_words
from raybench.results import reader
from raybench.results.columns import from_row

# Healthy devices differ by this share, or by this number of floors of the test, from day to day and
# from machine to machine; that is more than in one check. Copies between host and device differ
# most: two H200s copied both ways at 78 GB/s, and six minutes later at 91 and 96.
_USUAL_SHARE, _USUAL_FLOORS = 0.1, 5
# Tests with such a floor run on cores that other programs share. In a busy hour all of them are
# slow: memory was slower by 6 times on two cores with loads of 6 to 15.
_SHARED_FLOOR, _SHARED_RATIO = 0.1, 10.0
LEAST_PAST_CHECKS = 3
_ALMOST_ZERO = 1e-300
# The metric of all references of health checks.
_METRIC = "value"
_STAGES = ("alone", "host-links", "pairs", "together")


def read_findings(root: Path, run_id: str | None = None) -> list[tuple[str, Finding]]:
    """Return (run_id, finding) of one check, or of all checks, sorted by run_id.

    Among all checks, a damaged check is left out with a ResultsWarning.

    Args:
        root: the folder of results.
        run_id: as `find_run` takes it; None or "": all checks.

    Raises:
        ResultsError: the run is damaged or unknown, or a newer version has written it.
    """
    if not (root / "health").is_dir():
        return []
    rows = reader.read_table(root, "health", run_id).to_pylist()
    return [(row["run_id"], from_row(Finding, row)) for row in rows]


def limit_elsewhere(test: HealthTest) -> float:
    """Return the largest usual ratio of a time to the time on another day or machine."""
    if test.floor >= _SHARED_FLOOR:
        return _SHARED_RATIO
    if test.stage == "host-links":
        return test.bad_ratio
    return 1 + max(_USUAL_SHARE, _USUAL_FLOORS * test.floor)


def excess(usual: ValueRange, value: float, test: HealthTest) -> float | None:
    """Return how many times the usual time a value takes; None within the limit of its test."""
    ratio = value / usual.high if test.is_time else usual.low / max(value, _ALMOST_ZERO)
    return ratio if ratio > limit_elsewhere(test) else None


class Elsewhere:
    """Usual values: of subjects by earlier checks, of models by references or earlier checks."""

    def __init__(self, past: Iterable[tuple[str, Finding]], references: References) -> None:
        """Keep the healthy values of earlier checks; `past` has (run id, finding)."""
        self._references = references
        # Test of a subject, or of a model (`_model_key`) -> run id -> values.
        self._past: dict[object, dict[str, list[float]]] = {}
        for run_id, finding in past:
            if finding.verdict is not Verdict.HEALTHY or finding.value is None:
                continue
            test, subject = finding.test, finding.subject
            of_model = (subject.kind, subject.model, finding.link, len(subject.uuids))
            for key in ((test, subject.uuids), (test, *of_model)):
                self._past.setdefault(key, {}).setdefault(run_id, []).append(finding.value)

    def of_subject(self, subject: Subject, test: HealthTest) -> ValueRange | None:
        """Return the usual value of a subject; None if fewer than three earlier checks have one."""
        return self._past_range((test.name, subject.uuids), "own checks")

    def of_model(self, group: Group) -> ValueRange | None:
        """Return the usual values of the group's model; None if nothing is known."""
        if group.test.unit == "x":
            return ValueRange(low=1.0, high=1.0, source="start")
        of = {"test": group.test.name, "where": str(group.placement)}
        quantity = Quantity(of=of, metric=_METRIC, unit=group.test.unit, fabric=str(group.link))
        entry = self._references.find(group.model, quantity)
        if entry is not None:
            low, high = entry.observed
            return ValueRange(low=low, high=high, source="reference", provenance=entry.provenance)
        return self._past_range(_model_key(group), "checks of model")

    def count_checks(self, group: Group) -> int:
        """Return the number of earlier checks with a healthy value of this test and model."""
        return len(self._past.get(_model_key(group), {}))

    def _past_range(
        self, key: object, source: Literal["own checks", "checks of model"]
    ) -> ValueRange | None:
        """Return the median of earlier checks as a range; None for fewer than three checks."""
        by_run = self._past.get(key, {})
        if len(by_run) < LEAST_PAST_CHECKS:
            return None
        # Not the extremes, because an earlier check may have had a bad day.
        middle = median(chain(*by_run.values()))
        return ValueRange(low=middle, high=middle, source=source, checks=len(by_run))


def _model_key(group: Group) -> object:
    """Return the key of the group's test and model in `Elsewhere._past`."""
    subject = group.subjects[0]
    name = group.test.name
    return name, subject.kind, subject.model, str(group.link), len(subject.uuids)


def grades(
    findings: Iterable[Finding], gpus: Mapping[str, Device], references: References, run_id: str
) -> dict[str, list[Standing]]:
    """Return name of a device or `node HOST` -> its values beside their references.

    A node has the values of its devices, pairs and groups. Devices and nodes without a reference,
    and nodes with a single device, are left out.

    Args:
        gpus: UUID -> device of the check.
        run_id: of the check.
    """
    by_device: dict[str, list[Standing]] = {}
    by_node: dict[str, list[Standing]] = {}
    for finding in findings:
        for standing in standings(_measured(finding, gpus), references, run_id):
            if finding.subject.kind == "device":
                by_device.setdefault(finding.subject.name, []).append(standing)
            hosts = {gpus[uuid].host for uuid in finding.subject.uuids}
            if len(hosts) == 1:
                [host] = hosts
                by_node.setdefault(f"node {host}", []).append(standing)
    counts = Counter(f"node {device.host}" for device in gpus.values())
    return by_device | {node: graded for node, graded in by_node.items() if counts[node] > 1}


def grade_text(graded: Sequence[Standing]) -> str:
    """Return how many values are in the range of their reference, and which tests are outside.

    Args:
        graded: a value of `grades`.
    """
    outside = []
    for standing in graded:
        if not standing.is_within:
            outside.append(f"{standing.entry.of['test']} {standing.share:.0%}")
    names = f"Outside: {some(outside)}." if outside else ""
    return " ".join(filter(None, (within_words(graded, says_own=False), names)))


def measurements(findings: Iterable[Finding], gpus: Mapping[str, Device]) -> list[MeasuredValue]:
    """Return the values of healthy and unknown findings, of which references can be made.

    Args:
        gpus: UUID -> device of the check; values of other devices are left out.
    """
    measured: list[MeasuredValue] = []
    for finding in findings:
        if finding.verdict in (Verdict.HEALTHY, Verdict.UNKNOWN):
            measured += _measured(finding, gpus)
    return measured


def _measured(finding: Finding, gpus: Mapping[str, Device]) -> Iterator[MeasuredValue]:
    """Yield the value of a finding if the value is typical of its model of GPU."""
    subject, value = finding.subject, finding.value
    test = test_named(finding.test, "cuda")
    is_typical = finding.stage in _STAGES and (test is None or test.is_reference)
    if is_typical and value and subject.uuids and set(subject.uuids) <= set(gpus):
        yield MeasuredValue(
            model=subject.model,
            of={"test": finding.test, "where": str(placement_of(subject, gpus))},
            metric=_METRIC,
            unit=finding.unit,
            fabric=str(link_of(subject, finding.stage, gpus)),
            value=value,
            devices="+".join(subject.uuids),
        )
