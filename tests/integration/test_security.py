"""What strangers can do to raybench: on its ports, with a job file, and with their results."""

import os
import re
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from raybench.errors import ResultsError
from raybench.results.lock import hold_run
from raybench.results.writer import RunStore
from tests.integration.sweeps import RAYBENCH, begin, descendants, wait_for, write_text
from tests.unit.builders import (
    make_device,
    make_failed,
    make_measure,
    make_point,
    make_record,
    make_run,
)
from tests.unit.commands import command

__all__ = ["command"]  # a fixture

# Markup of HTML, of Markdown and of rich, and a line that goes on.
EVIL = "[red]boo[/red] | a <script>alert(1)</script> `x` ![i](//h/p.png) @you\nlast"


def job(folder, workload="{kind: mlp}"):
    write_text(folder, f"workload: {workload}\nmatrix: {{world_size: 1, batch_size: 4}}\n")
    return folder / "job.yaml"


def listening(family):
    """The addresses on which these processes listen by TCP, one for each socket."""
    found = psutil.net_connections("tcp")
    return [one.laddr.ip for one in found if one.status == "LISTEN" and one.pid in family]


def family_of(driver):
    return {driver, *descendants(driver)}


@pytest.fixture
def place():
    """A folder as /tmp is, short enough for Ray's sockets, which pytest's own are not."""
    with TemporaryDirectory(prefix="rb", dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def environment(place):
    """Of a user whose home is below this folder, too."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    home = place / "home"
    home.mkdir(exist_ok=True)
    locks = str(place / "locks")
    return {**usual, "HOME": str(home), "TMPDIR": str(place), "RAYBENCH_LOCK_DIR": locks}


LONG = """\
workload: {kind: mlp, hidden: 8}
matrix: {world_size: 2, batch_size: 1}
baseline: {world_size: 2}
measure: {iterations: 1000000, timeout_s: 600}
"""


@contextmanager
def measuring(folder, place):
    """All processes of a sweep of two workers, which does not end by itself; it is killed."""
    write_text(folder, LONG)
    with begin(folder, stdout=subprocess.DEVNULL, env=environment(place)) as driver:
        try:
            yield _when_measuring(driver.pid)
        finally:
            driver.kill()


def test_a_private_ray_listens_on_loopback_alone_with_a_token_that_nobody_else_ever_sees(
    tmp_path, place
):
    with measuring(tmp_path, place) as family:
        found = listening(family)
        asked = _ask_without_token(family)
        [folder] = place.glob("raybench-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        raylet = next(pid for pid in family if b"/raylet\0" in _command_line(pid)[:200])
        variables = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
        [secret] = [v[15:] for v in variables if v.startswith(b"RAY_AUTH_TOKEN=")]
        assert len(secret) == 64
        assert not [pid for pid in family if secret in _command_line(pid)]
    assert len(found) >= 5, "Ray's servers, the store and gloo"
    assert set(found) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, found
    assert "RAY_AUTH_TOKEN" in asked
    wait_for(lambda: not folder.exists(), within_s=15)
    left = {path.name for path in place.rglob("*")} - {"home"}
    assert not {name for name in left if "ray" in name or "token" in name}, left


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
# Sees no process that it has not started: a cluster of other tests would be joined.
ALONE = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


@needs_root
@pytest.mark.long
def test_another_user_of_the_host_gets_neither_the_token_nor_the_session_nor_into_ray(
    tmp_path, place
):
    with measuring(tmp_path, place) as family:
        [folder] = place.glob("raybench-*")
        raylet = next(pid for pid in family if b"/raylet\0" in _command_line(pid)[:200])
        words = [str(folder), str(raylet), _head_of(family)]
        for variables in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}):
            tried = subprocess.run(
                [sys.executable, "-c", STRANGER, *words],
                env={"PATH": "/usr/bin:/bin", **variables},
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert tried.stdout == "join\n", "each line before it is something that it could do"
            assert "Auth" in tried.stderr


# Listens, and writes its address to where Ray looks for the cluster of this host.
PLANTER = """\
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
listener = socket.create_server(("127.0.0.1", 0))
os.makedirs(sys.argv[1])
with open(f"{sys.argv[1]}/ray_current_cluster", "w") as file:
    file.write(f"127.0.0.1:{listener.getsockname()[1]}")
print("planted", flush=True)
while True:
    print("asked by", listener.accept()[1], flush=True)
"""


@needs_root
@pytest.mark.long
def test_a_cluster_that_another_user_has_planted_is_neither_asked_nor_joined(tmp_path, place):
    variables = environment(place)
    token = place / "home" / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("a" * 64)
    token.chmod(0o600)
    with subprocess.Popen(
        [sys.executable, "-c", PLANTER, str(place / "ray")], stdout=subprocess.PIPE, text=True
    ) as planter:
        try:
            assert planter.stdout.readline() == "planted\n"
            command = [*RAYBENCH, "sweep", str(job(tmp_path)), "-o", str(tmp_path / "r")]
            done = subprocess.run(
                [*ALONE, *command, "--device", "cpu"],
                env=variables,
                capture_output=True,
                text=True,
            )
        finally:
            planter.kill()
        assert planter.stdout.read() == "", "nobody has connected"
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert re.match(
        r"private Ray on this host \(the cluster at \S+ is gone or another user's", first
    )
    assert token.read_text() == "a" * 64


def _when_measuring(driver):
    """All processes of a driver, once its two workers are in a point."""

    def are_in_a_point():
        titles = [_command_line(pid) for pid in family_of(driver)]
        return sum(title.startswith(b"ray::_Worker.run") for title in titles) == 2

    wait_for(are_in_a_point, within_s=180)
    time.sleep(1)
    return family_of(driver)


def _command_line(process_id):
    """Empty for a process that has ended meanwhile, as those that Ray starts and stops."""
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _head_of(family):
    words = [w for pid in family for w in _command_line(pid).split(b"\0")]
    [head] = {word.decode()[14:] for word in words if word.startswith(b"--gcs-address=")}
    return head


def _ask_without_token(family):
    """What Ray's head says to a process of this host that has no token."""
    ask = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
    asked = subprocess.run(
        [sys.executable, "-c", ask, _head_of(family)],
        env={"PATH": "/usr/bin:/bin", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return asked.stderr


HOSTILE_WORKLOADS = {
    "a tag that calls": "!!python/object/apply:os.system [touch pwned]",
    "a tag deeper down": "{kind: mlp, hidden: !!python/name:os.system x}",
    "a function": "{kind: 'os:system', command: touch pwned}",
    "a class that would be a process": "{kind: 'subprocess:Popen', args: touch pwned}",
    "a function of a function": "{kind: 'os:system.__call__'}",
    "a path": "{kind: '/tmp/evil:Evil'}",
    "code": '{kind: \'__import__("os").system("touch pwned"):X\'}',
}


@pytest.mark.parametrize("workload", HOSTILE_WORKLOADS.values(), ids=HOSTILE_WORKLOADS.keys())
def test_a_job_file_calls_and_makes_nothing_but_a_workload(
    workload, tmp_path, command, monkeypatch
):
    path = job(tmp_path, workload)
    monkeypatch.chdir(tmp_path)
    done = command("plan", path, results=None)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1, done.err
    assert "workload" in done.err
    assert not Path("pwned").exists()


@pytest.mark.parametrize("place", ["points", "points/run-a", "traces/run-a", "runs/run-a/.driver"])
def test_a_link_in_results_does_not_lead_a_sweep_out_of_them(place, tmp_path):
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "results"
    elsewhere.mkdir()
    (root / place).parent.mkdir(parents=True)
    target = elsewhere / "new" if place.endswith(".driver") else elsewhere
    (root / place).symlink_to(target)
    with pytest.raises(ResultsError, match="leads out of"), hold_run(root, "run-a"):
        pass
    assert list(elsewhere.iterdir()) == []


def test_markdown_of_others_texts_has_no_markup_of_theirs(tmp_path, command):
    told = make_run("run-a", job_name=EVIL, job_text=EVIL, cluster=EVIL, tags={EVIL: EVIL})
    store = RunStore.create(tmp_path, told, make_measure())
    device = make_device(0, name=EVIL, host=EVIL, node_id=EVIL, driver_version=EVIL)
    store.write_devices([device])
    of = {"params": {"hidden": EVIL, "grad_accumulation": 1}, "workload": f"w:{EVIL}"}
    fault = {"error_type": EVIL, "error_message": EVIL}
    failed = make_failed(make_point(world_size=2, **of), devices=(device,) * 2, **fault)
    records = [make_record(make_point(**of), devices=(device,)), failed]
    store.write_records(list(enumerate(records)))
    text = command("report", "run-a", "--format", "md").out
    assert "boo" in text
    # What is escaped is text, and so is everything in a code span.
    prose = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", re.sub(r"\\.", "", text))
    for markup in ("<script", "![", "[i]", "@you"):
        assert markup in EVIL
        assert markup not in prose
