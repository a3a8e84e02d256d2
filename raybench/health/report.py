"""The report of a health check: verdict in a sentence, cases, tables of tests, page and exports.

In a table tests are the rows, because they do not fit side by side. Devices are the columns if they
fit; otherwise the columns are the range of all devices and the names of outliers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
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
from raybench.health.suite import (
    ENVIRONMENT,
    HealthTest,
    device_kinds,
    device_places,
    test_named,
)
from raybench.health.verdicts import EXPECTED_TEST, OTHER_PROGRAMS_TEST
from raybench.records.detection import DetectionLimit
from raybench.records.device import Device, DeviceKind
from raybench.records.devices import (
    DevicePlace,
    Finding,
    Subject,
    SubjectKind,
    Verdict,
    is_time,
)
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

# Stand before unhealthy figures, so that a reader sees them without colour; the worst first.
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
# Each cell of a map is an element of the page, and too many elements slow a browser.
_MOST_DEVICES_IN_A_MAP, _MOST_DEVICES = 32, 40
# With fewer devices a line of text says more than a map.
_LEAST_DEVICES_IN_A_MAP = 4
# With more devices the cells of a map have no room for values.
_MOST_WITH_TEXT = 8
# Relative differences from the median of similar pairs at which the colour of a cell changes.
_STEPS = (-0.2, -0.1, -0.05, 0.05, 0.2, 0.5)
_LIKE_THE_OTHERS = "like the others"
_SHAPES = {
    _LIKE_THE_OTHERS: ("circle", "var(--s1)"),
    "suspect": ("diamond", "var(--s2)"),
    "bad": ("cross", "var(--bad)"),
}
# Smallest range of the axis of times.
_LEAST_DOMAIN = (0.9, 1.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do about a device."""

    about: str
    text: str
    # Names of the tests that support the advice.
    rows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)  # no slots: it keeps what it has computed
