"""What an agent reads of the workers beside it."""

import os

from raybench.cluster.ray_cluster.nodes import read_output


def test_log_lines_omit_colours_and_ray_markers(tmp_path):
    (tmp_path / "worker-ab-01-77.out").write_text(":job_id:01\nfirst\n")
    (tmp_path / "worker-ab-01-77.err").write_bytes(b"\x1b[31mred\x1b[0m\x07\xff\n\n")
    (tmp_path / "worker-ab-01-78.err").write_text("another's\n")
    assert read_output(tmp_path, 77, {}) == "[stdout]\nfirst\n[stderr]\nred\ufffd"


def test_the_newer_of_two_logs_is_read(tmp_path):
    read_to = {}
    for age_s, name in [(100, "worker-older-77.err"), (0, "worker-new-77.err")]:
        (path := tmp_path / name).write_text(name)
        os.utime(path, (1e9 - age_s, 1e9 - age_s))
        assert read_output(tmp_path, 77, read_to) == f"[stderr]\n{name}"
    path.write_text("cut")
    assert read_output(tmp_path, 77, read_to) == ""


def test_output_keeps_the_last_progress_bar_state(tmp_path):
    out, err = (tmp_path / f"worker-ab-01-77.{kind}" for kind in ("out", "err"))
    out.write_text(":job_id:01\nfirst\n")
    read_to = {}
    assert read_output(tmp_path, 77, read_to) == "[stdout]\nfirst"
    assert read_output(tmp_path, 77, read_to) == ""
    with out.open("a") as file:
        file.write("second\n")
    err.write_text("\r 10%|#  |\r 100%|###|\nwarned\n")
    assert read_output(tmp_path, 77, read_to) == "[stdout]\nsecond\n[stderr]\n 100%|###|\nwarned"
    assert read_output(tmp_path, 78, {}) == ""


def test_only_the_end_of_long_output_is_kept(tmp_path):
    lines = [f"line {number:06}" for number in range(100_000)]
    (tmp_path / "worker-ab-01-77.out").write_text("\n".join(lines) + "\n")
    read_to = {"worker-ab-01-77.out": 12}
    output = read_output(tmp_path, 77, read_to)
    _, note, *kept = output.splitlines()
    assert len(output) < 34_000
    assert kept == lines[-len(kept) :]
    assert note == f"({1_200_000 - 32 * 1024 - 12} bytes before this are not kept)"
    assert read_to == {"worker-ab-01-77.out": 1_200_000}
