"""The report of a node as text for a terminal: verdict first, what is wrong, a table of tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raybench.records.devices import Finding, Verdict
from raybench.records.node_report import NodeReport, NodeState
from raybench.report.documents import Block, Line, ShownColumn, Table, Tone, render_text
from raybench.report.formatting import number
from raybench.report.words import health as health_words
from raybench.report.words import quick as words

_TONES: Mapping[NodeState, Tone] = {
    NodeState.DRAIN: "alarm",
    NodeState.SUSPECT: "advice",
    NodeState.UNTESTED: "advice",
    NodeState.HEALTHY: "good",
}
# Before figures that are not healthy; the worst first.
_MARKS = {Verdict.BAD: "!", Verdict.UNTESTED: "x", Verdict.SUSPECT: "?"}
_LEGEND = "! bad, ? suspect, x not tested"
# With more devices the table has their range.
_MOST_COLUMNS = 4


def format_node_report(report: NodeReport, *, width: int, color: bool = False) -> str:
    """Return the report of a node as text that ends in a line break."""
    return render_text(_blocks(report), width=width, color=color)


def _blocks(report: NodeReport) -> Iterator[Block]:
    """Yield the verdict, why tests are missing, what is wrong, notes and the table of tests."""
    unhealthy = [finding for finding in report.findings if finding.verdict.is_unhealthy]
    suspects: dict[str, None] = {}
    for finding in unhealthy:
        if finding.verdict.is_suspect_or_bad:
            suspects[words.short_name(finding.subject.name, report.host)] = None
    yield Line(text=words.headline(report, list(suspects)), tone=_TONES[report.state])
    yield Line(text=words.took(report))
    if report.detection is not None:
        yield Line(text=health_words.detection(report.detection))
    # Reasons that a line has given already.
    said_reasons = {reason.detail for reason in report.untested}
    if report.state is NodeState.UNTESTED:
        yield from _untested_lines(report, "Why")
    for finding in unhealthy:
        if finding.reason not in said_reasons and finding.verdict is not Verdict.UNTESTED:
            # A problem of the environment is told once, not for each device.
            if finding.stage == "environment":
                said_reasons.add(finding.reason)
            yield Line(text=_problem(finding, report))
            if finding.command:
                yield Line(text=f"  {finding.command.splitlines()[0]}", is_whole=True)
    if report.state is not NodeState.UNTESTED:
        # These reasons come last: they do not explain the verdict.
        yield from _untested_lines(report, "Not tested in full")
    notes = [
        words.note(finding)
        for finding in report.findings
        if finding.verdict is Verdict.NOTE and finding.reason not in said_reasons
    ]
    for note in dict.fromkeys(notes):
        yield Line(text=note, tone="aside")
    tests = []
    for finding in report.findings:
        if finding.unit and finding.value is not None and _is_test(finding):
            tests.append(finding)
    if tests:
        yield _table(tests, report)
    if any(finding.verdict in _MARKS for finding in tests):
        yield Line(text=_LEGEND, tone="aside")


def _untested_lines(report: NodeReport, title: str) -> Iterator[Line]:
    """Yield why tests are missing or disturbed, and what to do, for each kind of reason."""
    for kind in dict.fromkeys(reason.kind for reason in report.untested):
        for reason in report.untested:
            if reason.kind is kind:
                yield Line(text=f"{title}: {words.untested(reason)}")
        yield Line(text=words.untested_advice(kind))


def _is_test(finding: Finding) -> bool:
    return finding.stage in ("alone", "host-links", "together")


def _problem(finding: Finding, report: NodeReport) -> str:
    """Return what is wrong with a subject, and what to do."""
    name = words.short_name(finding.subject.name, report.host)
    problem = f"{name}: {health_words.reason_with_value(finding)}."
    action = health_words.action(finding.action)
    return f"{problem} Do: {action}." if action else problem


def _table(findings: Sequence[Finding], report: NodeReport) -> Table:
    """Return a row for each test: the values of all devices, or their range."""
    # (test, unit) -> name of the subject -> finding
    findings_of_test: dict[tuple[str, str], dict[str, Finding]] = {}
    for finding in findings:
        finding_of_subject = findings_of_test.setdefault((finding.test, finding.unit), {})
        finding_of_subject[finding.subject.name] = finding
    measured = {finding.subject.name for finding in findings}
    devices = [name for name in report.devices if name in measured]
    has_device_columns = len(devices) <= _MOST_COLUMNS
    columns = [ShownColumn(title="test", is_text=True), ShownColumn(title="unit", is_text=True)]
    if has_device_columns:
        columns += [ShownColumn(title=words.short_name(name, report.host)) for name in devices]
    else:
        columns += [ShownColumn(title=title) for title in ("least", "most")]
    columns.append(ShownColumn(title="node"))
    rows = []
    for (test, unit), finding_of_subject in findings_of_test.items():
        of_devices = [finding_of_subject[name] for name in devices if name in finding_of_subject]
        if has_device_columns:
            cells = [_figure(finding_of_subject.get(name)) for name in devices]
        elif of_devices:
            ascending = sorted(of_devices, key=lambda finding: finding.value or 0.0)
            cells = [_figure(ascending[0]), _figure(ascending[-1])]
        else:
            cells = ["", ""]
        of_node = [finding for name, finding in finding_of_subject.items() if name not in devices]
        rows.append((test, unit, *cells, _figure(of_node[0]) if of_node else ""))
    has_node_values = any(row[-1] for row in rows)
    if not has_node_values:
        return Table(columns=tuple(columns[:-1]), rows=tuple(row[:-1] for row in rows))
    return Table(columns=tuple(columns), rows=tuple(rows))


def _figure(finding: Finding | None) -> str:
    """Return `!12.3`: a mark if the value is not healthy, then the value; "" for None."""
    if finding is None:
        return ""
    return f"{_MARKS.get(finding.verdict, '')}{number(finding.value, 3)}"
