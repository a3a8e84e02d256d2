"""The process group of a worker, which consecutive points share, and the log of NCCL.

Ranks meet in one TCP store for the whole run. The store lives in its own process, so it outlives
any rank.
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

# Import before the first group is formed, because DDP would import this module later. Its functions
# keep the default group that exists at their definition, and the group could not be taken down.
import torch.distributed.nn.functional
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from raybench.conversion import MIB
from raybench.errors import UsageError
from raybench.hardware import nccl_log
from raybench.measure.instruments import align_ranks, any_rank
from raybench.records.environment import set_variables
from raybench.records.task import GroupSpec, RankInfo, Task
from raybench.workloads.scripts.running import COLLECTIVE_TIMING_VARIABLES

# torch's time limit is later than the driver's, because the driver must end a point first.
_TIMEOUT_MARGIN_S = 60.0
# Practically endless. The store counts milliseconds in 32 bits, so it refuses a much longer time.
_ENDLESS = timedelta(days=7)
_POLL_S = 0.02
# The destructor of gloo's group waits for its threads without releasing the GIL. A thread whose
# collective has just failed still needs the GIL, so give it time.
_GLOO_QUIET_S = 0.05
_FREE_TRIES, _FREE_WAIT_S = 20, 0.02
# The values of a group's abort key: a rank has failed, or all ranks have left.
_BROKEN, _LEFT = "broken", "left"
# A communicator of a thousand ranks may log this much; later bytes are not read.
_MAX_LOG_BYTES = 4 * MIB
# Subsystems of NCCL that log its connections, and its algorithms.
_CONNECTION_LOGS, _CHOICE_LOGS = "INIT,NET", "TUNING"
_c10d: Any = dist.distributed_c10d
_world: Any = _c10d._world


class GroupGoneError(Exception):
    """The group cannot be joined, because another rank or the driver has ended it."""


class ProcessGroup:
    """The process group of this worker, as torch's default group.

    When a rank fails, the other ranks are stuck in a collective. So a thread of each process waits
    until the group's abort key is set in the store, and then ends the group.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_nccl = device, device.type == "cuda"
        # The group that this rank has joined or is joining.
        self._joined: GroupSpec | None = None
        # torch's process group of the joined group; None until it is formed.
        self._torch_group: dist.ProcessGroup | None = None
        self._store: TCPStore | None = None
        # Groups that this rank cannot join again.
        self._left_groups: set[GroupSpec | None] = set()
        # The last group that another rank or the driver has broken.
        self._broken_group: GroupSpec | None = None
        # Held while a group is formed, left or broken, because the waiting thread may break it.
        self._lock = threading.Lock()
        self.nccl_log = NcclLogFile()

    def join(self, task: Task, rank_info: RankInfo, group: GroupSpec | None) -> None:
        """Make `group` the current group, and set torchrun's variables. Collective.

        A different current group ends on all its ranks.

        Args:
            task: its time limit plus a minute is torch's time limit.
            group: None for a point of one rank, which needs no group.

        Raises:
            GroupGoneError: this rank has left the group, or a rank or the driver has ended it.
        """
        set_torchrun_variables(rank_info, group)
        if group in self._left_groups or self.is_broken(group):
            raise GroupGoneError("it was ended")
        if group == self._joined:
            return
        if self._joined is not None:
            self._end_on_all_ranks(self._joined)  # the driver does not use this group any more
        if group is not None:
            with self.nccl_log.record() if self._is_nccl else nullcontext():
                self._form(group, task, rank_info)

    def wait_for_free_buffers(self, held_bytes: Callable[[], int]) -> None:
        """Wait up to 0.4 s until `held_bytes()` is 0 on all ranks. Collective.

        If the host has not waited for a collective, as in DDP, its buffers stay in use until NCCL's
        watchdog has seen its end and another collective has begun.
        """
        if self._is_nccl and self._joined is not None:
            # Each try is a collective, so all ranks must make the same number of tries.
            for _ in range(_FREE_TRIES):
                if not any_rank(held_bytes() > 0, self._device):
                    return
                time.sleep(_FREE_WAIT_S)

    def is_broken(self, group: GroupSpec | None) -> bool:
        """Return whether this rank has seen another rank or the driver break the group."""
        return group is not None and group == self._broken_group

    def _form(self, group: GroupSpec, task: Task, rank_info: RankInfo) -> None:
        """Wait for all ranks in the store, and form torch's default group."""
        timeout = timedelta(seconds=task.settings.timeout_s + _TIMEOUT_MARGIN_S)
        store = TCPStore(group.store_address, group.store_port, is_master=False, timeout=timeout)
        self._joined, self._store = group, store
        self._watch_for_end(group)
        # Poll, because a rank that waits inside torch cannot be stopped.
        all_here_key = f"{group.name}/all-here"
        ranks_here = store.add(f"{group.name}/here", 1)
        if ranks_here == rank_info.world_size:
            store.set(all_here_key, "")
        while not store.check([all_here_key]):
            if self.is_broken(group):
                raise GroupGoneError("a rank has failed on its way to it")
            time.sleep(_POLL_S)
        # To find a rank that hangs, torch must record which collectives have begun.
        timing_variables = COLLECTIVE_TIMING_VARIABLES if task.settings.hang_s is not None else {}
        # No device_id: torch then splits communicators, which crashes after a second init
        # (pytorch#192109).
        with set_variables(timing_variables):
            dist.init_process_group(
                "nccl" if self._is_nccl else "gloo",
                store=PrefixStore(group.name, store),
                rank=rank_info.rank,
                world_size=rank_info.world_size,
                timeout=timeout,
            )
        with self._lock:
            if self._joined != group:  # ended by another thread before torch's group existed
                self._end_torch_group()
                raise GroupGoneError("it was ended while it was formed")
            self._torch_group = dist.group.WORLD
        align_ranks(self._device)

    def leave(self) -> None:
        """Leave the group. Collective: all members must be alive and idle."""
        with self._lock:
            if self._store is not None:
                dist.destroy_process_group()
                self._set_abort_key(_LEFT)
                self._clear_joined()

    def take_down(self, timeout_s: float) -> bool:
        """End the group on all ranks; return whether group and device work ended in time.

        If the result is False, the process cannot be used any more. With NCCL, running collectives
        return garbage without an error.
        """
        group = self._joined
        if group is None:
            return True
        has_ended = threading.Event()
        # Keep torch's group alive until its threads are quiet, because its destructor would wait
        # for them with the GIL.
        held_groups = [self._torch_group]

        def end() -> None:
            self._end_on_all_ranks(group)
            # gloo's collectives on other ranks raise only when no workload holds the group.
            gc.collect()
            if self._is_nccl:
                torch.cuda.synchronize(self._device)
            else:
                time.sleep(_GLOO_QUIET_S)
            held_groups.clear()
            has_ended.set()

        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(timeout_s)
        return has_ended.is_set()

    def check_is_intact(self, workload: str) -> None:
        """Raise UsageError if the workload has destroyed the process group."""
        if self._joined is not None and dist.group.WORLD is not self._torch_group:
            raise UsageError(
                f"workload {workload} destroyed the process group, which is raybench's and kept "
                "for the next points; leave dist.destroy_process_group() out of it"
            )

    def destroy_extra_groups(self) -> None:
        """Destroy all groups except the joined group. Collective.

        At world size 1, a default group of the workload would keep the next point from forming its
        own.
        """
        extra_groups = [group for group in _world.pg_names if group is not self._torch_group]
        for group in reversed(extra_groups):  # the newest group first
            # Destroying a default group destroys all groups, so look again.
            if group in _world.pg_map:
                dist.destroy_process_group(group)

    def _watch_for_end(self, group: GroupSpec) -> None:
        """Start a thread that notes when the group is broken, and then ends NCCL's group."""
        # A client of the store that waits can do nothing else, so the thread has its own client.
        store = TCPStore(group.store_address, group.store_port, is_master=False)

        def wait() -> None:
            try:
                store.wait([_abort_key(group)], _ENDLESS)
                is_broken = store.get(_abort_key(group)) == _BROKEN.encode()
            except dist.DistError:
                return  # the store has ended, so nobody can break the group any more
            with self._lock:
                # This rank may have left the group before this thread woke.
                if not is_broken or group != self._joined:
                    return
                self._broken_group = group
            if self._is_nccl:  # gloo's collectives raise by themselves when a rank has gone
                self._end_on_all_ranks(group)

        threading.Thread(target=wait, name="raybench-abort", daemon=True).start()

    def _end_on_all_ranks(self, group: GroupSpec) -> None:
        """End the group on this rank, and make the other ranks end it. Thread-safe."""
        with self._lock:
            if self._store is None or self._joined != group:
                return
            # Set the key first, so that all ranks end the group at the same time.
            self._set_abort_key(_BROKEN)
            self._end_torch_group()
            self._clear_joined()

    def _end_torch_group(self) -> None:
        """End torch's default group without waiting for other ranks."""
        if not dist.is_initialized():
            return
        if self._is_nccl:
            _c10d._abort_process_group()
        else:
            dist.destroy_process_group()

    def _clear_joined(self) -> None:
        """Note that this rank has left its group."""
        self._left_groups.add(self._joined)
        self._joined = self._torch_group = self._store = None

    def _set_abort_key(self, value: str) -> None:
        """Set the abort key of the joined group, which wakes the waiting thread of each rank."""
        if self._store is not None and self._joined is not None:
            with suppress(dist.DistError):  # the store has ended, and the threads with it
                self._store.set(_abort_key(self._joined), value)


