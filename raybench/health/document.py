"""A health check as a document: its cases, tables of tests and maps of pairs; and its exports.

Tests are the rows of a table, because there are more tests than fit side by side. Devices are its
columns where they fit; otherwise it has the range of the devices, and the outliers by name. A mark
stands before a figure that is not healthy, so that it is seen without colour. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from raybench.health.references import grade_text
from raybench.health.report import ACTION_WORDS, UNHEALTHY, HealthReport, reason_with_value
from raybench.health.suite import BETWEEN_NODES
from raybench.records.health import Finding, Verdict, figure
from raybench.report import formatting
from raybench.report.blocks import SETTING_CHARS, Block, Column, Line, Listing, Table, Tone
from raybench.report.documents import Document, format_document
from raybench.report.export.formats import csv
from raybench.report.export.formats.junit import Case as JUnitCase
from raybench.report.export.formats.junit import format_suite
from raybench.report.sections.references import HOW_TO_MAKE
from raybench.results.columns import to_row

_TONES: Mapping[int, Tone] = {0: "good", 1: "alarm", 3: "advice"}
_MARKS = {Verdict.BAD: "!", Verdict.SUSPECT: "?", Verdict.UNTESTED: "x"}
_LEGEND = "! bad, ? suspect, x not tested"
_STAGES = {
    "alone": "Each alone, all at the same time",
    "host-links": "Between host and device",
    "pairs": "Pairs",
    "together": "Together",
    "smoke": "A training step",
    "straggler": "Who waits for whom",
    "burn-in": "Burn-in",
}
_LEAST_IN_A_MATRIX, _MOST_IN_A_MATRIX = 3, 8
_MOST_COLUMNS = 16
_MOST_OUTLIERS = 20
# A fact that is neither right nor wrong.
_NO_VERDICT = "free memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthDocument(Document):
    """The document of a health check (see `raybench.report.documents`)."""

    report: HealthReport

    @property
    def title(self) -> str:
        """Return the lamp and the verdict in a sentence."""
        return self.report.headline

    @property
    def tone(self) -> Tone:
        """Return the colour of the verdict."""
        return _TONES[self.report.exit_code]

    def blocks(self) -> Iterator[Block]:
        """Yield the machine, the run, and everything in `body`."""
        report = self.report
        yield Line(text=report.machine)
        yield Line(text=f"{formatting.course(report.run)}; run {report.run.run_id}")
        yield from self.body()

    def body(self) -> Iterator[Block]:
        """Yield a listing for each case, then advice, notes, tables, marks and grades."""
        report = self.report
        for case in report.cases:
            lines = [
                ("what", reason_with_value(case.findings[0])),
                ("also", case.further),
                ("why", case.evidence),
                ("victims", formatting.some(case.victims)),
                ("do", ACTION_WORDS[case.action] if case.action else ""),
                *(("type", command) for command in case.commands),
                ("is", ", ".join(case.subject.uuids) if case.subject.kind == "device" else ""),
            ]
            yield Listing(
                title=f"{case.subject.name}: {case.verdict.value}",
                lines=[(name, text) for name, text in lines if text],
            )
        for one in report.advice:
            yield Line(text=formatting.sentence(one.text), is_apart=True)
        for note in report.notes:
            yield Line(text=note, tone="advice", is_apart=True)
        yield from _stage_blocks(report.findings)
        if any(one.verdict in _MARKS for one in report.findings):
            yield Line(text=_LEGEND, tone="aside", is_apart=True)
        for place, (name, graded) in enumerate(report.grades.items()):
            yield Line(text=f"{name}: {grade_text(graded)}.", is_apart=not place)
        if not report.grades and "cuda" in report.kinds:
            yield Line(text=HOW_TO_MAKE, tone="aside", is_apart=True)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object.

        run, machine, verdict, lamp, headline, exit_code, cases (the subjects that are not healthy,
        the worst first, with what to do), advice (as of `raybench advise`), notes (models without
        known figures), findings (the table `health`), grades (how each device and node stands
        against references).
        """
        report, run_id = self.report, self.report.run.run_id
        return {
            "run": asdict(report.run),
            "machine": report.machine,
            "verdict": report.verdict,
            "lamp": report.lamp,
            "headline": report.headline,
            "exit_code": report.exit_code,
            "cases": [
                {
                    "subject": asdict(case.subject),
                    "verdict": case.verdict,
                    "what": reason_with_value(case.findings[0]),
                    "evidence": case.evidence,
                    "victims": case.victims,
                    "action": case.action,
                    "action_words": ACTION_WORDS[case.action] if case.action else "",
                    "commands": case.commands,
                    "tests": [one.test for one in case.findings],
                }
                for case in report.cases
            ],
            "advice": [asdict(one) for one in report.advice],
            "notes": report.notes,
            "findings": [{"run_id": run_id, **to_row(one)} for one in report.findings],
            "grades": {
                name: {"text": grade_text(graded), "standings": [one.members for one in graded]}
                for name, graded in report.grades.items()
            },
        }


