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
    wrong = [finding for finding in report.findings if finding.verdict.is_unhealthy]
    names = [words.short_name(finding.subject.name, report.host) for finding in wrong]
    suspects = list(dict.fromkeys(names))
    yield Line(text=words.headline(report, suspects), tone=_TONES[report.state])
    yield Line(text=words.took(report))
    if report.detection is not None:
        yield Line(text=health_words.detection(report.detection))
    said_reasons: set[str] = set()
    for kind in dict.fromkeys(reason.kind for reason in report.untested):
        for reason in report.untested:
            if reason.kind is kind:
                said_reasons.add(reason.detail)
                yield Line(text=f"Why: {words.untested(reason)}")
        yield Line(text=words.untested_advice(kind))
    for finding in wrong:
        text = health_words.reason_with_value(finding)
        if finding.reason not in said_reasons and finding.verdict is not Verdict.UNTESTED:
            if finding.stage == "environment":
                said_reasons.add(finding.reason)
            yield Line(text=_problem(finding, text, report))
            if finding.command:
                yield Line(text=f"  {finding.command.splitlines()[0]}", is_whole=True)
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


def _is_test(finding: Finding) -> bool:
    return finding.stage in ("alone", "host-links", "together")


def _problem(finding: Finding, text: str, report: NodeReport) -> str:
    """Return what is wrong with a subject, and what to do."""
    about = f"{words.short_name(finding.subject.name, report.host)}: {text}."
    action = health_words.action(finding.action)
    return f"{about} Do: {action}." if action else about


def _table(findings: Sequence[Finding], report: NodeReport) -> Table:
    """Return a row for each test: the values of all devices, or their range."""
    by_test: dict[tuple[str, str], dict[str, Finding]] = {}
    for finding in findings:
        by_test.setdefault((finding.test, finding.unit), {})[finding.subject.name] = finding
    measured = {finding.subject.name for finding in findings}
    names = [name for name in report.devices if name in measured]
    is_wide = len(names) <= _MOST_COLUMNS
    columns = [ShownColumn(title="test", is_text=True), ShownColumn(title="unit", is_text=True)]
    if is_wide:
        columns += [ShownColumn(title=words.short_name(name, report.host)) for name in names]
    else:
        columns += [ShownColumn(title=title) for title in ("least", "most")]
    columns.append(ShownColumn(title="node"))
    rows = []
    for test, finding_of_subject in by_test.items():
        of_devices = [finding_of_subject[name] for name in names if name in finding_of_subject]
        cells = [_figure(finding_of_subject.get(name)) for name in names]
        if not is_wide:
            ordered = sorted(of_devices, key=lambda finding: finding.value or 0.0)
            cells = [_figure(finding) for finding in (*ordered[:1], *ordered[-1:])] or ["", ""]
        of_node = [finding for name, finding in finding_of_subject.items() if name not in names]
        rows.append((*test, *cells, _figure(of_node[0]) if of_node else ""))
    if not any(row[-1] for row in rows):
        return Table(columns=tuple(columns[:-1]), rows=tuple(row[:-1] for row in rows))
    return Table(columns=tuple(columns), rows=tuple(rows))


def _figure(finding: Finding | None) -> str:
    if finding is None:
        return ""
    return f"{_MARKS.get(finding.verdict, '')}{number(finding.value, 3)}"
