"""What an agent reads of the workers beside it."""

from __future__ import annotations

import os
import subprocess

from raybench.cluster.node_processes import kill_siblings, log_tail
from raybench.cluster.ray_placement import shares


def test_the_tail_of_a_log_is_its_last_lines_without_colours_and_marks_of_ray(tmp_path):
    (tmp_path / "worker-ab-01-77.out").write_text(
        ":job_id:01\n" + "".join(f"line {number}\n" for number in range(70))
    )
    (tmp_path / "worker-ab-01-77.err").write_bytes(b"\x1b[31mred\x1b[0m\x07\xff\n\n")
    (tmp_path / "worker-ab-01-78.err").write_text("another's\n")
    lines = log_tail(tmp_path, 77).splitlines()
    assert lines == [*(f"line {number}" for number in range(11, 70)), "red\ufffd"]
    assert log_tail(tmp_path, 79) == ""


def test_of_two_logs_of_one_process_id_the_newer_is_read(tmp_path):
    for age_s, name in [(100, "worker-old-77.err"), (0, "worker-new-77.err")]:
        path = tmp_path / name
        path.write_text(name)
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
    assert log_tail(tmp_path, 77) == "worker-new-77.err"


def test_only_a_sibling_is_killed():
    with subprocess.Popen(["sleep", "60"]) as child:
        kill_siblings([child.pid, 2**22 + 1])
        assert child.poll() is None
        child.kill()


def test_pack_fills_the_fullest_nodes_and_spread_takes_from_all_in_turn():
    free = {"a": 2, "b": 4, "c": 1}
    assert shares(free, 5, "pack") == {"b": 4, "a": 1}
    assert shares(free, 5, "spread") == {"b": 2, "a": 2, "c": 1}
    assert shares(free, 9, "pack") == shares(free, 9, "spread") == {"b": 4, "a": 2, "c": 1}
    assert shares({}, 3, "spread") == {}
