"""Slurm's commands as far as a batch script of ours uses them, for the hosts of a test.

`srun` asks the test to run its command on all hosts, as slurmd does, and `scontrol` knows names and
addresses and notes that a job was queued again. Nothing else of Slurm is played.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.integration.namespaces import Host

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
esac
"""


@contextmanager
def slurm(folder: Path, hosts: Sequence[Host]) -> Iterator[dict[str, str]]:
    """Play Slurm inside the `with` block; gives the variables of a job on these hosts."""
    folder.mkdir()
    (folder / "hosts").write_text("".join(f"{host.name} {host.address}\n" for host in hosts))
    for name, script in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        path = folder / name
        path.write_text(script.format(folder=folder, python=sys.executable))
        path.chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []
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


def _serve(
    folder: Path,
    hosts: Sequence[Host],
    started: list[subprocess.Popen[bytes]],
    has_ended: threading.Event,
) -> None:
    """Run what `srun` asks for on all hosts, and tell it when all have ended."""
    running: dict[Path, list[subprocess.Popen[bytes]]] = {}
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


def _start(
    host: Host, number: int, words: Sequence[str], variables: dict[str, str]
) -> subprocess.Popen[bytes]:
    own = {"SLURM_NODEID": str(number), "SLURMD_NODENAME": host.name}
    return subprocess.Popen(
        host.command(words), env={**variables, **host.environment, **own, "PATH": variables["PATH"]}
    )
