"""What is said of nodes and of their reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raybench.records.node_report import (
    DrainKind,
    DrainReason,
    NodeReport,
    NodeState,
    UntestedReason,
)
from raybench.report.formatting import counted, sentence, some

_DRAIN: Mapping[DrainKind, str] = {
    DrainKind.FAILED_TWICE: "{device} failed twice in {test}",
    DrainKind.STUCK: "{device} hangs in the driver in {test}",
    DrainKind.DRIVER_ERROR: "the driver reports errors of {device}: {test}",
}
_MOST_REASONS = 2
# State -> status word at the start of a Nagios line.
_NAGIOS: Mapping[NodeState, str] = {
    NodeState.HEALTHY: "OK",
    NodeState.SUSPECT: "WARNING",
    NodeState.DRAIN: "CRITICAL",
    NodeState.UNTESTED: "UNKNOWN",
}
NO_RESULT = "the check ended with an error"


def drain_reason(reason: DrainReason) -> str:
    """Return why a device must not be used."""
    return _DRAIN[reason.kind].format(device=reason.device, test=reason.test)


def untested_reason(reason: UntestedReason) -> str:
    """Return why a node was not tested."""
    return f"{reason.kind}: {reason.detail}" if reason.detail else reason.kind.value


def why(report: NodeReport) -> str:
    """Return why a node is in its state; "" if the node is healthy."""
    reasons: list[str] = []
    if report.state is NodeState.DRAIN:
        reasons = [drain_reason(reason) for reason in report.drain]
    elif report.state is NodeState.SUSPECT:
        reasons = [
            f"{finding.subject.name} is {finding.verdict} in {finding.test}"
            for finding in report.findings
            if finding.verdict.is_suspect_or_bad and not finding.culprit
        ]
    elif report.state is NodeState.UNTESTED:
        reasons = [untested_reason(reason) for reason in report.untested]
    reasons = list(dict.fromkeys(reasons))
    shown, hidden = reasons[:_MOST_REASONS], len(reasons) - _MOST_REASONS
    if hidden > 0:
        shown.append(f"and {hidden} more")
    return "; ".join(shown)


def node_line(report: NodeReport) -> str:
    """Return `alpha: drain: alpha GPU 3 failed twice in same bits fp32 2048`."""
    return ": ".join(filter(None, (report.host, report.state.value, why(report))))


def nagios_line(reports: Sequence[NodeReport]) -> str:
    """Return the first line of a plugin of Nagios: the worst state, and the nodes in it."""
    if not reports:
        return f"{_NAGIOS[NodeState.UNTESTED]} - {NO_RESULT}"
    worst_first = list(NodeState)
    worst = min((report.state for report in reports), key=worst_first.index)
    worst_reports = [report for report in reports if report.state is worst]
    text = f"{counted(len(worst_reports), 'node')} healthy"
    if worst is not NodeState.HEALTHY:
        text = "; ".join(map(node_line, worst_reports))
    return f"{_NAGIOS[worst]} - {text}"


def not_this_host(hosts: Sequence[str]) -> str:
    """Return why no metrics were written."""
    return f"--textfile: not written: this host is not among the checked nodes: {some(hosts)}"


def ended_with_error(code: int) -> str:
    """Return the line for a scheduler if a check ended with an error; `code` as for Slurm."""
    return f"raybench health: {NO_RESULT}, so no node is drained (exit code {code})"


def collected(hosts_of_state: Mapping[str, Sequence[str]], suspect: Sequence[str]) -> str:
    """Return a traffic light, and how many nodes pass, fail, are silent or untested.

    Args:
        hosts_of_state: "passing", "failing", "silent" and "untested" -> nodes.
        suspect: passing nodes in which something was slow or wrong, but not surely.
    """
    counts = {state: len(hosts) for state, hosts in hosts_of_state.items()}
    total = sum(counts.values())
    light = "Green"
    if counts["failing"]:
        light = "Red"
    elif counts["passing"] < total:
        light = "Amber"
    phrases: list[str] = []
    for state, singular, plural in (
        ("failing", "fails", "fail"),
        ("silent", "is silent", "are silent"),
        ("untested", "was not tested", "were not tested"),
        ("passing", "passes", "pass"),
    ):
        if count := counts[state]:
            # Only the first phrase names the number of all nodes.
            of_total = "" if phrases else f" of {counted(total, 'node')}"
            phrases.append(f"{count}{of_total} {singular if count == 1 else plural}")
    if counts["passing"] == total:
        phrases = [f"all {total} nodes pass" if total > 1 else "the node passes"]
    if suspect:
        verb = "is" if len(suspect) == 1 else "are"
        # The last phrase is about the passing nodes.
        phrases[-1] += f", of which {len(suspect)} {verb} suspect"
    return f"{light}: {sentence('; '.join(phrases))}"


def age(seconds: float) -> str:
    """Return about how long ago something was: `3 days`, `5 h`, `12 min`."""
    minutes = round(abs(seconds) / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = round(minutes / 60)
    return f"{hours} h" if hours < 48 else f"{round(hours / 24)} days"
