"""The report of a node as metrics, for the textfile collector of Prometheus' node_exporter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from raybench.health.node_files import READABLE
from raybench.records.devices import Finding, Verdict
from raybench.records.node_report import NodeReport, NodeState
from raybench.results.columns import replace_file

_ORDER = list(Verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A metric with all its samples; the format wants them in one group."""

    name: str
    help: str
    samples: tuple[_Sample, ...]


def write_metrics(path: Path, report: NodeReport) -> None:
    """Write the metrics of a node into a file, which is replaced by renaming.

    Raises:
        ResultsError: the file cannot be written.
    """
    replace_file(path, metrics_text(report).encode(), READABLE)


def metrics_text(report: NodeReport) -> str:
    """Return the metrics of a node in the text format of Prometheus."""
    lines: list[str] = []
    for family in _families(report):
        if family.samples:
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} gauge"]
            for sample in family.samples:
                lines.append(f"{family.name}{_labels(sample)} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines)


def _families(report: NodeReport) -> Iterator[_Family]:
    states = (
        _Sample(labels={"state": state}, value=float(report.state is state)) for state in NodeState
    )
    yield _Family(
        name="raybench_health_state",
        help="1 for the state of the node at its last check, 0 for all other states.",
        samples=tuple(states),
    )
    began_s = datetime.fromisoformat(report.began).timestamp()
    yield _Family(
        name="raybench_health_timestamp_seconds",
        help="When the last check began.",
        samples=(_Sample(labels={}, value=began_s),),
    )
    yield _Family(
        name="raybench_health_duration_seconds",
        help="How long the last check took.",
        samples=(_Sample(labels={}, value=report.seconds),),
    )
    yield _Family(
        name="raybench_health_drain_reason",
        help="1 for each reason why a device must not be used.",
        samples=_unique(
            _Sample(
                labels={"device": reason.device, "kind": reason.kind, "test": reason.test}, value=1
            )
            for reason in report.drain
        ),
    )
    yield _Family(
        name="raybench_health_device_verdict",
        help="1 for the worst verdict of a device at the last check, 0 for all other verdicts.",
        samples=tuple(_device_verdicts(report)),
    )
    yield _Family(
        name="raybench_health_value",
        help="What a test measured, in the unit of its label.",
        samples=_unique(_values(report)),
    )


def _device_verdicts(report: NodeReport) -> Iterator[_Sample]:
    """Yield a sample of each device and verdict."""
    for device in report.devices:
        of_device = [finding for finding in report.findings if finding.subject.name == device]
        findings = [finding for finding in of_device if not finding.culprit]
        # A note is no verdict on a device.
        verdicts = {finding.verdict for finding in findings} - {Verdict.NOTE}
        worst = min(verdicts or {Verdict.UNKNOWN}, key=_ORDER.index)
        # Tests without anything to compare with do not hide that other tests are healthy.
        if worst is Verdict.UNKNOWN and Verdict.HEALTHY in verdicts:
            worst = Verdict.HEALTHY
        uuids = (finding.subject.uuids[0] for finding in findings if finding.subject.uuids)
        uuid = next(uuids, "")
        for verdict in Verdict:
            if verdict is not Verdict.NOTE:
                labels = {"device": device, "uuid": uuid, "verdict": verdict.value}
                yield _Sample(labels=labels, value=float(verdict is worst))


def _values(report: NodeReport) -> Iterator[_Sample]:
    for finding in report.findings:
        if finding.value is not None and math.isfinite(finding.value):
            yield _Sample(labels=_labels_of(finding), value=finding.value)


def _labels_of(finding: Finding) -> dict[str, str]:
    return {
        "stage": finding.stage,
        "subject": finding.subject.name,
        "test": finding.test,
        "unit": finding.unit,
    }


def _unique(samples: Iterator[_Sample]) -> tuple[_Sample, ...]:
    """Return the samples without repeated labels, which the format forbids."""
    by_labels = {tuple(sample.labels.items()): sample for sample in samples}
    return tuple(by_labels.values())


def _labels(sample: _Sample) -> str:
    if not sample.labels:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
    return f"{{{','.join(pairs)}}}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return repr(value) if value != int(value) else str(int(value))
