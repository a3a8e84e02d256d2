"""Hash the source files of a workload and of raybench.

The files of a workload are its module and, recursively, the modules that it imports, without the
standard library, site-packages and raybench. Imports are found by parsing, so imports by a computed
name are missed.
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
_UNHASHED_FOLDERS = ("ab", "analysis", "api", "cli", "report")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFile:
    """A script that is a workload."""

    # Absolute path.
    path: str
    # Working directory of the script.
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """Hashes of the source files of a workload, and of raybench."""

    # SHA-256 of each file by its name, such as `package/module.py` or `train.py`.
    workload: Mapping[str, str] = field(default_factory=dict)
    # Result of `raybench_sha256()`.
    raybench_sha256: str
    # None if the workload is not a script.
    script: ScriptFile | None = None
    # The pickled functions of workload `function`; empty for other workloads.
    functions: bytes = field(default=b"", repr=False)

    @property
    def workload_sha256(self) -> str | None:
        """One SHA-256 of all files of the workload; None if there are no files."""
        return _combined_sha256(self.workload) if self.workload else None


def code_of(module: str) -> Code:
    """Return the hashes of raybench, of a workload's module, and of the modules that it imports.

    For a built-in workload, `Code.workload` has only files of `raybench/workloads/`. It is empty if
    the module has no file, as in an archive.
    """
    own_package = module.partition(".")[0]
    files = _hash_recursively(_module_files(module, own_package), own_package)
    return Code(workload=files, raybench_sha256=raybench_sha256())


def code_of_script(path: Path) -> Code:
    """Return the hashes of raybench, of a script, and of the modules that it imports.

    A missing script counts as an empty file.
    """
    script = ScriptFile(path=str(path.absolute()), folder=str(Path.cwd()))
    saved_path = [*sys.path]
    # Python also puts the folder of a script first.
    sys.path.insert(0, str(path.absolute().parent))
    try:
        files = _hash_recursively([(path.name, path)])
    finally:
        sys.path[:] = saved_path
    return Code(workload=files, raybench_sha256=raybench_sha256(), script=script)


def code_here(code: Code) -> Code:
    """Hash the same files on this host; missing files are omitted.

    Raises:
        PermissionError: before Python 3.14, if a folder may not be entered.
    """
    hashes = {}
    for name in code.workload:
        # A name is `train.py`, or `package/module.py`.
        top, *subpath = name.split("/")
        module_files, package_folders = _find_top_level(top.partition(".")[0])
        candidates = module_files
        if subpath:
            candidates = [Path(folder, *subpath) for folder in package_folders]
        if code.script:
            # `sys.path` of this process lacks the folder of the script.
            candidates = [Path(code.script.path).parent / name, *candidates]
        if path := next((path for path in candidates if path.is_file()), None):
            hashes[name] = _sha256(_content(path))
    return replace(code, workload=hashes, raybench_sha256=raybench_sha256())


def differing_files(base: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return the sorted names of files that differ or are missing on one side.

    Args:
        base, new: file name -> hash.
    """
    return sorted(name for name in {*base, *new} if base.get(name) != new.get(name))


@cache
def raybench_sha256() -> str:
    """Return one SHA-256 of the files of raybench that affect a measurement."""
    folder, hashes = Path(__file__).parents[1], {}
    for path in folder.rglob("*.py"):
        name = path.relative_to(folder)
        if name.parts[0] not in _UNHASHED_FOLDERS:
            hashes[name.as_posix()] = _sha256(_content(path))
    return _combined_sha256(hashes)


def _combined_sha256(hashes: Mapping[str, str]) -> str:
    """Return one SHA-256 of file names and hashes, independent of their order."""
    lines = "".join(f"{name}\0{digest}\n" for name, digest in sorted(hashes.items()))
    return _sha256(lines.encode())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _content(path: Path) -> bytes:
    """Return the bytes of a file; empty if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError:
        # The import of the file will raise a better error.
        return b""


def _hash_recursively(
    files: Iterable[tuple[str, Path]],  # (name, path)
    own_package: str = "",  # top package of the workload, whose imports are always followed
) -> dict[str, str]:
    """Return file name -> SHA-256, for the given files and the files that they import.

    Imports of raybench, of the standard library and of installed packages are not followed.
    """
    hashes: dict[str, str] = {}
    seen_modules: set[str] = set()
    # Each entry has the (name, path) of the files of one module.
    waiting = [files]
    while waiting:
        for name, path in waiting.pop():
            # `raybench_sha256` hashes the rest of raybench.
            is_elsewhere = not name.startswith("raybench/workloads/")
            if name in hashes or (own_package == "raybench" and is_elsewhere):
                continue
            content = _content(path)
            hashes[name] = _sha256(content)
            imported = set(_imported_names(content, name))
            waiting += [_module_files(module, own_package) for module in imported - seen_modules]
            seen_modules |= imported
    return hashes


def _module_files(
    module: str,
    own_package: str,  # top package of the workload
) -> Iterator[tuple[str, Path]]:
    """Yield name and path of a module, and of each package that contains the module."""
    # Yield nothing for raybench, the standard library and installed packages, unless the module is
    # in `own_package`.
    top, *submodules = module.split(".")
    if top != own_package and (top == "raybench" or top in sys.stdlib_module_names):
        return
    files, folders = _find_top_level(top)
    if top != own_package and any(map(_is_installed, [*files, *folders])):
        return
    # Walk down from the top package to the module; `folders` are the folders of the package so far.
    package_path = ""
    for part in (top, *submodules):
        if package_path:
            spec = PathFinder.find_spec(part, [*map(str, folders)])
            files, folders = _files_and_folders(spec)
        for path in files:
            is_package = path.stem == "__init__"
            parent = f"{package_path}{part}/" if is_package else package_path
            yield f"{parent}{path.name}", path
        package_path += f"{part}/"


def _find_top_level(name: str) -> tuple[list[Path], list[Path]]:
    """Return the file of a top-level module, if any, and the folders of its package."""
    try:
        return _files_and_folders(importlib.util.find_spec(name))
    except (ImportError, ValueError, AttributeError):
        # A module may have no spec, and an import finder of the user may fail.
        return [], []


def _files_and_folders(spec: ModuleSpec | None) -> tuple[list[Path], list[Path]]:
    """Return the file of a module, if any, and the folders of its package."""
    if spec is None:
        return [], []
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    has_file = spec.has_location and spec.origin and Path(spec.origin).is_file()
    files = [Path(str(spec.origin))] if has_file else []
    return files, folders


def _is_installed(path: Path) -> bool:
    """Return whether a file is part of the standard library, or in site-packages."""
    if {"site-packages", "dist-packages"} & set(path.parts):
        return True
    folders = map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))
    return any(path.resolve().is_relative_to(Path(folder).resolve()) for folder in folders)


def _imported_names(content: bytes, file: str) -> Iterator[str]:
    """Yield the dotted names that a source file imports, also inside functions and classes."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # The import of the file will raise a better error.
        return
    # Both `a/b.py` and `a/__init__.py` belong to the package `a`.
    package = file.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A relative import: one dot means the package of the file, two dots its parent.
            parents = package[: len(package) - node.level + 1] if node.level else []
            # `from . import x` has no module.
            module = [node.module] if node.module else []
            base = ".".join([*parents, *module])
            if base:
                yield base
                # An imported name may be a module or an attribute; try both.
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
