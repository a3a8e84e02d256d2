"""The file that names devices, one a line: a health check writes it, a sweep keeps to it.

A GPU is named by its UUID. A CPU worker has none that lasts: it is named by its host and its number
there, as in `alpha:0`; workers of one host share its processors and can stand in for each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from raybench.errors import UsageError
from raybench.records import Device

_GPU = re.compile(r"(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_WORKER = re.compile(r"(?P<host>[^\s:#/]+):(?P<number>\d{1,6})")
_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceList:
    """Devices by name. source: where they were named, for the user."""

    names: tuple[str, ...]
    source: str

    def cpu_workers(self) -> Mapping[str, int]:
        """Return how many CPU workers each host must have for its highest number in the list."""
        counts: Counter[str] = Counter()
        for name in self.names:
            if found := _WORKER.fullmatch(name):
                counts[found["host"]] = max(counts[found["host"]], int(found["number"]) + 1)
        return counts


def read_device_list(path: Path) -> DeviceList:
    """Return the devices named in a file, without comments and repeats.

    Raises UsageError where the file cannot be read, names no device, or a line is no name.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text in UTF-8"
        raise UsageError(f"--devices {path}: {reason}") from None
    names: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        names.setdefault(line.partition("#")[0].strip(), number)
    names.pop("", None)
    for name, number in names.items():
        if not (_GPU.fullmatch(name) or _WORKER.fullmatch(name)):
            raise UsageError(
                f"{path}:{number}: expected the UUID of a GPU, as `nvidia-smi -L` lists it, or "
                f"HOST:NUMBER of a CPU worker, got {name[:_SHOWN]!r}"
            )
    if not names:
        raise UsageError(f"--devices {path}: names no device; give one a line")
    return DeviceList(names=tuple(names), source=f"--devices {path}")


def write_device_list(path: Path, devices: Iterable[Device], comment: str) -> None:
    """Write the names of these devices, each with its host and index.

    comment: above them. Raises UsageError where the file cannot be written.
    """
    lines = [f"# {line}" for line in comment.splitlines()]
    lines += [
        f"{device.lasting_name}  # {device.host} {device.kind}:{device.index}" for device in devices
    ]
    with _report_unwritable(path):
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def check_list_writable(path: Path) -> None:
    """Raise UsageError where no list can be written; what is there stays as it is."""
    with _report_unwritable(path), path.open("ab"):
        pass


@contextmanager
def _report_unwritable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
