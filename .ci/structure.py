"""Count what the structure of the package must hold, print it, and fail where a limit is passed.

    python .ci/structure.py [ROOT]

A room is a folder or a file at the top of the package. An arrow is that one room imports another,
however often and wherever: inside of functions and for type checkers too. It points up where the
rows of the first contract of import-linter (pyproject.toml) do not have the other room below it.
A room has a circle inside where one of its modules imports itself by way of others of the room.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "raybench"
# The most that is allowed of each count, by its name in the output.
LIMITS = {
    "rooms": 20,
    "arrows between rooms": 92,
    "arrows that point up": 0,
    "circles of rooms": 0,
    "rooms with circles inside": 0,
    "longest function": 80,
    # pytest imports a test file by its name alone.
    "test files with the name of another": 0,
}

Graph = Mapping[str, set[str]]


def main() -> int:
    """Print each count beside its limit; 1 where one is passed."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    counts = count(root)
    for name, value in counts.items():
        limit = LIMITS.get(name)
        print(f"{value:>8}  {name}" + (f" (at most {limit})" if limit is not None else ""))
    passed = [name for name, limit in LIMITS.items() if counts[name] > limit]
    for name in passed:
        print(f"too many: {name}", file=sys.stderr)
    return 1 if passed else 0


def count(root: Path) -> dict[str, int]:
    """Make each count by its name; `root` holds the package, the tests and pyproject.toml."""
    texts = {
        module_name(path.relative_to(root)): path.read_text(encoding="utf-8")
        for path in sorted((root / PACKAGE).rglob("*.py"))
    }
    trees = {name: ast.parse(text) for name, text in texts.items()}
    modules = {name: imported_modules(tree, trees) - {name} for name, tree in trees.items()}
    rooms: dict[str, set[str]] = defaultdict(set)
    inside: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for name in modules.keys() - {PACKAGE}:
        # What the package itself offers is no room's.
        imported = modules[name] - {PACKAGE}
        rooms[room(name)] |= {room(other) for other in imported} - {room(name)}
        inside[room(name)][name] = {other for other in imported if room(other) == room(name)}
    tests = [path.name for path in (root / "tests").rglob("test_*.py")]
    return {
        "rooms": len(rooms),
        "arrows between rooms": sum(map(len, rooms.values())),
        "arrows that point up": len(pointing_up(rooms, read_rows(root))),
        "circles of rooms": int(has_circle(rooms)),
        "rooms with circles inside": sum(map(has_circle, inside.values())),
        "longest function": max(
            node.end_lineno - node.lineno + 1
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef) and node.end_lineno
        ),
        "test files with the name of another": len(tests) - len(set(tests)),
        f"modules of {PACKAGE}": len(trees),
        f"lines of {PACKAGE}": sum(len(text.splitlines()) for text in texts.values()),
    }


def module_name(path: Path) -> str:
    """Return the dotted name of the module in this file."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    """Return the folder or the file at the top of the package."""
    return module.split(".")[1]


def imported_modules(tree: ast.Module, modules: Mapping[str, object]) -> set[str]:
    """Collect those of `modules` that this one imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # A name that is no module is one of the module's own.
            found |= names if names <= modules.keys() else {node.module, *names}
    return found & modules.keys()


def read_rows(root: Path) -> dict[str, int]:
    """Read the row of each room in the first contract, 0 for the top one.

    A room whose modules are in several rows has the highest of them.
    """
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    layers = tomllib.loads(text)["tool"]["importlinter"]["contracts"][0]["layers"]
    rows: dict[str, int] = {}
    for row, layer in enumerate(layers):
        for module in re.split(r"\s*[|:]\s*", layer):
            rows.setdefault(room(module), row)
    return rows


def pointing_up(graph: Graph, rows: Mapping[str, int]) -> list[tuple[str, str]]:
    """List the arrows to a room that is not below; rooms without a row are above all others."""
    return [
        (above, below)
        for above, imported in graph.items()
        for below in sorted(imported)
        if rows.get(above, -1) >= rows.get(below, -1)
    ]


def has_circle(graph: Graph) -> bool:
    """Tell whether any node of the graph leads back to itself."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