class HealthReport(Document):
    """The results of a check: a document (see `raybench.report.documents`)."""

    run: Run
    # The devices and nodes in words.
    machine: str
    # Devices by rank.
    devices: Sequence[Device]
    # After an interrupt only of tests that ended.
    findings: Sequence[Finding]
    # Name of a device or node -> its values beside their references.
    grades: Mapping[str, Sequence[Standing]] = field(default_factory=dict)
    # Values of which references may be made.
    measurements: Sequence[MeasuredValue] = ()

    @cached_property
    def places(self) -> Mapping[str, DevicePlace]:
        """Uuid as a subject -> place of the device."""
        return device_places(self.devices)

    @property
    def _has_gpus(self) -> bool:
        return any(device.kind == "cuda" for device in self.devices)

    @cached_property
    def cases(self) -> list[Case]:
        """The unhealthy subjects with their findings, worst first."""
        return cases_of(self.findings)

    @cached_property
    def environment(self) -> list[Finding]:
        """The findings of the stage "environment"."""
        return [finding for finding in self.findings if finding.stage == ENVIRONMENT]

    @cached_property
    def _test_findings(self) -> Sequence[Finding]:
        """The findings without the stage "environment"; all if only environment was checked."""
        if self.is_of_environment:
            return self.findings
        return [finding for finding in self.findings if finding.stage != ENVIRONMENT]

    @property
    def is_of_environment(self) -> bool:
        """Whether the check looked only at environment and facts, which takes seconds."""
        stages = {finding.stage for finding in self.findings}
        return ENVIRONMENT in stages and stages <= {ENVIRONMENT, "facts"}

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 something is bad or suspect, 3 not all was tested or nothing is known."""
        # Cases have the verdicts bad, suspect and untested, without findings that blame a culprit.
        unhealthy: set[Verdict] = set()
        for case in self.cases:
            unhealthy.update(finding.verdict for finding in case.findings)
        if unhealthy & {Verdict.BAD, Verdict.SUSPECT}:
            return 1
        has_ended = self.run.status is not RunStatus.INTERRUPTED
        is_all_tested = has_ended and Verdict.UNTESTED not in unhealthy
        is_known = any(finding.verdict is not Verdict.UNKNOWN for finding in self._test_findings)
        return 0 if is_all_tested and is_known else 3

    @property
    def _verdict(self) -> Verdict:
        """The worst verdict of the cases; without a case healthy, or untested."""
        if self.cases:
            return self.cases[0].verdict
        return Verdict.HEALTHY if self.exit_code == 0 else Verdict.UNTESTED

    @property
    def lamp(self) -> str:
        """Is "red" if something is bad, "green" if `exit_code` is 0, else "amber"."""
        return {Verdict.HEALTHY: "green", Verdict.BAD: "red"}.get(self._verdict, "amber")

    @property
    def title(self) -> str:
        """The question that a check answers."""
        if self.is_of_environment:
            return environment_words.QUESTION
        return words.question("cuda" if self._has_gpus else "cpu")

    @cached_property
    def headline(self) -> str:
        """Lamp and verdict in a sentence: `Red: 1 of 4 GPUs is bad: node7 GPU 3`."""
        noun, count = "GPU" if self._has_gpus else "CPU worker", len(self.devices)
        status = self.run.status
        healthy_kinds: set[SubjectKind] = set()
        for finding in self._test_findings:
            if finding.verdict is Verdict.HEALTHY:
                healthy_kinds.add(finding.subject.kind)
        if parts := list(self._unhealthy_words(noun)):
            if all(case.subject.kind in ("pair", "cluster") for case in self.cases):
                parts.append(f"no {noun} is bad by itself")
            text = "; ".join(parts)
        elif status is RunStatus.INTERRUPTED or (not self.findings and status is not RunStatus.OK):
            result = "nothing can be said"
            if healthy_kinds:
                result = "nothing was wrong in the tests that ended"
            text = f"The check did not come to its end: {result}."
        elif self.exit_code and any(finding.value is not None for finding in self._test_findings):
            text = "It ran, but there is nothing to compare it with."
        elif self.exit_code:
            text = "Nothing could be tested."
        elif self.is_of_environment:
            device_kind: DeviceKind = "cuda" if self._has_gpus else "cpu"
            note_count = len({finding.test for finding in noted(self.environment)})
            devices = words.devices_name(count, device_kind)
            text = sentence(environment_words.headline(devices, note_count))
        else:
            text = sentence(self._healthy_words(noun, healthy_kinds))
        return f"{self.lamp.capitalize()}: {text}"

    def _healthy_words(self, noun: str, healthy_kinds: Collection[SubjectKind]) -> str:
        """Return `all 4 GPUs are healthy`, or that their paths are, or that they are together."""
        count = len(self.devices)
        devices, are = f"{'both' if count == 2 else f'all {count}'} {noun}s", "are"
        if count == 1:
            devices, are = f"the {noun}", "is"
        if "device" in healthy_kinds and "pair" in healthy_kinds:
            return f"{devices} and the paths between them are healthy"
        if "device" in healthy_kinds:
            return f"{devices} {are} healthy"
        if "pair" in healthy_kinds:
            return f"the paths between {devices} are healthy"
        # Only tests of whole nodes or of the cluster ran.
        return f"{devices} {are} healthy together"

    def _unhealthy_words(self, device_noun: str) -> Iterator[str]:
        """Yield `1 of 4 GPUs is bad: a GPU 3` for each verdict and kind of subject."""
        for verdict in _MARKS:
            # A subject that was not tested in one stage may be suspect in another stage.
            worst: list[Finding] = []
            for case in self.cases:
                if case.verdict in (verdict, Verdict.UNTESTED):
                    worst += [one for one in case.findings if one.verdict is verdict][:1]
            for kind, noun in (("device", device_noun), ("node", "node"), ("pair", "path")):
                of_kind = [finding for finding in worst if finding.subject.kind == kind]
                names = [finding.subject.name for finding in of_kind]
                if not names:
                    continue
                # The number of all nodes or paths is not named.
                total = len(self.devices) if kind == "device" else len(names)
                of_total = f" of {total}" if kind == "device" else ""
                plural = "s" if total > 1 else ""
                is_slow = kind == "pair" and all(finding.ratio for finding in of_kind)
                word = "slow" if is_slow else verdict.value
                predicate = f"{'is' if len(names) == 1 else 'are'} {word}"
                if verdict is Verdict.UNTESTED:
                    predicate = "could not be tested"
                yield f"{len(names)}{of_total} {noun}{plural} {predicate}: {some(names)}"
            for finding in worst:
                if finding.subject.kind == "cluster":
                    is_fact = finding.stage == ENVIRONMENT
                    yield f"{finding.test if is_fact else finding.subject.name}: {finding.reason}"

    @property
    def _notes(self) -> list[str]:
        """Sentences on copies that share a bottleneck, and on models without figures."""
        notes = list(_shared_copies(self.findings))
        for finding in self.findings:
            is_of_model = finding.subject.kind == "cluster" and finding.stage != ENVIRONMENT
            if is_of_model and finding.verdict is Verdict.UNKNOWN and finding.value is None:
                notes.append(sentence(finding.reason))
        return list(dict.fromkeys(notes))

    @property
    def advice(self) -> list[Advice]:
        """What to do about each unhealthy device, and what throughput would gain by that."""
        count = len(self.devices)
        advice = []
        for case in self.cases:
            if case.subject.kind != "device":
                continue
            name = case.subject.name
            is_bad = case.verdict is Verdict.BAD
            text = words.device_advice(name, is_bad=is_bad, action=case.action)
            alone = [finding for finding in case.findings if finding.stage == "alone"]
            # How slow the host is says little about a step.
            ratios = [one.ratio for one in alone if one.ratio and not _is_paced_by_host(one)]
            if ratios and count > 1:
                gains = estimated_gains([1.0] * (count - 1) + [1 / max(ratios)], 0.0)
                text = "; ".join(filter(None, (text, gains)))
            tests = tuple(dict.fromkeys(finding.test for finding in case.findings))
            advice.append(Advice(about="devices", text=text, rows=tests))
        return advice

    def blocks(self) -> Iterator[Block]:
        """Yield verdict, machine, run, and which slowdowns such a check finds; then the results."""
        yield Line(text=self.headline, tone=_TONES[self.exit_code])
        yield Line(text=self.machine)
        yield Line(text=f"{course(self.run)}; run {self.run.run_id}")
        if found_slowdowns := self.detection:
            yield Line(text=words.detection(found_slowdowns))
        yield from self._body()

    @property
    def detection(self) -> DetectionLimit | None:
        """Which slowdowns such a check finds; None if it was not simulated or is not complete."""
        # The noise of other programs was not simulated.
        if any(finding.test == OTHER_PROGRAMS_TEST for finding in self.findings):
            return None
        alone = [finding for finding in self.findings if finding.stage == "alone"]
        has_passes = any(finding.passes for finding in alone)
        if not has_passes or self.run.status is RunStatus.INTERRUPTED or not self.devices:
            return None
        count = max(Counter(device.name for device in self.devices).values())
        limit = detection_limit("full", self.devices[0].kind, count, bool(self.grades))
        # A single device that has earlier checks was not simulated.
        is_compared = any(finding.expected for finding in alone if finding.passes)
        return None if limit and limit.slowdown is None and is_compared else limit

    def _basis(self) -> Iterator[str]:
        """Yield with what the devices are compared, and what the check cannot see."""
        models = Counter(device.name for device in self.devices)
        has_peers = max(models.values(), default=0) > 1
        standings = list(chain.from_iterable(self.grades.values()))
        wide = count_within(standings).wide
        yield words.basis(has_peers=has_peers, references=len(standings), wide=wide)
        is_own = any(standing.is_own for standing in standings)
        # A note already names models without references.
        has_note = any(finding.test == EXPECTED_TEST for finding in self.findings)
        has_references = bool(standings) or has_note
        yield words.blind_spot(has_peers=has_peers, has_references=has_references, is_own=is_own)

    def _body(self) -> Iterator[Block]:
        """Yield basis, cases, environment, advice, notes, tables of tests, and grades."""
        if any(finding.ratio is not None for finding in self.findings):
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
        for advice in self.advice:
            yield Line(text=sentence(advice.text), is_apart=True)
        for note in self._notes:
            yield Line(text=note, tone="advice", is_apart=True)
        yield from self._tests()
        if any(finding.verdict in _MARKS for finding in self.findings):
            yield Line(text=_LEGEND, tone="aside", is_apart=True)
        for row, (name, graded) in enumerate(self.grades.items()):
            yield Line(text=f"{name}: {grade_text(graded)}", is_apart=row == 0)
        if not self.grades and self._has_gpus:
            yield Line(text=HOW_TO_MAKE, tone="aside", is_apart=True)

    def _tests(self) -> Iterator[Block]:
        """Yield the names of the healthy facts, then the tables of each stage that has values."""
        facts = [one for one in self.findings if one.stage == "facts" and one.passes]
        # A fact may be healthy on one device and unhealthy on another device.
        unhealthy = {fact.test for fact in facts if fact.verdict.is_unhealthy}
        healthy = {fact.test for fact in facts if fact.verdict is Verdict.HEALTHY}
        if names := healthy - unhealthy - {FREE_MEMORY}:
            text = f"No problems found in: {', '.join(sorted(names))}."
            yield Line(text=text, is_apart=True)
        if self.is_of_environment:
            yield environment_table(self.environment)
        maps = _pair_maps(self.findings, self.places)
        has_matrices = maps and _LEAST_IN_A_MATRIX <= len(maps[0].places) <= _MOST_IN_A_MATRIX
        for stage, title in _STAGES.items():
            # In other stages a finding about the cluster is a case: all devices are slow.
            kinds = ("pair",) if stage == "pairs" else ("device", "node")
            if stage == "together":
                kinds = ("node", "cluster")
            of_stage = []
            for finding in self.findings:
                subject = finding.subject
                is_row = subject.kind in kinds and subject.uuids and finding.passes
                # Other programs have a case, and are no test of the stage.
                is_test = finding.test != OTHER_PROGRAMS_TEST
                if finding.stage == stage and is_row and is_test:
                    of_stage.append(finding)
            if stage == "pairs" and has_matrices:
                yield from map(_matrix, maps)
            elif of_stage:
                yield _stage_table(title, of_stage, self.places)
                tests = dict.fromkeys(finding.test for finding in of_stage)
                if meaning := words.meaning_of_tests(tests):
                    yield Line(text=meaning, tone="aside")

    def _rows(self) -> list[dict[str, Any]]:
        """Return the findings as rows of the table `health`: column -> value."""
        return [{"run_id": self.run.run_id, **to_row(finding)} for finding in self.findings]

    def members(self) -> Mapping[str, Any]:
        """Return the members of the JSON object."""
        grades = {}
        for name, graded in self.grades.items():
            members = [standing.members for standing in graded]
            grades[name] = {"text": grade_text(graded), "standings": members}
        return {
            "run": asdict(self.run),
            "machine": self.machine,
            "verdict": self._verdict,
            "lamp": self.lamp,
            "headline": self.headline,
            "exit_code": self.exit_code,
            "detection": asdict(self.detection) if self.detection else None,
            "cases": list(map(_case_members, self.cases)),
            "advice": [asdict(advice) for advice in self.advice],
            "notes": self._notes,
            "findings": self._rows(),
            "grades": grades,
        }


def _case_members(case: Case) -> dict[str, Any]:
    return {
        "subject": asdict(case.subject),
        "verdict": case.verdict,
        "what": case.reason,
        "evidence": case.evidence,
        "victims": case.victims,
        "action": case.action,
        "action_words": case.action_words,
        "commands": case.commands,
        "tests": [finding.test for finding in case.findings],
    }


# Copies of all devices at once that lose more than this share of their rate share a bottleneck.
_LARGEST_COPY_LOSS = 0.1
_DIRECTIONS = {
    "h2d": "from the host to the device",
    "d2h": "from the device to the host",
    "both": "in both directions",
}


def _shared_copies(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield a sentence for each direction in which all devices at once copy slower than one."""
    rates: dict[str, list[float]] = {}
    for finding in findings:
        if finding.value:
            rates.setdefault(finding.test, []).append(finding.value)
    for direction, way in _DIRECTIONS.items():
        alone = rates.get(f"{direction} alone")
        at_once = rates.get(f"{direction} all at once")
        if alone and at_once and min(at_once) < (1 - _LARGEST_COPY_LOSS) * min(alone):
            yield (
                f"Copies between host and device {way} reach {min(alone):.0f} GB/s on one device; "
                f"if all devices copy at once, each reaches {min(at_once):.0f} GB/s."
            )


