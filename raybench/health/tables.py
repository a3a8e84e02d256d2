"""The tables of a health check: each test of each device, and what each pair carried. Pure.

Tests are the rows, for there are more of them than fit beside each other; devices are the columns
where there is room, else their range, and those that stand out by name. A mark stands before a
figure, so that it is seen without colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from raybench.health.report import ACTION_WORDS, UNHEALTHY, Case, HealthReport
from raybench.records.health import Finding, Link, Verdict, figure
from raybench.report import formatting
from raybench.report.blocks import SETTING_CHARS, Block, Column, Line, Listing, Table

MARKS = {Verdict.BAD: "!", Verdict.SUSPECT: "?", Verdict.UNTESTED: "x"}
_LEGEND = "! bad, ? suspect, x not tested"
_STAGES = {
    "facts": "Facts",
    "alone": "Each alone, all at the same time",
    "host-links": "Between host and device",
    "together": "Together",
    "smoke": "A training step",
    "straggler": "Who waits for whom",
    "burn-in": "Burn-in",
}
# More devices than this have no matrix and no column each.
MOST_IN_A_MATRIX = 8
# Fewer have a line of text.
_LEAST_IN_A_MATRIX = 3
_MOST_OUTLIERS = 20
_COPY, _HOST_KINDS = "copy", ("h2d", "d2h")
# An amount, which is neither right nor wrong.
_NO_VERDICT = ("free memory",)


def blocks(report: HealthReport) -> Iterator[Block]:
    """Yield what follows the verdict: cases, advice, notes and tables."""
    for case in report.cases:
        yield _case(case)
    if report.advice:
        yield Line(text=report.advice, is_apart=True)
    for note in report.notes:
        yield Line(text=note, tone="advice", is_apart=True)
    tables = [*_stage_tables(report), *_matrices(report)]
    yield from tables
    if any(one.verdict in MARKS for one in report.findings):
        yield Line(text=_LEGEND, tone="aside", is_apart=True)


def _case(case: Case) -> Listing:
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


def _stage_tables(report: HealthReport) -> Iterator[Table | Line]:
    for stage, title in _STAGES.items():
        # What is said of all alike is a case, and no column beside them.
        kinds = ("device", "node", "cluster") if stage == "together" else ("device", "node")
        own = [
            one
            for one in report.findings
            if one.stage == stage and one.subject.kind in kinds and one.passes
        ]
        if stage == "facts":
            yield from _facts(own)
        elif own:
            yield _table(title, own)


def _facts(own: Sequence[Finding]) -> Iterator[Line]:
    """Say of facts that are wrong which they are; of the others how many there are."""
    if not own:
        return
    wrong = {one.test for one in own if one.verdict in UNHEALTHY}
    tests = {one.test for one in own if one.verdict is Verdict.HEALTHY} - wrong - {*_NO_VERDICT}
    if tests:
        text = f"Facts that are as they should be: {', '.join(sorted(tests))}."
        yield Line(text=text, is_apart=True)


def _table(title: str, own: Sequence[Finding]) -> Table:
    """Return the table of a stage: a column a subject, or their ranges where these do not fit."""
    wide, narrow = _by_subject(title, own), _ranges(title, own)
    count = len({one.subject.name for one in own})
    return narrow if count > MOST_IN_A_MATRIX * 2 else replace(wide, narrower=narrow)


def _by_test(own: Iterable[Finding]) -> Mapping[tuple[str, str], list[Finding]]:
    """Group by what is a row: the test and its unit."""
    found: dict[tuple[str, str], list[Finding]] = {}
    for one in own:
        found.setdefault((one.test, one.unit), []).append(one)
    return found


def _by_subject(title: str, own: Sequence[Finding]) -> Table:
    subjects = list(dict.fromkeys(one.subject.name for one in own))
    rows = []
    for (test, unit), found in _by_test(own).items():
        cells = {one.subject.name: cell(one) for one in found}
        rows.append((test, unit, *(cells.get(name, "") for name in subjects)))
    heads = short_names(subjects)
    return Table(columns=_columns("test", "unit", numbers=heads), rows=tuple(rows), kind=title)


def _columns(*texts: str, numbers: Iterable[str] = ()) -> tuple[Column, ...]:
    """Return columns of text, the others are of numbers."""
    return (
        *(Column(title=title, is_text=True) for title in texts),
        *(Column(title=title) for title in numbers),
    )


def _ranges(title: str, own: Sequence[Finding]) -> Table:
    rows = []
    for (test, unit), found in _by_test(own).items():
        values = [one.value for one in found if one.value is not None]
        figures = [figure(of(values)) for of in (min, median, max)] if values else ["", "", ""]
        odd = [one for one in found if one.verdict in MARKS]
        names = [f"{one.subject.name} {cell(one)}" for one in odd]
        rows.append((test, unit, *figures, formatting.some(names, _MOST_OUTLIERS)))
    columns = (
        *_columns("test", "unit", numbers=("least", "median", "most")),
        Column(title="stands out", is_text=True, min_chars=SETTING_CHARS),
    )
    return Table(columns=columns, rows=tuple(rows), kind=title)


def cell(finding: Finding) -> str:
    """Write a value with its mark."""
    mark = MARKS.get(finding.verdict, "")
    value = "" if finding.value is None else figure(finding.value)
    return f"{mark} {value}".strip()


def short_names(names: Sequence[str]) -> list[str]:
    """Leave out the host where all are of one, as in "GPU 3"."""
    hosts = {name.partition(" ")[0] for name in names}
    is_short = len(hosts) == 1 and all(" " in name for name in names) and len(names) > 1
    return [name.partition(" ")[2] if is_short else name for name in names]


def link_sets(report: HealthReport) -> Mapping[tuple[str, int], list[Link]]:
    """Group links by how the bytes went and how many: each is a matrix."""
    found: dict[tuple[str, int], list[Link]] = {}
    for link in report.links:
        found.setdefault((link.kind, link.message_bytes), []).append(link)
    return found


def marks_of_links(report: HealthReport, kind: str, unit: str) -> Mapping[tuple[str, str], str]:
    """Find the marks of pairs, from and to, in the test that links of a kind are read by.

    Copies have tests of their own; messages have the others.
    """
    return {
        (one.subject.uuids[0], one.subject.uuids[-1]): MARKS[one.verdict]
        for one in report.findings
        if one.subject.kind == "pair"
        and one.subject.uuids
        and one.verdict in MARKS
        and one.unit == unit
        and one.test.startswith(_COPY) == (kind == _COPY)
    }


def _matrices(report: HealthReport) -> Iterator[Table | Line]:
    for (kind, message_bytes), links in link_sets(report).items():
        if kind in _HOST_KINDS:
            continue  # they are in the table of each device
        for field, unit in (("gb_per_s", "GB/s"), ("latency_us", "µs")):
            values = {
                (one.from_uuid, one.to_uuid): value
                for one in links
                if (value := getattr(one, field)) is not None
            }
            if not values:
                continue
            title = f"Pairs: {kind} of {formatting.size(message_bytes)}"
            names = ends_of(links)
            marks = marks_of_links(report, kind, unit)
            if len(names) < _LEAST_IN_A_MATRIX:
                yield _pair_in_words(title, unit, names, values, marks)
            elif len(names) <= MOST_IN_A_MATRIX:
                yield _matrix(f"{title}, {unit}", names, values, marks)
            else:
                yield _summary_of_pairs(f"{title}, {unit}", values)


def ends_of(links: Iterable[Link]) -> dict[str, str]:
    """Name the ends of links by their identity, in order."""
    names: dict[str, str] = {}
    for link in links:
        names.setdefault(link.from_uuid, link.from_name)
        names.setdefault(link.to_uuid, link.to_name)
    return dict(sorted(names.items(), key=lambda item: _natural(item[1])))


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort GPU 10 after GPU 9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in name.split()]


def _matrix(
    title: str,
    names: Mapping[str, str],
    values: Mapping[tuple[str, str], float],
    marks: Mapping[tuple[str, str], str],
) -> Table:
    short = dict(zip(names, short_names(list(names.values())), strict=True))

    def text(ends: tuple[str, str]) -> str:
        if ends not in values:
            return "-"
        return f"{marks.get(ends, '')} {figure(values[ends])}".strip()

    sources = [uuid for uuid in names if any(uuid == first for first, _ in values)]
    targets = [uuid for uuid in names if any(uuid == second for _, second in values)]
    return Table(
        columns=_columns("from / to", numbers=(short[uuid] for uuid in targets)),
        rows=tuple((short[one], *(text((one, to)) for to in targets)) for one in sources),
        kind=title,
    )


def _pair_in_words(
    title: str,
    unit: str,
    names: Mapping[str, str],
    values: Mapping[tuple[str, str], float],
    marks: Mapping[tuple[str, str], str],
) -> Line:
    """Return both directions of the only pair in a line."""
    short = dict(zip(names, short_names(list(names.values())), strict=True))
    words = []
    for (start, end), value in values.items():
        marked = f"{marks.get((start, end), '')} {figure(value)} {unit}".strip()
        words.append(f"{marked} from {short[start]} to {short[end]}")
    return Line(text=f"{title}: {', '.join(words)}.", is_apart=True)


def _summary_of_pairs(title: str, values: Mapping[tuple[str, str], float]) -> Line:
    found = sorted(values.values())
    return Line(
        text=f"{title}: {len(found)} directions, {figure(found[0])} to {figure(found[-1])}, "
        f"median {figure(median(found))}.",
        is_apart=True,
    )
