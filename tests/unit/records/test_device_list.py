"""The file that names the devices of a sweep."""

from dataclasses import replace
from pathlib import Path

import pytest
from commands import refusal_of

from raybench.errors import UsageError
from raybench.records.devices import read_device_list, write_device_list
from tests.unit.fakes import make_device

FIRST = "GPU-11111111-2222-3333-4444-555555555555"
SECOND = "GPU-aaaaaaaa-2222-3333-4444-555555555555"


def read(folder: Path, text: str) -> tuple[str, ...]:
    (path := folder / "healthy.txt").write_text(text, encoding="utf-8")
    return read_device_list(path).names


def test_list_drops_comments_blanks_and_repeats(tmp_path):
    text = f"\ufeff# of node7\n\n  {SECOND}  # GPU 3\n{FIRST}\nalpha-1.net:0\n{SECOND}\n"
    assert read(tmp_path, text) == (SECOND, FIRST, "alpha-1.net:0")


def test_what_is_written_is_read_again(tmp_path):
    cpu = make_device(kind="cpu", index=2, uuid="a/4711")
    devices = [make_device(uuid=SECOND), make_device(uuid=FIRST), cpu]
    path = tmp_path / "healthy.txt"
    write_device_list(path, devices, "4 of 5 devices\nby raybench health")
    assert read_device_list(path).names == tuple(device.lasting_name for device in devices)
    assert path.read_text().startswith("# 4 of 5 devices\n# by raybench health\n")
    assert f"{FIRST}  # host-a cuda:0\n" in path.read_text()
    # A CPU worker has the same name in its next process.
    assert cpu.lasting_name == replace(cpu, uuid="b/1", process_id=1).lasting_name == "host-a:2"


def test_host_needs_workers_up_to_last_number(tmp_path):
    read(tmp_path, f"alpha:1\nalpha:3\nbeta:0\n{FIRST}\n")
    assert read_device_list(tmp_path / "healthy.txt").cpu_workers() == {"alpha": 4, "beta": 1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "names no device; give one a line"),
        ("# none is healthy\n\n", "names no device; give one a line"),
        (f"{FIRST}\n\nGPU-12\n", ":3: expected the UUID of a GPU"),
        (f"{FIRST} {SECOND}\n", ":1: expected the UUID of a GPU"),
        ("0\n", "got '0'"),
        ("alpha:1\nalpha:01\n", ":2: expected the UUID of a GPU"),
        ("x" * 500, f"got '{'x' * 60}'"),
    ],
)
def test_invalid_list_is_one_line(tmp_path, text, problem):
    told = refusal_of(UsageError, read, tmp_path, text)
    assert problem in told
    assert "healthy.txt" in told


def test_inaccessible_list_is_one_line(tmp_path):
    with pytest.raises(UsageError, match=r"--devices .*none.txt: No such file or directory"):
        read_device_list(tmp_path / "none.txt")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not a text in UTF-8"):
        read_device_list(tmp_path / "binary")
    with pytest.raises(UsageError, match="cannot be written: Is a directory"):
        write_device_list(tmp_path, [make_device()], "")
