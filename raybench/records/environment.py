"""What a number was made with: versions, variables that change timing, source files, the commit.

Of a workload its source files are: its module, and the modules that it imports, and so on, as far
as they are of its own package, or neither of the standard library, nor installed in site-packages,
nor raybench. Imports are read from the text, those inside of functions too, so nothing is imported
to find them. What is imported by a name that is computed is not seen, nor are files that are no
Python modules.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from raybench.version import __version__

# The newest minor version of torch that the tests have run with.
_TESTED_TORCH = (2, 13)
_PACKAGES = ("torch", "ray", "numpy", "pyarrow")
_PREFIXES = ("NCCL_", "TORCH_", "CUDA_", "OMP_", "PYTORCH_", "GLOO_", "MKL_", "NVIDIA_TF32_")


def package_versions() -> dict[str, str]:
    """Return the installed versions of raybench, python, torch, ray, numpy and pyarrow, by name.

    Packages that are not installed are left out. Nothing is imported.
    """
    found = {"raybench": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def warn_of_torch(versions: Mapping[str, str]) -> str | None:
    """Return a warning if versions["torch"] is of a newer minor version than tested, else None."""
    minor = tuple(map(int, re.findall(r"\d+", versions.get("torch", ""))[:2]))
    if minor <= _TESTED_TORCH:
        return None
    newest = "{}.{}, the newest that raybench was tested with".format(*_TESTED_TORCH)
    return f"torch {versions['torch']} is newer than {newest}"


def variables_that_matter() -> dict[str, str]:
    """Return this process's variables {NCCL,TORCH,CUDA,OMP,PYTORCH,GLOO,MKL,NVIDIA_TF32}_*."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


@contextmanager
def set_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process in the block; then restore or unset them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def git_commit(folder: Path) -> str | None:
    """Return HEAD, with "+changes" if any tracked file differs; None if git fails or takes 10 s."""
    command = ["git", "describe", "--always", "--abbrev=64", "--exclude=*", "--dirty=+changes"]
    try:
        return subprocess.check_output(
            command, cwd=folder, stderr=subprocess.DEVNULL, text=True, timeout=10
        ).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many CPUs (hardware threads) this process may keep busy, 1 or more, rounded down.

    By its CPU affinity and the quota of its cgroup at the root, which in a container is its own;
    nested cgroups are not read. root: of the file system, for tests.
    """
    cores, folder = len(os.sched_getaffinity(0)), root / "sys/fs/cgroup"
    for name in ("cpu.max", "cpu/cpu.cfs_quota_us"):
        try:
            content = (folder / name).read_text(encoding="ascii").split()
            period = content[1:] or [(folder / "cpu/cpu.cfs_period_us").read_text("ascii")]
            quota_us, period_us = int(content[0]), int(period[0])
        except (OSError, ValueError, IndexError):
            continue  # `max`, or no such cgroup
        if quota_us > 0 and period_us > 0:
            cores = min(cores, quota_us // period_us)
    return max(1, cores)


# Folders of raybench that only show results.
_ONLY_SHOW = ("analysis", "cli", "doctor", "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFile:
    """A script that is a workload. path: absolute. folder: the current directory that it gets."""

    path: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What is measured and what measures it.

    workload: SHA-256 of each file by its name, as `package/module.py`; of a script as `train.py`.
    raybench_sha256: as of `raybench_sha256()`. script: None if the workload is a module.
    """

    workload: Mapping[str, str] = field(default_factory=dict)
    raybench_sha256: str
    script: ScriptFile | None = None

    @property
    def workload_sha256(self) -> str | None:
        """One SHA-256 of the names and hashes in `workload`; None if it is empty."""
        return _digest(self.workload) if self.workload else None


def code_of(module: str) -> Code:
    """Return the hashes of raybench, of a module, and of what it imports, directly or not.

    Files are read and parsed, none is imported. Modules of another top-level package do not count
    if that is installed, raybench, or named as one of the standard library. For a built-in workload
    only `raybench/workloads/` counts. module: its dotted name. `workload` is empty where no file is
    found, as in an archive; a file that cannot be read counts as empty.
    """
    own_package = module.partition(".")[0]
    files = _workload_files(_files_of(module, own_package), own_package)
    return Code(workload=files, raybench_sha256=raybench_sha256())


def code_of_script(path: Path) -> Code:
    """Return the hashes of raybench, of a script, and of what it imports, directly or not.

    As `code_of`, but a missing script counts as empty. A module that this process has loaded comes
    before one beside the script, and that before others. `script.folder` is the current directory.
    """
    script = ScriptFile(path=str(path.absolute()), folder=str(Path.cwd()))
    before = [*sys.path]
    # As a script finds modules beside it.
    sys.path.insert(0, str(path.absolute().parent))
    try:
        files = _workload_files([(path.name, path)])
    finally:
        sys.path[:] = before
    return Code(workload=files, raybench_sha256=raybench_sha256(), script=script)