def _stage_table(
    title: str, findings: Sequence[Finding], places: Mapping[str, DevicePlace]
) -> Table:
    """Return the table of a stage: a column for each subject, or ranges if they do not fit."""
    by_test: dict[tuple[str, str], dict[str, Finding]] = {}
    for finding in findings:
        by_test.setdefault((finding.test, finding.unit), {})[finding.subject.name] = finding
    subjects = {finding.subject.name: finding.subject for finding in findings}
    first_columns = [ShownColumn(title=name, is_text=True) for name in ("test", "unit")]
    rows, range_rows = [], []
    for test, by_subject in by_test.items():
        cells = (_marked(by_subject[name]) if name in by_subject else "" for name in subjects)
        rows.append((*test, *cells))
        values, outliers = [], []
        for name, finding in by_subject.items():
            if finding.value is not None:
                values.append(finding.value)
            if finding.verdict in _MARKS:
                outliers.append(f"{name} {_marked(finding)}")
        statistics = ["", "", ""]
        if values:
            statistics = [number(statistic(values), 3) for statistic in (min, median, max)]
        range_rows.append((*test, *statistics, some(outliers, _MOST_OUTLIERS)))
    ranges = Table(
        columns=(
            *first_columns,
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
            *first_columns,
            *(ShownColumn(title=name) for name in _short_names(subjects.values(), places)),
        ),
        rows=tuple(rows),
        kind=title,
        narrower=ranges,
    )


