"""Where the processes run: on this host, or where an srun or a torchrun has started them."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Condition
from typing import Literal

from raybench.cluster import DeviceKind
from raybench.cluster.processes.agent import AgentOrder, HostFacts, describe_host, serve_from
from raybench.cluster.processes.channel import Door, Reception, addresses, new_secret
from raybench.cluster.processes.hosts import Host, Hosts
from raybench.cluster.processes.started import StartedProcess, read_started
from raybench.cluster.processes.workers import Slot, Starter
from raybench.errors import ClusterError, UsageError

# As that of workers.
_RUN_AGENT = "from raybench.cluster.processes.agent import main; main()"
_LOOPBACK = "127.0.0.1"
# All of an srun begin at once, but some find the files of Python in no cache.
_MEET_S = 120.0
_LOOK_S = 0.5
_END_S = 5.0
_SECRET = "RAYBENCH_SECRET"


class Meeting:
    """The driver's place, to which agents come, and later their workers.

    folder: of the socket file; it is removed at the end.
    """

    def __init__(self, door: Door, folder: Path | None = None) -> None:
        self.starter = Starter(door)
        self._folder = folder
        self._hosts: list[Host] = []
        self._address = _LOOPBACK
        self._came = Condition()
        self._reception = Reception(door, self._come)

    @property
    def address(self) -> str:
        """Of this host, as the others have reached it."""
        return self._address

    def wait_for(
        self, count: int, timeout_s: float, check: Callable[[], None] = lambda: None
    ) -> Hosts:
        """Wait for so many agents. Raises ClusterError where they do not come.

        check: raises where one cannot come; it is asked again and again.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._came:
            while len(self._hosts) < count and time.monotonic() < deadline_s:
                self._came.wait(_LOOK_S)
                check()
            if len(self._hosts) < count:
                raise ClusterError(
                    f"{len(self._hosts)} of {count} processes have come in {timeout_s:g} s: look "
                    "at what the others wrote; all must be started with the same command"
                )
            for host in self._hosts:
                host.address = host.address or self._address
            return Hosts(self._hosts)

    def close(self) -> None:
        """Let nobody in any more."""
        self._reception.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _come(self, connection: Connection, hello: object) -> None:
        if not isinstance(hello, HostFacts):
            self.starter.come(connection, str(hello))
            return
        ours, theirs = addresses(connection)
        with self._came:
            self._address = ours if ours and hello.rank else self._address
            self._hosts.append(Host(connection, hello, theirs if hello.rank else ""))
            self._came.notify_all()


class OwnAgent:
    """The agent of this host, which ends when the driver lets it go, or is gone."""

    def __init__(self, order: AgentOrder) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _RUN_AGENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # An interrupt by Ctrl-C is for the driver.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(pickle.dumps(order))

    def check(self) -> None:
        """Raise ClusterError when it has ended."""
        if self._process.poll() is not None:
            raise ClusterError(f"the agent of this host ended, code {self._process.returncode}")

    def wait(self) -> None:
        """Wait until it has ended its workers, and itself."""
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The hosts of a sweep, and the devices that they offer. where: for the user.

    agent: that of this host, where it is a process of its own.
    """

    where: str
    kind: DeviceKind
    meeting: Meeting
    hosts: Hosts
    slots: tuple[Slot, ...]
    agent: OwnAgent | None = None

    def close(self) -> None:
        """Let all processes go."""
        self.hosts.close()
        self.meeting.close()
        if self.agent is not None:
            self.agent.wait()


def connect(
    device: Literal["auto", "cuda", "cpu"], wanted: int, *, oversubscribe: bool = False
) -> Joined:
    """Start an agent on this host, and wait for those of other processes. Raises ClusterError.

    device, wanted, oversubscribe: as `raybench.cluster.connect.connect`.
    """
    started = read_started(os.environ)
    if started is None:
        folder = Path(tempfile.mkdtemp(prefix="raybench-"))
        door = Door(address=str(folder / "door"), secret=new_secret())
        meeting, count = Meeting(door, folder), 1
        where = "processes of this host"
    else:
        door = _door(started)
        meeting, count = Meeting(door), started.world_size
        where = f"{count} processes of {started.by}"
    agent = OwnAgent(AgentOrder(door=door, started=started))
    try:
        hosts = meeting.wait_for(count, _MEET_S, agent.check)
        kind = _kind(device, hosts)
        slots = _slots(hosts, kind, wanted, oversubscribe=oversubscribe)
    except BaseException:
        meeting.close()
        agent.wait()
        raise
    return Joined(where=where, kind=kind, meeting=meeting, hosts=hosts, slots=slots, agent=agent)


def serves_another() -> bool:
    """Be the agent of the first process of an srun or a torchrun, until that ends.

    False in the first one, and in a process that none of them has started. Raises ClusterError.
    """
    started = read_started(os.environ)
    if started is None or started.rank == 0:
        return False
    serve_from(_door(started), describe_host(started), _MEET_S)
    return True


def _door(started: StartedProcess) -> Door:
    """Where the first of them listens. Raises UsageError where strangers could enter."""
    if started.is_on_one_host:
        folder = Path(tempfile.gettempdir(), f"raybench-{os.getuid()}")
        _make_private(folder)
        return Door(address=str(folder / f"{started.by}-{started.id}"), secret=b"")
    secret = os.environ.get(_SECRET, "")
    if not secret:
        raise UsageError(
            f"--launcher processes: over several hosts the processes know each other by a secret; "
            f"export {_SECRET}=$(openssl rand -hex 16) before {started.by}, the same on all hosts"
        )
    host = "" if started.rank == 0 else started.address
    return Door(address=(host, started.port), secret=secret.encode())


def _make_private(folder: Path) -> None:
    """Make a folder that only this user can enter. Raises ClusterError for another's."""
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o77 or folder.is_symlink():
        raise ClusterError(f"{folder}: others can enter it; remove it, or set TMPDIR")


def _kind(device: Literal["auto", "cuda", "cpu"], hosts: Hosts) -> DeviceKind:
    has_gpus = any(host.facts.gpus for host in hosts)
    if device == "cuda" and not has_gpus:
        raise ClusterError("--device cuda: no GPU is here; use --device cpu to measure CPUs")
    return "cuda" if device != "cpu" and has_gpus else "cpu"


def _slots(hosts: Hosts, kind: DeviceKind, wanted: int, *, oversubscribe: bool) -> tuple[Slot, ...]:
    """List the devices that the hosts offer. CPU workers get a core each, or share them."""
    offers: list[tuple[Host, Mapping[int, str]]] = [
        (host, host.facts.gpus if kind == "cuda" else host.facts.cpus) for host in hosts
    ]
    if kind == "cpu" and oversubscribe and len(offers) == 1:
        host = offers[0][0]
        offers = [(host, {number: f"{host.facts.host}:{number}" for number in range(wanted)})]
    return tuple(
        Slot(host=host, index=index, name=name)
        for host, offered in offers
        for index, name in offered.items()
    )
