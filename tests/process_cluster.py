"""The cluster of plain processes as tests use it: its workers are there in a moment.

They are forks of a server that has loaded torch, and their agent is a thread of the test. All else
is the product's: the messages, the process groups, and what ends a point.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import Client
from pathlib import Path

from raybench.cluster.processes.agent import Agent, HostFacts, serve
from raybench.cluster.processes.channel import Door
from raybench.cluster.processes.cluster import ProcessCluster
from raybench.cluster.processes.connection import Joined, Meeting
from raybench.cluster.processes.worker_process import WorkerOrder
from raybench.cluster.processes.workers import Slot

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["raybench.worker.worker"])


def serve_fork(order: WorkerOrder, environment: Mapping[str, str], logs: Path) -> None:
    """Be a worker that writes to its log."""
    from raybench.cluster.processes.worker_process import serve as serve_driver

    for descriptor, kind in ((1, "out"), (2, "err")):
        path = logs / f"worker-{order.index}-{os.getpid()}.{kind}"
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(environment)
    serve_driver(order)


class Fork:
    """A fork as the agent knows a process."""

    def __init__(self, order: WorkerOrder, environment: Mapping[str, str], logs: Path) -> None:
        arguments = (order, environment, logs)
        self._process = _CONTEXT.Process(target=serve_fork, args=arguments, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        import subprocess

        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self._process.exitcode


def start_forks(count: int, logs: Path) -> ProcessCluster:
    """The cluster of so many CPU workers, which are not started yet."""
    folder = Path(tempfile.mkdtemp(prefix="raybench-"))
    meeting = Meeting(Door(address=str(folder / "door"), secret=b"test"), folder)
    host = socket.gethostname()
    facts = HostFacts(
        rank=0,
        node_id=host,
        host=host,
        rack="",
        cpus={n: f"{host}:{n}" for n in range(count)},
        gpus={},
    )

    def look_after() -> None:
        connection = Client(str(folder / "door"), authkey=b"test")
        connection.send(facts)
        serve(connection, Agent(logs, Fork))

    threading.Thread(target=look_after, daemon=True).start()
    hosts = meeting.wait_for(1, timeout_s=10.0)
    slots = tuple(
        Slot(host=one, index=index, name=name)
        for one in hosts
        for index, name in facts.cpus.items()
    )
    return ProcessCluster(
        Joined(where="forks", kind="cpu", meeting=meeting, hosts=hosts, slots=slots)
    )
