"""What looks after the workers of one host, or of one process of an srun or a torchrun.

It starts and kills them, and does what a NodeAgent does. The driver asks it by messages.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from raybench.cluster import proc, reaper
from raybench.cluster.node_agent import NodeAgent
from raybench.cluster.processes.channel import BROKEN, Door
from raybench.cluster.processes.started import StartedProcess
from raybench.cluster.processes.worker_process import WorkerOrder
from raybench.cluster.worker_environment import worker_environment
from raybench.hardware import nvml
from raybench.records.environment import usable_cores

# Not by -m, which would make a second module of it, with classes of its own.
_RUN_WORKER = "from raybench.cluster.processes.worker_process import main; main()"
# How often it says that it lives.
BEAT_S = 1.0
_END_S = 2.0
# What a launcher says of its own processes: a worker is none of them.
_OF_LAUNCHERS = ("SLURM_", "PMI", "OMPI_", "TORCHELASTIC_", "RAYBENCH_SECRET", "MASTER_")
_OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What an agent says of its host. rank: of its process among those of an srun or a torchrun.

    rack: of the host; empty where nobody tells.
    cpus, gpus: numbers of the devices that it may use -> their lasting names.
    """

    rank: int
    node_id: str
    host: str
    rack: str
    cpus: Mapping[int, str]
    gpus: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOrder:
    """What the driver's own agent is to be. started: who has started the driver."""

    door: Door
    started: StartedProcess | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How a worker's process has ended. exit_code: negative for a signal.

    killed_for_memory: by SIGKILL, and the kernel has killed a process for want of memory.
    """

    exit_code: int
    killed_for_memory: bool

    def __str__(self) -> str:
        if self.killed_for_memory:
            return "died by SIGKILL: its host has run out of memory"
        if self.exit_code < 0:
            return f"died by {signal.Signals(-self.exit_code).name}"
        return f"ended with exit code {self.exit_code}"


class Process(Protocol):
    """A process that was started: `subprocess.Popen`, as far as it is used."""

    @property
    def pid(self) -> int:
        """Return its number."""

    def kill(self) -> None:
        """End it by SIGKILL."""

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code, negative for a signal."""


Start = Callable[[WorkerOrder, Mapping[str, str], Path], Process]


def start_process(order: WorkerOrder, environment: Mapping[str, str], logs: Path) -> Process:
    """Start a worker whose variables are those of this process and these."""
    files = [logs / f"starting-{order.token}.{kind}" for kind in ("out", "err")]
    with files[0].open("ab") as out, files[1].open("ab") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", _RUN_WORKER],
            env={**_inheritance(), **environment, reaper.MARK: reaper.new_mark()},
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
        )
    assert process.stdin is not None
    with process.stdin as stdin, suppress(BrokenPipeError):
        stdin.write(pickle.dumps(order))
    for file in files:
        file.rename(logs / f"worker-{order.index}-{process.pid}{file.suffix}")
    return process


def _inheritance() -> dict[str, str]:
    """Return the variables of this process without what launchers have said of it."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OF_LAUNCHERS) and name not in _OF_TORCHRUN
    }


class Agent(NodeAgent):
    """Looks after its own child processes. start: how one of them is started."""

    def __init__(self, logs: Path, start: Start = start_process) -> None:
        super().__init__()
        self._folder, self._start = logs, start
        self._workers: dict[int, Process] = {}
        self._kills_before = _kills_for_memory()

    @property
    def logs(self) -> Path:
        """The folder with what the workers write."""
        return self._folder

    def start_worker(self, order: WorkerOrder, environment: Mapping[str, str]) -> int:
        """Start a worker with these variables of a job; return the number of its process."""
        process = self._start(order, {**worker_environment(), **environment}, self._folder)
        self._workers[process.pid] = process
        return process.pid

    def kill(self, process_ids: Sequence[int]) -> None:
        """SIGKILL those that are its workers, and wait for their end."""
        there = [self._workers[one] for one in process_ids if one in self._workers]
        for process in there:
            process.kill()
        for process in there:
            with suppress(subprocess.TimeoutExpired):  # the driver finds its memory in use
                process.wait(_END_S)

    def end_of(self, process_id: int, timeout_s: float = _END_S) -> WorkerEnd | None:
        """Say how a worker that ends now has ended; None where it does not."""
        try:
            code = self._workers[process_id].wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        killed_for_memory = code == -signal.SIGKILL and _kills_for_memory() > self._kills_before
        return WorkerEnd(exit_code=code, killed_for_memory=killed_for_memory)

    def close(self) -> None:
        """Kill all workers."""
        self.kill(list(self._workers))


def _kills_for_memory() -> int:
    """How often the kernel has killed for want of memory since the host was started."""
    lines = (line.split() for line in proc.read_host("vmstat").splitlines())
    return sum(int(value) for name, value in lines if name == "oom_kill")


def describe_host(started: StartedProcess | None) -> HostFacts:
    """Say what this process may use of its host: its share, where others are beside it."""
    gpus, host, cpus = visible_gpus(), socket.gethostname(), [*range(usable_cores())]
    if started is not None and started.local_world_size > 1:
        cpus = [started.local_rank]
        if len(gpus) > 1:
            gpus = dict(list(gpus.items())[started.local_rank :: started.local_world_size])
    return HostFacts(
        rank=started.rank if started else 0,
        node_id=f"{host}/{started.node}" if started else host,
        host=host,
        rack=started.rack if started else "",
        cpus={number: f"{host}:{number}" for number in cpus},
        gpus=gpus,
    )


def visible_gpus() -> dict[int, str]:
    """Find the UUIDs of the GPUs that torch counts here, by its numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(nvml.devices()) if visible is None else len([e for e in visible.split(",") if e])
    uuids = {index: nvml.uuid_of(index) for index in range(count)}
    return {index: uuid for index, uuid in uuids.items() if uuid is not None}


def serve(connection: Connection, agent: Agent) -> None:
    """Do what the driver asks until it is gone, then end all workers.

    A request is (number, method, arguments), its answer (number, result or exception); (0, None)
    says that this process lives.
    """
    lock, ended = threading.Lock(), threading.Event()

    def send(message: object) -> None:
        with lock, suppress(*BROKEN):
            connection.send(message)

    def do(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = getattr(agent, method)(*arguments)
        except Exception as error:  # it is the driver's
            result = error
        send((number, result))

    def beat() -> None:
        while not ended.wait(BEAT_S):
            send((0, None))

    threading.Thread(target=beat, name="beat", daemon=True).start()
    with ThreadPoolExecutor(max_workers=4) as threads, suppress(*BROKEN):
        while True:
            threads.submit(do, *connection.recv())
    ended.set()
    agent.close()


def serve_from(door: Door, facts: HostFacts, timeout_s: float) -> None:
    """Be the agent of this process until the driver is gone. Raises ClusterError without one."""
    # These are for the driver, which ends all others.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    connection = door.enter(facts, timeout_s)
    logs = Path(tempfile.mkdtemp(prefix="raybench-logs-"))
    with reaper.reap_orphans_of_children(logs):
        try:
            serve(connection, Agent(logs))
        finally:
            shutil.rmtree(logs, ignore_errors=True)


def main() -> None:
    """Be the driver's own agent. Its AgentOrder comes by stdin, a pickle."""
    order: AgentOrder = pickle.load(sys.stdin.buffer)
    serve_from(order.door, describe_host(order.started), timeout_s=10.0)
