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
    wrong = [one for one in report.findings if one.verdict.is_unhealthy]
    suspects = list(dict.fromkeys(words.short_name(one.subject.name, report.host) for one in wrong))
    yield Line(text=words.headline(report, suspects), tone=_TONES[report.state])
    yield Line(text=words.took(report))
    if report.detection is not None:
        yield Line(text=health_words.detection(report.detection))
    said: set[str] = set()
    for kind in dict.fromkeys(reason.kind for reason in report.untested):
        for reason in report.untested:
            if reason.kind is kind:
                said.add(reason.detail)
                yield Line(text=f"Why: {words.untested(reason)}")
        yield Line(text=words.untested_advice(kind))
    for one in wrong:
        text = health_words.reason_with_value(one)
        if one.reason not in said and one.verdict is not Verdict.UNTESTED:
            if one.stage == "environment":
                said.add(one.reason)
            yield Line(text=_problem(one, text, report))
            if one.command:
                yield Line(text=f"  {one.command.splitlines()[0]}", is_whole=True)
    notes = [
        words.note(one)
        for one in report.findings
        if one.verdict is Verdict.NOTE and one.reason not in said
    ]
    for note in dict.fromkeys(notes):
        yield Line(text=note, tone="aside")
    tests = [one for one in report.findings if one.unit and one.value is not None and _is_test(one)]
    if tests:
        yield _table(tests, report)
    if any(one.verdict in _MARKS for one in tests):
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
    for one in findings:
        by_test.setdefault((one.test, one.unit), {})[one.subject.name] = one
    measured = {one.subject.name for one in findings}
    names = [name for name in report.devices if name in measured]
    is_wide = len(names) <= _MOST_COLUMNS
    columns = [ShownColumn(title="test", is_text=True), ShownColumn(title="unit", is_text=True)]
    if is_wide:
        columns += [ShownColumn(title=words.short_name(name, report.host)) for name in names]
    else:
        columns += [ShownColumn(title=title) for title in ("least", "most")]
    columns.append(ShownColumn(title="node"))
    rows = []
    for test, own in by_test.items():
        of_devices = [own[name] for name in names if name in own]
        cells = [_figure(own.get(name)) for name in names]
        if not is_wide:
            ordered = sorted(of_devices, key=lambda one: one.value or 0.0)
            cells = [_figure(one) for one in (*ordered[:1], *ordered[-1:])] or ["", ""]
        of_node = [one for name, one in own.items() if name not in names]
        rows.append((*test, *cells, _figure(of_node[0]) if of_node else ""))
    if not any(row[-1] for row in rows):
        return Table(columns=tuple(columns[:-1]), rows=tuple(row[:-1] for row in rows))
    return Table(columns=tuple(columns), rows=tuple(rows))


def _figure(finding: Finding | None) -> str:
    if finding is None:
        return ""
    return f"{_MARKS.get(finding.verdict, '')}{number(finding.value, 3)}"
