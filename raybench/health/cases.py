"""The cases of a health check: each subject with unhealthy findings, with all of these.

A device that fails in many tests is one case. A finding that another subject is to blame for
belongs to the case of that subject.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from raybench.records.devices import Action, Finding, Subject, Verdict
from raybench.report.formatting import some
from raybench.report.words import health as words

_SEVERITY = {verdict: place for place, verdict in enumerate(Verdict)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A subject that is not healthy. findings: the unhealthy ones about it, the worst first.

    further: `TEST (1.60x the time), ...` of the findings but the worst, four of them at most.
    evidence: of each stage, that of the worst finding that has some. victims: names of subjects
    that are slow because of it. action: the gravest of the findings; None where none has one.
    commands: those of that action. Texts without content are empty.
    """

    subject: Subject
    findings: Sequence[Finding]
    further: str
    evidence: str
    victims: Sequence[str]
    action: Action | None
    commands: Sequence[str]

    @property
    def verdict(self) -> Verdict:
        """Return the worst verdict of the findings: bad, else untested, else suspect."""
        return self.findings[0].verdict

    @property
    def reason(self) -> str:
        """Return the reason of the worst finding."""
        return words.reason_with_value(self.findings[0])

    @property
    def action_words(self) -> str:
        """Return what to do about the subject, in words; empty without an action."""
        return words.action(self.action)


def cases_of(findings: Iterable[Finding]) -> list[Case]:
    """Return a case for each subject with a bad, untested or suspect finding, the worst first.

    A finding with a culprit makes no case: its subject is a victim in the culprit's case, if there
    is one. Both directions of a pair are one case, and so are findings of the cluster on one model.
    findings: of one check, as `judge` orders them.
    """
    own: dict[tuple[str, object], list[Finding]] = {}
    victims: dict[str, list[str]] = {}
    for finding in findings:
        subject = finding.subject
        if finding.culprit:
            victims.setdefault(finding.culprit, []).append(subject.name)
        elif finding.verdict.is_unhealthy:
            name: object = subject.model if subject.kind == "cluster" else subject.name
            if subject.kind == "pair" and subject.uuids:
                name = frozenset(subject.uuids)
            own.setdefault((subject.kind, name), []).append(finding)
    cases = [_case(found, victims) for found in own.values()]
    return sorted(cases, key=lambda case: _SEVERITY[case.verdict])


def _case(found: list[Finding], victims: Mapping[str, Sequence[str]]) -> Case:
    """Return the case of the unhealthy findings about one subject, in the order of the tests.

    victims: name of a subject -> names of those that are slow because of it.
    """
    is_pair = found[0].subject.kind == "pair"
    # Of findings that are about as slow the last one: the largest size says most.
    found = found if is_pair else found[::-1]
    found = sorted(found, key=lambda one: (_SEVERITY[one.verdict], -round(one.ratio or 0, 1)))
    subject, further = found[0].subject, []
    for one in found[1:]:
        is_reverse = is_pair and one.subject.uuids == subject.uuids[::-1]
        further.append(words.further(one, is_reverse=is_reverse))
    # Other findings of a stage repeat its evidence.
    stages = {one.stage: one.evidence for one in reversed(found) if one.evidence}
    evidence = [stages[one.stage] for one in found if one.stage in stages]
    asked = {one.action for one in found}
    action = next((action for action in Action if action in asked), None)
    commands = [one.command.splitlines() for one in found if one.action is action]
    return Case(
        subject=subject,
        findings=found,
        further=some(further),
        evidence="; ".join(dict.fromkeys(evidence)),
        victims=list(dict.fromkeys(victims.get(subject.name, ()))),
        action=action,
        commands=list(dict.fromkeys(chain(*commands))),
    )