def code_here(code: Code) -> Code:
    """Return a copy of the code with the hashes that its files have now on this host.

    Files that `code` names are read, none parsed: beside its script, else where this process would
    import them. Those not found are left out; one that may not be read counts as empty. raybench's:
    `raybench_sha256()`. PermissionError, before Python 3.14, for a folder that may not be entered.
    """
    files = {}
    for name in code.workload:
        top, *below = name.split("/")
        origin, folders = _top_level(top.partition(".")[0])
        places = [Path(folder, *below) for folder in folders] if below else origin
        if code.script:
            # The files beside a script are not loaded in this process.
            places = [Path(code.script.path).parent / name, *places]
        if found := next((place for place in places if place.is_file()), None):
            files[name] = _sha256(_content(found))
    return replace(code, workload=files, raybench_sha256=raybench_sha256())


def differing(base: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the sorted names of files that one side lacks, or that have another SHA-256 there."""
    return sorted(name for name in {*base, *new} if base.get(name) != new.get(name))


@cache
def raybench_sha256() -> str:
    """Return one SHA-256 of raybench's *.py but analysis, cli, doctor, report; read only once."""
    folder, hashes = Path(__file__).parents[1], {}
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder)
        if name.parts[0] not in _ONLY_SHOW:
            hashes[name.as_posix()] = _sha256(_content(path))
    return _digest(hashes)


def _digest(files: Mapping[str, str]) -> str:
    """Return one SHA-256 of files in any order. files: the SHA-256 of each, by name."""
    listed = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return _sha256(listed.encode())


def _sha256(content: bytes) -> str:
    """Return the SHA-256 of the bytes in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def _content(path: Path) -> bytes:
    """Return the bytes of a file; none where it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        return b""  # whoever imports it is told why it cannot be read


def _workload_files(first: Iterable[tuple[str, Path]], own_package: str = "") -> dict[str, str]:
    """Return the SHA-256 of files of the user's and of all of his that they import, by name.

    Of a built-in workload those of `raybench/workloads/`. Reads each file, imports none.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    waiting = [first]
    while waiting:
        for name, path in waiting.pop():
            # Of a built-in workload what is not beside it counts as raybench's.
            is_elsewhere = not name.startswith("raybench/workloads/")
            if name in found or (own_package == "raybench" and is_elsewhere):
                continue
            content = _content(path)
            found[name] = _sha256(content)
            imported = set(_imports(content, name))
            waiting += [_files_of(one, own_package) for one in imported - seen]
            seen |= imported
    return found


def _files_of(module: str, own_package: str) -> Iterator[tuple[str, Path]]:
    """Yield the file of a module of the user's and those of the packages it is in, by name.

    The names begin with the top package, as `a/b/c.py`. Nothing for a module that is not the
    user's, and for a name that is no module.
    """
    top, *below = module.split(".")
    if top != own_package and (top == "raybench" or top in sys.stdlib_module_names):
        return
    origin, folders = _top_level(top)
    if top != own_package and any(map(_is_installed, [*origin, *folders])):
        return
    package = ""
    for part in (top, *below):
        if package:
            spec = PathFinder.find_spec(part, [*map(str, folders)])
            origin, folders = _files_and_folders(spec)
        for path in origin:
            inside = f"{package}{part}/" if path.stem == "__init__" else package
            yield f"{inside}{path.name}", path
        package += f"{part}/"


def _top_level(name: str) -> tuple[list[Path], list[Path]]:
    """Return the file of a top-level module, none or one, and the folders of its package."""
    try:
        return _files_and_folders(importlib.util.find_spec(name))
    except (ImportError, ValueError, AttributeError):
        return [], []  # of a module that somebody made by hand, or whose finder fails


def _files_and_folders(spec: ModuleSpec | None) -> tuple[list[Path], list[Path]]:
    """Return the file of a module, none or one, and the folders of its package."""
    if spec is None:
        return [], []
    origin = Path(spec.origin) if spec.has_location and spec.origin else None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return [origin] if origin is not None and origin.is_file() else [], folders


def _is_installed(path: Path) -> bool:
    """Return whether a file is of the standard library, or installed in site-packages."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    folders = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return any(path.resolve().is_relative_to(Path(folder).resolve()) for folder in folders)


def _imports(content: bytes, file: str) -> Iterator[str]:
    """Yield the dotted names that a source file imports, wherever in it.

    Of `from a import b` both `a` and `a.b`, which may be no module. Nothing where it cannot be
    parsed. file: its name as `a/b.py`, by which relative imports become whole names.
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # it is not imported either, or its own error tells
    # The module's package: of `a/b.py` and of `a/__init__.py` this is `a`.
    package = file.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
