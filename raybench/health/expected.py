"""Values that a test has elsewhere: in the references of the model, and in earlier checks.

Earlier checks are read from the table `health`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
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
    """Return (run_id, finding) of one check, or of all; none where a folder has no check.

    Raises ResultsError where they cannot be read.
    """
    if not (root / "health").is_dir():
        return []
    found = reader.read_table(root, "health", run_id).to_pylist()
    return [(row["run_id"], from_row(Finding, row)) for row in found]


def limit_elsewhere(test: HealthTest) -> float:
    """Return the ratio from which a time is too long, over the time of another day or machine."""
    if test.floor >= _SHARED_FLOOR:
        return _SHARED_RATIO
    if test.stage == "host-links":
        return test.bad_ratio
    return 1 + max(_USUAL_SHARE, _USUAL_FLOORS * test.floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRange:
    """The range of a figure on other days or machines. source: how it is known, for people."""

    low: float
    high: float
    source: str

    def excess(self, value: float, test: HealthTest) -> float | None:
        """Return the time of a value over the worst time of the range; None: within the limit."""
        ratio = value / self.high if test.is_time else self.low / max(value, _ALMOST_ZERO)
        return ratio if ratio > limit_elsewhere(test) else None

    def words(self, unit: str) -> str:
        """Return the range as `671 to 782 TFLOP/s (source)`."""
        low, high = figure(self.low), figure(self.high)
        return f"{low if low == high else f'{low} to {high}'} {unit} ({self.source})"


class Elsewhere:
    """Values of subjects in earlier checks, and of models by references or earlier checks.

    past: findings of earlier checks with the ids of their runs; only healthy ones count.
    """

    def __init__(self, past: Iterable[tuple[str, Finding]], references: References) -> None:
        self._references = references
        # The values by run, of each test of a subject, and of a kind of subject of a model.
        self._past: dict[object, dict[str, list[float]]] = {}
        for run_id, one in past:
            subject = one.subject
            if one.verdict is Verdict.HEALTHY and one.value is not None:
                for key in (_subject_key(subject, one.test), _model_key(subject, one.test)):
                    self._past.setdefault(key, {}).setdefault(run_id, []).append(one.value)

    def of_subject(self, subject: Subject, test: HealthTest) -> ValueRange | None:
        """Return the median of a subject in earlier checks; None of fewer than three."""
        return self._past_range(_subject_key(subject, test.name), "its earlier checks")

    def of_model(self, group: Group) -> ValueRange | None:
        """Return the range of references, else the median of three earlier checks; None: neither.

        group: one whose model, test and placement are meant.
        """
        of = {"test": group.test.name, "where": str(group.placement)}
        quantity = Quantity(of=of, metric=METRIC, unit=group.test.unit, fabric=group.topology)
        found = self._references.find(group.model, quantity)
        if found is not None:
            low, high = found.observed
            return ValueRange(low=low, high=high, source=found.provenance)
        key = _model_key(group.subjects[0], group.test.name)
        return self._past_range(key, "earlier checks of this model")

    def _past_range(self, key: object, source: str) -> ValueRange | None:
        """Return the median, because an earlier check may have had a bad day."""
        by_run = self._past.get(key, {})
        if len(by_run) < _LEAST_PAST_CHECKS:
            return None
        middle = median(chain(*by_run.values()))
        return ValueRange(low=middle, high=middle, source=f"{source}, {len(by_run)} of them")


def _subject_key(subject: Subject, test: str) -> object:
    return test, subject.uuids


def _model_key(subject: Subject, test: str) -> object:
    """Return a key of all subjects of a kind, model and number of devices in one test."""
    return test, subject.kind, subject.model, len(subject.uuids)