def _stage_blocks(findings: Sequence[Finding]) -> Iterator[Table | Line]:
    """Yield the names of the healthy facts, then the tables of each stage that has values."""
    facts = [one for one in findings if one.stage == "facts" and one.passes]
    wrong = {one.test for one in facts if one.verdict in UNHEALTHY}
    healthy = {one.test for one in facts if one.verdict is Verdict.HEALTHY}
    if names := healthy - wrong - {_NO_VERDICT}:
        text = f"Facts that are as they should be: {', '.join(sorted(names))}."
        yield Line(text=text, is_apart=True)
    maps = pair_maps(findings)
    has_matrices = maps and _LEAST_IN_A_MATRIX <= len(maps[0].names) <= _MOST_IN_A_MATRIX
    for stage, title in _STAGES.items():
        # Elsewhere a finding about the cluster says that all are slow alike, which is a case.
        kinds = ("pair",) if stage == "pairs" else ("device", "node")
        if stage == "together":
            kinds = ("node", "cluster")
        own = [
            one
            for one in findings
            if one.stage == stage and one.subject.kind in kinds and one.passes and one.subject.uuids
        ]
        if stage == "pairs" and has_matrices:
            yield from map(_matrix, maps)
        elif own:
            yield _stage_table(title, own)


def _stage_table(title: str, findings: Sequence[Finding]) -> Table:
    """Return the table of a stage: a column for each subject, or ranges where these do not fit."""
    subjects = list(dict.fromkeys(one.subject.name for one in findings))
    by_test: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        by_test.setdefault((one.test, one.unit), []).append(one)
    range_rows, subject_rows = [], []
    for test, own in by_test.items():
        values = [one.value for one in own if one.value is not None]
        ends = [figure(of(values)) for of in (min, median, max)] if values else ["", "", ""]
        outliers = [f"{one.subject.name} {marked(one)}" for one in own if one.verdict in _MARKS]
        range_rows.append((*test, *ends, formatting.some(outliers, _MOST_OUTLIERS)))
        cells = {one.subject.name: marked(one) for one in own}
        subject_rows.append((*test, *(cells.get(name, "") for name in subjects)))
    heads = tuple(Column(title=name, is_text=True) for name in ("test", "unit"))
    ranges = Table(
        columns=(
            *heads,
            *(Column(title=name) for name in ("least", "median", "most")),
            Column(title="stands out", is_text=True, min_chars=SETTING_CHARS),
        ),
        rows=tuple(range_rows),
        kind=title,
    )
    if len(subjects) > _MOST_COLUMNS:
        return ranges
    columns = (*heads, *(Column(title=name) for name in short_names(subjects)))
    return Table(columns=columns, rows=tuple(subject_rows), kind=title, narrower=ranges)