def _marked(finding: Finding) -> str:
    """Return the value after the mark of its verdict: `! 470`."""
    return f"{_MARKS.get(finding.verdict, '')} {number(finding.value, 3)}".strip()


def _short_names(subjects: Iterable[Subject], places: Mapping[str, DevicePlace]) -> list[str]:
    """Return the names of the subjects, without their host if all are on the same host."""
    names, subject_places = [], []
    for subject in subjects:
        names.append(f"{'node ' * (subject.kind == 'node')}{subject.name}")
        if subject.kind in ("device", "pair") and places.keys() >= set(subject.uuids):
            subject_places.append([places[uuid] for uuid in subject.uuids])
    has_places = len(subject_places) == len(names) and all(subject_places)
    short = words.short_names(subject_places) if has_places else None
    return short or names


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairMap:
    """The findings of one test of pairs of devices."""

    # Such as "copy 256 MiB, GB/s".
    title: str
    # Uuid -> place of the device, ordered by host and index.
    places: Mapping[str, DevicePlace]
    # (uuid of the sender, uuid of the receiver) -> finding. A latency is in both directions.
    findings: Mapping[tuple[str, str], Finding]

    @property
    def short_names(self) -> dict[str, str]:
        """Uuid -> name, without the host if all devices are on the same host."""
        short = words.short_names([[place] for place in self.places.values()])
        names = short or map(words.device_name, self.places.values())
        return dict(zip(self.places, names, strict=True))


