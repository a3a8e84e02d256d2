"""A health check as a document: its cases, advice, tables of tests and maps of pairs. Pure.

Tests are the rows of a table, because there are more tests than fit side by side. Devices are its
columns where they fit; otherwise it has the range of the devices, and the outliers by name. A mark
stands before a figure that is not healthy, so that it is seen without colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from raybench.health.references import grade_text
from raybench.health.report import ACTION_WORDS, UNHEALTHY, Case, HealthReport
from raybench.records.health import Finding, Link, Verdict, figure
from raybench.report import formatting
from raybench.report.blocks import SETTING_CHARS, Block, Column, Line, Listing, Table, Tone
from raybench.report.documents import Document
from raybench.report.references import HOW_TO_MAKE
from raybench.results.columns import to_row

_TONES: Mapping[int, Tone] = {0: "good", 1: "alarm", 3: "advice"}
_MARKS = {Verdict.BAD: "!", Verdict.SUSPECT: "?", Verdict.UNTESTED: "x"}
_LEGEND = "! bad, ? suspect, x not tested"
_STAGES = {
    "alone": "Each alone, all at the same time",
    "host-links": "Between host and device",
    "together": "Together",
    "smoke": "A training step",
    "straggler": "Who waits for whom",
    "burn-in": "Burn-in",
}
# Pairs of fewer devices are a line of text, pairs of more devices a range.
_LEAST_IN_A_MATRIX, _MOST_IN_A_MATRIX = 3, 8
_MOST_COLUMNS = 16
_MOST_OUTLIERS = 20
_COPY, _HOST_KINDS = "copy", ("h2d", "d2h")
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
        """Yield a listing for each case, then advice, notes, tables and the legend of the marks."""
        report = self.report
        yield from map(_case_listing, report.cases)
        if report.advice:
            yield Line(text=report.advice, is_apart=True)
        for note in report.notes:
            yield Line(text=note, tone="advice", is_apart=True)
        yield from _stage_tables(report.findings)
        for pairs in pair_maps(report):
            yield _pair_block(pairs)
        if any(one.verdict in _MARKS for one in report.findings):
            yield Line(text=_LEGEND, tone="aside", is_apart=True)
        for place, (name, graded) in enumerate(report.grades.items()):
            yield Line(text=f"{name}: {grade_text(graded)}.", is_apart=not place)
        if not report.grades and "cuda" in report.kinds:
            yield Line(text=HOW_TO_MAKE, tone="aside", is_apart=True)

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object.

        run, machine, verdict, lamp, headline, exit_code, cases (the subjects that are not healthy,
        the worst first, with what to do), advice (on the devices as a set), notes (models of which
        no figures are known), findings (the table `health`), links (the table `links`), grades (how
        each device and node stands against references).
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
                    "what": case.what,
                    "evidence": case.evidence,
                    "victims": case.victims,
                    "action": case.action,
                    "action_words": ACTION_WORDS[case.action] if case.action else "",
                    "commands": case.commands,
                    "tests": [one.test for one in case.findings],
                }
                for case in report.cases
            ],
            "advice": report.advice,
            "notes": report.notes,
            "findings": [{"run_id": run_id, **to_row(one)} for one in report.findings],
            "links": [{"run_id": run_id, **to_row(one)} for one in report.links],
            "grades": {
                name: {"text": grade_text(graded), "standings": [one.members for one in graded]}
                for name, graded in report.grades.items()
            },
        }


def _case_listing(case: Case) -> Listing:
    lines = [
        ("what", case.what),
        ("also", case.further),
        ("why", case.evidence),
        ("victims", formatting.some(case.victims)),
        ("do", ACTION_WORDS[case.action] if case.action else ""),
        *(("type", command) for command in case.commands),
        ("is", ", ".join(case.subject.uuids) if case.subject.kind == "device" else ""),
    ]
    return Listing(
        title=f"{case.subject.name}: {case.verdict.value}",
        lines=[(name, text) for name, text in lines if text],
    )


def _stage_tables(findings: Sequence[Finding]) -> Iterator[Table | Line]:
    """Yield the names of the healthy facts, then the table of each stage that has values."""
    facts = [one for one in findings if one.stage == "facts" and one.passes]
    wrong = {one.test for one in facts if one.verdict in UNHEALTHY}
    healthy = {one.test for one in facts if one.verdict is Verdict.HEALTHY}
    if names := healthy - wrong - {_NO_VERDICT}:
        text = f"Facts that are as they should be: {', '.join(sorted(names))}."
        yield Line(text=text, is_apart=True)
    for stage, title in _STAGES.items():
        # Elsewhere a finding about the cluster says that all are slow alike, which is a case.
        kinds = ("device", "node", "cluster") if stage == "together" else ("device", "node")
        own = [
            one
            for one in findings
            if one.stage == stage and one.subject.kind in kinds and one.passes
        ]
        if own:
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
        outliers = [f"{one.subject.name} {_cell(one)}" for one in own if one.verdict in _MARKS]
        range_rows.append((*test, *ends, formatting.some(outliers, _MOST_OUTLIERS)))
        cells = {one.subject.name: _cell(one) for one in own}
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


def _cell(finding: Finding) -> str:
    """Return the value after its mark; an empty text where a healthy finding has no value."""
    value = "" if finding.value is None else figure(finding.value)
    return f"{_MARKS.get(finding.verdict, '')} {value}".strip()


def short_names(names: Sequence[str]) -> list[str]:
    """Return the names without their host, as "GPU 3", where several names share one host."""
    hosts = {name.partition(" ")[0] for name in names}
    is_short = len(hosts) == 1 and all(" " in name for name in names) and len(names) > 1
    return [name.partition(" ")[2] if is_short else name for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMap:
    """One figure of all pairs of devices that sent messages of one size in one way.

    title: as "copy of 256 MiB". names: of the devices, by UUID, in the order of hosts and indices.
    values: in `unit`, by (UUID of the sender, UUID of the receiver). marks: "!", "?" or "x" of the
    pairs that are not healthy, with the same keys.
    """

    title: str
    unit: str
    names: Mapping[str, str]
    values: Mapping[tuple[str, str], float]
    marks: Mapping[tuple[str, str], str]

    def cell(self, pair: tuple[str, str]) -> str:
        """Return the value of a pair after its mark; "-" where it was not measured."""
        value = self.values.get(pair)
        return "-" if value is None else f"{self.marks.get(pair, '')} {figure(value)}".strip()


def pair_maps(report: HealthReport) -> Iterator[PairMap]:
    """Yield a map for each way to send, message size and unit; links to hosts are left out."""
    by_kind: dict[tuple[str, int], list[Link]] = {}
    for link in report.links:
        if link.kind not in _HOST_KINDS:
            by_kind.setdefault((link.kind, link.message_bytes), []).append(link)
    for (kind, message_bytes), links in by_kind.items():
        names: dict[str, str] = {}
        for link in links:
            names.setdefault(link.from_uuid, link.from_name)
            names.setdefault(link.to_uuid, link.to_name)
        for field, unit in (("gb_per_s", "GB/s"), ("latency_us", "µs")):
            values = {
                (link.from_uuid, link.to_uuid): value
                for link in links
                if (value := getattr(link, field)) is not None
            }
            if values:
                yield PairMap(
                    title=f"{kind} of {formatting.size(message_bytes)}",
                    unit=unit,
                    names=dict(sorted(names.items(), key=lambda item: _natural_order(item[1]))),
                    values=values,
                    # Copies have tests of their own.
                    marks={
                        (one.subject.uuids[0], one.subject.uuids[-1]): _MARKS[one.verdict]
                        for one in report.findings
                        if one.subject.kind == "pair"
                        and one.subject.uuids
                        and one.verdict in _MARKS
                        and one.unit == unit
                        and one.test.startswith(_COPY) == (kind == _COPY)
                    },
                )


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key that puts "GPU 10" after "GPU 9"."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split()]


def _pair_block(pairs: PairMap) -> Table | Line:
    """Return the matrix of the pairs; a sentence of two devices, and a range of many devices."""
    title = f"Pairs: {pairs.title}"
    short = dict(zip(pairs.names, short_names(list(pairs.names.values())), strict=True))
    if len(short) < _LEAST_IN_A_MATRIX:
        words = [
            f"{pairs.cell((start, end))} {pairs.unit} from {short[start]} to {short[end]}"
            for start, end in pairs.values
        ]
        return Line(text=f"{title}: {', '.join(words)}.", is_apart=True)
    title = f"{title}, {pairs.unit}"
    if len(short) > _MOST_IN_A_MATRIX:
        found = sorted(pairs.values.values())
        text = (
            f"{title}: {len(found)} directions, {figure(found[0])} to {figure(found[-1])}, "
            f"median {figure(median(found))}."
        )
        return Line(text=text, is_apart=True)
    sources, targets = (
        [uuid for uuid in short if any(pair[end] == uuid for pair in pairs.values)]
        for end in (0, 1)
    )
    return Table(
        columns=(
            Column(title="from / to", is_text=True),
            *(Column(title=short[uuid]) for uuid in targets),
        ),
        rows=tuple(
            (short[source], *(pairs.cell((source, target)) for target in targets))
            for source in sources
        ),
        kind=title,
    )
