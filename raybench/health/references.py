"""What a value of a health check should be: by references of the model, and by earlier checks.

Earlier checks are read from the table `health`. References also grade each device and node, and the
sound values of a check can be exported as references.
"""

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

# Devices differ from day to day, and from machine to machine, by more than beside each other: by
# this share, or by so many floors of the test. What a link to the host carries is up to the host:
# two H200s copied both ways at 78 GB/s, and six minutes later on the same host at 91 and 96. Too
# slow is there only what would be bad among similar ones.
_USUAL_SHARE, _USUAL_FLOORS = 0.1, 5
# Tests with such a floor share their device with whatever else the host does, as CPU workers do: a
# busy hour makes all of them slow, memory by 6 times on two cores with loads of 6 to 15.
_SHARED_FLOOR, _SHARED_RATIO = 0.1, 10.0
LEAST_PAST_CHECKS = 3
_ALMOST_ZERO = 1e-300
# The metric of all references of health checks.
_METRIC = "value"
_STAGES = ("alone", "host-links", "pairs", "together")


def read_findings(root: Path, run_id: str | None = None) -> list[tuple[str, Finding]]:
    """Return (run_id, finding) of one check, or for None or "" of all, sorted by run_id.

    Empty without a check, and for a run that is none. run_id: as `find_run` takes it, of a run in
    `root`. Of all checks a damaged one is left out, with a ResultsWarning. Raises ResultsError for
    a damaged run, for a run_id that means no run or several (if `root` has checks), and for a value
    that this version does not know.
    """
    if not (root / "health").is_dir():
        return []
    found = reader.read_table(root, "health", run_id).to_pylist()
    return [(row["run_id"], from_row(Finding, row)) for row in found]


def limit_elsewhere(test: HealthTest) -> float:
    """Return the largest usual ratio of a time to that of another day or machine, above 1.

    It is 10 for tests of what all programs of a host share (a floor of 0.1 or more), `bad_ratio`
    for those of host-links, and else 1.1, or 1 + 5 * floor if that is more.
    """
    if test.floor >= _SHARED_FLOOR:
        return _SHARED_RATIO
    if test.stage == "host-links":
        return test.bad_ratio
    return 1 + max(_USUAL_SHARE, _USUAL_FLOORS * test.floor)


def excess(known: ValueRange, value: float, test: HealthTest) -> float | None:
    """Return value / high of a time, low / value of a rate; None up to `limit_elsewhere`."""
    ratio = value / known.high if test.is_time else known.low / max(value, _ALMOST_ZERO)
    return ratio if ratio > limit_elsewhere(test) else None


class Elsewhere:
    """Values of subjects in earlier checks, and of models by references or earlier checks.

    past: findings of earlier checks with the ids of their runs; only healthy ones with a value
    count.
    """

    def __init__(self, past: Iterable[tuple[str, Finding]], references: References) -> None:
        self._references = references
        # The values by run, of each test of a subject, and of a kind of subject of a model.
        self._past: dict[object, dict[str, list[float]]] = {}
        for run_id, one in past:
            if one.verdict is Verdict.HEALTHY and one.value is not None:
                of_model = one.subject.kind, one.subject.model, one.link, len(one.subject.uuids)
                for key in ((one.test, one.subject.uuids), (one.test, *of_model)):
                    self._past.setdefault(key, {}).setdefault(run_id, []).append(one.value)

    def of_subject(self, subject: Subject, test: HealthTest) -> ValueRange | None:
        """Return its median in earlier checks as low and high; None if under three have a value."""
        return self._past_range((test.name, subject.uuids), "own checks")

    def of_model(self, group: Group) -> ValueRange | None:
        """Return `observed` of the reference for the group's model, test, placement and link.

        Of a drift it is 1 to 1. Without a reference low and high are the median of earlier checks
        of these, on any number of nodes; None if under three have a value.
        """
        if group.test.unit == "x":
            return ValueRange(low=1.0, high=1.0, source="start")
        of = {"test": group.test.name, "where": str(group.placement)}
        quantity = Quantity(of=of, metric=_METRIC, unit=group.test.unit, fabric=str(group.link))
        found = self._references.find(group.model, quantity)
        if found is not None:
            low, high = found.observed
            return ValueRange(low=low, high=high, source="reference", provenance=found.provenance)
        return self._past_range(_model_key(group), "checks of model")

    def count_checks(self, group: Group) -> int:
        """Return in how many earlier checks the group's model has a healthy value in this test."""
        return len(self._past.get(_model_key(group), {}))

    def _past_range(
        self, key: object, source: Literal["own checks", "checks of model"]
    ) -> ValueRange | None:
        """Return the median of earlier checks as a range; None where fewer than three have a value.

        Not their extremes, because an earlier check may have had a bad day.
        """
        by_run = self._past.get(key, {})
        if len(by_run) < LEAST_PAST_CHECKS:
            return None
        middle = median(chain(*by_run.values()))
        return ValueRange(low=middle, high=middle, source=source, checks=len(by_run))


def _model_key(group: Group) -> object:
    """Return the key of a test of this kind of subject and model in earlier checks."""
    subject = group.subjects[0]
    name = group.test.name
    return name, subject.kind, subject.model, str(group.link), len(subject.uuids)


def grades(
    findings: Iterable[Finding], gpus: Mapping[str, Device], references: References, run_id: str
) -> dict[str, list[Standing]]:
    """Return name -> how its values stand against references, in the order of the findings.

    Names are those of devices, then `node HOST` of nodes with several devices: with the values of
    its devices, pairs and groups. Tests are those of `measurements`, with any verdict. gpus: UUID
    -> device of the check. run_id: of the check. Devices and nodes without a reference are left
    out.
    """
    by_device: dict[str, list[Standing]] = {}
    by_node: dict[str, list[Standing]] = {}
    for finding in findings:
        for standing in standings(_measured(finding, gpus), references, run_id):
            if finding.subject.kind == "device":
                by_device.setdefault(finding.subject.name, []).append(standing)
            host, *others = {gpus[uuid].host for uuid in finding.subject.uuids}
            if not others:
                by_node.setdefault(f"node {host}", []).append(standing)
    counts = Counter(f"node {device.host}" for device in gpus.values())
    return by_device | {node: own for node, own in by_node.items() if counts[node] > 1}


def grade_text(graded: Sequence[Standing]) -> str:
    """Return in sentences how many values are in the range of their reference, and who is outside.

    At most four tests are named, with their speed as a share of the reference. graded: of one name
    in `grades`.
    """
    outside = [f"{one.entry.of['test']} {one.share:.0%}" for one in graded if not one.is_within]
    told = f"Outside: {some(outside)}." if outside else ""
    return " ".join(filter(None, (within_words(graded, says_own=False), told)))


def measurements(findings: Iterable[Finding], gpus: Mapping[str, Device]) -> list[MeasuredValue]:
    """Return the values of healthy and unknown findings, from which references can be made.

    Only of the stages alone, host-links, pairs and together, without tests of all at once, of same
    bits, and of products up to 1024: these say little of a model. A value of 0 or None, and one
    of devices that are not in `gpus` (UUID -> device of the check), is left out.
    """
    sound = (one for one in findings if one.verdict in (Verdict.HEALTHY, Verdict.UNKNOWN))
    return [measured for one in sound for measured in _measured(one, gpus)]


def _measured(finding: Finding, gpus: Mapping[str, Device]) -> Iterator[MeasuredValue]:
    """Yield the value of a finding if it is typical of a model of GPU, else nothing."""
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
