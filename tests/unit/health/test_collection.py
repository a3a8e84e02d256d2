"""Which nodes pass, fail, are silent or were not tested."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from builders import make_node_report

from raybench.health.collection import SilenceKind, collect_nodes, write_lists
from raybench.health.node_files import StoredReports, UnreadableReport
from raybench.records.node_report import NodeState

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


def stored(*reports, unreadable=()):
    bad = tuple(UnreadableReport(path=Path(f"{name}.json"), reason="no") for name in unreadable)
    return StoredReports(reports={one.host: one for one in reports}, unreadable=bad)


def report(host, state=NodeState.HEALTHY, ago_s=600.0, seconds=60.0):
    began = (NOW - timedelta(seconds=ago_s)).isoformat()
    return make_node_report(host=host, state=state, began=began, seconds=seconds)


def collect(reports, expected):
    return collect_nodes(reports, expected, NOW, 3600.0)


def test_each_expected_node_is_in_one_list(tmp_path):
    states = {"a": "healthy", "b": "suspect", "c": "drain", "d": "untested"}
    reports = [report(host, NodeState(state)) for host, state in states.items()]
    collection = collect(stored(*reports, report("z")), ["e", "d", "c", "b", "a"])
    write_lists(tmp_path, collection)
    lists = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert lists == {
        "passing.txt": "b\na\n",
        "failing.txt": "c\n",
        "silent.txt": "e\n",
        "untested.txt": "d\n",
    }
    assert collection.others == ("z",)
    assert collection.hosts(NodeState.SUSPECT) == ("b",)


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["healthy", "suspect"], 0),
        (["healthy", "untested"], 3),
        (["healthy"], 3),
        (["drain", "untested"], 1),
    ],
)
def test_failing_nodes_outrank_silent_ones(states, code):
    reports = [report(host, NodeState(state)) for host, state in zip("ab", states, strict=False)]
    assert collect(stored(*reports), ["a", "b"]).exit_code == code


@pytest.mark.parametrize(
    ("ago_s", "seconds", "kind"),
    [
        (3500.0, 0.0, None),
        (3700.0, 0.0, SilenceKind.OLD),
        # What counts is the end of the check: a burn-in takes hours.
        (7300.0, 7200.0, None),
        (-60.0, 0.0, None),
        (-86400.0, 0.0, SilenceKind.AHEAD),
    ],
)
def test_old_report_is_no_answer(ago_s, seconds, kind):
    collection = collect(stored(report("a", ago_s=ago_s, seconds=seconds)), ["a"])
    assert [node.kind for node in collection.silent] == ([kind] if kind else [])
    assert collection.passing == (() if kind else ("a",))


def test_unreadable_report_is_silence():
    collection = collect(stored(unreadable=["a"]), ["a", "b"])
    kinds = {node.host: node.kind for node in collection.silent}
    assert kinds == {"a": SilenceKind.UNREADABLE, "b": SilenceKind.NO_REPORT}


@pytest.mark.parametrize(
    ("expected", "hosts", "passing"),
    [
        (["a"], ["a.site"], ["a"]),
        (["a.site"], ["a"], ["a.site"]),
        (["a", "a.site"], ["a.site"], ["a.site"]),
        (["a.one"], ["a.two"], []),
        (["a"], ["a.one", "a.two"], []),
    ],
)
def test_names_match_without_their_domain(expected, hosts, passing):
    collection = collect(stored(*map(report, hosts)), expected)
    assert list(collection.passing) == passing


def test_zone_of_the_node_does_not_matter():
    eastern = replace(report("a"), began="2026-11-30T19:55:00+08:00")
    assert collect(stored(eastern), ["a"]).passing == ("a",)
