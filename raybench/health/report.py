"""What a health check says, as a person reads it: the verdict first, then each case. Pure.

A case is a subject that something is wrong with, and all that is: of many tests in which one device
fails it is one. What another subject is to blame for is no case of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from raybench.records.health import Action, Finding, Link, Subject, Verdict, figure
from raybench.report import formatting
from raybench.report.advice import Advice, estimate_gains
from raybench.results.run import Run, RunStatus

# The worst first.
UNHEALTHY = (Verdict.BAD, Verdict.UNTESTED, Verdict.SUSPECT)
_SEVERITY = {verdict: place for place, verdict in enumerate(Verdict)}
_ACTIONS = {action: place for place, action in enumerate(Action)}
_ACTION_WORDS = {
    Action.REPLACE: "replace it: keep jobs off it until then",
    Action.RESET: "reset it; where that does not help, replace it",
    Action.SETTING: "change a setting",
    Action.WATCH: "look at it, and watch it",
}
# A device without a slow one among those alike is as fast as they are.
_ALONE = "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A subject that something is wrong with. findings: the worst first.

    victims: names of subjects that are slow because of it.
    """

    subject: Subject
    findings: Sequence[Finding]
    victims: Sequence[str]

    @property
    def verdict(self) -> Verdict:
        """Return the worst one."""
        return self.findings[0].verdict

    @property
    def what(self) -> str:
        """What is wrong, and how much, by the worst finding."""
        return what_of(self.findings[0])

    @property
    def further(self) -> str:
        """What else is wrong with it, in a line."""
        return formatting.some([self._also(one) for one in self.findings[1:]])

    def _also(self, finding: Finding) -> str:
        is_reverse = finding.subject.uuids == tuple(reversed(self.subject.uuids))
        way = " the other way" if self.subject.kind == "pair" and is_reverse else ""
        much = "not tested" if finding.verdict is Verdict.UNTESTED else finding.reason
        if finding.ratio is not None:
            much = f"{finding.ratio:.2f}x the time"
        return f"{finding.test}{way} ({much})"

    @property
    def evidence(self) -> str:
        """What holds besides."""
        # Of each stage that of the worst finding: the others say the same.
        by_stage: dict[str, str] = {}
        for one in self.findings:
            if one.evidence:
                by_stage.setdefault(one.stage, one.evidence)
        return "; ".join(dict.fromkeys(by_stage.values()))

    @property
    def action(self) -> Action | None:
        """Return the most that any finding asks for."""
        asked = [one.action for one in self.findings if one.action]
        return min(asked, key=lambda action: _ACTIONS[action], default=None)

    @property
    def commands(self) -> list[str]:
        """What to type for that."""
        found = [one.command for one in self.findings if one.action is self.action]
        return list(dict.fromkeys(line for text in found for line in text.splitlines()))


def what_of(finding: Finding) -> str:
    """Write a finding in a line: the test, what it found, and what it was held against."""
    value = "" if finding.value is None else f"{figure(finding.value)} {finding.unit}".strip()
    is_held = finding.ratio is not None or finding.subject.kind == "cluster"
    held = ", against ".join(filter(None, (value, finding.expected))) if is_held else ""
    return f"{finding.test}: {finding.reason}" + (f" ({held})" if held else "")


