"""The cases of a health check: each unhealthy subject with all its findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from raybench.records.devices import Action, Finding, Subject, Verdict
from raybench.report.formatting import some
from raybench.report.words import health as words

_SEVERITY = {verdict: place for place, verdict in enumerate(Verdict)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An unhealthy subject."""

    subject: Subject
    # Unhealthy findings, the worst first.
    findings: Sequence[Finding]
    # `TEST (1.60x the time), ...` of the other findings; "" for a single finding.
    further: str
    # Evidence of one finding of each stage, what supports the action first.
    evidence: str
    # Names of subjects that are slow because of this subject.
    victims: Sequence[str]
    # The gravest action of the findings, and its commands.
    action: Action | None
    commands: Sequence[str]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the findings."""
        return self.findings[0].verdict

    @property
    def reason(self) -> str:
        """The reason of the worst finding."""
        return words.reason_with_value(self.findings[0])

    @property
    def action_words(self) -> str:
        """What to do about the subject, in words; empty without an action."""
        return words.action(self.action)


def cases_of(findings: Iterable[Finding]) -> list[Case]:
    """Return a case for each unhealthy subject, the worst first.

    The subject of a finding with a culprit is a victim in the case of the culprit. Both directions
    of a pair are one case, and so are all findings of the cluster on one model.

    Args:
        findings: of one check, as `judge` orders them.
    """
    by_subject: dict[tuple[str, object], list[Finding]] = {}
    victims: dict[str, list[str]] = {}
    for finding in findings:
        subject = finding.subject
        if finding.culprit:
            victims.setdefault(finding.culprit, []).append(subject.name)
        elif finding.verdict.is_unhealthy:
            name: object = subject.model if subject.kind == "cluster" else subject.name
            if subject.kind == "pair" and subject.uuids:
                name = frozenset(subject.uuids)
            by_subject.setdefault((subject.kind, name), []).append(finding)
    cases = [_case(of_subject, victims) for of_subject in by_subject.values()]
    return sorted(cases, key=lambda case: _SEVERITY[case.verdict])


def _case(findings: list[Finding], victims: Mapping[str, Sequence[str]]) -> Case:
    """Return the case of all unhealthy findings about one subject.

    Args:
        findings: in the order of the tests.
        victims: name of a culprit -> names of the subjects that are slow because of it.
    """
    is_pair = findings[0].subject.kind == "pair"
    # Among findings with equal ratios the last comes first, because the largest size says most.
    latest_first = findings if is_pair else findings[::-1]
    worst_first = sorted(
        latest_first,
        key=lambda finding: (_SEVERITY[finding.verdict], -round(finding.ratio or 0, 1)),
    )
    subject, further = worst_first[0].subject, []
    for finding in worst_first[1:]:
        is_reverse = is_pair and finding.subject.uuids == subject.uuids[::-1]
        further.append(words.further(finding, is_reverse=is_reverse))
    actions = {finding.action for finding in worst_first}
    action = next((action for action in Action if action in actions), None)
    # Once for each stage, because the findings of a stage have similar evidence. What supports the
    # action comes first.
    supporting_first = sorted(worst_first, key=lambda finding: finding.action is not action)
    evidence: dict[str, str] = {}
    for finding in supporting_first:
        evidence[finding.stage] = evidence.get(finding.stage) or finding.evidence
    commands = []
    for finding in worst_first:
        if finding.action is action:
            commands += finding.command.splitlines()
    return Case(
        subject=subject,
        findings=worst_first,
        further=some(further),
        evidence="; ".join(dict.fromkeys(filter(None, evidence.values()))),
        victims=list(dict.fromkeys(victims.get(subject.name, ()))),
        action=action,
        commands=list(dict.fromkeys(commands)),
    )
