"""Hash the source files of a workload and of raybench.

The files of a workload are its module and, recursively, the modules that it imports, unless they
are in the standard library, in site-packages or in raybench. Imports are found by parsing, so
nothing is imported, and imports by a computed name are missed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

# Folders of raybench that do not affect a measurement.
_ONLY_SHOW = ("analysis", "cli", "doctor", "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFile:
    """A script that is a workload."""

    # Absolute.
    path: str
    # Its current directory.
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Hashes of the source files of a workload, and of raybench."""

    # SHA-256 of each file by its name, such as `package/module.py` or `train.py`.
    workload: Mapping[str, str] = field(default_factory=dict)
    # Result of `raybench_sha256()`.
    raybench_sha256: str
    # None if the workload is a module.
    script: ScriptFile | None = None

    @property
    def workload_sha256(self) -> str | None:
        """One SHA-256 of `workload`; None if it is empty."""
        return _digest(self.workload) if self.workload else None


def code_of(module: str) -> Code:
    """Return the hashes of raybench, of a module, and of the modules that it imports.

    For a built-in workload only `raybench/workloads/` counts. `workload` is empty if no file is
    found, as in an archive; an unreadable file counts as empty.
    """
    own_package = module.partition(".")[0]
    files = _workload_files(_files_of(module, own_package), own_package)
    return Code(workload=files, raybench_sha256=raybench_sha256())


def code_of_script(path: Path) -> Code:
    """Return the hashes of raybench, of a script, and of the modules that it imports.

    Modules beside the script come before installed modules. A missing script counts as empty.
    """
    script = ScriptFile(path=str(path.absolute()), folder=str(Path.cwd()))
    path_before = [*sys.path]
    # When Python runs a script, it puts the folder of the script first.
    sys.path.insert(0, str(path.absolute().parent))
    try:
        files = _workload_files([(path.name, path)])
    finally:
        sys.path[:] = path_before
    return Code(workload=files, raybench_sha256=raybench_sha256(), script=script)


def code_here(code: Code) -> Code:
    """Return a copy of the code with the hashes that its files have now on this host.

    Missing files are left out.

    Raises:
        PermissionError: before Python 3.14, if a folder may not be entered.
    """
    files = {}
    for name in code.workload:
        top, *below = name.split("/")
        origin, folders = _top_level(top.partition(".")[0])
        candidates = [Path(folder, *below) for folder in folders] if below else origin
        if code.script:
            # The folder of the script is not in `sys.path` of this process.
            candidates = [Path(code.script.path).parent / name, *candidates]
        if path := next((path for path in candidates if path.is_file()), None):
            files[name] = _sha256(_content(path))
    return replace(code, workload=files, raybench_sha256=raybench_sha256())


def differing(base: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the sorted names of files that differ or are missing on one side."""
    return sorted(name for name in {*base, *new} if base.get(name) != new.get(name))


@cache
def raybench_sha256() -> str:
    """Return one SHA-256 of the files of raybench that affect a measurement; read once."""
    folder, hashes = Path(__file__).parents[1], {}
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder)
        if name.parts[0] not in _ONLY_SHOW:
            hashes[name.as_posix()] = _sha256(_content(path))
    return _digest(hashes)


def _digest(files: Mapping[str, str]) -> str:
    """Return one SHA-256 of names and hashes, independent of their order."""
    listed = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files.items()))
    return _sha256(listed.encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _content(path: Path) -> bytes:
    """Return the bytes of a file; empty if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        # Importing the file raises a better error.
        return b""


def _workload_files(first: Iterable[tuple[str, Path]], own_package: str = "") -> dict[str, str]:
    """Return the SHA-256 of the given files and of the files that they import, by name."""
    hashes: dict[str, str] = {}
    seen: set[str] = set()
    waiting = [first]
    while waiting:
        for name, path in waiting.pop():
            # The rest of raybench is hashed by `raybench_sha256`.
            is_elsewhere = not name.startswith("raybench/workloads/")
            if name in hashes or (own_package == "raybench" and is_elsewhere):
                continue
            content = _content(path)
            hashes[name] = _sha256(content)
            imported = set(_imports(content, name))
            waiting += [_files_of(module, own_package) for module in imported - seen]
            seen |= imported
    return hashes


def _files_of(module: str, own_package: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of a module of the user and of the packages that contain it."""
    # Skip raybench, the standard library and installed packages, unless the workload is in them.
    top, *below = module.split(".")
    if top != own_package and (top == "raybench" or top in sys.stdlib_module_names):
        return
    origin, folders = _top_level(top)
    if top != own_package and any(map(_is_installed, [*origin, *folders])):
        return
    # Walk down from the top package to the module.
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
    """Return the file of a top-level module, if any, and the folders of its package."""
    try:
        return _files_and_folders(importlib.util.find_spec(name))
    except (ImportError, ValueError, AttributeError):
        # A module made by hand has no spec, and a finder of the user may fail.
        return [], []


def _files_and_folders(spec: ModuleSpec | None) -> tuple[list[Path], list[Path]]:
    """Return the file of a module, if any, and the folders of its package."""
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
    """Yield the dotted names that a source file imports, also inside functions and classes.

    `from a import b` yields both `a` and `a.b`, which may not be a module. A file that cannot be
    parsed yields nothing.
    """
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Importing the file raises a better error.
        return
    # The package of both `a/b.py` and `a/__init__.py` is `a`.
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
