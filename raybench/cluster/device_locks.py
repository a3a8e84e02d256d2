"""Who uses the devices of this host: locks across sweeps and users.

Each device has a row of slots, files in a folder that everybody may enter, and each sweep that uses
the device holds the lock of one of them (flock: the kernel lets go of it when the holder dies). A
sweep that wants a device for itself takes none while any is held; one that shares takes the next.
All processors of a host are one device, `CPU`.

The folder is anybody's to write in. So nothing in it is followed (links), waited for (pipes), or
believed: what a slot says of its holder is cut, cleaned and shown, no more.
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

# All processors of a host: CPU workers are not bound to cores.
CPU = "cpu"
# Names another folder, as for the tests of raybench, which run sweeps side by side.
FOLDER_VARIABLE = "RAYBENCH_LOCK_DIR"
# Not TMPDIR: users have each their own.
_FOLDER = Path("/tmp/raybench-locks")
_MOST_SLOTS = 64
_GATE = "gate"
# Slots are looked at in a moment; who holds the gate for longer keeps nobody out.
_GATE_S = 2.0
_PAUSE_S = 0.02
_MOST_BYTES = 2048
_MOST_CHARACTERS = 120
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who uses a device. sweep: the same for all locks of one sweep. what: `run ID`, for example.

    host, process_id: of the driver. since: as text, in UTC.
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
        """Whether its driver was of this host and is gone: the device will be free in a moment."""
        if self.host != socket.gethostname() or self.process_id <= 0:
            return False
        try:
            os.kill(self.process_id, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # another user's
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a sweep takes its devices. holder: this sweep, as others are told of it.

    shared: run beside others. wait_s: how long others are waited for, where it is not.
    """

    holder: Holder
    shared: bool = False
    wait_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What became of a claim. others: device -> who uses it besides.

    problem: why there are no locks; then nobody is known, and nobody is kept out.
    """

    others: Mapping[str, tuple[Holder, ...]] = field(default_factory=dict)
    problem: str = ""


def this_process(what: str) -> Holder:
    """Describe this process as a holder, with a token of its own."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # without an entry in passwd
    return Holder(
        sweep=os.urandom(16).hex(),
        what=what,
        user=user,
        host=socket.gethostname(),
        process_id=os.getpid(),
        since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )


class DeviceLocks:
    """The locks that this process holds, until it ends or closes them."""

    def __init__(self) -> None:
        self._folder = Path(os.environ.get(FOLDER_VARIABLE) or _FOLDER)
        self._held: dict[str, int] = {}

    def claim(self, devices: Sequence[str], holder: Holder, *, shared: bool) -> Claim:
        """Hold the devices, all or, where others use one of them and it is not shared, none."""
        try:
            with self._gate() as folder:
                others = self._others(folder, devices, holder.sweep)
                if shared or not others:
                    for device in devices:
                        self._hold(folder, device, holder)
        except OSError as error:
            return Claim(problem=f"{self._folder}: {error.strerror or error}")
        return Claim(others=others)

    def others(self, devices: Sequence[str], sweep: str = "") -> Claim:
        """Who else uses the devices now."""
        try:
            with self._gate() as folder:
                return Claim(others=self._others(folder, devices, sweep))
        except OSError as error:
            return Claim(problem=f"{self._folder}: {error.strerror or error}")

    def close(self) -> None:
        """Let go of all."""
        while self._held:
            os.close(self._held.popitem()[1])

    @contextmanager
    def _gate(self) -> Iterator[int]:
        """Open the folder, in which nobody else looks or takes meanwhile."""
        folder = _open_folder(self._folder)
        try:
            gate = _open_file(folder, _GATE)
            try:
                _lock_soon(gate)
                yield folder
            finally:
                os.close(gate)
        finally:
            os.close(folder)

    def _others(
        self, folder: int, devices: Sequence[str], sweep: str
    ) -> dict[str, tuple[Holder, ...]]:
        names = sorted(os.listdir(folder))
        found = {
            device: tuple(
                holder
                for name in names
                if _is_slot(name, device)
                and name not in self._held
                and (holder := _holder(folder, name)) is not None
                and holder.sweep != sweep
            )
            for device in devices
        }
        return {device: holders for device, holders in found.items() if holders}

    def _hold(self, folder: int, device: str, holder: Holder) -> None:
        if any(_is_slot(name, device) for name in self._held):
            return
        for name in (_slot(device, number) for number in range(_MOST_SLOTS)):
            with suppress(OSError):  # another's, or no file
                self._held[name] = _take(folder, name, holder)
                return
        raise OSError(f"no slot of {device} can be had")


def _slot(device: str, number: int) -> str:
    return f"{re.sub(r'[^A-Za-z0-9-]', '_', device)}.{number}"


def _is_slot(name: str, device: str) -> bool:
    return name.rpartition(".")[0] == _slot(device, 0).rpartition(".")[0]


def _open_folder(path: Path) -> int:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
        path.chmod(0o1777)  # whatever the umask
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)


def _open_file(folder: int, name: str) -> int:
    """Open a plain file of that name, made where there is none. Raises OSError for another."""
    try:
        file = _open(folder, name)
    except FileNotFoundError:
        # Linux refuses O_CREAT for another's file in such a folder: so only where there is none.
        with suppress(FileExistsError):
            made = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600, dir_fd=folder)
            os.fchmod(made, 0o666)
            return made
        file = _open(folder, name)
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
        os.close(file)
        raise OSError(f"{name} is no plain file; remove it")
    return file


def _open(folder: int, name: str) -> int:
    try:
        return os.open(name, os.O_RDWR | _OPEN, dir_fd=folder)
    except PermissionError:
        return os.open(name, os.O_RDONLY | _OPEN, dir_fd=folder)


def _lock_soon(file: int) -> None:
    deadline_s = time.monotonic() + _GATE_S
    while time.monotonic() < deadline_s:
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_PAUSE_S)
    return None


def _take(folder: int, name: str, holder: Holder) -> int:
    """Lock the slot and write the holder into it. Raises BlockingIOError where it is another's."""
    file = _open_file(folder, name)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_RDWR:
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(asdict(holder)).encode()[:_MOST_BYTES], 0)
    except OSError:
        os.close(file)
        raise
    return file


def _holder(folder: int, name: str) -> Holder | None:
    """Who holds the slot, as far as it says; None where nobody does, and where it is no file."""
    try:
        file = _open_file(folder, name)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(os.pread(file, _MOST_BYTES, 0))
    finally:
        os.close(file)
    return None


def _read_holder(content: bytes) -> Holder:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    told = found if isinstance(found, dict) else {}
    number = told.get("process_id")
    return Holder(
        sweep=_clean(told.get("sweep")),
        what=_clean(told.get("what")),
        user=_clean(told.get("user")),
        host=_clean(told.get("host")),
        process_id=number if type(number) is int and 0 < number < 2**22 else 0,
        since=_clean(told.get("since")),
    )


def _clean(text: object) -> str:
    if not isinstance(text, str):
        return "unknown"
    return "".join(c if c.isprintable() else "?" for c in text[:_MOST_CHARACTERS])
