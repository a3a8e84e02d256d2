"""The reports of many nodes, sorted into nodes that pass, fail, are silent or were not tested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from raybench.health.node_files import READABLE, StoredReports, UnreadableReport
from raybench.records.node_report import NodeReport, NodeState
from raybench.results.columns import replace_file

# Clocks of nodes differ by less; a report from further ahead has a wrong clock.
_MOST_AHEAD_S = 300.0


class SilenceKind(StrEnum):
    """Why an expected node counts as silent."""

    NO_REPORT = "no report"
    UNREADABLE = "unreadable report"
    OLD = "old report"
    # The clock of the node is ahead, so that the age of its report is unknown.
    AHEAD = "report from the future"


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentNode:
    """An expected node without a fresh report."""

    host: str
    kind: SilenceKind
    # Age of the report; negative if the report is from the future.
    age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCollection:
    """What the expected nodes reported."""

    # Name as expected -> fresh report.
    reports: Mapping[str, NodeReport]
    silent: tuple[SilentNode, ...]
    # Hosts of reports of other nodes.
    others: tuple[str, ...]
    unreadable: tuple[UnreadableReport, ...]

    def hosts(self, *states: NodeState) -> tuple[str, ...]:
        """Return the nodes with one of these states, by the names that were expected."""
        return tuple(host for host, report in self.reports.items() if report.state in states)

    @property
    def passing(self) -> tuple[str, ...]:
        """Return the nodes that may run jobs, suspect nodes included."""
        return self.hosts(NodeState.HEALTHY, NodeState.SUSPECT)

    @property
    def failing(self) -> tuple[str, ...]:
        """Return the nodes with a device that must not be used."""
        return self.hosts(NodeState.DRAIN)

    @property
    def untested(self) -> tuple[str, ...]:
        """Return the nodes that reported that they could not be tested."""
        return self.hosts(NodeState.UNTESTED)

    @property
    def lists(self) -> Mapping[str, tuple[str, ...]]:
        """Return name of a list -> its nodes; each node is in one list."""
        return {
            "passing": self.passing,
            "failing": self.failing,
            "silent": tuple(node.host for node in self.silent),
            "untested": self.untested,
        }

    @property
    def exit_code(self) -> int:
        """Return 1 if a node fails, 3 if nodes are silent or untested, else 0."""
        if self.failing:
            return 1
        return 3 if self.silent or self.untested else 0


def collect_nodes(
    stored: StoredReports, expected: Sequence[str], now: datetime, max_age_s: float
) -> NodeCollection:
    """Sort the reports of a folder by the expected nodes.

    A node is found by its name, or by the part before the first dot if this part is unique.

    Args:
        stored: the reports.
        expected: names of nodes.
        now: with its time zone.
        max_age_s: a node whose check ended earlier is silent.
    """
    hosts = {*stored.reports, *(one.path.stem for one in stored.unreadable)}
    matches = dict(_matches(expected, hosts))
    reports: dict[str, NodeReport] = {}
    silent = []
    for name in expected:
        host = matches.get(name)
        report = stored.reports.get(host) if host else None
        if report is None:
            kind = SilenceKind.UNREADABLE if host else SilenceKind.NO_REPORT
            silent.append(SilentNode(host=name, kind=kind))
            continue
        began_ago_s = (now - datetime.fromisoformat(report.began)).total_seconds()
        age_s = began_ago_s - report.seconds
        if age_s > max_age_s:
            silent.append(SilentNode(host=name, kind=SilenceKind.OLD, age_s=age_s))
        elif age_s < -_MOST_AHEAD_S:
            silent.append(SilentNode(host=name, kind=SilenceKind.AHEAD, age_s=age_s))
        else:
            reports[name] = report
    others = sorted(stored.reports.keys() - set(matches.values()))
    return NodeCollection(
        reports=reports,
        silent=tuple(silent),
        others=tuple(others),
        unreadable=stored.unreadable,
    )


def _matches(expected: Sequence[str], hosts: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (expected name, host of a report); Slurm's names are often without the domain."""
    short_names = Counter(_short(name) for name in expected)
    by_short: dict[str, list[str]] = {}
    for host in hosts - set(expected):
        by_short.setdefault(_short(host), []).append(host)
    for name in expected:
        alike = by_short.get(_short(name), [])
        # Two names with two domains are two nodes.
        may_match = _short(name) == name or all(_short(host) == host for host in alike)
        if name in hosts:
            yield name, name
        elif len(alike) == 1 and short_names[_short(name)] == 1 and may_match:
            yield name, alike[0]


def _short(host: str) -> str:
    return host.partition(".")[0]


def write_lists(folder: Path, collection: NodeCollection) -> None:
    """Write `passing.txt`, `failing.txt`, `silent.txt` and `untested.txt`, one node a line.

    Raises:
        ResultsError: a file cannot be written.
    """
    for name, hosts in collection.lists.items():
        text = "".join(f"{host}\n" for host in hosts)
        replace_file(folder / f"{name}.txt", text.encode(), READABLE)
