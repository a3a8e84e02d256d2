"""Who uses which devices: locks between the sweeps of a host, and other users of its devices.

A sweep that uses a device holds an exclusive lock (flock) on a file, which the kernel releases when
the holder dies. The files are in a folder in which every user can write, so links are not followed,
and the text of a file only decides how long a sweep waits. All processors of a host are one device
with the name `CPU`.

Other users are found by comparing two readings of each node, before and after a point: the locks of
other sweeps, the processor time of other processes, and the processes that NVML lists.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

from raybench.cluster import other_programs, reaper, timeouts
from raybench.conversion import KIB
from raybench.errors import DevicesInUseError
from raybench.records.device import Device
from raybench.records.other_program import OtherProgram
from raybench.records.record import HostLoad, OtherUsers

# CPU workers are not bound to cores, so all processors of a host are one device.
CPU = "cpu"
# Environment variable with another folder, for tests that run sweeps side by side.
FOLDER_VARIABLE = "RAYBENCH_LOCK_DIR"
# Not in TMPDIR, which may differ between users.
_FOLDER = Path("/tmp/raybench-locks")
_MAX_FILE_BYTES = 64 * KIB
_MAX_FIELD_CHARACTERS = 120
_FOLDER_POLL_S = 0.05
# Format of `Holder.since`.
_SINCE_FORMAT = "%Y-%m-%d %H:%M:%S UTC"
_FOLDER_LIMIT_S = 5.0
# Name of a lock file: the device, and a random suffix.
_LOCK_FILE = re.compile(r"(?P<device>cpu|GPU-[0-9A-Za-z-]+)\..+")
_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Smaller loads, as a share of the workers' processors, are ignored: an idle system has some load.
_MIN_LOAD_SHARE = 0.05
# Shorter processor times are ignored, because the kernel counts in ticks of 10 ms.
_MIN_LOAD_S = 0.1
# Ray's own processes count as ours, even if another user has started them.
_RAY_PROGRAMS = ("gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
# Columns of a line of /proc/stat: user, nice, system, irq, softirq.
_BUSY_COLUMNS = (1, 2, 3, 6, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A sweep that uses a device. Unknown fields are "unknown" or 0."""

    # Random id of the sweep.
    sweep: str
    # What the sweep measures, such as `run ID`.
    what: str
    # User, host and process id of the driver.
    user: str
    host: str
    process_id: int
    # Start of the sweep (UTC).
    since: str

    @property
    def program(self) -> OtherProgram:
        """The driver of the sweep as a program."""
        since = None
        with suppress(ValueError):  # "unknown"
            since = datetime.strptime(self.since, _SINCE_FORMAT).replace(tzinfo=UTC)
        return OtherProgram(
            host=self.host,
            process_id=self.process_id,
            name=self.what,
            user=self.user,
            since=since,
        )

    def __str__(self) -> str:
        return f"{self.what} of {self.user} (process {self.process_id} on {self.host})"

    @property
    def has_ended(self) -> bool:
        """Whether the driver has ended; False if it runs on another host or is unknown."""
        is_here = self.process_id > 0 and self.host == socket.gethostname()
        return is_here and not psutil.pid_exists(self.process_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationTerms:
    """How a sweep shares its devices with other sweeps."""

    holder: Holder
    # Whether other sweeps may use the devices at the same time.
    shared: bool = False
    # How long to wait for the end of other sweeps, if not shared.
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LockResult:
    """The result of locking devices."""

    # Lock name of a device -> other sweeps that use the device.
    others: Mapping[str, tuple[Holder, ...]] = field(default_factory=dict)
    # Why the locks could not be taken or read; "" if they could.
    problem: str = ""


def this_process(what: str) -> Holder:
    """Return this process as a holder of devices, with a new sweep id.

    Args:
        what: what the sweep measures, such as `run ID`.
    """
    return Holder(
        sweep=os.urandom(16).hex(),
        what=what,
        user=psutil.Process().username(),
        host=socket.gethostname(),
        process_id=os.getpid(),
        since=time.strftime(_SINCE_FORMAT, time.gmtime()),
    )


class DeviceLocks:
    """The device locks of this process on this host, held until `close` or its end."""

    def __init__(self) -> None:
        self._folder = Path(os.environ.get(FOLDER_VARIABLE) or _FOLDER)
        # Lock name of a device -> (descriptor, path) of the file that this process has locked.
        self._held: dict[str, tuple[int, Path]] = {}

    def lock(self, devices: Sequence[str], holder: Holder, shared: bool) -> LockResult:
        """Lock more devices; return who else uses them. Takes up to 5 s and never raises.

        Args:
            devices: names from `lock_name`.
            shared: if False, lock no device if another sweep uses any of the devices.
        """
        try:
            with _lock_folder(self._folder):
                others = self._find_others(devices, holder.sweep, remove_stale=True)
                if shared or not others:
                    for device in set(devices) - self._held.keys():
                        self._held[device] = self._make_lock_file(device, holder)
        except OSError as error:
            return LockResult(problem=f"{self._folder}: {error.strerror or error}")
        return LockResult(others=others)

    def _make_lock_file(self, device: str, holder: Holder) -> tuple[int, Path]:
        """Make a locked file that names the holder; return its descriptor and path."""
        # Other sweeps ignore hidden files, so they see the file only when it is complete.
        file, name = tempfile.mkstemp(prefix=".", dir=self._folder)
        hidden = Path(name)
        path = self._folder / f"{_file_name(device)}{hidden.name}"
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(file, json.dumps(asdict(holder)).encode())
            os.fchmod(file, 0o644)
            hidden.rename(path)
        except OSError:
            os.close(file)
            hidden.unlink()
            raise
        return file, path

    def other_users(self, devices: Sequence[str], sweep: str = "") -> LockResult:
        """Return who uses the devices now; locks nothing.

        Args:
            devices: names from `lock_name`.
            sweep: id of a sweep to leave out.
        """
        try:
            return LockResult(others=self._find_others(devices, sweep))
        except OSError as error:
            return LockResult(problem=f"{self._folder}: {error.strerror or error}")

    def users_of_other_devices(
        self, devices: Collection[str], sweep: str
    ) -> dict[str, tuple[Holder, ...]]:
        """Return lock name -> other sweeps, for all devices of this host except `devices`."""
        matches = (_LOCK_FILE.fullmatch(path.name) for path in self._folder.glob("*"))
        locked_devices = {match["device"] for match in matches if match}
        other_devices = locked_devices - set(devices)
        return dict(self.other_users(sorted(other_devices), sweep).others)

    def close(self) -> None:
        """Release all locks; `lock` may be called again."""
        for file, path in self._held.values():
            path.unlink(missing_ok=True)
            os.close(file)
        self._held = {}

    def _find_others(
        self, devices: Sequence[str], sweep: str, *, remove_stale: bool = False
    ) -> dict[str, tuple[Holder, ...]]:
        """Return device -> sweeps that use the device, without the sweep with the id `sweep`.

        Args:
            remove_stale: remove the files of killed sweeps; the folder must be locked.
        """
        others: dict[str, tuple[Holder, ...]] = {}
        for device in devices:
            holders: dict[Holder, None] = {}  # an ordered set
            for path in sorted(self._folder.glob(f"{_file_name(device)}.*")):
                # None: the sweep that has made the file has ended.
                holder = _read_holder(path)
                if holder is not None and holder.sweep != sweep:
                    holders[holder] = None
                elif holder is None and remove_stale:
                    with suppress(OSError):  # a file of another user, or a folder
                        path.unlink()
            if holders:
                others[device] = tuple(holders)
        return others


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Let one process use the folder at a time; raise OSError after 5 s without the lock."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o1777)  # the umask would take rights away from the mode of mkdir
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN_FLAGS)
    deadline_s = time.monotonic() + _FOLDER_LIMIT_S
    try:
        while not _try_lock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() > deadline_s:
                raise OSError("another process holds the folder's lock")
            time.sleep(_FOLDER_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(file: int, lock_mode: int) -> bool:
    try:
        fcntl.flock(file, lock_mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _file_name(device: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", device)


def _read_holder(path: Path) -> Holder | None:
    """Return who holds the lock of a file; None if nobody does, or if it is no regular file."""
    try:
        file = os.open(path, os.O_RDONLY | _OPEN_FLAGS)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        # A file with several names (hard links) may belong to something else.
        is_plain_file = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
        # If we get the lock, no sweep holds it.
        if not is_plain_file or _try_lock(file, fcntl.LOCK_SH):
            return None
        content = json.loads(os.pread(file, _MAX_FILE_BYTES, 0))
    except (ValueError, RecursionError):
        content = None  # a sweep holds the lock, but its text is invalid
    finally:
        os.close(file)
    return _parse_holder(content)


def _parse_holder(content: object) -> Holder:
    """Return the holder in a lock file; invalid fields become "unknown" or 0."""
    # Any user may have written the file, so check types, length and characters.
    fields = content if isinstance(content, dict) else {}
    number = fields.get("process_id")
    # Linux has no process id above 2**22.
    process_id = number if type(number) is int and 0 < number < 2**22 else 0
    texts = {}
    for name in ("sweep", "what", "user", "host", "since"):
        value = fields.get(name)
        text = value[:_MAX_FIELD_CHARACTERS] if isinstance(value, str) else "unknown"
        texts[name] = "".join(c if c.isprintable() else "?" for c in text)
    return Holder(**texts, process_id=process_id)


def lock_name(device: Device) -> str:
    """Return the name under which a device is locked: the UUID of a GPU, or `CPU`."""
    return device.uuid if device.kind == "cuda" else CPU


@contextmanager
def reserve_this_hosts_cpus(terms: ReservationTerms, log: Callable[[str], None]) -> Iterator[None]:
    """Lock the CPUs of this host in the `with` block, in which this process starts Ray.

    Unless `terms` are shared, wait first for other sweeps on the CPUs. If the lock cannot be taken,
    the block runs without the lock.

    Raises:
        DevicesInUseError: other sweeps did not end in time.
    """
    locks = DeviceLocks()

    def lock_cpus() -> dict[str, tuple[Holder, ...]]:
        others = locks.lock([CPU], terms.holder, shared=terms.shared).others
        return {"the processors of this host": others[CPU]} if others else {}

    try:
        if terms.shared:
            # The `DeviceReservation` will log other sweeps, when all devices are known.
            lock_cpus()
        else:
            _wait_for_others(lock_cpus, terms, log)
        yield
    finally:
        locks.close()


class NodeLocks(Protocol):
    """The calls to nodes that a reservation makes; `ray_cluster.nodes.NodeAgents` has them."""

    def lock(
        self, devices: Sequence[Device], holder: Holder, *, shared: bool
    ) -> list[tuple[Device, LockResult]]:
        """Call `DeviceLocks.lock` on each node; return one device of each node and its result.

        Never raises: the result of a node that does not answer has a `problem`.
        """

    def unlock(self, devices: Sequence[Device]) -> None:
        """Release all locks of this sweep on the nodes of `devices`; never raises."""


class DeviceReservation:
    """The locked devices of one sweep, on all its nodes; without terms, no device is locked."""

    def __init__(
        self, nodes: NodeLocks, terms: ReservationTerms | None, log: Callable[[str], None]
    ) -> None:
        self._nodes = nodes
        self._terms = terms
        self._log = log
        self._logged_problems: set[str] = set()
        # Other sweeps on the same devices, each in words.
        self.other_sweeps: tuple[str, ...] = ()

    def reserve(self, devices: Sequence[Device]) -> None:
        """Lock the devices until the agents of the nodes end. Call it once.

        Raises:
            DevicesInUseError: other sweeps did not end in time; no device is locked.
        """
        if (terms := self._terms) is not None:
            others = _wait_for_others(lambda: self._lock_all(devices, terms), terms, self._log)
            sweeps = map(str, chain.from_iterable(others.values()))
            self.other_sweeps = tuple(dict.fromkeys(sweeps))

    def try_reserve(self, device: Device) -> str:
        """Lock one more device without waiting; return which sweep has it, or "" if it is usable.

        A device is also usable if the terms are shared, or if locking itself fails.
        """
        if self._terms is None:
            return ""
        others = self._lock([device], self._terms)
        return "" if self._terms.shared else _describe_use(others)

    def _lock_all(
        self, devices: Sequence[Device], terms: ReservationTerms
    ) -> dict[str, tuple[Holder, ...]]:
        """Call `_lock`; unless the terms are shared, lock all devices or none."""
        others = self._lock(devices, terms)
        if others and not terms.shared:
            # Release the locks while waiting, so that two sweeps never wait for each other.
            self._nodes.unlock(devices)
        return others

    def _lock(
        self, devices: Sequence[Device], terms: ReservationTerms
    ) -> dict[str, tuple[Holder, ...]]:
        """Lock the devices on each node; return device in words -> other sweeps that use it.

        If another sweep uses a device, no device of its node is locked, unless terms are shared.
        """
        others: dict[str, tuple[Holder, ...]] = {}
        for node_device, result in self._nodes.lock(devices, terms.holder, shared=terms.shared):
            if result.problem and result.problem not in self._logged_problems:
                self._logged_problems.add(result.problem)
                self._log(
                    f"cannot lock the devices of {node_device.host} ({result.problem}): other "
                    "sweeps on this host are not noticed (warning)"
                )
            # Lock name -> device in words.
            device_words = {}
            for device in devices:
                if device.node_id == node_device.node_id:
                    is_gpu = device.kind == "cuda"
                    name = f"cuda:{device.index}" if is_gpu else "the processors"
                    device_words[lock_name(device)] = f"{name} of {device.host}"
            others |= {device_words[name]: holders for name, holders in result.others.items()}
        return others


def _wait_for_others(
    lock_devices: Callable[[], Mapping[str, tuple[Holder, ...]]],
    terms: ReservationTerms,
    log: Callable[[str], None],
) -> Mapping[str, tuple[Holder, ...]]:
    """Wait until no other sweep has the devices; with shared terms return the others at once.

    Args:
        lock_devices: returns device in words -> other sweeps that use the device.

    Raises:
        DevicesInUseError: other sweeps did not end in time.
    """
    begun_s, logged_text = time.monotonic(), ""
    while (others := lock_devices()) and not terms.shared:
        text = _describe_use(others)
        # The agents of a killed driver hold its locks for up to a minute, so wait that long.
        is_ending = all(holder.has_ended for holder in chain.from_iterable(others.values()))
        patience_s = max(terms.wait_s, timeouts.ENDED_SWEEP_S if is_ending else 0.0)
        if time.monotonic() >= begun_s + patience_s:
            gpu_hint = "" if "processors" in text else ", CUDA_VISIBLE_DEVICES to use other GPUs"
            raise DevicesInUseError(
                f"{text}; --wait SECONDS waits for them, --shared measures beside them "
                f"and says so in each row{gpu_hint}"
            )
        if logged_text != text:
            logged_text = text
            log(f"waiting: {text}" + (", and ends" if is_ending else ""))
        time.sleep(timeouts.ASK_OTHER_SWEEPS_EVERY_S)
    if others:
        log(f"not alone: {_describe_use(others)}")
    return others


def _describe_use(others: Mapping[str, tuple[Holder, ...]]) -> str:
    """Return `cuda:0 of alpha is used by run a-1 of bob (…) since 2026-11-22 04:00:00`, or ""."""
    if not others:
        return ""
    (device, holders), *further = others.items()
    count = len(further)
    other_devices = f" and {count} more device{'s' * (count > 1)}" if count else ""
    verb = "are" if other_devices or device.startswith("the processors") else "is"
    holder, *other_holders = holders
    other_sweeps = f" and {len(other_holders)} more" if other_holders else ""
    return f"{device}{other_devices} {verb} used by {holder}{other_sweeps} since {holder.since}"


class CpuTime(NamedTuple):
    """Processor time of a process."""

    own_s: float
    # Time of ended children that the process has waited for.
    children_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """Who used a node and the devices of a point on it, at one moment."""

    # Monotonic clock of the node.
    time_s: float
    # Other sweeps that have locked devices of the point.
    holders: tuple[Holder, ...] = ()
    # UUID of a GPU of the point -> other processes on it, in words. GPUs for which NVML's list is
    # incomplete are missing.
    processes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Other sweeps and processes on other devices of the node, in words.
    on_other_devices: tuple[str, ...] = ()
    # Busy time of `processors` processors since the host started; None if unknown, or if the point
    # has no CPU worker here.
    busy_s: float | None = None
    processors: int = 0
    # (process id, start time) -> processor time of each process of this sweep.
    own_times: Mapping[tuple[int, float], CpuTime] = field(default_factory=dict)
    # Other processes on the point's GPUs, and those that kept cores busy.
    programs: tuple[OtherProgram, ...] = ()


def read_node_use(
    devices: Sequence[Device],
    locks: DeviceLocks,
    holder: Holder,
    ended_ids: Collection[int] = (),
    busy: Collection[str] = (),
    watch: other_programs.ProgramWatch | None = None,
) -> NodeUse:
    """Return who uses this node now. Call it in a child process of the node's raylet.

    Args:
        devices: devices of a point on this node.
        holder: this sweep.
        ended_ids: processes of this sweep that have ended; NVML may still list these processes.
        busy: UUIDs of GPUs with other points of this sweep.
        watch: names the processes that keep cores busy.
    """
    # All CPU workers of a node have the same lock.
    lock_names = list(dict.fromkeys(map(lock_name, devices)))
    locked = locks.other_users(lock_names, holder.sweep)
    living_ids = _own_process_ids(holder)
    own_ids = {*living_ids, *ended_ids, *(device.process_id for device in devices)}
    gpus = [device for device in devices if device.kind == "cuda"]
    # UUID of a GPU -> other processes in words; only GPUs whose processes NVML can name.
    processes = {}
    programs: list[OtherProgram] = []
    for gpu in gpus:
        other_ids = _other_processes_on(gpu, own_ids)
        if other_ids is not None:
            processes[gpu.uuid] = tuple(map(_describe_process, other_ids))
            for process_id in other_ids:
                programs.append(other_programs.describe(process_id, gpu.host, device_uuid=gpu.uuid))
    # In a container NVML may list process ids of the host, which do not match ours. So name
    # processes on other GPUs only if NVML lists our workers by their ids.
    known_ids = own_ids if processes else None
    processors = os.sched_getaffinity(0)
    # A device that is no GPU is a CPU worker.
    has_cpu_workers = len(gpus) < len(devices)
    cpu_times = _cpu_times(living_ids) if has_cpu_workers else {}
    if has_cpu_workers and watch is not None:
        programs += watch.look(devices[0].host, own_ids)
    return NodeUse(
        time_s=time.monotonic(),
        holders=tuple(dict.fromkeys(chain.from_iterable(locked.others.values()))),
        processes=processes,
        on_other_devices=_others_on_node(devices, locks, holder, busy, known_ids),
        busy_s=_busy_s(processors) if has_cpu_workers else None,
        own_times=cpu_times,
        processors=len(processors),
        programs=tuple(programs),
    )


def _cpu_times(process_ids: Collection[int]) -> dict[tuple[int, float], CpuTime]:
    """Return (process id, start time) -> processor time so far, for living processes."""
    times = {}
    for process_id in process_ids:
        with suppress(psutil.Error):  # the process has ended
            process = psutil.Process(process_id)
            spent = process.cpu_times()
            times[process_id, process.create_time()] = CpuTime(
                own_s=spent.user + spent.system,
                children_s=spent.children_user + spent.children_system,
            )
    return times


def other_users(before: NodeUse, after: NodeUse, devices: Sequence[Device]) -> OtherUsers:
    """Return the users in either reading, and the CPU load of other processes in between.

    Args:
        before, after: readings just before and just after the point.
        devices: devices of the point on this node, at least one.
    """
    load = _load_of_others(before, after, devices)
    return OtherUsers(
        on_devices=tuple(_users_of_devices(before, after, devices)),
        on_nodes=tuple(dict.fromkeys((*before.on_other_devices, *after.on_other_devices))),
        loads=() if load is None else (load,),
        programs=tuple(_programs_beside(before, after, has_load=load is not None)),
    )


def _programs_beside(before: NodeUse, after: NodeUse, *, has_load: bool) -> Iterator[OtherProgram]:
    """Yield the other sweeps, the processes on GPUs, and the processes that kept cores busy.

    Args:
        before, after: readings before and after the point; only `after` has the processes that kept
            cores busy between the readings.
        has_load: whether a load of the cores is reported; otherwise its processes are left out.
    """
    sweeps = dict.fromkeys((*before.holders, *after.holders))
    yield from (sweep.program for sweep in sweeps)
    on_gpus = {}
    for program in (*before.programs, *after.programs):
        if program.device_uuid:
            on_gpus[program.device_uuid, program.process_id] = program
    yield from on_gpus.values()
    if has_load:
        on_cores = [program for program in after.programs if not program.device_uuid]
        yield from on_cores


def _users_of_devices(before: NodeUse, after: NodeUse, devices: Sequence[Device]) -> Iterator[str]:
    """Yield the other sweeps and processes on the devices in either reading, in words."""
    host = devices[0].host
    yield from map(str, dict.fromkeys((*before.holders, *after.holders)))
    for device in devices:
        others = (*before.processes.get(device.uuid, ()), *after.processes.get(device.uuid, ()))
        for process in dict.fromkeys(others):
            yield f"{process} on {device.kind}:{device.index} of {host}"


def _load_of_others(before: NodeUse, after: NodeUse, devices: Sequence[Device]) -> HostLoad | None:
    """Return the cores that other processes kept busy; None if unknown or too few to matter."""
    if before.busy_s is None or after.busy_s is None:
        return None
    # Processor time that our processes used between the readings.
    own_s = children_s = 0.0
    for process, time_after in after.own_times.items():
        time_before = before.own_times.get(process, CpuTime(0.0, 0.0))
        own_s += time_after.own_s - time_before.own_s
        children_s += time_after.children_s - time_before.children_s
    # When a process of ours ends, all its time is added to the children's time of its parent, also
    # the time that the process had used before the first reading.
    used_earlier_s = 0.0
    for process, time_before in before.own_times.items():
        if process not in after.own_times:
            used_earlier_s += time_before.own_s + time_before.children_s
    own_s += max(0.0, children_s - used_earlier_s)
    others_s = after.busy_s - before.busy_s - own_s

    busy_cores = others_s / (after.time_s - before.time_s) if others_s > _MIN_LOAD_S else 0.0
    # Ignore a small share of the processors that the point uses: an idle system has some load.
    threads = sum(max(1, device.omp_num_threads) for device in devices if device.kind == "cpu")
    if busy_cores <= _MIN_LOAD_SHARE * min(threads, after.processors):
        return None
    return HostLoad(host=devices[0].host, busy_cores=busy_cores, cores=after.processors)


def _busy_s(processors: Collection[int]) -> float | None:
    """Return the busy time of some processors since the host started; None if unknown."""
    # Read /proc/stat, because psutil does not number the processors if some are offline.
    names = {f"cpu{number}" for number in processors}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    ticks = []
    for line in lines:
        if line[0] in names:
            ticks += [int(line[column]) for column in _BUSY_COLUMNS]
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def _own_process_ids(holder: Holder) -> set[int]:
    """Return the ids of the processes of Ray and of this sweep on this node, with descendants.

    Ray workers of other sweeps are included too, because their locks show those sweeps.
    """
    living = list(psutil.process_iter(["ppid", "name"]))
    ray_ids = {process.pid for process in living if process.info["name"] in _RAY_PROGRAMS}
    ray_ids.add(os.getppid())
    own_ids = {*ray_ids, os.getpid()}
    if holder.host == socket.gethostname():
        own_ids.add(holder.process_id)
    # The driver may have ended.
    own_ids &= {process.pid for process in living}

    candidates = [process for process in living if not _is_foreign_worker(process, ray_ids)]
    # Add the descendants, one generation at a time.
    while True:
        children = {child.pid for child in candidates if child.info["ppid"] in own_ids}
        if children <= own_ids:
            return own_ids
        own_ids |= children


def _is_foreign_worker(process: psutil.Process, ray_ids: Collection[int]) -> bool:
    """Return whether the process is a Ray worker of another program than raybench."""
    if process.info["ppid"] not in ray_ids:
        return False
    title = ""
    with suppress(psutil.Error):  # the process has ended
        title = " ".join(process.cmdline())
    is_worker = title.startswith("ray::") or "default_worker.py" in title
    if not is_worker:
        return False
    try:
        return reaper.MARK not in process.environ()
    except psutil.Error:
        return True  # only the title of another user's process can be read


def _others_on_node(
    devices: Sequence[Device],
    locks: DeviceLocks,
    holder: Holder,
    busy: Collection[str],
    own_ids: set[int] | None,
) -> tuple[str, ...]:
    """Return who uses other devices of this node, in words.

    Args:
        devices: devices of the point.
        busy: UUIDs of GPUs with other points of this sweep.
        own_ids: processes of this sweep; None names other sweeps only.
    """
    from raybench.hardware import nvml

    host, point_devices = devices[0].host, set(map(lock_name, devices))
    users: list[str] = []
    # Lock name of a device -> other sweeps.
    sweeps = locks.users_of_other_devices(point_devices, holder.sweep)
    # UUID of a GPU, which is its lock name -> its index. Ask NVML only if a GPU may be named.
    gpu_indices = nvml.uuids() if sweeps or own_ids is not None else {}
    for name, holders in sweeps.items():
        if name == CPU:
            device = "the processors"
        else:
            # A container may hide the GPU that a sweep outside of the container has locked.
            device = f"GPU {gpu_indices[name]}" if name in gpu_indices else "another GPU"
        users += [f"{other} used {device} of {host}" for other in holders]
    if own_ids is None:
        return tuple(users)

    # Name processes on GPUs that no sweep has locked.
    unlocked_gpus = gpu_indices.keys() - point_devices - sweeps.keys() - set(busy)
    for uuid in sorted(unlocked_gpus, key=gpu_indices.__getitem__):
        handle = nvml.device(uuid)
        process_ids = set() if handle is None else nvml.compute_process_ids(handle)
        for process_id in sorted(process_ids - own_ids):
            process = _describe_process(process_id)
            users.append(f"{process} used GPU {gpu_indices[uuid]} of {host}")
    return tuple(users)


def _other_processes_on(device: Device, own_ids: set[int]) -> list[int] | None:
    """Return the ids of other processes on the GPU; None if NVML gives no usable ids."""
    from raybench.hardware import nvml

    handle = nvml.device(device.uuid)
    process_ids = set() if handle is None else nvml.process_ids(handle)
    # Our worker uses the GPU. In a container NVML may list ids of the host instead of ours.
    if device.process_id not in process_ids:
        return None
    return sorted(process_ids - own_ids)


def _describe_process(process_id: int) -> str:
    try:
        name = psutil.Process(process_id).name()
    except psutil.Error:
        name = "of another container"
    return f"process {process_id} ({''.join(c if c.isprintable() else '?' for c in name)})"
