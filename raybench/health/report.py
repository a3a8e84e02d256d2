"""The report of a health check: verdict in a sentence, cases, tables of tests, page and exports.

Tests are the rows of a table, because there are more tests than fit side by side. Devices are its
columns where they fit; otherwise it has the range of the devices, and the outliers by name. A mark
stands before a figure that is not healthy, so that it is seen without colour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from raybench.analysis.references import MeasuredValue, Standing, count_within
from raybench.health.cases import Case, cases_of
from raybench.health.detection import detection_limit
from raybench.health.environment_report import (
    ENVIRONMENT_TITLE,
    environment_listing,
    environment_table,
    noted,
)
from raybench.health.readings import FREE_MEMORY
from raybench.health.references import grade_text
from raybench.health.suite import ENVIRONMENT, device_kinds, device_places, test_named
from raybench.health.verdicts import EXPECTED_TEST, OTHER_PROGRAMS_TEST
from raybench.records.detection import DetectionLimit
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import DevicePlace, Finding, Subject, Verdict, is_time
from raybench.records.status import RunStatus
from raybench.report import formatting
from raybench.report.charts.grammar import (
    Figure,
    HeatLayout,
    Level,
    Mark,
    Panel,
    ScatterLayout,
    axis,
    by_threshold,
    heat_panel,
    names_axis,
    scatter_panel,
)
from raybench.report.documents import (
    SETTING_CHARS,
    Block,
    Document,
    Line,
    Listing,
    ShownColumn,
    Table,
    Tone,
    format_document,
    make_table,
)
from raybench.report.export import JUnitCase, csv_text, junit_text
from raybench.report.formatting import course, number, sentence, some
from raybench.report.page import device_table, render_template
from raybench.report.words import environment as environment_words
from raybench.report.words import health as words
from raybench.report.words.references import HOW_TO_MAKE
from raybench.report.words.shares import estimated_gains
from raybench.results.columns import to_row
from raybench.results.tables import TABLES, Run
from raybench.stats.outliers import BAD_RATIO

if TYPE_CHECKING:
    import pandas as pd

# Before figures that are not healthy; the worst first.
_MARKS = {Verdict.BAD: "!", Verdict.UNTESTED: "x", Verdict.SUSPECT: "?"}
_LEGEND = "! bad, ? suspect, x not tested"
_TONES: Mapping[int, Tone] = {0: "good", 1: "alarm", 3: "advice"}
# The titles of the tables.
_STAGES = {
    "alone": "Single devices, all tested at the same time, without communication",
    "host-links": "Between host and device",
    "pairs": "Pairs",
    "together": "Collectives over all devices",
    "smoke": "A training step",
    "straggler": "Waiting in a training step",
    "burn-in": "Burn-in",
}
_LEAST_IN_A_MATRIX, _MOST_IN_A_MATRIX = 3, 8
_MOST_COLUMNS = 16
_MOST_OUTLIERS = 20
# Each cell is an element of the page.
_MOST_DEVICES_IN_A_MAP, _MOST_DEVICES = 32, 40
# A map of fewer devices says less than a line of text.
_LEAST_DEVICES_IN_A_MAP = 4
# Values are written into the cells of maps of up to so many devices.
_MOST_WITH_TEXT = 8
# Differences from the median of similar pairs at which the colour of a cell changes.
_STEPS = (-0.2, -0.1, -0.05, 0.05, 0.2, 0.5)
_LIKE_THE_OTHERS = "like the others"
_SHAPES = {
    _LIKE_THE_OTHERS: ("circle", "var(--s1)"),
    "suspect": ("diamond", "var(--s2)"),
    "bad": ("cross", "var(--bad)"),
}
# The axis of times reaches at least from and to these.
_LEAST_DOMAIN = (0.9, 1.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do about a device."""

    about: str
    text: str
    # The tests that it rests on.
    rows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class HealthReport(Document):
    """The results of a check: a document (see `raybench.report.documents`).

    machine: the devices and nodes in words. devices: by rank. findings: after an interrupt only of
    the tests that ended. grades: how the values of each device and node stand against the
    references. measurements: values that references may be made of.
    """

    run: Run
    machine: str
    devices: Sequence[Device]
    findings: Sequence[Finding]
    grades: Mapping[str, Sequence[Standing]] = field(default_factory=dict)
    measurements: Sequence[MeasuredValue] = ()

    @cached_property
    def places(self) -> Mapping[str, DevicePlace]:
        """Return where the devices are, by their uuid as subjects."""
        return device_places(self.devices)

    @property
    def _has_gpus(self) -> bool:
        return any(device.kind == "cuda" for device in self.devices)

    @cached_property
    def cases(self) -> list[Case]:
        """Return the cases (`cases_of`), worst first; a finding with a culprit makes none."""
        return cases_of(self.findings)

    @cached_property
    def environment(self) -> list[Finding]:
        """Return the findings of the stage "environment"."""
        return [one for one in self.findings if one.stage == ENVIRONMENT]

    @cached_property
    def _tested(self) -> Sequence[Finding]:
        """Return the findings of other stages; those of the environment if there are no others."""
        if self.is_of_environment:
            return self.findings
        return [one for one in self.findings if one.stage != ENVIRONMENT]

    @property
    def is_of_environment(self) -> bool:
        """Return whether the check looked at the environment, and at nothing that takes minutes."""
        stages = {one.stage for one in self.findings}
        return ENVIRONMENT in stages and stages <= {ENVIRONMENT, "facts"}

    @property
    def exit_code(self) -> int:
        """Return 1 if something is bad or suspect, also after an interrupt; else 3 or 0.

        3 if something is untested, all findings are unknown, there are none, or after an interrupt.
        """
        verdicts = {one.verdict for case in self.cases for one in case.findings}
        if verdicts & {Verdict.BAD, Verdict.SUSPECT}:
            return 1
        is_tested = any(one.verdict is not Verdict.UNKNOWN for one in self._tested)
        is_whole = self.run.status is not RunStatus.INTERRUPTED
        return 0 if is_tested and is_whole and Verdict.UNTESTED not in verdicts else 3

    @property
    def _verdict(self) -> Verdict:
        """Return the worst verdict of the cases; without any healthy, or untested (exit code 3)."""
        if self.cases:
            return self.cases[0].verdict
        return Verdict.HEALTHY if self.exit_code == 0 else Verdict.UNTESTED

    @property
    def lamp(self) -> str:
        """Return "red" if something is bad, "green" if `exit_code` is 0, else "amber"."""
        return {Verdict.HEALTHY: "green", Verdict.BAD: "red"}.get(self._verdict, "amber")

    @property
    def title(self) -> str:
        """Return the question that a check answers."""
        if self.is_of_environment:
            return environment_words.QUESTION
        return words.question("cuda" if self._has_gpus else "cpu")

    @cached_property
    def headline(self) -> str:
        """Return lamp and verdict in a sentence: `Red: 1 of 4 GPUs is bad: node7 GPU 3`."""
        noun, count = "GPU" if self._has_gpus else "CPU worker", len(self.devices)
        status = self.run.status
        kinds = {one.subject.kind for one in self._tested if one.verdict is Verdict.HEALTHY}
        if parts := list(self._unhealthy_words(noun)):
            if all(case.subject.kind in ("pair", "cluster") for case in self.cases):
                parts.append(f"no {noun} is bad by itself")
            text = "; ".join(parts)
        elif status is RunStatus.INTERRUPTED or (not self.findings and status is not RunStatus.OK):
            told = "nothing was wrong in the tests that ended" if kinds else "nothing can be said"
            text = f"The check did not come to its end: {told}."
        elif self.exit_code and any(one.value is not None for one in self._tested):
            text = "It ran, but there is nothing to compare it with."
        elif self.exit_code:
            text = "Nothing could be tested."
        elif self.is_of_environment:
            kind: DeviceKind = "cuda" if self._has_gpus else "cpu"
            notes = len({one.test for one in noted(self.environment)})
            devices = words.devices_name(count, kind)
            text = sentence(environment_words.headline(devices, notes))
        else:
            devices, healthy = f"{'both' if count == 2 else f'all {count}'} {noun}s", "are healthy"
            if count == 1:
                devices, healthy = f"the {noun}", "is healthy"
            text = f"{devices} {healthy} together"
            if "device" in kinds:
                paths = " and the paths between them" if "pair" in kinds else ""
                text = f"{devices}{paths} {'are healthy' if paths else healthy}"
            elif "pair" in kinds:
                text = f"the paths between {devices} are healthy"
            text = sentence(text)
        return f"{self.lamp.capitalize()}: {text}"

    def _unhealthy_words(self, device: str) -> Iterator[str]:
        """Yield `1 of 4 GPUs is bad: a GPU 3` for each verdict and kind of subject.

        device: "GPU" or "CPU worker".
        """
        for verdict in _MARKS:
            # What was not tested in one way may be suspect by another.
            told = [case for case in self.cases if case.verdict in (verdict, Verdict.UNTESTED)]
            alike = [[one for one in case.findings if one.verdict is verdict] for case in told]
            own = [findings[0] for findings in alike if findings]
            for kind, noun in (("device", device), ("node", "node"), ("pair", "path")):
                found = [one for one in own if one.subject.kind == kind]
                names = [one.subject.name for one in found]
                if not names:
                    continue
                of = f" of {len(self.devices)}" if kind == "device" else ""
                plural = "s" * (len(self.devices if of else names) > 1)
                is_slow = kind == "pair" and all(one.ratio for one in found)
                word = "slow" if is_slow else verdict.value
                verb = f"{'is' if len(names) == 1 else 'are'} {word}"
                verb = "could not be tested" if verdict is Verdict.UNTESTED else verb
                yield f"{len(names)}{of} {noun}{plural} {verb}: {some(names)}"
            for one in own:
                if one.subject.kind == "cluster":
                    name = one.test if one.stage == ENVIRONMENT else one.subject.name
                    yield f"{name}: {one.reason}"

    @property
    def _notes(self) -> list[str]:
        """Return sentences on copies that share a bottleneck, and on models without figures."""
        found = (
            sentence(one.reason)
            for one in self.findings
            if one.verdict is Verdict.UNKNOWN
            and one.stage != ENVIRONMENT
            and one.subject.kind == "cluster"
            and one.value is None
        )
        return list(dict.fromkeys([*_shared_copies(self.findings), *found]))

    @property
    def advice(self) -> list[Advice]:
        """Return an advice for each case of a device: a bad one to leave out, others to look at.

        If it was slow in the stage "alone" and there are other devices, also an estimate of what
        throughput gains without it and with shares by speed, unless both gain less than 2 %.
        """
        count = len(self.devices)
        advice = []
        for case in (case for case in self.cases if case.subject.kind == "device"):
            name = case.subject.name
            is_bad = case.verdict is Verdict.BAD
            text = words.device_advice(name, is_bad=is_bad, action=case.action)
            times = [one.ratio for one in case.findings if one.ratio and one.stage == "alone"]
            if times and count > 1:
                gains = estimated_gains([1.0] * (count - 1) + [1 / max(times)], 0.0)
                text = "; ".join(filter(None, (text, gains)))
            tests = tuple(dict.fromkeys(finding.test for finding in case.findings))
            advice.append(Advice(about="devices", text=text, rows=tests))
        return advice

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of the document: verdict, machine, run, and those of `_body`."""
        yield Line(text=self.headline, tone=_TONES[self.exit_code])
        yield Line(text=self.machine)
        yield Line(text=f"{course(self.run)}; run {self.run.run_id}")
        if limit := self.detection:
            yield Line(text=words.detection(limit))
        yield from self._body()

    @property
    def detection(self) -> DetectionLimit | None:
        """Return what such a check finds; None after an interrupt, and without the stage alone.

        Also None for a check beside other programs, whose noise was not simulated.
        """
        if any(one.test == OTHER_PROGRAMS_TEST for one in self.findings):
            return None
        alone = [one for one in self.findings if one.stage == "alone" and one.passes]
        if not alone or self.run.status is RunStatus.INTERRUPTED or not self.devices:
            return None
        count = max(Counter(device.name for device in self.devices).values())
        limit = detection_limit("full", self.devices[0].kind, count, bool(self.grades))
        # A single device that has earlier checks was not simulated.
        is_compared = any(one.expected for one in alone)
        return None if limit and limit.slowdown is None and is_compared else limit

    def _basis(self) -> Iterator[str]:
        """Yield with what the devices are compared, and what that leaves open, in sentences."""
        models = Counter(device.name for device in self.devices)
        has_peers = max(models.values(), default=0) > 1
        standings = [one for graded in self.grades.values() for one in graded]
        wide = count_within(standings).wide
        yield words.basis(has_peers=has_peers, references=len(standings), wide=wide)
        is_own = any(one.is_own for one in standings)
        # A note names each model without a comparison, and how to make one.
        is_told = any(one.test == EXPECTED_TEST for one in self.findings)
        has_references = bool(standings) or is_told
        yield words.blind_spot(has_peers=has_peers, has_references=has_references, is_own=is_own)

    def _body(self) -> Iterator[Block]:
        """Yield basis, cases, environment, advice, notes, tables of tests, and grades."""
        if any(one.ratio is not None for one in self.findings):
            yield from (Line(text=text) for text in self._basis() if text)
        for case in self.cases:
            lines = [
                ("what", case.reason),
                ("also", case.further),
                ("why", case.evidence),
                ("victims", some(case.victims)),
                ("do", case.action_words),
                *(("type", command) for command in case.commands),
                ("is", ", ".join(case.subject.uuids) if case.subject.kind == "device" else ""),
            ]
            yield Listing(
                title=f"{case.subject.name}: {case.verdict.value}",
                lines=[(name, text) for name, text in lines if text],
            )
        if self.environment:
            listing = environment_listing(self.environment)
            yield listing if listing.lines else Line(text=listing.title, is_apart=True)
        for one in self.advice:
            yield Line(text=sentence(one.text), is_apart=True)
        for note in self._notes:
            yield Line(text=note, tone="advice", is_apart=True)
        yield from self._tests()
        if any(one.verdict in _MARKS for one in self.findings):
            yield Line(text=_LEGEND, tone="aside", is_apart=True)
        for place, (name, graded) in enumerate(self.grades.items()):
            yield Line(text=f"{name}: {grade_text(graded)}", is_apart=not place)
        if not self.grades and self._has_gpus:
            yield Line(text=HOW_TO_MAKE, tone="aside", is_apart=True)

    def _tests(self) -> Iterator[Block]:
        """Yield the names of the healthy facts, then the tables of each stage that has values."""
        facts = [one for one in self.findings if one.stage == "facts" and one.passes]
        wrong = {one.test for one in facts if one.verdict.is_unhealthy}
        healthy = {one.test for one in facts if one.verdict is Verdict.HEALTHY}
        if names := healthy - wrong - {FREE_MEMORY}:
            text = f"No problems found in: {', '.join(sorted(names))}."
            yield Line(text=text, is_apart=True)
        if self.is_of_environment:
            yield environment_table(self.environment)
        maps = _pair_maps(self.findings, self.places)
        has_matrices = maps and _LEAST_IN_A_MATRIX <= len(maps[0].places) <= _MOST_IN_A_MATRIX
        for stage, title in _STAGES.items():
            # Elsewhere a finding about the cluster says that all are slow alike, which is a case.
            kinds = ("pair",) if stage == "pairs" else ("device", "node")
            if stage == "together":
                kinds = ("node", "cluster")
            own = [
                one
                for one in self.findings
                if one.stage == stage
                and one.subject.kind in kinds
                and one.passes
                and one.subject.uuids
            ]
            if stage == "pairs" and has_matrices:
                yield from map(_matrix, maps)
            elif own:
                yield _stage_table(title, own, self.places)
                if meaning := words.meaning_of_tests(dict.fromkeys(one.test for one in own)):
                    yield Line(text=meaning, tone="aside")

    def _rows(self) -> list[dict[str, Any]]:
        """Return the findings as rows of the table `health`: column -> value."""
        return [{"run_id": self.run.run_id, **to_row(one)} for one in self.findings]

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object, as `format_object` takes them.

        run, machine, verdict, lamp, headline, exit_code, detection (`DetectionLimit`), cases
        (subject, verdict, what, evidence, victims, action, action_words, commands, tests), advice
        (about, text, rows), notes (models without known figures), findings (table `health`),
        grades (name -> text and standings).
        """
        return {
            "run": asdict(self.run),
            "machine": self.machine,
            "verdict": self._verdict,
            "lamp": self.lamp,
            "headline": self.headline,
            "exit_code": self.exit_code,
            "detection": asdict(self.detection) if self.detection else None,
            "cases": [
                {
                    "subject": asdict(case.subject),
                    "verdict": case.verdict,
                    "what": case.reason,
                    "evidence": case.evidence,
                    "victims": case.victims,
                    "action": case.action,
                    "action_words": case.action_words,
                    "commands": case.commands,
                    "tests": [one.test for one in case.findings],
                }
                for case in self.cases
            ],
            "advice": [asdict(one) for one in self.advice],
            "notes": self._notes,
            "findings": self._rows(),
            "grades": {
                name: {"text": grade_text(graded), "standings": [one.members for one in graded]}
                for name, graded in self.grades.items()
            },
        }


