"""Reports of nodes as files of a shared folder."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from builders import make_finding, make_node_report

from raybench.health.node_files import read_node_reports, write_node_report
from raybench.records.devices import Action, Verdict
from raybench.records.node_report import (
    DrainKind,
    DrainReason,
    NodeState,
    UntestedKind,
    UntestedReason,
)


def test_report_is_read_as_written(tmp_path):
    report = make_node_report(
        state=NodeState.DRAIN,
        drain=(DrainReason(kind=DrainKind.STUCK, device="alpha GPU 0", test="gemm"),),
        untested=(UntestedReason(kind=UntestedKind.BUSY, detail="ünïcode\nline"),),
        findings=(
            make_finding(verdict=Verdict.BAD, action=Action.RESET, ratio=None),
            make_finding(value=None),
        ),
    )
    path = write_node_report(tmp_path, report)
    assert path.name == "alpha.json"
    stored = read_node_reports(tmp_path)
    assert (stored.reports, stored.unreadable) == ({"alpha": report}, ())


def test_infinite_ratio_leaves_a_valid_file(tmp_path):
    report = make_node_report(findings=(make_finding(ratio=float("inf"), value=float("nan")),))
    path = write_node_report(tmp_path, report)
    json.loads(path.read_text(), parse_constant=pytest.fail)
    [read] = read_node_reports(tmp_path).reports.values()
    assert (read.findings[0].ratio, read.findings[0].value) == (None, None)


def test_file_is_readable_by_others_despite_umask(tmp_path):
    before = os.umask(0o077)
    try:
        path = write_node_report(tmp_path, make_node_report())
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda fields: fields | {"schema_version": 2}, "schema_version must be 1, got 2"),
        (lambda fields: fields | {"state": "fine"}, "state: "),
        (lambda fields: fields | {"seconds": "60"}, "seconds: "),
        (lambda fields: fields | {"seconds": float("inf")}, "seconds: must be a number"),
        (lambda fields: fields | {"seconds": -1e300}, "seconds: must be a number"),
        (lambda fields: fields | {"host": "beta"}, "host: must be alpha"),
        (lambda fields: fields | {"began": "2026-11-30T10:00:00"}, "began: must be a time"),
        (lambda fields: fields | {"began": "yesterday"}, "began: must be a time"),
        (lambda fields: {name: fields[name] for name in fields if name != "devices"}, "devices: "),
        (lambda fields: [fields], "schema_version must be 1, got None"),
    ],
)
def test_bad_file_is_named_with_its_fault(change, reason, tmp_path):
    path = write_node_report(tmp_path, make_node_report())
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    stored = read_node_reports(tmp_path)
    [bad] = stored.unreadable
    assert stored.reports == {}
    assert bad.reason.startswith(reason)
    assert "\n" not in bad.reason


@pytest.mark.parametrize("content", [b"", b'{"schema_version": 1, "ho', b"\xff\xfe", b"[" * 5000])
def test_damaged_file_spoils_no_other(content, tmp_path):
    write_node_report(tmp_path, make_node_report())
    (tmp_path / "beta.json").write_bytes(content)
    stored = read_node_reports(tmp_path)
    assert list(stored.reports) == ["alpha"]
    assert [bad.path.name for bad in stored.unreadable] == ["beta.json"]


def test_pipes_and_huge_files_are_not_read(tmp_path):
    write_node_report(tmp_path, make_node_report())
    os.mkfifo(tmp_path / "beta.json")
    with (tmp_path / "gamma.json").open("wb") as huge:
        huge.truncate(2**30)
    stored = read_node_reports(tmp_path)
    assert list(stored.reports) == ["alpha"]
    assert [bad.reason for bad in stored.unreadable] == [
        "not a regular file",
        "larger than 32 MiB",
    ]


def test_later_version_may_add_fields(tmp_path):
    path = write_node_report(tmp_path, make_node_report())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"firmware": "1.2"}))
    assert list(read_node_reports(tmp_path).reports) == ["alpha"]


WRITER = """
import sys
sys.path.insert(0, "tests/unit")
from pathlib import Path
from builders import make_finding, make_node_report
from raybench.health.node_files import write_node_report
report = make_node_report(host=sys.argv[2], findings=(make_finding(),) * 300)
for _ in range(60):
    write_node_report(Path(sys.argv[1]), report)
"""


@pytest.mark.long
def test_many_nodes_write_while_one_reads(tmp_path):
    hosts = [f"node{number}" for number in range(4)]
    # Twice the same host: a prolog and a weekly check may end at the same time.
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), host])
        for host in [*hosts, hosts[0]]
    ]
    while any(writer.poll() is None for writer in writers):
        assert read_node_reports(tmp_path).unreadable == ()
    assert [writer.returncode for writer in writers] == [0] * 5
    assert sorted(read_node_reports(tmp_path).reports) == hosts
    assert len(list(tmp_path.iterdir())) == 4


def test_strange_host_name_cannot_leave_the_folder(tmp_path):
    from raybench.errors import ResultsError

    with pytest.raises(ResultsError, match="cannot be a file name"):
        write_node_report(tmp_path, replace(make_node_report(), host="../alpha"))