def marked(finding: Finding) -> str:
    """Return the value after its mark: `! 470`; an empty text where it has neither."""
    value = "" if finding.value is None else figure(finding.value)
    return f"{_MARKS.get(finding.verdict, '')} {value}".strip()


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names without their host, as "GPU 3", where several names share one host."""
    host = names[0].partition(" ")[0]
    is_short = len(names) > 1 and all(name.startswith(f"{host} ") for name in names)
    return [name.replace(f"{host} ", "") if is_short else name for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMap:
    """The findings of one test of pairs of devices.

    title: as "copy 256 MiB, GB/s". names: of the devices, in the order of hosts and indices.
    findings: by the names of (sender, receiver); both ways for a latency.
    """

    title: str
    names: Sequence[str]
    findings: Mapping[tuple[str, str], Finding]


def pair_maps(findings: Sequence[Finding]) -> list[PairMap]:
    """Return a map for each test of pairs; pairs on a node and between nodes are in the same."""
    by_test: dict[str, dict[tuple[str, str], Finding]] = {}
    for one in findings:
        if one.subject.kind == "pair" and one.subject.uuids and one.value is not None:
            title = f"{one.test.removesuffix(BETWEEN_NODES)}, {one.unit}"
            start, _, end = one.subject.name.partition(" to ")
            found = by_test.setdefault(title, {})
            found[start, end] = one
            if one.unit == "µs":
                found[end, start] = one

    def natural_order(name: str) -> list[tuple[int, str]]:
        """Return a sort key that puts "GPU 10" after "GPU 9"."""
        return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split()]

    return [
        PairMap(
            title=title,
            names=sorted({name for pair in found for name in pair}, key=natural_order),
            findings=found,
        )
        for title, found in by_test.items()
    ]


def _matrix(pairs: PairMap) -> Table:
    """Return a row for each sender, a column for each receiver, "-" where nothing was measured."""
    rows = [
        (
            short,
            *(
                marked(pairs.findings[start, end]) if (start, end) in pairs.findings else "-"
                for end in pairs.names
            ),
        )
        for start, short in zip(pairs.names, short_names(pairs.names), strict=True)
    ]
    columns = (
        Column(title="from / to", is_text=True),
        *(Column(title=short) for short in short_names(pairs.names)),
    )
    return Table(columns=columns, rows=tuple(rows), kind=f"Pairs: {pairs.title}")


def export(report: HealthReport, kind: str) -> str:
    """Return a check as the text of a file; CSV and JUnit XML have a row per test and subject.

    csv has the columns of the table `health`. In junit a finding that is bad or suspect is a
    failure, one that could not be tested is an error, and one that is unknown, or slow because of
    another subject, is skipped. kind: "json", "csv" or "junit".
    """
    run = report.run
    if kind == "json":
        return format_document(HealthDocument(report=report), "json")
    if kind == "csv":
        found = [{"run_id": run.run_id, **to_row(one)} for one in report.findings]
        return csv.write(list(found[0]) if found else [], found)
    facts = {"run_id": run.run_id, "machine": report.machine}
    return format_suite(report.headline, run, facts, list(map(_junit_case, report.findings)))


def _junit_case(finding: Finding) -> JUnitCase:
    named = {
        "value": finding.value,
        "unit": finding.unit or None,
        "expected": finding.expected or None,
        "ratio": finding.ratio,
        "uuids": " ".join(finding.subject.uuids) or None,
    }
    is_unhealthy = finding.verdict in UNHEALTHY
    outcome: Literal["ok", "failure", "error", "skipped"] = "failure" if is_unhealthy else "ok"
    if finding.verdict is Verdict.UNKNOWN or (finding.culprit and is_unhealthy):
        outcome = "skipped"
    elif finding.verdict is Verdict.UNTESTED:
        outcome = "error"
    return JUnitCase(
        group=f"health.{finding.stage}",
        name=f"{finding.subject.name}: {finding.test}",
        properties={name: value for name, value in named.items() if value is not None},
        outcome=outcome,
        kind=finding.verdict.value,
        message=f"because of {finding.culprit}" if finding.culprit else reason_with_value(finding),
        text="\n".join(filter(None, (finding.evidence, finding.command))),
    )