def break_group(store: TCPStore, group: GroupSpec) -> None:
    """Make all ranks of the group end it; do not wait for them."""
    store.set(_abort_key(group), _BROKEN)


def _abort_key(group: GroupSpec) -> str:
    return f"{group.name}/abort"


def set_torchrun_variables(rank_info: RankInfo, group: GroupSpec | None) -> None:
    """Set torchrun's environment variables; MASTER_ADDR and MASTER_PORT only for a group."""
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
    """Return a new store that listens on this IP address only, on a free port.

    Raises:
        OSError: this host does not have the address.
    """
    # TCPStore's own listener would be open on every network of this host.
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=2048)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def choose_interface(address: str) -> None:
    """Set GLOO_SOCKET_IFNAME, if it is unset, to the interface with this IPv4 address.

    Call this before a group is formed.

    Args:
        address: address of this node in Ray, which all nodes can reach.
    """
    # gloo would take the address of the host's name, which is often loopback (127.0.1.1). Leave
    # NCCL alone, because its choice is part of the measurement.
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    for name, addresses in psutil.net_if_addrs().items():
        ipv4 = [entry.address for entry in addresses if entry.family == socket.AF_INET]
        # gloo takes the first address of an interface.
        if ipv4 and ipv4[0] == address:
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _find_log_reset() -> Callable[[], object] | None:
    """Return a function that makes NCCL read its log's variables again; None if NCCL lacks it."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        # NCCL has this function for its own tests; some builds lack it.
        reset_debug, count_ranks = library.ncclResetDebugInit, library.ncclCommCount
    except (OSError, AttributeError):
        return None

    def reset_log() -> None:
        reset_debug()
        # NCCL reads the variables when it writes a line of the log. This invalid call makes it
        # write a line.
        count_ranks(None, ctypes.byref(ctypes.c_int()))

    return reset_log


class NcclLogFile:
    """NCCL's log of its connections and of its algorithms, in a file in memory.

    Unused if the user has set NCCL_DEBUG.
    """

    def __init__(
        self, find_log_reset: Callable[[], Callable[[], object] | None] = _find_log_reset
    ) -> None:
        # Descriptor of the file; None until `record`.
        self._file: int | None = None
        # Byte at which the lines of the current group begin in the file.
        self._log_begin = 0
        # Transports of the current group whose lines are no longer in the file, because `choices`
        # makes NCCL open the file again, which truncates it.
        self._saved_routes: frozenset[str] = frozenset()
        self._find_log_reset = find_log_reset

    @contextmanager
    def record(self) -> Iterator[None]:
        """Make NCCL log the connections of the group that is formed in the `with` block.

        The group must communicate in the block, and NCCL must not be used before the first block.
        """
        self._saved_routes = frozenset()
        if self._file is None and os.environ.get("NCCL_DEBUG"):
            yield
            return
        if self._file is None:
            self._file = os.memfd_create("raybench-nccl")
        self._log_begin = os.fstat(self._file).st_size
        # If NCCL has written a line, it has read its variables and keeps them.
        variables = {} if self._log_begin else _log_variables(self._file, _CONNECTION_LOGS)
        with set_variables(variables):
            yield

    def routes(self) -> tuple[str, ...]:
        """Return this rank's transports in its group, such as `P2P/CUMEM`; () if unknown."""
        if self._file is None:
            return ()
        log = nccl_log.parse(_read_lines(self._file, self._log_begin))
        return tuple(sorted(self._saved_routes.union(route.words for route in log.routes)))

    def choices(self, step: Callable[[], object]) -> tuple[str, ...]:
        """Run a step; return what NCCL ran in it, as `AllReduce 4 B: RING LL, 2 channels`.

        Only groups in which this rank is the first are listed; () if NCCL's log cannot be read.
        """
        reset_log = self._find_log_reset() if self._file is not None else None
        if self._file is None or reset_log is None:
            step()
            return ()
        # NCCL truncates the file when it opens it again, so save the transports first.
        self._saved_routes, self._log_begin = frozenset(self.routes()), 0
        choices_file = os.memfd_create("raybench-nccl-choices")
        try:
            with set_variables(_log_variables(choices_file, _CHOICE_LOGS)):
                reset_log()
            try:
                step()
            finally:
                with set_variables(_log_variables(self._file, _CONNECTION_LOGS)):
                    reset_log()
            return tuple(dict.fromkeys(nccl_log.choices(_read_lines(choices_file, 0))))
        finally:
            os.close(choices_file)


def _read_lines(file: int, begin: int) -> list[str]:
    size = os.fstat(file).st_size - begin
    return os.pread(file, min(size, _MAX_LOG_BYTES), begin).decode(errors="replace").splitlines()


def _log_variables(file: int, subsystems: str) -> dict[str, str]:
    """Return the variables that make NCCL log these subsystems to the file descriptor."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": subsystems,
        "NCCL_DEBUG_FILE": f"/proc/self/fd/{file}",
    }