# Copies that all devices do at once and that are slower than alone by more share a bottleneck.
_LARGEST_COPY_LOSS = 0.1
_DIRECTIONS = {
    "h2d": "from the host to the device",
    "d2h": "from the device to the host",
    "both": "in both directions",
}


def _shared_copies(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a sentence for each direction in which all devices at once copy slower than one."""
    for direction, way in _DIRECTIONS.items():
        alone, at_once = (
            [one.value for one in findings if one.test == f"{direction} {how}" and one.value]
            for how in ("alone", "all at once")
        )
        if alone and at_once and min(at_once) < (1 - _LARGEST_COPY_LOSS) * min(alone):
            yield (
                f"Copies between host and device {way} reach {min(alone):.0f} GB/s on one device; "
                f"if all devices copy at once, each reaches {min(at_once):.0f} GB/s."
            )


def _stage_table(
    title: str, findings: Sequence[Finding], places: Mapping[str, DevicePlace]
) -> Table:
    """Return the table of a stage: a column for each subject, or ranges where these do not fit."""
    by_test: dict[tuple[str, str], dict[str, Finding]] = {}
    for one in findings:
        by_test.setdefault((one.test, one.unit), {})[one.subject.name] = one
    subjects = {one.subject.name: one.subject for one in findings}
    heads = [ShownColumn(title=name, is_text=True) for name in ("test", "unit")]
    range_rows = []
    for test, own in by_test.items():
        values = [one.value for one in own.values() if one.value is not None]
        ends = [number(of(values), 3) for of in (min, median, max)] if values else ["", "", ""]
        outliers = [f"{name} {_marked(one)}" for name, one in own.items() if one.verdict in _MARKS]
        range_rows.append((*test, *ends, some(outliers, _MOST_OUTLIERS)))
    ranges = Table(
        columns=(
            *heads,
            *(ShownColumn(title=name) for name in ("least", "median", "most")),
            ShownColumn(title="stands out", is_text=True, min_chars=SETTING_CHARS),
        ),
        rows=tuple(range_rows),
        kind=title,
    )
    if len(subjects) > _MOST_COLUMNS:
        return ranges
    return Table(
        columns=(
            *heads,
            *(ShownColumn(title=name) for name in _short_names(subjects.values(), places)),
        ),
        rows=tuple(
            (*test, *(_marked(own[name]) if name in own else "" for name in subjects))
            for test, own in by_test.items()
        ),
        kind=title,
        narrower=ranges,
    )


def _marked(finding: Finding) -> str:
    """Return the value after its mark: `! 470`; an empty text where it has neither."""
    return f"{_MARKS.get(finding.verdict, '')} {number(finding.value, 3)}".strip()


def _short_names(subjects: Iterable[Subject], places: Mapping[str, DevicePlace]) -> list[str]:
    """Return the names of the subjects, without their host where several devices share one."""
    subjects = list(subjects)
    is_short = all(
        one.kind in ("device", "pair") and one.uuids and places.keys() >= set(one.uuids)
        for one in subjects
    )
    short = None
    if is_short:
        short = words.short_names([[places[uuid] for uuid in one.uuids] for one in subjects])
    return short or [f"{'node ' * (one.kind == 'node')}{one.name}" for one in subjects]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairMap:
    """The findings of one test of pairs of devices.

    title: as "copy 256 MiB, GB/s". places: of the devices, by uuid, in the order of hosts and
    indices. findings: by the uuids of (sender, receiver); both ways for a latency.
    """

    title: str
    places: Mapping[str, DevicePlace]
    findings: Mapping[tuple[str, str], Finding]

    @property
    def short_names(self) -> dict[str, str]:
        """Return the names by uuid, without the host where all devices share it."""
        short = words.short_names([[place] for place in self.places.values()])
        names = short or map(words.device_name, self.places.values())
        return dict(zip(self.places, names, strict=True))


def _pair_maps(findings: Sequence[Finding], places: Mapping[str, DevicePlace]) -> list[_PairMap]:
    """Return a map for each test of pairs; pairs on a node and between nodes are in the same."""
    by_test: dict[str, dict[tuple[str, str], Finding]] = {}
    for one in findings:
        if one.subject.kind != "pair" or one.value is None or not one.subject.uuids:
            continue
        start, end = one.subject.uuids
        if {start, end} <= places.keys():
            found = by_test.setdefault(f"{_name_of_pairs(one)}, {one.unit}", {})
            found[start, end] = one
            if one.unit == "µs":
                found[end, start] = one
    maps = []
    for title, found in by_test.items():
        uuids = sorted({uuid for pair in found for uuid in pair}, key=lambda uuid: places[uuid])
        own = {uuid: places[uuid] for uuid in uuids}
        maps.append(_PairMap(title=title, places=own, findings=found))
    return maps


def _name_of_pairs(finding: Finding) -> str:
    """Return the name that the test of a pair has on one node."""
    tests = (test_named(finding.test, kind) for kind in device_kinds(finding.subject))
    return next((test.within_nodes for test in tests if test and test.within_nodes), finding.test)


def _matrix(pairs: _PairMap) -> Table:
    """Return a row for each sender, a column for each receiver, "-" where nothing was measured."""
    short, found = pairs.short_names, pairs.findings
    rows = []
    for start, name in short.items():
        cells = (_marked(found[start, end]) if (start, end) in found else "-" for end in short)
        rows.append((name, *cells))
    columns = (ShownColumn(title=name) for name in short.values())
    return Table(
        columns=(ShownColumn(title="from / to", is_text=True), *columns),
        rows=tuple(rows),
        kind=f"Pairs: {pairs.title}",
    )


def export(report: HealthReport, kind: str) -> str:
    """Return a check as the text of a file; csv and junit have the findings alone, one by one.

    csv has the columns of the table `health`. In junit a finding that is bad or suspect is a
    failure, one that could not be tested is an error, and one that is unknown, or slow because of
    another subject, is skipped. kind: "json", "csv" or "junit".
    """
    if kind == "json":
        return format_document(report, "json")
    if kind == "csv":
        return csv_text([column.name for column in TABLES["health"]], report._rows())
    facts = {"run_id": report.run.run_id, "machine": report.machine}
    return junit_text(report.headline, report.run, facts, list(map(_junit_case, report.findings)))


def _junit_case(finding: Finding) -> JUnitCase:
    """Return a finding as a case of JUnit, with its outcome as `export` says."""
    named = {
        "value": finding.value,
        "unit": finding.unit or None,
        "expected": finding.expected or None,
        "ratio": finding.ratio,
        "uuids": " ".join(finding.subject.uuids) or None,
    }
    is_unhealthy = finding.verdict.is_unhealthy
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
        message=f"because of {finding.culprit}"
        if finding.culprit
        else words.reason_with_value(finding),
        text="\n".join(filter(None, (finding.evidence, finding.command))),
    )


def format_page(report: HealthReport, devices: pd.DataFrame) -> str:
    """Return the page of a check as HTML, complete in one file.

    devices: the table `devices` of its run; may be empty.
    """
    found, run = list(report._body()), report.run
    environment = environment_listing(report.environment)
    return render_template(
        "health.html",
        report=report,
        run=run,
        lines=[one.text for one in found if isinstance(one, Line)],
        cases=[one for one in found if isinstance(one, Listing) and one != environment],
        environment=environment if report.environment else None,
        environment_facts=environment_table(report.environment),
        figures=health_figures(report),
        tables=[one for one in found if isinstance(one, Table) and one.kind != ENVIRONMENT_TITLE],
        facts=[
            ("run", run.run_id),
            ("started", formatting.when(run.started_at)),
            ("took", formatting.course(run)),
            ("cluster", run.cluster),
            ("command", " ".join(run.argv)),
            ("versions", formatting.versions(run.versions)),
            ("variables", formatting.settings(run.environment)),
        ],
        devices=device_table(devices),
        course=formatting.course(run),
    )


def health_figures(report: HealthReport) -> list[Figure]:
    """Return the chart of pairs, then the chart of devices; each only where there is data for it.

    The first has the tests of pairs of four or more devices, the second the findings of devices
    with a ratio. They draw up to 32 and 40 devices; the tables of the figures have all.
    """
    figures = []
    maps = [
        one
        for one in _pair_maps(report.findings, report.places)
        if len(one.places) >= _LEAST_DEVICES_IN_A_MAP
    ]
    if maps:
        pairs = Figure(
            anchor="pairs",
            title="Pairs",
            note="From the device of the row to that of the column. Colours: the time against the "
            "median of the similar pairs, those on a node and those between nodes apart. ! bad, "
            "? suspect.",
            panels=[_heat_map(one) for one in maps],
            table=_drawn_values([found for one in maps for found in one.findings.values()]),
        )
        figures.append(pairs)
    compared = [
        one for one in report.findings if one.subject.kind == "device" and one.ratio is not None
    ]
    if compared:
        unhealthy = {case.subject.name for case in report.cases}
        figures.append(_device_figure(compared, unhealthy, report.places))
    return figures


def _heat_map(pairs: _PairMap) -> Panel:
    """Return the heat map of one test: a cell for each pair of the first 32 devices.

    Unhealthy pairs are outlined; up to 8 devices the values are written into the cells.
    """
    drawn = dict(list(pairs.places.items())[:_MOST_DEVICES_IN_A_MAP])
    short = replace(pairs, places=drawn).short_names
    has_text = len(drawn) <= _MOST_WITH_TEXT
    similar: dict[str, list[float]] = {}
    for one in pairs.findings.values():
        similar.setdefault(one.test, []).append(one.value or 0.0)
    cells: list[Mark] = []
    for (start, end), one in pairs.findings.items():
        if start not in short or end not in short:
            continue
        value, typical = one.value or 0.0, median(similar[one.test])
        ratio = value / typical if is_time(one.unit) else typical / max(value, 1e-300)
        path = words.path_name(*(words.device_name(drawn[uuid]) for uuid in (start, end)))
        change = f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'}"
        cells.append(
            {
                "x": short[end],
                "y": short[start],
                "excess": round(ratio - 1, 4),
                "text": _marked(one) if has_text else _marked(replace(one, value=None)),
                "is_marked": one.verdict.is_unhealthy,
                "tip": f"{path}\n{number(value, 3)} {one.unit}, {change} "
                "than the median of similar pairs",
            }
        )
    labels = list(short.values())
    angle = 0 if len(labels) <= 4 else -45
    shown = {"labelOverlap": not has_text}
    layout = HeatLayout(
        x=names_axis(labels, **shown, orient="top", labelAngle=angle) | {"title": "to"},
        y=names_axis(labels, **shown),
        color=by_threshold("excess", _STEPS, "time against the median"),
        height=max(70, min(470, 30 * len(labels))),
        inverse=f"datum.excess < {_STEPS[0]} || datum.excess >= {_STEPS[-1]}",
    )
    return heat_panel(cells, layout, pairs.title)


def _device_figure(
    compared: Sequence[Finding], unhealthy: Collection[str], places: Mapping[str, DevicePlace]
) -> Figure:
    """Return the chart with a mark for each test of each device, by its time against the others.

    Of more than 40 devices it shows 40, unhealthy ones first. compared: findings with a ratio, one
    at least. unhealthy: names of devices.
    """
    subjects = {one.subject.name: one.subject for one in compared}
    names = shown = list(subjects)
    if len(names) > _MOST_DEVICES:
        shown = sorted(names, key=lambda name: name not in unhealthy)[:_MOST_DEVICES]
    short_names = _short_names([subjects[name] for name in shown], places)
    short = dict(zip(shown, short_names, strict=True))
    marks: list[Mark] = [
        {
            "y": short[one.subject.name],
            "x": round(min(one.ratio or 1.0, 100.0), 4),
            "line": one.verdict.value if one.verdict.is_suspect_or_bad else _LIKE_THE_OTHERS,
            "tip": f"{formatting.plain(f'{one.subject.name}, {one.test}:')}\n"
            f"{number(one.value, 3)} {one.unit}, {one.ratio:.2f} times the time of similar devices",
        }
        for one in compared
        if one.subject.name in short
    ]
    times = [mark["x"] for mark in marks]
    domain = [min(_LEAST_DOMAIN[0], *times) * 0.99, max(_LEAST_DOMAIN[1], *times) * 1.01]
    ticks = [0.25, 0.5, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10, 30, 100]
    layout = ScatterLayout(
        x=axis(
            "time against similar devices",
            10,
            values=[tick for tick in ticks if domain[0] <= tick <= domain[1]],
            format="~g",
            scale={"domain": domain, "padding": 0},
        ),
        y=names_axis(list(short.values()), grid=True),
        kinds=_SHAPES,
        height=max(50, min(840, 22 * len(short))),
        level=Level(value=BAD_RATIO, label="bad") if domain[1] > BAD_RATIO else None,
    )
    more = f" The first {len(shown)} of {len(names)}." if len(shown) < len(names) else ""
    return Figure(
        anchor="devices",
        title="Devices",
        note="Each mark is a test: the time that the device takes, against the median of the "
        f"similar devices, or the fastest of fewer than four. Above 1 is slower.{more}",
        panels=[scatter_panel(marks, layout)],
        table=_drawn_values(compared),
    )


def _drawn_values(findings: Iterable[Finding]) -> Table:
    """Return the values that a chart draws: a row for each finding, without repeats."""
    return make_table(
        list(dict.fromkeys(findings)),
        [
            (ShownColumn(title="of", is_text=True), lambda one: one.subject.name),
            (ShownColumn(title="test", is_text=True), lambda one: one.test),
            (ShownColumn(title="value"), lambda one: f"{number(one.value, 3)} {one.unit}".strip()),
            (
                ShownColumn(title="time against similar ones"),
                lambda one: "" if one.ratio is None else f"{one.ratio:.3f}",
            ),
            (ShownColumn(title="verdict", is_text=True), lambda one: one.verdict.value),
        ],
    )
