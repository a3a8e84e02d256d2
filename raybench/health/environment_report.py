"""The environment in the report of a check: a short listing, and a table of all facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raybench.health.suite import NETWORK_TEST, TRANSPORT_TEST
from raybench.records.devices import Finding, Verdict
from raybench.report.documents import SETTING_CHARS, Listing, ShownColumn, Table
from raybench.report.formatting import some
from raybench.report.words import environment as words

ENVIRONMENT_TITLE = "Environment"
# The listing must leave room for the verdict on the first screen.
_MOST_NOTES = 4


def noted(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with a note."""
    return [finding for finding in findings if finding.verdict is Verdict.NOTE]


def environment_listing(findings: Sequence[Finding]) -> Listing:
    """Return what is fine in one line, and each note with its advice.

    Args:
        findings: of the stage "environment".
    """
    verdicts: dict[str, set[Verdict]] = {}
    for finding in findings:
        verdicts.setdefault(finding.test, set()).add(finding.verdict)
    unknown_count = fine_count = 0
    for of_test in verdicts.values():
        if of_test == {Verdict.UNKNOWN}:
            unknown_count += 1
        elif of_test <= {Verdict.HEALTHY, Verdict.UNKNOWN}:
            fine_count += 1
    transports = dict.fromkeys(
        finding.evidence
        for finding in findings
        if finding.test in (TRANSPORT_TEST, NETWORK_TEST) and finding.evidence
    )
    # The same note on many devices is one line.
    notes: dict[tuple[str, str], list[Finding]] = {}
    for finding in noted(findings):
        notes.setdefault((finding.test, finding.reason), []).append(finding)
    lines = []
    for (test, reason), alike in list(notes.items())[:_MOST_NOTES]:
        names = [finding.subject.name for finding in alike if finding.subject.kind != "cluster"]
        lines.append(("note", words.note(test, names, reason)))
        commands = [finding.command for finding in alike if finding.command]
        if commands:
            lines.append(("type", commands[0]))
    if len(notes) > _MOST_NOTES:
        lines.append(("also", words.more_notes(len(notes) - _MOST_NOTES)))
    title = words.summary(fine_count, unknown_count, list(transports))
    return Listing(title=title, lines=lines)


def environment_table(findings: Sequence[Finding]) -> Table:
    """Return a row for each fact: its name, what was read, and who stands out."""
    by_test: dict[str, list[Finding]] = {}
    for finding in findings:
        by_test.setdefault(finding.test, []).append(finding)
    rows = []
    for test, of_test in by_test.items():
        outliers: dict[Verdict, list[str]] = {}
        for finding in of_test:
            if finding.verdict not in (Verdict.HEALTHY, Verdict.UNKNOWN):
                outliers.setdefault(finding.verdict, []).append(finding.subject.name)
        texts = [f"{verdict}: {some(names)}" for verdict, names in outliers.items()]
        rows.append((test, words.fact_values(of_test), "; ".join(texts)))
    return Table(
        columns=(
            ShownColumn(title="fact", is_text=True, min_chars=SETTING_CHARS),
            ShownColumn(title="value", is_text=True, min_chars=SETTING_CHARS),
            ShownColumn(title="stands out", is_text=True, min_chars=SETTING_CHARS),
        ),
        rows=tuple(rows),
        kind=ENVIRONMENT_TITLE,
    )
