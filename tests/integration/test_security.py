"""What strangers can do to raybench: with a cluster, a job file, and with their results."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from raybench.errors import ResultsError
from raybench.results.writer import RunStore, hold_run
from tests.integration.sweeps import RAYBENCH, write_text
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


# Sees no process that it has not started: a cluster of other tests would be joined.
ALONE = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")


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
def test_planted_cluster_is_neither_asked_nor_joined(tmp_path, place):
    token = place / "home" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text("a" * 64)
    token.chmod(0o600)
    usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with subprocess.Popen(
        [sys.executable, "-c", PLANTER, str(place / "ray")], stdout=subprocess.PIPE, text=True
    ) as planter:
        try:
            assert planter.stdout.readline() == "planted\n"
            command = [*RAYBENCH, "sweep", str(job(tmp_path)), "-o", str(tmp_path / "r")]
            done = subprocess.run(
                [*ALONE, *command, "--device", "cpu"],
                env={**usual, "HOME": str(place / "home"), "TMPDIR": str(place)},
                capture_output=True,
                text=True,
            )
        finally:
            planter.kill()
        assert planter.stdout.read() == "", "nobody has connected"
    assert done.returncode == 0, done.stderr
    told = r"^private Ray on this host \(the cluster at \S+ is gone or another user's"
    assert re.search(told, done.stderr, re.MULTILINE)
    assert token.read_text() == "a" * 64


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
def test_job_file_creates_nothing_but_a_workload(workload, tmp_path, command, monkeypatch):
    path = job(tmp_path, workload)
    monkeypatch.chdir(tmp_path)
    done = command("plan", path, results=None)
    assert done.code == 2
    assert len(done.err.splitlines()) == 1, done.err
    assert "workload" in done.err
    assert not Path("pwned").exists()


@pytest.mark.parametrize("place", ["points", "points/run-a", "traces/run-a", "runs/run-a/.driver"])
def test_sweep_refuses_links_that_leave_results(place, tmp_path):
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "results"
    elsewhere.mkdir()
    (root / place).parent.mkdir(parents=True)
    target = elsewhere / "new" if place.endswith(".driver") else elsewhere
    (root / place).symlink_to(target)
    with pytest.raises(ResultsError, match="leads out of"), hold_run(root, "run-a"):
        pass
    assert list(elsewhere.iterdir()) == []


def test_markdown_escapes_markup_in_foreign_texts(tmp_path, command):
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