def _pair_maps(findings: Sequence[Finding], places: Mapping[str, DevicePlace]) -> list[_PairMap]:
    """Return a map for each test of pairs; pairs on a node and between nodes share a map."""
    by_test: dict[str, dict[tuple[str, str], Finding]] = {}
    for finding in findings:
        subject = finding.subject
        if subject.kind != "pair" or finding.value is None or not subject.uuids:
            continue
        sender, receiver = subject.uuids
        if {sender, receiver} <= places.keys():
            title = f"{_name_of_pairs(finding)}, {finding.unit}"
            by_pair = by_test.setdefault(title, {})
            by_pair[sender, receiver] = finding
            if finding.unit == "µs":
                by_pair[receiver, sender] = finding
    maps = []
    for title, by_pair in by_test.items():
        uuids = sorted(set(chain.from_iterable(by_pair)), key=lambda uuid: places[uuid])
        of_map = {uuid: places[uuid] for uuid in uuids}
        maps.append(_PairMap(title=title, places=of_map, findings=by_pair))
    return maps


def _tests_of(finding: Finding) -> list[HealthTest]:
    """Return the tests of the suite with this name, at most one for each kind of devices."""
    tests = [test_named(finding.test, kind) for kind in sorted(device_kinds(finding.subject))]
    return [test for test in tests if test is not None]


