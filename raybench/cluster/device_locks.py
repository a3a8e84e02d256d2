"""Who uses the devices of this host: locks across sweeps and users.

Each device has a file in a folder that everybody may enter. Whoever uses the device has a line in
the file and a shared lock of it (flock: the kernel lets go of it when the holder dies). A sweep
that wants the device for itself must get an exclusive lock first, which it then turns into a
shared one: other processes of its own may come, and sweeps that share. All processors of a host
are one device, `CPU`.

The folder is anybody's to write in. So nothing in it is followed (links), waited for (pipes), or
believed: what a line says of its holder is cut, cleaned and shown, no more.
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

import psutil

# All processors of a host: CPU workers are not bound to cores.
CPU = "cpu"
# Names another folder, as for the tests of raybench, which run sweeps side by side.
FOLDER_VARIABLE = "RAYBENCH_LOCK_DIR"
# Not TMPDIR: users have each their own.
_FOLDER = Path("/tmp/raybench-locks")
_MOST_BYTES = 64 * 1024
_PAUSE_S = 0.05
_TURN_S = 5.0
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
        return self.host == socket.gethostname() and _has_ended(self.process_id)


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
    """The devices that this process uses, until it ends or closes them."""

    def __init__(self) -> None:
        self._folder = Path(os.environ.get(FOLDER_VARIABLE) or _FOLDER)
        self._held: dict[str, tuple[int, bytes]] = {}

    def claim(self, devices: Sequence[str], holder: Holder, *, shared: bool) -> Claim:
        """Hold the devices, all or, where others use one of them and it is not shared, none."""
        line = f"{json.dumps({**asdict(holder), 'locked_by': os.getpid()})}\n".encode()
        others: dict[str, tuple[Holder, ...]] = {}
        new: list[str] = []
        try:
            with _only_claim(self._folder):
                for device in set(devices) - self._held.keys():
                    file = _open_file(self._folder, device)
                    is_alone = _lock(file, fcntl.LOCK_EX)
                    if not is_alone and (users := _users(file, holder.sweep)):
                        others[device] = users
                    if others and not shared:
                        os.close(file)
                        continue
                    self._held[device] = file, line
                    new.append(device)
                    if is_alone:
                        os.ftruncate(file, 0)  # what killed sweeps have left
                    os.write(file, line)
                    _lock(file, fcntl.LOCK_SH)
        except OSError as error:
            return self._problem(error)
        if others and not shared:
            for device in new:
                self._let_go(device)
        return Claim(others=others)

    def others(self, devices: Sequence[str], sweep: str = "") -> Claim:
        """Who else uses the devices now."""
        others: dict[str, tuple[Holder, ...]] = {}
        try:
            for device in devices:
                if device in self._held:
                    users = _users(self._held[device][0], sweep, is_ours=True)
                else:
                    file = _open_file(self._folder, device)
                    users = () if _lock(file, fcntl.LOCK_EX) else _users(file, sweep)
                    os.close(file)
                if users:
                    others[device] = users
        except OSError as error:
            return self._problem(error)
        return Claim(others=others)

    def close(self) -> None:
        """Let go of all."""
        for device in list(self._held):
            self._let_go(device)

    def _let_go(self, device: str) -> None:
        file, line = self._held.pop(device)
        left = os.pread(file, _MOST_BYTES, 0).replace(line, b"")
        os.ftruncate(file, 0)
        os.write(file, left)
        os.close(file)

    def _problem(self, error: OSError) -> Claim:
        return Claim(problem=f"{self._folder}: {error.strerror or error}")


@contextmanager
def _only_claim(folder: Path) -> Iterator[None]:
    """Let one process of the host claim devices at a time. Raises OSError after 5 s of waiting.

    The kernel does not turn an exclusive lock into a shared one in one step: between the two,
    another process could get the exclusive one.
    """
    place = _open_folder(folder)
    until_s = time.monotonic() + _TURN_S
    try:
        while not _lock(place, fcntl.LOCK_EX):
            if time.monotonic() > until_s:
                raise OSError("another process holds the folder's lock")
        yield
    finally:
        os.close(place)


def _open_folder(folder: Path) -> int:
    """Open the folder, made where there is none."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o1777)  # whatever the umask
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OPEN)


def _open_file(folder: Path, device: str) -> int:
    """Open the file of a device, made where there is none. Raises OSError for what is no file."""
    place = _open_folder(folder)
    name = re.sub(r"[^A-Za-z0-9-]", "_", device)
    try:
        # Linux refuses O_CREAT for another's file in such a folder: so only where there is none.
        for made in (0, os.O_CREAT | os.O_EXCL, 0):
            with suppress(FileNotFoundError, FileExistsError):
                flags = os.O_RDWR | os.O_APPEND | _OPEN | made
                file = os.open(name, flags, 0o600, dir_fd=place)
                break
        else:
            raise OSError(f"{name} is removed by others")
    finally:
        os.close(place)
    if made:
        os.fchmod(file, 0o666)
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1:
        os.close(file)
        raise OSError(f"{name} is no plain file; remove it")
    return file


def _lock(file: int, mode: int) -> bool:
    """Take the lock, or change its mode. False where others have it for more than a look."""
    for pause_s in (_PAUSE_S, 0.0):
        with suppress(BlockingIOError):
            fcntl.flock(file, mode | fcntl.LOCK_NB)
            return True
        time.sleep(pause_s)
    return False


def _users(file: int, sweep: str, *, is_ours: bool = False) -> tuple[Holder, ...]:
    """Name the other sweeps that use a device. is_ours: whether this process does too."""
    told = [_read_line(line) for line in os.pread(file, _MOST_BYTES, 0).splitlines()]
    living = dict.fromkeys(
        user for user, process in told if user.sweep != sweep and not _has_ended(process)
    )
    if living or is_ours or any(user.sweep == sweep for user, _ in told):
        return tuple(living)
    # Somebody has the lock all the same: of another container, or one who says nothing.
    return (told or [_read_line(b"")])[-1][:1]


def _has_ended(process_id: int) -> bool:
    """Whether there is no such process on this host any more."""
    return process_id > 0 and not psutil.pid_exists(process_id)


def _read_line(line: bytes) -> tuple[Holder, int]:
    """Return what a line says of a holder, and which process has the lock, or 0."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    told = found if isinstance(found, dict) else {}
    process_id, locked_by = (
        number if type(number) is int and 0 < number < 2**22 else 0
        for number in (told.get("process_id"), told.get("locked_by"))
    )
    words = {name: _clean(told.get(name)) for name in ("sweep", "what", "user", "host", "since")}
    return Holder(**words, process_id=process_id), locked_by


def _clean(text: object) -> str:
    if not isinstance(text, str):
        return "unknown"
    return "".join(c if c.isprintable() else "?" for c in text[:_MOST_CHARACTERS])
