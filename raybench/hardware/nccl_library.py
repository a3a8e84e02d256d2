"""The NCCL library that this process has loaded, and its version."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Such as libnccl.so.2 or libnccl.so.2.28.9, but not plugins such as libnccl-net.so.
_FILE = re.compile(r"libnccl\.so(?:\.\d+)*")
# Linux appends this text to the path of a loaded file that was replaced.
_DELETED = " (deleted)"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedNccl:
    """An NCCL library in the memory of this process."""

    # Such as `2.28.9`.
    version: str
    path: str


def loaded_nccl() -> LoadedNccl | None:
    """Return the NCCL that this process calls; None if it has loaded no shared library of NCCL."""
    # Not torch.cuda.nccl.version(): it is the version that torch was compiled with, even if
    # LD_PRELOAD or LD_LIBRARY_PATH have loaded another NCCL.
    libraries = list(_loaded_libraries())
    if len(libraries) > 1:
        # The dynamic linker uses the first library in the global scope, such as one of LD_PRELOAD.
        # Put this library first.
        address_in_use = _function_address(ctypes.CDLL(None))
        in_use: list[tuple[str, ctypes.CDLL]] = []
        others: list[tuple[str, ctypes.CDLL]] = []
        for path, library in libraries:
            if _function_address(library) == address_in_use:
                in_use.append((path, library))
            else:
                others.append((path, library))
        libraries = [*in_use, *others]
    for path, library in libraries:
        number = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)) == 0:
            return LoadedNccl(version=_version_text(number.value), path=path)
    return None


def loaded_files(names: re.Pattern[str]) -> list[str]:
    """Return the paths of the files that this process has mapped, without repeats.

    Args:
        names: must match the whole name of a file.
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    # The path is the sixth column and may contain blanks.
    paths = (columns[5] for line in lines if len(columns := line.split(maxsplit=5)) == 6)
    files = dict.fromkeys(path.removesuffix(_DELETED) for path in paths)
    return [path for path in files if names.fullmatch(Path(path).name)]


def _loaded_libraries() -> Iterator[tuple[str, ctypes.CDLL]]:
    """Yield path and handle of each NCCL library that this process has loaded."""
    for path in loaded_files(_FILE):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
        except OSError:
            continue  # the file was replaced, and the linker knows the library by another path
        if _function_address(library) is not None:
            yield path, library


def _function_address(library: ctypes.CDLL) -> int | None:
    """Return the address of ncclGetVersion, which identifies a library; None without it."""
    function = getattr(library, "ncclGetVersion", None)
    return function and ctypes.cast(function, ctypes.c_void_p).value


def _version_text(number: int) -> str:
    """Return NCCL's version number with dots: 22809 is 2.28.9, and 2804 is 2.8.4."""
    major = 10_000 if number >= 10_000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"