def _is_paced_by_host(finding: Finding) -> bool:
    return any(test.is_paced_by_host for test in _tests_of(finding))


def _name_of_pairs(finding: Finding) -> str:
    """Return the name that the test of a pair has on one node."""
    within_nodes = (test.within_nodes for test in _tests_of(finding))
    return next(filter(None, within_nodes), finding.test)


def _matrix(pairs: _PairMap) -> Table:
    """Return a row for each sender, and a column for each receiver; "-": not measured."""
    short, by_pair = pairs.short_names, pairs.findings
    rows = []
    for sender, name in short.items():
        cells = []
        for receiver in short:
            finding = by_pair.get((sender, receiver))
            cells.append(_marked(finding) if finding else "-")
        rows.append((name, *cells))
    columns = (ShownColumn(title=name) for name in short.values())
    return Table(
        columns=(ShownColumn(title="from / to", is_text=True), *columns),
        rows=tuple(rows),
        kind=f"Pairs: {pairs.title}",
    )


def export(report: HealthReport, kind: str) -> str:
    """Return a check as the text of a file: "json", or its findings as "csv" or "junit"."""
    if kind == "json":
        return format_document(report, "json")
    if kind == "csv":
        return csv_text([column.name for column in TABLES["health"]], report._rows())
    facts = {"run_id": report.run.run_id, "machine": report.machine}
    return junit_text(report.headline, report.run, facts, list(map(_junit_case, report.findings)))


def _junit_case(finding: Finding) -> JUnitCase:
    """Return a finding as a case of JUnit; findings with a culprit are skipped, not failed."""
    properties = {
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
        properties={name: value for name, value in properties.items() if value is not None},
        outcome=outcome,
        kind=finding.verdict.value,
        message=words.blamed(finding) or words.reason_with_value(finding),
        text="\n".join(filter(None, (finding.evidence, finding.command))),
    )


