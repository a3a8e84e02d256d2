"""A private Ray talks to nobody else, and whatever ends a driver or a worker leaves nothing."""

import os
import pty
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.orphans import family, hanging_sweep, lives, orphans_in
from tests.integration.sweeps import descendants, wait_for


@pytest.fixture(scope="module")
def private(place, tmp_path_factory):
    """A hanging sweep on a private Ray below `place`, and its folder; the last test kills it."""
    folder = tmp_path_factory.mktemp("private")
    own = {"HOME": "home", "RAYBENCH_LOCK_DIR": "locks"}
    (place / "home").mkdir()
    variables = {name: str(place / of_it) for name, of_it in own.items()}
    with hanging_sweep(folder, TMPDIR=str(place), **variables) as driver:
        yield driver, folder


def listening(processes):
    """The addresses on which these processes listen by TCP, one for each socket."""
    found = psutil.net_connections("tcp")
    return [one.laddr.ip for one in found if one.status == "LISTEN" and one.pid in processes]


def command_line(process_id):
    """Empty for a process that has ended meanwhile, as those that Ray starts and stops."""
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def raylet_and_head(processes):
    """Return the process of the raylet, and the address of the head."""
    raylet = next(pid for pid in processes if b"/raylet\0" in command_line(pid)[:200])
    words = command_line(raylet).split(b"\0")
    [head] = {word.decode()[14:] for word in words if word.startswith(b"--gcs-address=")}
    return raylet, head


def ask_without_token(head):
    """What Ray's head says to a process of this host that has no token."""
    ask = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
    asked = subprocess.run(
        [sys.executable, "-c", ask, head],
        env={"PATH": "/usr/bin:/bin", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return asked.stderr


@pytest.mark.long
def test_private_ray_listens_on_loopback_with_secret_token(private, place):
    driver, _ = private
    processes = {driver.pid, *descendants(driver.pid)}
    found = listening(processes)
    assert len(found) >= 5, "Ray's servers, the store and gloo"
    assert set(found) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, found
    [folder] = place.glob("raybench-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    raylet, head = raylet_and_head(processes)
    variables = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
    [secret] = [v[15:] for v in variables if v.startswith(b"RAY_AUTH_TOKEN=")]
    assert len(secret) == 64
    assert not [pid for pid in processes if secret in command_line(pid)]
    assert "RAY_AUTH_TOKEN" in ask_without_token(head)


def test_logs_of_a_private_ray_are_bounded(private):
    driver, _ = private
    raylet, _ = raylet_and_head(descendants(driver.pid))
    settings = Path(f"/proc/{raylet}/environ").read_text(encoding="utf-8").split("\0")
    variables = dict(setting.split("=", 1) for setting in settings if setting)
    backups = int(variables["RAY_ROTATION_BACKUP_COUNT"])
    # Python's handlers never rotate a file without a backup.
    assert backups > 0
    assert int(variables["RAY_ROTATION_MAX_BYTES"]) * (1 + backups) <= 16 * 2**20


# It drops its rights after the imports, for which it may need those of the user who runs the tests.
STRANGER = """\
import os, socket, sys
from ray._raylet import GcsClient
os.setgroups([]); os.setgid(65534); os.setuid(65534)
folder, process, head = sys.argv[1:]
session = f"{folder}/r/session_latest"
tries = {
    "list the folder": lambda: os.listdir(folder),
    "read the logs": lambda: os.listdir(f"{session}/logs"),
    "replace the folder": lambda: os.rename(folder, f"{folder}-old"),
    "replace the session": lambda: os.rename(session, f"{session}-old"),
    "write into it": lambda: open(f"{folder}/new", "w"),
    "talk to the store": lambda: socket.socket(socket.AF_UNIX).connect(
        f"{session}/sockets/plasma_store"
    ),
    "read variables": lambda: open(f"/proc/{process}/environ").read(),
}
for what, attempt in tries.items():
    try:
        attempt()
    except PermissionError:
        continue
    print(what)
print("join", flush=True)
GcsClient(address=head)
print("joined")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.long
def test_other_users_cannot_access_the_private_ray(private, place):
    driver, _ = private
    [folder] = place.glob("raybench-*")
    raylet, head = raylet_and_head(descendants(driver.pid))
    for variables in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}):
        tried = subprocess.run(
            [sys.executable, "-c", STRANGER, str(folder), str(raylet), head],
            env={"PATH": "/usr/bin:/bin", **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert tried.stdout == "join\n", "each line before it is something that it could do"
        assert "Auth" in tried.stderr


def test_killed_driver_leaves_nothing_of_its_ray(private, place):
    driver, folder = private
    assert len(family(folder)) > 8, "Ray's processes, two workers and their children"
    first, second = orphans_in(folder)
    rays = descendants(driver.pid)
    driver.kill()
    driver.wait()
    took_s = wait_for(lambda: not any(map(lives, first + second)), 15)
    all_took_s = took_s + wait_for(
        lambda: not family(folder) and not any(map(lives, rays)), 30 - took_s
    )
    wait_for(lambda: not list(place.glob("raybench-*")), within_s=15)
    left = {path.name for path in place.rglob("*")} - {"home"}
    assert not {name for name in left if "ray" in name or "token" in name}, left
    print(f"gone after the driver's SIGKILL: workers {took_s:.1f} s, all {all_took_s:.1f} s")


@pytest.mark.long
def test_a_closed_terminal_leaves_nothing(tmp_path):
    ours, theirs = pty.openpty()
    with hanging_sweep(tmp_path, terminal=theirs) as driver:
        rays = descendants(driver.pid)
        os.close(theirs)
        os.close(ours)
        took_s = wait_for(lambda: driver.poll() is not None and not family(tmp_path), 15)
        took_s += wait_for(lambda: not any(map(lives, rays)), 15 - took_s)
    print(f"gone after the terminal was closed: {took_s:.1f} s")
