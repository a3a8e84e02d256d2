"""The batch script for Slurm, on hosts of their own, with Slurm's commands played.

`srun` asks the test to run its command on all hosts, as slurmd does, and `scontrol` knows names and
addresses and notes that a job was queued again or a node drained. Nothing else of Slurm is played.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.namespaces import hosts, needs_hosts, only_child
from tests.integration.sweeps import table, wait_for_rows, write_text

_SRUN = """\
#!{python}
import json, os, pathlib, sys, time
words = sys.argv[1:]
while words[0].startswith("-"):
    words.pop(0)
asked = pathlib.Path("{folder}") / f"request-{{os.getpid()}}-{{time.time_ns()}}"
asked.with_suffix(".new").write_text(json.dumps([words, dict(os.environ)]))
asked.with_suffix(".new").rename(asked)
ended = asked.with_suffix(".ended")
while not ended.exists():
    time.sleep(0.2)
sys.exit(int(ended.read_text()))
"""
_SCONTROL = """\
#!/bin/bash
case "$1" in
  show) cut -d' ' -f1 {folder}/hosts ;;
  getaddrs) awk -v name="$2" '$1 == name {{print name ": " $2 ":6818"}}' {folder}/hosts ;;
  requeue) echo "$2" >> {folder}/requeued ;;
  update) echo "$@" >> {folder}/updated ;;
esac
"""


@contextmanager
def slurm(folder, hosts):
    """Play Slurm inside the `with` block; gives the variables of a job on these hosts."""
    folder.mkdir()
    (folder / "hosts").write_text("".join(f"{host.name} {host.address}\n" for host in hosts))
    for name, script in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        path = folder / name
        path.write_text(script.format(folder=folder, python=sys.executable))
        path.chmod(0o755)
    started = []
    has_ended = threading.Event()
    server = threading.Thread(target=_serve, args=(folder, hosts, started, has_ended))
    server.start()
    try:
        yield {
            "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": f"node[0-{len(hosts) - 1}]",
            "SLURM_NNODES": str(len(hosts)),
            "SLURM_CPUS_ON_NODE": "1",
            "SLURM_SUBMIT_DIR": str(Path.cwd()),
        }
    finally:
        has_ended.set()
        server.join()
        for process in started:
            process.kill()
            process.wait()


def _serve(folder, hosts, started, has_ended):
    """Run what `srun` asks for on all hosts, and tell it when all have ended."""
    running = {}
    while not has_ended.is_set():
        for request in sorted(folder.glob("request-*[0-9]")):
            words, variables = json.loads(request.read_text())
            request.unlink()
            running[request] = [
                _start(host, number, words, variables) for number, host in enumerate(hosts)
            ]
            started += running[request]
        for request, processes in list(running.items()):
            if None not in (codes := [process.poll() for process in processes]):
                request.with_suffix(".ended").write_text(str(max(map(abs, codes))))
                del running[request]
        time.sleep(0.1)


def _start(host, number, words, variables):
    own = {"SLURM_NODEID": str(number), "SLURMD_NODENAME": host.name}
    return subprocess.Popen(
        host.command(words), env={**variables, **host.environment, **own, "PATH": variables["PATH"]}
    )


LAUNCHERS = Path(__file__).parents[2] / "docs" / "launchers"
JOB = """\
workload: {kind: mlp, hidden: 64, layers: 2}
matrix: {world_size: [2], batch_size: [8, 16, 32, 64]}
measure: {warmup: 2, seconds: 6, max_seconds: 8, breakdown: false}
"""
PATIENCE_S = 240

pytestmark = [pytest.mark.long, needs_hosts]


@contextmanager
def batch_job(home, name, script="slurm.sbatch"):
    """Start the batch script on the first of two new hosts."""
    with hosts(2) as nodes, slurm(home / name, nodes) as variables:
        first = nodes[0]
        own = {"RAYBENCH_OUTPUT": f"{home}/results"}
        own["RAYBENCH_TMPDIR"] = first.environment["RAY_TMPDIR"]
        with subprocess.Popen(
            first.command(["bash", LAUNCHERS / script, home / "job.yaml"]),
            env={**first.environment, **variables, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as batch:
            yield batch


def test_timed_out_slurm_job_is_requeued_and_resumed(tmp_path):
    write_text(tmp_path, JOB)
    with batch_job(tmp_path, "first") as batch:
        wait_for_rows(batch, tmp_path, 1)
        os.kill(only_child(batch.pid), signal.SIGTERM)
        said, _ = batch.communicate(timeout=60)
        assert batch.returncode == 130, said
    assert (tmp_path / "first" / "requeued").read_text() == "7\n"
    assert 1 <= (table(tmp_path)["status"] == "ok").sum() < 4, said
    with batch_job(tmp_path, "second") as batch:
        said, _ = batch.communicate(timeout=PATIENCE_S)
        assert batch.returncode == 0, said
    assert not (tmp_path / "second" / "requeued").exists()
    points = table(tmp_path)
    ok = points[points["status"] == "ok"]
    assert len(ok) == ok["point_id"].nunique() == 4
    assert points["run_id"].nunique() == 1
    assert set(ok["node_count"]) == {2}


@pytest.mark.timeout(2 * PATIENCE_S + 60)
def test_symmetric_run_slurm_job_spans_both_hosts(tmp_path):
    write_text(tmp_path, JOB.replace("[8, 16, 32, 64]", "[8]") + "placement: {strategy: spread}\n")
    with batch_job(tmp_path, "slurm", "slurm-symmetric.sbatch") as batch:
        said, _ = batch.communicate(timeout=2 * PATIENCE_S)  # a minute of it for the head
        assert batch.returncode == 0, said
    points = table(tmp_path)
    assert list(points["status"]) == ["ok"], said
    assert list(points["node_count"]) == [2]


@pytest.mark.timeout(PATIENCE_S + 60)
def test_weekly_check_lists_all_nodes_of_its_job(tmp_path):
    reports = tmp_path / "checks" / "7"
    with hosts(2) as nodes, slurm(tmp_path / "slurm", nodes) as variables:
        first = nodes[0]
        own = {
            "RAYBENCH_REPORTS": str(tmp_path / "checks"),
            "RAYBENCH_TMPDIR": first.environment["RAY_TMPDIR"],
            "RAYBENCH_DRAIN": "yes",
            # One host of the job does not exist: it is silent.
            "SLURM_JOB_NODELIST": "node[0-2]",
        }
        done = subprocess.run(
            first.command(["bash", LAUNCHERS / "health-weekly.sbatch", "--only", "smoke"]),
            env={**first.environment, **variables, **own},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    said = done.stdout + done.stderr
    lists = {path.stem: path.read_text().split() for path in reports.glob("*ing.txt")}
    told = "".join(path.read_text() for path in reports.glob("node*.txt"))
    assert (reports / "silent.txt").read_text() == "node2\n", said + told
    assert done.returncode == 3, said
    assert lists["failing"] == []
    assert {path.stem for path in reports.glob("*.json")} == {"node0", "node1"}, told
    assert not (tmp_path / "slurm" / "updated").exists()