def format_page(report: HealthReport, devices: pd.DataFrame) -> str:
    """Return the page of a check as HTML, complete in one file.

    Args:
        devices: the table `devices` of its run; may be empty.
    """
    lines: list[str] = []
    cases: list[Listing] = []
    tables: list[Table] = []
    environment = environment_listing(report.environment)
    # The page shows the environment in a place of its own.
    for block in report._body():
        if isinstance(block, Line):
            lines.append(block.text)
        elif isinstance(block, Listing) and block != environment:
            cases.append(block)
        elif isinstance(block, Table) and block.kind != ENVIRONMENT_TITLE:
            tables.append(block)
    run = report.run
    return render_template(
        "health.html",
        report=report,
        run=run,
        lines=lines,
        cases=cases,
        environment=environment if report.environment else None,
        environment_facts=environment_table(report.environment),
        figures=health_figures(report),
        tables=tables,
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
    """Return the chart of pairs and the chart of devices, if there is data for them.

    The charts draw a limited number of devices; their tables have all devices.
    """
    figures = []
    maps = []
    drawn: list[Finding] = []
    for pair_map in _pair_maps(report.findings, report.places):
        if len(pair_map.places) >= _LEAST_DEVICES_IN_A_MAP:
            maps.append(pair_map)
            drawn += pair_map.findings.values()
    if maps:
        pairs = Figure(
            anchor="pairs",
            title="Pairs",
            note="From the device of the row to that of the column. Colours: the time against the "
            "median of the similar pairs, those on a node and those between nodes apart. ! bad, "
            "? suspect.",
            panels=list(map(_heat_map, maps)),
            table=_drawn_values(drawn),
        )
        figures.append(pairs)
    of_devices = [finding for finding in report.findings if finding.subject.kind == "device"]
    compared = [finding for finding in of_devices if finding.ratio is not None]
    if compared:
        unhealthy = {case.subject.name for case in report.cases}
        figures.append(_device_figure(compared, unhealthy, report.places))
    return figures


def _heat_map(pairs: _PairMap) -> Panel:
    """Return the heat map of one test: a cell for each pair of the first devices."""
    drawn = dict(list(pairs.places.items())[:_MOST_DEVICES_IN_A_MAP])
    short = replace(pairs, places=drawn).short_names
    has_text = len(drawn) <= _MOST_WITH_TEXT
    similar: dict[str, list[float]] = {}
    for finding in pairs.findings.values():
        similar.setdefault(finding.test, []).append(finding.value or 0.0)
    cells: list[Mark] = []
    for (sender, receiver), finding in pairs.findings.items():
        if sender not in short or receiver not in short:
            continue
        value, typical = finding.value or 0.0, median(similar[finding.test])
        ratio = value / typical if is_time(finding.unit) else typical / max(value, 1e-300)
        path = words.path_name(*(words.device_name(drawn[uuid]) for uuid in (sender, receiver)))
        change = f"{abs(ratio - 1):.0%} {'slower' if ratio > 1 else 'faster'}"
        cells.append(
            {
                "x": short[receiver],
                "y": short[sender],
                "excess": round(ratio - 1, 4),
                "text": _marked(finding if has_text else replace(finding, value=None)),
                "is_marked": finding.verdict.is_unhealthy,
                "tip": f"{path}\n{number(value, 3)} {finding.unit}, {change} "
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
    """Return the chart with a mark for each test of each device: its time against its peers.

    Args:
        compared: findings with a ratio; at least one finding.
        unhealthy: names of devices that are drawn first.
    """
    subjects = {finding.subject.name: finding.subject for finding in compared}
    names = shown = list(subjects)
    if len(names) > _MOST_DEVICES:
        shown = sorted(names, key=lambda name: name not in unhealthy)[:_MOST_DEVICES]
    short_names = _short_names([subjects[name] for name in shown], places)
    short = dict(zip(shown, short_names, strict=True))
    marks: list[Mark] = []
    for finding in compared:
        name, verdict = finding.subject.name, finding.verdict
        if name not in short:
            continue
        figure = f"{number(finding.value, 3)} {finding.unit}"
        marks.append(
            {
                "y": short[name],
                "x": round(min(finding.ratio or 1.0, 100.0), 4),
                "line": verdict.value if verdict.is_suspect_or_bad else _LIKE_THE_OTHERS,
                "tip": f"{formatting.plain(f'{name}, {finding.test}:')}\n"
                f"{figure}, {finding.ratio:.2f} times the time of similar devices",
            }
        )
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
            (ShownColumn(title="of", is_text=True), lambda row: row.subject.name),
            (ShownColumn(title="test", is_text=True), lambda row: row.test),
            (ShownColumn(title="value"), lambda row: f"{number(row.value, 3)} {row.unit}".strip()),
            (
                ShownColumn(title="time against similar ones"),
                lambda row: "" if row.ratio is None else f"{row.ratio:.3f}",
            ),
            (ShownColumn(title="verdict", is_text=True), lambda row: row.verdict.value),
        ],
    )
