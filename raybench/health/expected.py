"""What a test reaches elsewhere: by the references of its model, and in earlier checks.

Earlier checks are read from the table `health`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from raybench.analysis.references import Quantity, References
from raybench.health.groups import Group
from raybench.health.references import METRIC
from raybench.health.suite import HealthTest
from raybench.records.health import Finding, Subject, Verdict, figure
from raybench.results import reader
from raybench.results.columns import from_row

# Devices differ from day to day, and from machine to machine, by more than beside each other: by
# this share, and by so many floors of the test. What a link to the host carries is up to the host:
# two H200s copied both ways at 78 GB/s, and six minutes later on the same host at 91 and 96. Too
# slow is there only what would be bad among similar ones.
_USUAL_SHARE, _USUAL_FLOORS = 0.1, 5
# Tests with such a floor share their device with whatever else the host does, as CPU workers do: a
# busy hour makes all of them slow, memory by 6 times on two cores with loads of 6 to 15.
_SHARED_FLOOR, _SHARED_RATIO = 0.1, 10.0
_LEAST_PAST_CHECKS = 3
_ALMOST_ZERO = 1e-300


def read_findings(root: Path, run_id: str | None = None) -> list[tuple[str, Finding]]:
    """Return (run_id, finding) of one run, or of all. Raises ResultsError if one cannot be read."""
    found = reader.read_table(root, "health", run_id).to_pylist()
    return [(row["run_id"], from_row(Finding, row)) for row in found]


def limit_elsewhere(test: HealthTest) -> float:
    """Return how many times the time of another day or machine is too long."""
    if test.floor >= _SHARED_FLOOR:
        return _SHARED_RATIO
    if test.stage == "host-links":
        return test.bad_ratio
    return 1 + max(_USUAL_SHARE, _USUAL_FLOORS * test.floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastValue:
    """The value of a test that an earlier check found healthy. Fields as those of `Finding`."""

    run_id: str
    test: str
    subject: Subject
    value: float


def past_values(root: Path) -> Sequence[PastValue]:
    """Return the values of healthy subjects in all checks of a folder; none without a check."""
    if not (root / "health").is_dir():
        return ()
    return tuple(
        PastValue(run_id=of_run, test=finding.test, subject=finding.subject, value=finding.value)
        for of_run, finding in read_findings(root)
        if finding.verdict is Verdict.HEALTHY and finding.value is not None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """The range of a figure elsewhere, and how it is known."""

    low: float
    high: float
    source: str

    def excess(self, value: float, test: HealthTest) -> float | None:
        """Return a value's time over the worst time of the range; None where that is usual."""
        ratio = value / self.high if test.is_time else self.low / max(value, _ALMOST_ZERO)
        return ratio if ratio > limit_elsewhere(test) else None

    def words(self, unit: str) -> str:
        """Return the range as `671 to 782 TFLOP/s (source)`."""
        low, high = figure(self.low), figure(self.high)
        return f"{low if low == high else f'{low} to {high}'} {unit} ({self.source})"


class Elsewhere:
    """Values of subjects in earlier checks, and of models by references or earlier checks."""

    def __init__(self, past: Iterable[PastValue], references: References) -> None:
        self._references = references
        self._subjects: dict[tuple[str, tuple[str, ...]], list[PastValue]] = {}
        self._models: dict[tuple[str, str, str, int], list[PastValue]] = {}
        for one in past:
            subject = one.subject
            self._subjects.setdefault((one.test, subject.uuids), []).append(one)
            key = (one.test, subject.kind, subject.model, len(subject.uuids))
            self._models.setdefault(key, []).append(one)

    def of_subject(self, subject: Subject, test: HealthTest) -> ValueRange | None:
        """Return the range of a subject in earlier checks; None of fewer than three."""
        past = self._subjects.get((test.name, subject.uuids), ())
        return _past_range(past, "its earlier checks")

    def of_model(self, group: Group) -> ValueRange | None:
        """Return what starts of the model reached elsewhere, else in three earlier checks."""
        of = {"test": group.test.name, "where": str(group.placement)}
        quantity = Quantity(of=of, metric=METRIC, unit=group.test.unit, fabric=group.topology)
        found = self._references.find(group.model, quantity)
        if found is not None:
            low, high = found.observed
            return ValueRange(low=low, high=high, source=found.provenance)
        first = group.subjects[0]
        key = (group.test.name, first.kind, group.model, len(first.uuids))
        return _past_range(self._models.get(key, ()), "earlier checks of this model")


def _past_range(past: Sequence[PastValue], source: str) -> ValueRange | None:
    """Return the median, because an earlier check may have had a bad day."""
    checks = len({one.run_id for one in past})
    if checks < _LEAST_PAST_CHECKS:
        return None
    middle = median(one.value for one in past)
    return ValueRange(low=middle, high=middle, source=f"{source}, {checks} of them")
