"""Who uses which devices: locks across the sweeps and users of a host, and who is there besides.

Who uses a device has a file of it in a folder that everybody may enter, and an exclusive lock of
that file (flock: the kernel lets go of it when the holder dies). A sweep that wants the device for
itself makes no file where there is a locked one of another sweep. Only one process of the host
makes files at a time. All processors of a host are one device, `CPU`.

Everybody can write into the folder. So no link in it is followed, and what a file says of its
holder is shortened, cleaned and shown; it decides no more than how long a sweep waits.

A `DeviceReservation` takes the locks on all nodes of a sweep, by the agents of these nodes.

Who else used the nodes of a point is found by two looks at each node, before the point and after
it: other sweeps by their locks, on CPUs the processor time of processes that are not of this sweep,
on GPUs the processes that NVML names. Nothing here runs in the process of a rank.
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
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

from raybench.cluster import reaper, timeouts
from raybench.conversion import KIB
from raybench.errors import DevicesInUseError
from raybench.records.device import Device
from raybench.records.record import HostLoad, OtherUsers

# All processors of a host: CPU workers are not bound to cores.
CPU = "cpu"
# Names another folder, as for the tests of raybench, which run sweeps side by side.
FOLDER_VARIABLE = "RAYBENCH_LOCK_DIR"
# Not TMPDIR: users have each their own.
_FOLDER = Path("/tmp/raybench-locks")
_MOST_BYTES = 64 * KIB
_PAUSE_S = 0.05
_TURN_S = 5.0
# What a file in the folder may be the lock of.
_LOCK_FILE = re.compile(r"(cpu|GPU-[0-9A-Za-z-]+)\..+")
_MOST_CHARACTERS = 120
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Share of the processors of the workers below which a load is ignored: an idle system has some.
_LEAST_SHARE = 0.05
# Processor time is counted in ticks of 10 ms, for each processor and each process.
_LEAST_S = 0.1
# Ray's own processes count as ours, also where somebody else has started them.
_RAY_PROGRAMS = ("gcs_server", "raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent")
# Columns of a line of /proc/stat behind the name: user, nice, system, irq, softirq.
_BUSY_COLUMNS = (1, 2, 3, 6, 7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who uses a device. sweep: the same for all locks of one sweep. what: `run ID`, for example.

    host, process_id: of its driver. since: the sweep's start (UTC). Unknown: "unknown", or 0.
    """

    sweep: str
    what: str
    user: str
    host: str
    process_id: int
    since: str

    def __str__(self) -> str:
        return f"{self.what} of {self.user} (process {self.process_id} on {self.host})"

    @property
    def has_ended(self) -> bool:
        """Whether the driver ran on this host and no process has its id now; False if unknown."""
        is_here = self.process_id > 0 and self.host == socket.gethostname()
        return is_here and not psutil.pid_exists(self.process_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationTerms:
    """How a sweep shares its devices with other sweeps.

    holder: this sweep, as other sweeps will see it. shared: measure beside sweeps that have the
    same devices. wait_s: if not, how long to wait for their end; at least 65 s if all their drivers
    ran on this host and are gone.
    """

    holder: Holder
    shared: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LockResult:
    """The result of locking devices. others: name of a device in use -> other sweeps on it.

    problem: why not all could be locked or seen, or "". The caller then goes on without locks.
    """

    others: Mapping[str, tuple[Holder, ...]] = field(default_factory=dict)
    problem: str = ""


def this_process(what: str) -> Holder:
    """Return this process as the holder of a new sweep; each call makes one. what: as `run ID`."""
    return Holder(
        sweep=os.urandom(16).hex(),
        what=what,
        user=psutil.Process().username(),
        host=socket.gethostname(),
        process_id=os.getpid(),
        since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )


class DeviceLocks:
    """The device locks of this process on this host, held until `close` or its end."""

    def __init__(self) -> None:
        self._folder = Path(os.environ.get(FOLDER_VARIABLE) or _FOLDER)
        self._held: dict[str, tuple[int, Path]] = {}

    def lock(self, devices: Sequence[str], holder: Holder, shared: bool) -> LockResult:
        """Lock the devices; return who else uses them, or why locking failed. Never raises.

        They are locked in addition to those of earlier calls. If another sweep uses one of them,
        none is locked, unless `shared`: then all are. devices: names as returned by `lock_name`.
        holder: this sweep, which is not counted as another. Waits at most 5 s while another process
        of this host locks devices, then the result has a `problem`.
        """
        try:
            with _exclusive(self._folder):
                others = self._find_others(devices, holder.sweep, remove_stale=True)
                if shared or not others:
                    for device in set(devices) - self._held.keys():
                        # Under a name at which nobody looks until it is locked and whole.
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
                        self._held[device] = file, path
        except OSError as error:
            return LockResult(problem=f"{self._folder}: {error.strerror or error}")
        return LockResult(others=others)

    def other_users(self, devices: Sequence[str], sweep: str = "") -> LockResult:
        """Return who uses the devices now, or why that cannot be seen; locks nothing.

        A missing or unreadable folder shows nobody, without a `problem`. devices: as of `lock`.
        sweep: `Holder.sweep` of the sweep not to report; "" reports all, also this process.
        """
        try:
            return LockResult(others=self._find_others(devices, sweep))
        except OSError as error:
            return LockResult(problem=f"{self._folder}: {error.strerror or error}")

    def users_beside(self, devices: Collection[str], sweep: str) -> dict[str, tuple[Holder, ...]]:
        """Return the other sweeps on devices of this host that are not in `devices`, by device."""
        matches = (_LOCK_FILE.fullmatch(path.name) for path in self._folder.glob("*"))
        names = sorted({match[1] for match in matches if match} - set(devices))
        return dict(self.other_users(names, sweep).others)

    def close(self) -> None:
        """Release all locks; `lock` may be called again."""
        for file, path in self._held.values():
            path.unlink(missing_ok=True)
            os.close(file)
        self._held = {}

    def _find_others(
        self, devices: Sequence[str], sweep: str, *, remove_stale: bool = False
    ) -> dict[str, tuple[Holder, ...]]:
        """Return the other sweeps that use each device; devices without any are left out.

        remove_stale: remove the files of sweeps that were killed; the folder must be locked.
        """
        others: dict[str, tuple[Holder, ...]] = {}
        for device in devices:
            users: dict[Holder, None] = {}
            for path in sorted(self._folder.glob(f"{_file_name(device)}.*")):
                user = _read_holder(path)
                if user is not None and user.sweep != sweep:
                    users[user] = None
                elif user is None and remove_stale:
                    with suppress(OSError):  # another user's, or a folder
                        path.unlink()
            if users:
                others[device] = tuple(users)
        return others


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Let one process use the folder at a time; OSError after 5 s, or where it cannot be opened."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o1777)  # whatever the umask
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
    until_s = time.monotonic() + _TURN_S
    try:
        while not _try_lock(place, fcntl.LOCK_EX):
            if time.monotonic() > until_s:
                raise OSError("another process holds the folder's lock")
            time.sleep(_PAUSE_S)
        yield
    finally:
        os.close(place)


def _try_lock(file: int, kind: int) -> bool:
    """Lock the file unless somebody has; return whether that was done. kind: as of `flock`."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _file_name(device: str) -> str:
    """Return the beginning of the names of a device's lock files."""
    return re.sub(r"[^A-Za-z0-9-]", "_", device)


def _read_holder(path: Path) -> Holder | None:
    """Return who holds the lock of a file; see `Holder` for the facts that it does not tell.

    Each is a short line without control characters. None if nobody does; for links, folders, pipes.
    """
    try:
        file = os.open(path, os.O_RDONLY | _OPEN)
    except OSError:
        return None
    try:
        facts = os.fstat(file)
        is_file = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
        if not is_file or _try_lock(file, fcntl.LOCK_SH):
            return None
        found = json.loads(os.pread(file, _MOST_BYTES, 0))
    except (ValueError, RecursionError):
        found = None
    finally:
        os.close(file)
    told = found if isinstance(found, dict) else {}
    number = told.get("process_id")
    process_id = number if type(number) is int and 0 < number < 2**22 else 0
    words = {}
    for name in ("sweep", "what", "user", "host", "since"):
        text = told.get(name)
        shown = text[:_MOST_CHARACTERS] if isinstance(text, str) else "unknown"
        words[name] = "".join(c if c.isprintable() else "?" for c in shown)
    return Holder(**words, process_id=process_id)


def lock_name(device: Device) -> str:
    """Return under which name a worker's device is locked: the GPU's UUID, or the constant `CPU`.

    So all CPU workers of a host share one lock.
    """
    return device.uuid if device.kind == "cuda" else CPU


@contextmanager
def reserve_this_hosts_cpus(terms: ReservationTerms, log: Callable[[str], None]) -> Iterator[None]:
    """Return a context in which this process has locked the CPUs of this host, to start Ray in it.

    Unless the terms are shared, it first waits for the end of other sweeps on these CPUs, not of
    those on GPUs only, and raises as `DeviceReservation.reserve`. Where no lock can be had, it does
    without, and does not say so. log: gets a line for the user when it waits.
    """
    locks = DeviceLocks()

    def others() -> dict[str, tuple[Holder, ...]]:
        found = locks.lock([CPU], terms.holder, shared=terms.shared).others
        return {"the processors of this host": found[CPU]} if found else {}

    try:
        if terms.shared:
            others()  # a `DeviceReservation` will name them, when all devices are known
        else:
            _wait_for_others(others, terms, log)
        yield
    finally:
        locks.close()


class NodeLocks(Protocol):
    """The calls to nodes that a reservation makes; `ray_cluster.nodes.NodeAgents` is one."""

    def lock(
        self, devices: Sequence[Device], holder: Holder, *, shared: bool
    ) -> list[tuple[Device, LockResult]]:
        """Lock them on each node as `DeviceLocks.lock`; return one device per node with its result.

        Never raises: the result of a node that does not answer has a `problem`.
        """

    def unlock(self, devices: Sequence[Device]) -> None:
        """Release all locks of this sweep on these devices' nodes, if they answer; never raises."""


class DeviceReservation:
    """The devices of one sweep, locked against other sweeps on all its nodes.

    terms: None locks no device and sees no other sweep. log: gets lines for the user, also where it
    goes on without a lock. other_sweeps: those that `reserve` shared devices with, in words.
    """

    def __init__(
        self, nodes: NodeLocks, terms: ReservationTerms | None, log: Callable[[str], None]
    ) -> None:
        self._nodes = nodes
        self._terms = terms
        self._log = log
        self._logged: set[str] = set()
        self.other_sweeps: tuple[str, ...] = ()

    def reserve(self, devices: Sequence[Device]) -> None:
        """Lock the devices until the nodes' agents end; sets `other_sweeps`. Call it once.

        If another sweep has one of them, and the terms are not shared, waits for its end as long as
        the terms say, then raises DevicesInUseError with none locked. Without terms does nothing.
        """
        if (terms := self._terms) is not None:
            others = _wait_for_others(lambda: self._lock_all(devices, terms), terms, self._log)
            holders = (str(one) for held_by in others.values() for one in held_by)
            self.other_sweeps = tuple(dict.fromkeys(holders))

    def try_reserve(self, device: Device) -> str:
        """Lock one more device, or return in words which other sweep has it; "" if it is locked.

        "" too without terms, and with shared ones or where no lock can be had. Does not wait for
        the other's end. Devices that are reserved already stay so.
        """
        if self._terms is None:
            return ""
        others = self._lock([device], self._terms)
        return "" if self._terms.shared else _in_use(others)

    def _lock_all(
        self, devices: Sequence[Device], terms: ReservationTerms
    ) -> dict[str, tuple[Holder, ...]]:
        """Lock all devices of the sweep, or none; return what `_lock` does."""
        found = self._lock(devices, terms)
        if found and not terms.shared:
            # Two sweeps that wait for each other's nodes would wait for ever.
            self._nodes.unlock(devices)
        return found

    def _lock(
        self, devices: Sequence[Device], terms: ReservationTerms
    ) -> dict[str, tuple[Holder, ...]]:
        """Lock the devices; return each place in words that others have, and its holders.

        If others have a device of a node and the terms are not shared, none is locked there.
        """
        found: dict[str, tuple[Holder, ...]] = {}
        for first, result in self._nodes.lock(devices, terms.holder, shared=terms.shared):
            if result.problem and result.problem not in self._logged:
                self._logged.add(result.problem)
                self._log(
                    f"device locks of {first.host} cannot be had ({result.problem}): another sweep "
                    "there would go unseen (warning)"
                )
            here = [device for device in devices if device.node_id == first.node_id]
            places = {
                lock_name(device): f"cuda:{device.index} of {device.host}"
                if device.kind == "cuda"
                else f"the processors of {device.host}"
                for device in here
            }
            found |= {places[name]: holders for name, holders in result.others.items()}
        return found


def _wait_for_others(
    find_others: Callable[[], Mapping[str, tuple[Holder, ...]]],
    terms: ReservationTerms,
    log: Callable[[str], None],
) -> Mapping[str, tuple[Holder, ...]]:
    """Wait until no other sweep has the devices, and return {}.

    With shared terms return the other sweeps at once, by device, without waiting.
    Raises DevicesInUseError where the terms' time, or 65 s for sweeps that have ended, is over.
    """
    begun_s, logged = time.monotonic(), ""
    while (others := find_others()) and not terms.shared:
        told = _in_use(others)
        is_ending = all(one.has_ended for held_by in others.values() for one in held_by)
        patience_s = max(terms.wait_s, timeouts.ENDED_SWEEP_S if is_ending else 0.0)
        if time.monotonic() >= begun_s + patience_s:
            gpus = "" if "processors" in told else ", CUDA_VISIBLE_DEVICES to use other GPUs"
            raise DevicesInUseError(
                f"{told}; --wait SECONDS waits for them, --shared measures beside them "
                f"and says so in each row{gpus}"
            )
        if logged != told:
            logged = told
            log(f"waiting: {told}" + (", and ends" if is_ending else ""))
        time.sleep(timeouts.ASK_OTHER_SWEEPS_EVERY_S)
    if others:
        log(f"not alone: {_in_use(others)}")
    return others


def _in_use(others: Mapping[str, tuple[Holder, ...]]) -> str:
    """Return `cuda:0 of alpha is used by run a-1 of bob (…) since 2026-11-22 04:00:00`, or "".

    others: device in words -> its holders.
    """
    if not others:
        return ""
    place, held_by = next(iter(others.items()))
    more = f" and {len(others) - 1} more device{'s' * (len(others) > 2)}" if len(others) > 1 else ""
    are = "are" if more or place.startswith("the processors") else "is"
    besides = f" and {len(held_by) - 1} more" if len(held_by) > 1 else ""
    return f"{place}{more} {are} used by {held_by[0]}{besides} since {held_by[0].since}"


class CpuTime(NamedTuple):
    """Processor time of a process, and of its children that have ended and were waited for."""

    own_s: float
    children_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUse:
    """Who used a node at one moment."""

    # Time of the look, by the monotonic clock of the node.
    time_s: float
    # Other sweeps that have locked the devices.
    holders: tuple[Holder, ...] = ()
    # GPU UUID -> other processes, in words. A GPU is missing where NVML does not name our worker.
    processes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Other sweeps and processes on other devices of the node, in words.
    beside: tuple[str, ...] = ()
    # Busy time of the `processors` since the host started; None if unknown or without CPU workers.
    busy_s: float | None = None
    # (process id, start time) -> processor time of each process of this sweep.
    own: Mapping[tuple[int, float], CpuTime] = field(default_factory=dict)
    processors: int = 0


def read_node_use(
    devices: Sequence[Device],
    locks: DeviceLocks,
    holder: Holder,
    ended: Collection[int] = (),
    busy: Collection[str] = (),
) -> NodeUse:
    """Return who uses this node now.

    Must be called in a child process of the node's raylet. Ray workers with a mark of raybench that
    can be read count as this sweep's; another sweep shows by its lock, as `locks` sees it.

    Args:
        devices: devices of a point on this node.
        locks: locks of this sweep on this node.
        holder: this sweep.
        ended: ids of processes of this sweep that have just ended; NVML may still list them.
        busy: UUIDs of GPUs with other points of this sweep; these points report their neighbours.
    """
    locked = locks.other_users(list(dict.fromkeys(map(lock_name, devices))), holder.sweep)
    own = _own_processes(holder)
    gpus = [device for device in devices if device.kind == "cuda"]
    ended = {*ended, *(device.process_id for device in devices)}
    looks = {gpu.uuid: _on_gpu(gpu, own | ended) for gpu in gpus}
    processes = {uuid: others for uuid, others in looks.items() if others is not None}
    # In a container NVML may name processes by ids of the host; then ours cannot be told apart.
    known = own | ended if processes else None
    processors = os.sched_getaffinity(0)
    has_cpu_workers = len(gpus) < len(devices)
    times = {}
    for number in own if has_cpu_workers else ():
        with suppress(psutil.Error):  # it has ended
            process = psutil.Process(number)
            spent = process.cpu_times()
            times[number, process.create_time()] = CpuTime(
                own_s=spent.user + spent.system,
                children_s=spent.children_user + spent.children_system,
            )
    return NodeUse(
        time_s=time.monotonic(),
        holders=tuple(dict.fromkeys(one for held_by in locked.others.values() for one in held_by)),
        processes=processes,
        beside=_others_on_node(devices, locks, holder, busy, known),
        busy_s=_busy_s(processors) if has_cpu_workers else None,
        own=times,
        processors=len(processors),
    )


def other_users(before: NodeUse, after: NodeUse, devices: Sequence[Device]) -> OtherUsers:
    """Return who else was seen at either look, and others' CPU load between.

    before, after: the node's use just before and just after our own. devices: those that we used
    on this node, at least one. Left out are loads up to 0.1 s or 5 % of our threads, or of the
    cores if these are fewer, and any load if we had no CPU workers.
    """
    load = _load_of_others(before, after, devices)
    return OtherUsers(
        on_devices=tuple(_users_of(before, after, devices)),
        on_nodes=tuple(dict.fromkeys((*before.beside, *after.beside))),
        loads=() if load is None else (load,),
    )


def _users_of(before: NodeUse, after: NodeUse, devices: Sequence[Device]) -> Iterator[str]:
    """Yield who else used these devices, in a few words each."""
    host = devices[0].host
    yield from (str(one) for one in dict.fromkeys((*before.holders, *after.holders)))
    for device in devices:
        found = (*before.processes.get(device.uuid, ()), *after.processes.get(device.uuid, ()))
        for process in dict.fromkeys(found):
            yield f"{process} on {device.kind}:{device.index} of {host}"


def _load_of_others(before: NodeUse, after: NodeUse, devices: Sequence[Device]) -> HostLoad | None:
    """Return the cores that other processes kept busy; None if few, or without CPU workers."""
    if before.busy_s is None or after.busy_s is None:
        return None
    threads = sum(max(1, device.omp_num_threads) for device in devices if device.kind == "cpu")
    nothing = CpuTime(0.0, 0.0)
    gained = [(now, before.own.get(process, nothing)) for process, now in after.own.items()]
    own_s = sum(now.own_s - then.own_s for now, then in gained)
    children_s = sum(now.children_s - then.children_s for now, then in gained)
    # When a process exits, its time moves to the children_* counters of its parent, if that waits
    # for it: subtract what was already counted.
    ended_s = sum(sum(then) for process, then in before.own.items() if process not in after.own)
    others_s = after.busy_s - before.busy_s - own_s - max(0.0, children_s - ended_s)
    taken = others_s / (after.time_s - before.time_s) if others_s > _LEAST_S else 0.0
    if taken <= _LEAST_SHARE * min(threads, after.processors):
        return None
    return HostLoad(host=devices[0].host, busy_cores=taken, cores=after.processors)


def _busy_s(processors: Collection[int]) -> float | None:
    """Return the busy time of these processors since the host started; None without /proc/stat.

    Not by psutil, which does not say which processor is which where some are switched off.
    """
    names = {f"cpu{number}" for number in processors}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except OSError:
        return None
    busy = [sum(int(line[place]) for place in _BUSY_COLUMNS) for line in lines if line[0] in names]
    return sum(busy) / os.sysconf("SC_CLK_TCK") if busy else None


def _own_processes(holder: Holder) -> set[int]:
    """Return the ids of this sweep's processes on this node, and of the Ray that it runs on."""
    living = list(psutil.process_iter(["ppid", "name"]))
    rays = {os.getppid(), *(one.pid for one in living if one.info["name"] in _RAY_PROGRAMS)}
    own = {*rays, os.getpid()}
    if holder.host == socket.gethostname():
        own.add(holder.process_id)
    own &= {one.pid for one in living}
    ours = []
    for one in living:
        is_foreign = False  # a Ray worker of another program
        if one.info["ppid"] in rays:
            with suppress(psutil.Error):  # another user's shows its title only
                title = " ".join(one.cmdline())
                is_foreign = title.startswith("ray::") or "default_worker.py" in title
                is_foreign = is_foreign and reaper.MARK not in one.environ()
        ours += [] if is_foreign else [one]
    while children := {one.pid for one in ours if one.info["ppid"] in own} - own:
        own |= children
    return own


def _others_on_node(
    devices: Sequence[Device],
    locks: DeviceLocks,
    holder: Holder,
    busy: Collection[str],
    own: set[int] | None,
) -> tuple[str, ...]:
    """Return, in words, other sweeps and processes on the other devices of this host."""
    from raybench.hardware import nvml

    host, here, told = devices[0].host, set(map(lock_name, devices)), []
    sweeps = locks.users_beside(here, holder.sweep)
    numbers = nvml.uuids() if sweeps or own is not None else {}
    for name, holders in sweeps.items():
        place = f"GPU {numbers[name]}" if name in numbers else "another GPU"
        place = "the processors" if name == CPU else place
        told += [f"{one} used {place} of {host}" for one in holders]
    if own is None:
        return tuple(told)
    for uuid in sorted(numbers.keys() - here - sweeps.keys() - set(busy), key=numbers.__getitem__):
        handle = nvml.device(uuid)
        found = set() if handle is None else nvml.compute_process_ids(handle)
        told += [
            f"{_in_words(process)} used GPU {numbers[uuid]} of {host}"
            for process in sorted(found - own)
        ]
    return tuple(told)


def _on_gpu(device: Device, own: set[int]) -> tuple[str, ...] | None:
    """Return other processes on the GPU in words; None where NVML does not even name the worker's.

    own: ids of the processes of this sweep.
    """
    from raybench.hardware import nvml

    handle = nvml.device(device.uuid)
    found = set() if handle is None else nvml.process_ids(handle)
    if device.process_id not in found:
        return None
    return tuple(map(_in_words, sorted(found - own)))


def _in_words(process: int) -> str:
    """Return `process 17 (python)`."""
    try:
        name = psutil.Process(process).name()
    except psutil.Error:
        name = "of another container"
    return f"process {process} ({''.join(c if c.isprintable() else '?' for c in name)})"
