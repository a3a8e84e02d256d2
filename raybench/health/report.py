"""The results of a health check as a person reads them: lamp, sentence, then each case. Pure.

A case is a subject that is not healthy, with all its findings: a device that fails in many tests is
one case. A finding that another subject is to blame for is part of the case of that subject.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from raybench.analysis.references import Measurement
from raybench.records.health import Action, Finding, Subject, Verdict, figure
from raybench.report import formatting
from raybench.report.advice import Advice, estimate_gains
from raybench.report.sections.references import Standing
from raybench.results.run import Run, RunStatus

# The worst first.
UNHEALTHY = (Verdict.BAD, Verdict.UNTESTED, Verdict.SUSPECT)
_SEVERITY = {verdict: place for place, verdict in enumerate(Verdict)}
# The gravest action first.
ACTION_WORDS: Mapping[Action, str] = {
    Action.REPLACE: "replace it: keep jobs off it until then",
    Action.RESET: "reset it; where that does not help, replace it",
    Action.SETTING: "change a setting",
    Action.WATCH: "look at it, and watch it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A subject that is not healthy. findings: about it, the worst first.

    victims: names of subjects that are slow because of it.
    """

    subject: Subject
    findings: Sequence[Finding]
    victims: Sequence[str]

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict."""
        return self.findings[0].verdict

    @property
    def further(self) -> str:
        """Return `TEST (1.60x the time), ...` of all findings but the worst; empty for one."""
        found = []
        for one in self.findings[1:]:
            is_reverse = one.subject.uuids == tuple(reversed(self.subject.uuids))
            way = " the other way" if self.subject.kind == "pair" and is_reverse else ""
            much = "not tested" if one.verdict is Verdict.UNTESTED else one.reason
            found.append(f"{one.test}{way} ({f'{one.ratio:.2f}x the time' if one.ratio else much})")
        return formatting.some(found)

    @property
    def evidence(self) -> str:
        """Return the evidence of the worst finding of each stage; the others repeat it."""
        by_stage: dict[str, str] = {}
        for one in self.findings:
            if one.evidence:
                by_stage.setdefault(one.stage, one.evidence)
        return "; ".join(dict.fromkeys(by_stage.values()))

    @property
    def action(self) -> Action | None:
        """Return the gravest action of the findings; None where no finding has one."""
        asked = {one.action for one in self.findings}
        return next((action for action in ACTION_WORDS if action in asked), None)

    @property
    def commands(self) -> list[str]:
        """Return the commands of that action, without repeats."""
        found = [one.command for one in self.findings if one.action is self.action]
        return list(dict.fromkeys(line for text in found for line in text.splitlines()))


def reason_with_value(finding: Finding) -> str:
    """Return `TEST: REASON (VALUE, against EXPECTED)`; without the bracket if it has no ratio."""
    text = f"{finding.test}: {finding.reason}"
    is_compared = finding.ratio is not None or finding.subject.kind == "cluster"
    if not is_compared or not finding.expected:
        return text
    value = "" if finding.value is None else f"{figure(finding.value)} {finding.unit}".strip()
    return f"{text} ({', against '.join(filter(None, (value, finding.expected)))})"


@dataclass(frozen=True, kw_only=True)
class HealthReport:
    """The results of a check.

    machine: the devices and nodes in words. kinds: "cuda" or "cpu" of each device.
    grades: how the values of each device and node stand against the references. measurements:
    values that references may be made of.
    """

    run: Run
    machine: str
    kinds: Sequence[str]
    findings: Sequence[Finding]
    grades: Mapping[str, Sequence[Standing]] = field(default_factory=dict)
    measurements: Sequence[Measurement] = ()

    @cached_property
    def cases(self) -> list[Case]:
        """Return the subjects that are not healthy, the worst first."""
        own: dict[object, list[Finding]] = {}
        victims: dict[str, dict[str, None]] = {}
        for finding in self.findings:
            subject = finding.subject
            if finding.culprit:
                victims.setdefault(finding.culprit, {})[subject.name] = None
            elif finding.verdict in UNHEALTHY:
                # Both directions of a pair are one case, and so are all devices of a model.
                name: object = subject.model if subject.kind == "cluster" else subject.name
                if subject.kind == "pair" and subject.uuids:
                    name = frozenset(subject.uuids)
                own.setdefault((subject.kind, name), []).append(finding)
        found = []
        for findings in own.values():
            # Of findings that are about as slow the last one: the largest size says most.
            if findings[0].subject.kind != "pair":
                findings.reverse()
            findings.sort(key=lambda one: (_SEVERITY[one.verdict], -round(one.ratio or 0, 1)))
            subject = findings[0].subject
            names = list(victims.get(subject.name, ()))
            found.append(Case(subject=subject, findings=findings, victims=names))
        return sorted(found, key=lambda case: _SEVERITY[case.verdict])

    @property
    def noun(self) -> str:
        """Return `GPU` or `CPU worker`."""
        return "GPU" if "cuda" in self.kinds else "CPU worker"

    @property
    def exit_code(self) -> int:
        """Return 0: healthy, 1: something is suspect or bad, 3: it could not be tested."""
        verdicts = {case.verdict for case in self.cases}
        if verdicts & {Verdict.BAD, Verdict.SUSPECT}:
            return 1
        is_tested = any(one.verdict is not Verdict.UNKNOWN for one in self.findings)
        return 0 if is_tested and Verdict.UNTESTED not in verdicts else 3

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict; untested where nothing was read."""
        if self.cases:
            return self.cases[0].verdict
        return Verdict.HEALTHY if self.exit_code == 0 else Verdict.UNTESTED

    @property
    def lamp(self) -> Literal["green", "amber", "red"]:
        """Return green: healthy, red: something is bad, amber: suspect or not tested."""
        if self.verdict is Verdict.HEALTHY:
            return "green"
        return "red" if self.verdict is Verdict.BAD else "amber"

    @cached_property
    def headline(self) -> str:
        """Return the lamp and the verdict in a sentence: `Red: 1 of 4 GPUs is bad: a GPU 3`."""
        if parts := list(self._unhealthy_words()):
            if all(case.subject.kind in ("pair", "cluster") for case in self.cases):
                parts.append(f"no {self.noun} is bad by itself")
            sentence = "; ".join(parts)
        elif not self.findings and self.run.status is not RunStatus.OK:
            sentence = "The check did not come to its end: nothing can be said."
        elif self.exit_code and any(one.value is not None for one in self.findings):
            sentence = "It ran, but there is nothing to compare it with."
        elif self.exit_code:
            sentence = "Nothing could be tested."
        else:
            sentence = formatting.sentence(self._healthy_words())
        return f"{self.lamp.capitalize()}: {sentence}"

    def _healthy_words(self) -> str:
        """Return `all 4 GPUs are healthy, and the paths between them`, or what of it was tested."""
        count = len(self.kinds)
        many = "both" if count == 2 else f"all {count}"
        devices = f"the {self.noun}" if count == 1 else f"{many} {self.noun}s"
        kinds = {one.subject.kind for one in self.findings if one.verdict is Verdict.HEALTHY}
        if "device" in kinds:
            paths = ", and the paths between them" if "pair" in kinds else ""
            return f"{devices} {'is' if count == 1 else 'are'} healthy{paths}"
        if "pair" in kinds:
            return f"the paths between {devices} are healthy"
        return f"{devices} are healthy together"

    def _unhealthy_words(self) -> Iterator[str]:
        """Yield `1 of 4 GPUs is bad: a GPU 3` for each verdict and kind of subject."""
        count = len(self.kinds)
        for verdict in UNHEALTHY:
            own = [case for case in self.cases if case.verdict is verdict]
            for kind, noun in (("device", self.noun), ("node", "node"), ("pair", "path")):
                names = [case.subject.name for case in own if case.subject.kind == kind]
                if not names:
                    continue
                of = f" of {count}" if kind == "device" else ""
                plural = "s" * (count > 1 if of else len(names) > 1)
                word = "slow" if kind == "pair" else verdict.value
                verb = f"{'is' if len(names) == 1 else 'are'} {word}"
                if verdict is Verdict.UNTESTED:
                    verb = "could not be tested"
                yield f"{len(names)}{of} {noun}{plural} {verb}: {formatting.some(names)}"
            for case in own:
                if case.subject.kind == "cluster":
                    yield f"{case.subject.name}: {case.findings[0].reason}"

    @cached_property
    def notes(self) -> list[str]:
        """Return a sentence for each model without any known figures."""
        found = [
            one.reason
            for one in self.findings
            if one.verdict is Verdict.UNKNOWN
            and one.subject.kind == "cluster"
            and one.value is None
        ]
        return [formatting.sentence(text) for text in dict.fromkeys(found)]

    @cached_property
    def advice(self) -> list[Advice]:
        """Return for each device that is not healthy whether to leave it out.

        With an estimate of the throughput without it, and with shares by speed.
        """
        count = len(self.kinds)
        advice = []
        for case in self.cases:
            if case.subject.kind != "device":
                continue
            name = case.subject.name
            is_bad = case.verdict is Verdict.BAD
            text = f"leave {name} out until it is repaired" if is_bad else f"look at {name} first"
            times = [one.ratio for one in case.findings if one.ratio and one.stage == "alone"]
            if times and count > 1:
                gains = estimate_gains([1.0] * (count - 1) + [1 / max(times)], 0.0)
                text = "; ".join(filter(None, (text, gains)))
            tests = tuple(dict.fromkeys(finding.test for finding in case.findings))
            advice.append(Advice(about="devices", text=text, rows=tests))
        return advice
