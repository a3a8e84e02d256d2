"""The process group of a worker, kept while points use the same workers, its store, NCCL's log.

Ranks find each other in one TCP store for the whole run. It lives in a process of its own, so it
outlives any rank, and the system picks its port, so no other process can take it first.

NCCL reads the variables of its log once, when the first communicator is made. From then on it
writes lines of INIT and NET where communicators are made and connected, before anything is timed; a
collective that is connected writes none. For one step that is not timed it can be made to read them
again, and then says which algorithm each collective runs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

# Before the first group: its functions take the default group of the moment in which they are
# defined for their own, and DDP loads them. That group could never be taken down.
import torch.distributed.nn.functional
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from raybench.conversion import MIB
from raybench.errors import UsageError
from raybench.hardware.nccl_log import choices, parse
from raybench.measure.instruments import align_ranks, any_rank
from raybench.records.environment import set_variables
from raybench.records.task import GroupSpec, RankInfo, Task

# The driver's deadline ends a point; torch's own must not come before it, nor never.
_TIMEOUT_MARGIN_S = 60.0
# A wait without end: the store counts milliseconds in 32 bits.
_LONG = timedelta(days=7)
_LOOK_S = 0.02
# The destructor of gloo's group waits for its threads without giving the GIL away, which a thread
# whose collective has just failed still needs.
_GLOO_QUIET_S = 0.05
_FREE_TRIES, _FREE_WAIT_S = 20, 0.02
# The values of a group's abort key.
_BROKEN, _LEFT = "broken", "left"
# NCCL's log: a communicator of a thousand ranks may write so much; more is not read.
_MOST_LOG_BYTES = 4 * MIB
_CONNECTIONS, _CHOICES = "INIT,NET", "TUNING"
_c10d: Any = dist.distributed_c10d
_world: Any = _c10d._world


class GroupGoneError(Exception):
    """The group cannot be joined, because another rank or the driver has ended it."""


class ProcessGroup:
    """The group that this worker is a member of, at most one, as torch's default group.

    device: a GPU must be the current one of the thread that joins. When one rank fails, the others
    are stuck in a collective. So a thread of each process waits for a key of the store.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_nccl = device, device.type == "cuda"
        self._group: GroupSpec | None = None
        self._ours: dist.ProcessGroup | None = None
        self._store: TCPStore | None = None
        self._ended: set[GroupSpec | None] = set()
        self._broken: GroupSpec | None = None
        self._lock = threading.Lock()
        self.nccl_file = NcclFile()

    def join(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> None:
        """End the current group and form `group`, if it is another; set torchrun's variables.

        The current group ends on all its ranks. All ranks of `group` must call this; it waits for
        them until `group` is ended. None, for a point of one rank, forms none. task: torch's limit
        is a minute more than that of the task that formed the group. Raises GroupGoneError if this
        rank has left `group`, or any rank or the driver has ended it, else what torch raises.
        """
        set_torchrun_variables(rank_info, group)
        if group in self._ended or self.is_broken(group):
            raise GroupGoneError("it was ended")
        if group == self._group:
            return
        if self._group is not None:
            self._take_down(self._group)  # the driver has given it up
        if group is not None:
            with self.nccl_file.record() if self._is_nccl else nullcontext():
                self._form(group, task, rank_info)

    def free_buffers(self, held_bytes: Callable[[], int]) -> None:
        """Wait until NCCL has freed the buffers of finished collectives; all ranks must call it.

        It ends when `held_bytes()` is 0 on all ranks, or after 20 tries, 20 ms apart; at once if
        NCCL or a group is missing. Buffers of collectives for which the host never waited, as in
        DDP, stay until NCCL's watchdog has seen their end, and then until the next collective.
        """
        if self._is_nccl and self._group is not None:
            for _ in range(_FREE_TRIES):  # counted, not timed: no rank may stop before another
                if not any_rank(held_bytes() > 0, self._device):
                    return
                time.sleep(_FREE_WAIT_S)

    def is_broken(self, group: GroupSpec | None) -> bool:
        """Return whether `group` is the last that another rank or the driver broke while joined."""
        return group is not None and group == self._broken

    def _form(self, group: GroupSpec, task: Task, rank_info: RankInfo) -> None:
        """Meet all ranks in the store and make the group torch's default one, as `join`."""
        timeout = timedelta(seconds=task.settings.timeout_s + _TIMEOUT_MARGIN_S)
        store = TCPStore(group.store_address, group.store_port, is_master=False, timeout=timeout)
        self._group, self._store = group, store
        self._watch_for_end(group)
        # A rank that waits for the others inside of torch could not be stopped. Nor in `wait`: when
        # its time is up torch writes warnings to the log of the worker, and looks up host names for
        # them, which takes seconds where there is no DNS.
        all_here = f"{group.name}/all-here"
        if store.add(f"{group.name}/here", 1) == rank_info.world_size:
            store.set(all_here, "")
        while not store.check([all_here]):
            if self.is_broken(group):
                raise GroupGoneError("a rank has failed on its way to it")
            time.sleep(_LOOK_S)
        # No device_id: torch then splits communicators, which crashes after a second init
        # (pytorch#192109).
        dist.init_process_group(
            "nccl" if self._is_nccl else "gloo",
            store=PrefixStore(group.name, store),
            rank=rank_info.rank,
            world_size=rank_info.world_size,
            timeout=timeout,
        )
        with self._lock:
            if self._group != group:  # ended when there was nothing yet to take down
                self._end()
                raise GroupGoneError("it was ended while it was formed")
            self._ours = dist.group.WORLD
        align_ranks(self._device)

    def leave(self) -> None:
        """Leave the group, if any; all its members must be alive and idle, and call it too."""
        with self._lock:
            if self._store is not None:
                dist.destroy_process_group()
                self._tell_others(_LEFT)
                self._forget()

    def take_down(self, timeout_s: float) -> bool:
        """End the group; return whether it and the device's work ended in `timeout_s`.

        True at once without a group. False also where that raises; let the process end then. NCCL's
        is ended on all ranks: collectives that are going on return garbage, without an error.
        gloo's connections close when no workload holds the group; the peers' collectives raise.
        """
        group = self._group
        if group is None:
            return True
        done: list[bool] = []
        held = [self._ours]

        def end() -> None:
            self._take_down(group)
            gc.collect()  # what held the group may be part of a cycle
            if self._is_nccl:
                torch.cuda.synchronize(self._device)
            else:
                time.sleep(_GLOO_QUIET_S)
            held.clear()
            done.append(True)

        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(timeout_s)
        return bool(done)

    def check(self, workload: str) -> None:
        """Raise UsageError if the workload (its name) has destroyed the process group.

        Its ranks then have measured alone, and so would those of the next points.
        """
        if self._group is not None and dist.group.WORLD is not self._ours:
            raise UsageError(
                f"workload {workload} destroyed the process group, which is raybench's and kept "
                "for the next points; leave dist.destroy_process_group() out of it"
            )

    def drop_others(self) -> None:
        """Destroy all groups but that of `join`, the latest first; all ranks must call it, idle.

        Those are what a workload or raybench made beside it. At world size 1 one may be a default
        group, which would keep the next point from forming its own.
        """
        for group in reversed([group for group in _world.pg_names if group is not self._ours]):
            if group in _world.pg_map:
                dist.destroy_process_group(group)

    def _watch_for_end(self, group: GroupSpec) -> None:
        """Start a thread that waits until the group is left, or broken by another or the driver.

        Broken, it is noted as such, and NCCL's is ended at once.
        """
        # A client of its own, because one that waits can do nothing else.
        store = TCPStore(group.store_address, group.store_port, is_master=False)

        def wait() -> None:
            try:
                store.wait([_abort_key(group)], _LONG)
                is_broken = store.get(_abort_key(group)) == _BROKEN.encode()
            except dist.DistError:
                return  # the store is gone, and with it all signals
            with self._lock:
                if not is_broken or group != self._group:
                    return  # an earlier group: this thread woke late
                self._broken = group
            if self._is_nccl:  # gloo's collectives raise when a peer has closed its connections
                self._take_down(group)

        threading.Thread(target=wait, name="raybench-abort", daemon=True).start()

    def _take_down(self, group: GroupSpec) -> None:
        """End the group on this rank, from any thread, and have the others end it."""
        with self._lock:
            if self._store is None or self._group != group:
                return
            self._tell_others(_BROKEN)  # first: the other ranks need as long as this one
            self._end()
            self._forget()

    def _end(self) -> None:
        """End torch's default group, if there is one, without waiting for other ranks."""
        if dist.is_initialized():
            end = _c10d._abort_process_group if self._is_nccl else dist.destroy_process_group
            end()

    def _forget(self) -> None:
        self._ended.add(self._group)
        self._group = self._ours = self._store = None

    def _tell_others(self, end: str) -> None:
        """Set the abort key of the group, which the other ranks wait for. end: its value."""
        if self._store is not None and self._group is not None:
            with suppress(dist.DistError):  # the store is gone, and the waits have ended with it
                self._store.set(_abort_key(self._group), end)


def break_group(store: TCPStore, group: GroupSpec) -> None:
    """Tell all ranks of `group`, in its store, to end it, without waiting; gloo's only note it."""
    store.set(_abort_key(group), _BROKEN)


def _abort_key(group: GroupSpec) -> str:
    return f"{group.name}/abort"


def set_torchrun_variables(rank_info: RankInfo, group: GroupSpec | None) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and GROUP_RANK, as torchrun does.

    With a group MASTER_ADDR and MASTER_PORT too; without one, those that are set stay.
    """
    os.environ.update(
        RANK=str(rank_info.rank),
        WORLD_SIZE=str(rank_info.world_size),
        LOCAL_RANK=str(rank_info.local_rank),
        LOCAL_WORLD_SIZE=str(rank_info.local_world_size),
        GROUP_RANK=str(rank_info.node_rank),
    )
    if group is not None:
        os.environ.update(MASTER_ADDR=group.store_address, MASTER_PORT=str(group.store_port))


def serve_store(address: str) -> TCPStore:
    """Return a store, served on this address alone and on a port (`port`) that the system picks.

    address: an IP address, v4 or v6, not empty. Threads of this process serve it as long as the
    object lives. Raises OSError if the address is not one of this host.
    """
    # A listener of our own: TCPStore's would be open on every network of this host.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=2048)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def choose_interface(address: str) -> None:
    """Set GLOO_SOCKET_IFNAME, if unset or empty, to the interface that has `address`.

    address: that by which Ray knows this node; all reach it. Call it before a group is formed. Sets
    nothing where no interface has it as its first IPv4 address (IPv6, NAT). gloo itself takes that
    of this host's name, often loopback (127.0.1.1). NCCL's choice is part of the measurement.
    """
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    for name, addresses in psutil.net_if_addrs().items():
        if [one.address for one in addresses if one.family == socket.AF_INET][:1] == [address]:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _find_read_again() -> Callable[[], object] | None:
    """Return a function that has the NCCL of this process read the variables of its log again.

    The function also makes a call without a communicator, which writes a line of the log: only then
    are the variables read. None where NCCL is not loaded or lacks `ncclResetDebugInit`, which NCCL
    has for its own tests.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        forget, count = library.ncclResetDebugInit, library.ncclCommCount
    except (OSError, AttributeError):
        return None

    def read_again() -> None:
        forget()
        count(None, ctypes.byref(ctypes.c_int()))

    return read_again


class NcclFile:
    """The file in memory to which this process's NCCL writes its log.

    Where the user has switched the log on (NCCL_DEBUG) it is left alone, and nothing is known.
    find_read_again: returns a function that has NCCL read its variables again; None if it cannot.
    """

    def __init__(
        self, find_read_again: Callable[[], Callable[[], object] | None] = _find_read_again
    ) -> None:
        self._file: int | None = None
        self._begin = 0
        self._known: frozenset[str] = frozenset()
        self._find_read_again = find_read_again

    @contextmanager
    def record(self) -> Iterator[None]:
        """Make NCCL log the connections of the group that is formed in the `with` block.

        `routes` begins anew. The group must communicate in the block, and NCCL must not be used
        before the first one. The variables of the log are set only in it and in `choices`, so not
        for what a workload starts.
        """
        self._known = frozenset()
        if self._file is None and os.environ.get("NCCL_DEBUG"):
            yield
            return
        if self._file is None:
            # In memory: nothing is left behind, however the process ends.
            self._file = os.memfd_create("raybench-nccl")
        self._begin = os.fstat(self._file).st_size
        # NCCL reads them once; as long as it has written nothing, it may not have.
        with set_variables({} if self._begin else _variables(self._file, _CONNECTIONS)):
            yield

    def routes(self) -> tuple[str, ...]:
        """Return this rank's transports, as `P2P/CUMEM`, sorted; () if none or not known.

        Those since the last `record` began, of a workload's own groups too; not what is connected
        in the step of `choices`, nor what the log tells beyond 4 MiB.
        """
        if self._file is None:
            return ()
        log = parse(_read(self._file, self._begin))
        return tuple(sorted(self._known.union(route.words for route in log.routes)))

    def choices(self, step: Callable[[], object]) -> tuple[str, ...]:
        """Run a step; return what NCCL ran, each once, as `AllReduce 4 B: RING LL, 2 channels`.

        Only collectives of groups in which this rank is the first. () before `record`, if the user
        has switched the log on, or NCCL cannot change it. Always runs the step; raises its error.
        """
        read_again = self._find_read_again() if self._file is not None else None
        if self._file is None or read_again is None:
            step()
            return ()
        # NCCL empties the file of its routes when it opens it again.
        self._known, self._begin = frozenset(self.routes()), 0
        file = os.memfd_create("raybench-nccl-choices")
        try:
            with set_variables(_variables(file, _CHOICES)):
                read_again()
            try:
                step()
            finally:
                with set_variables(_variables(self._file, _CONNECTIONS)):
                    read_again()
            return tuple(dict.fromkeys(choices(_read(file, 0))))
        finally:
            os.close(file)


def _read(file: int, begin: int) -> list[str]:
    size = os.fstat(file).st_size - begin
    return os.pread(file, min(size, _MOST_LOG_BYTES), begin).decode(errors="replace").splitlines()


def _variables(file: int, subsystems: str) -> dict[str, str]:
    """Return the variables that have NCCL log these subsystems to the file descriptor."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": subsystems,
        "NCCL_DEBUG_FILE": f"/proc/self/fd/{file}",
    }