@dataclass(frozen=True, kw_only=True)
class HealthReport:
    """What a check says.

    machine: what it ran on, in words. kinds: "cuda" or "cpu" of each device that was checked.
    """

    run: Run
    machine: str
    kinds: Sequence[str]
    findings: Sequence[Finding]
    links: Sequence[Link]

    @cached_property
    def cases(self) -> list[Case]:
        """What is wrong, the worst first."""
        own: dict[object, list[Finding]] = {}
        victims: dict[str, dict[str, None]] = {}
        for finding in self.findings:
            if finding.culprit:
                victims.setdefault(finding.culprit, {})[finding.subject.name] = None
            elif finding.verdict in UNHEALTHY:
                own.setdefault(_identity(finding.subject), []).append(finding)
        found = []
        for findings in own.values():
            # Of those about as slow the last one: sizes come in order, and the largest says most.
            if findings[0].subject.kind != "pair":
                findings.reverse()
            findings.sort(key=lambda one: (_SEVERITY[one.verdict], -round(one.ratio or 0, 1)))
            subject = findings[0].subject
            names = list(victims.get(subject.name, ()))
            found.append(Case(subject=subject, findings=findings, victims=names))
        return sorted(found, key=lambda case: _SEVERITY[case.verdict])

    @cached_property
    def devices(self) -> list[Subject]:
        """The devices that were checked, in order."""
        found = {
            one.subject.uuids: one.subject for one in self.findings if one.subject.kind == "device"
        }
        return list(found.values())

    @property
    def noun(self) -> str:
        """What a device is called."""
        return "GPU" if "cuda" in self.kinds else "CPU worker"

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 something is suspect or bad, 3 it could not be tested."""
        verdicts = {case.verdict for case in self.cases}
        if verdicts & {Verdict.BAD, Verdict.SUSPECT}:
            return 1
        is_tested = any(one.verdict is not Verdict.UNKNOWN for one in self.findings)
        return 0 if is_tested and Verdict.UNTESTED not in verdicts else 3

    @property
    def verdict(self) -> Verdict:
        """Return the worst one; of a check that read nothing, that it is untested."""
        if self.cases:
            return self.cases[0].verdict
        return Verdict.HEALTHY if self.exit_code == 0 else Verdict.UNTESTED

    @cached_property
    def headline(self) -> str:
        """The verdict in a sentence."""
        parts = list(self._parts())
        if not parts:
            if not self.findings and self.run.status is not RunStatus.OK:
                return "The check did not come to its end: nothing can be said."
            if self.exit_code and any(one.value is not None for one in self.findings):
                return "It ran, but nothing is known to hold it against."
            if self.exit_code:
                return "Nothing could be tested."
            return formatting.sentence(self._healthy())
        if all(case.subject.kind in ("pair", "cluster") for case in self.cases):
            parts.append(f"no {self.noun} is bad by itself")
        return "; ".join(parts)

    def _healthy(self) -> str:
        """Say what was found to be healthy: devices, the paths between them, or both."""
        count = len(self.kinds)
        many = "both" if count == 2 else f"all {count}"
        devices = f"the {self.noun}" if count == 1 else f"{many} {self.noun}s"
        kinds = {one.subject.kind for one in self.findings if one.verdict is Verdict.HEALTHY}
        if "device" in kinds:
            paths = ", and the paths between them" if "pair" in kinds else ""
            return f"{devices} {'is' if count == 1 else 'are'} healthy{paths}"
        what = "the paths between" if "pair" in kinds else "what was tried of"
        return f"{what} {devices} {'are' if 'pair' in kinds else 'is'} healthy"

    def _parts(self) -> Iterator[str]:
        """Yield what is wrong, by kind of subject and verdict."""
        count = len(self.kinds)
        for verdict in UNHEALTHY:
            for kind, noun in (("device", self.noun), ("node", "node"), ("pair", "path")):
                names = [
                    case.subject.name
                    for case in self.cases
                    if (case.subject.kind, case.verdict) == (kind, verdict)
                ]
                if names:
                    of = f" of {count}" if kind == "device" else ""
                    plural = "s" * (len(names) > 1 if not of else count > 1)
                    verb = _verb(verdict, len(names), kind)
                    yield f"{len(names)}{of} {noun}{plural} {verb}: {formatting.some(names)}"
            yield from (
                f"{case.subject.name}: {case.findings[0].reason}"
                for case in self.cases
                if (case.subject.kind, case.verdict) == ("cluster", verdict)
            )

    @cached_property
    def notes(self) -> list[str]:
        """What was not known, in sentences."""
        found = [
            one.reason
            for one in self.findings
            if one.verdict is Verdict.UNKNOWN
            and one.subject.kind == "cluster"
            and one.value is None
        ]
        return [formatting.sentence(text) for text in dict.fromkeys(found)]

    @cached_property
    def advice(self) -> str:
        """How to use the devices as a set; empty where none was tested alone."""
        alone = [
            one for one in self.findings if one.stage == _ALONE and one.subject.kind == "device"
        ]
        if not alone:
            return ""
        # What gives wrong results, or none.
        out = [
            case.subject
            for case in self.cases
            if case.subject.kind == "device"
            and any(
                one.ratio is None and one.verdict in (Verdict.BAD, Verdict.UNTESTED)
                for one in case.findings
            )
        ]
        left = [device for device in self.devices if device not in out]
        speeds = {device.uuids: _speed(device, alone) for device in left}
        slow = [device for device in left if speeds[device.uuids] < 1]
        kept = [f"Leave out {formatting.some([one.name for one in out])}."] if out else []
        if not slow:
            if not left:
                return kept[0]
            if len(left) == 1:
                return " ".join([*kept, f"Use {left[0].name}."])
            many = "both" if len(left) == 2 else f"all {len(left)}"
            return " ".join([*kept, f"As a set: balanced, use {'the others' if out else many}."])
        fast = len(left) - len(slow)
        equal = len(left) * min(speeds.values())
        weighted = sum(speeds.values())
        names = formatting.some([one.name for one in slow])
        best = "leave out" if fast >= equal else "keep"
        return " ".join(
            [
                *kept,
                f"As a set: {best} {names}. In units of a fast {self.noun}, equal shares on all "
                f"{len(left)} give {equal:.2f}, the {fast} fast alone {fast}, and shares by their "
                f"speed {weighted:.2f}.",
            ]
        )


def _identity(subject: Subject) -> object:
    """Name what a case is about: both directions of a pair are one, and all of a model."""
    if subject.kind == "cluster":
        return subject.kind, subject.model
    if subject.kind == "pair" and subject.uuids:
        return subject.kind, frozenset(subject.uuids)
    return subject.kind, subject.name


def _verb(verdict: Verdict, count: int, kind: str) -> str:
    if verdict is Verdict.UNTESTED:
        return "could not be tested"
    words = {Verdict.BAD: "bad", Verdict.SUSPECT: "suspect"}
    word = "slow" if kind == "pair" else words[verdict]
    return f"{'is' if count == 1 else 'are'} {word}"


def _speed(device: Subject, alone: Iterable[Finding]) -> float:
    """Relate the speed of a device to that of those alike, by the tests in which it is slow."""
    slow = [
        one.ratio
        for one in alone
        if one.subject == device and one.verdict in UNHEALTHY and one.ratio
    ]
    return 1 / median(slow) if slow else 1.0


def action_words(action: Action) -> str:
    """Say what to do."""
    return _ACTION_WORDS[action]


def advise_health(report: HealthReport) -> list[Advice]:
    """Advise from the findings of a health check about each device that is not healthy."""
    count = len(report.devices)
    return [
        Advice(
            about="devices",
            text=_about_device(case.subject.name, case.findings, count),
            rows=tuple(dict.fromkeys(finding.test for finding in case.findings)),
        )
        for case in report.cases
        if case.subject.kind == "device"
    ]


def _about_device(name: str, findings: Sequence[Finding], count: int) -> str:
    """Say whether to leave a device out, and what shares by its speed would gain."""
    times = [one.ratio for one in findings if one.ratio is not None and one.stage == "alone"]
    is_bad = findings[0].verdict is Verdict.BAD
    text = f"leave {name} out until it is repaired" if is_bad else f"look at {name} first"
    estimate = (
        estimate_gains([1.0] * (count - 1) + [1 / max(times)], 0.0) if times and count > 1 else ""
    )
    return f"{text}; {estimate}" if estimate else text
