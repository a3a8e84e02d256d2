"""Count what the structure of the package must hold, print it, and fail where a limit is passed.

    python .ci/structure.py [ROOT]

A room is a folder or a file at the top of the package. An arrow is that one room imports another,
however often and wherever: inside of functions and for type checkers too. It points up where the
rows of the first contract of import-linter (pyproject.toml) do not have the other room below it.
A function is named by a participle where the first word of its name is one: what it does is not
told (`opened`), unlike by a verb (`open_store`), a noun (`rows`) or a question (`is_open`).
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

PACKAGE = "raybench"
# The most that is allowed of each count, by its name in the output.
LIMITS = {
    "rooms": 19,
    "arrows between rooms": 70,
    "arrows that point up": 0,
    "circles of rooms": 0,
    "median lines of a function": 8,
    "95th percentile": 30,
    "longest function": 60,
    "functions named by participles, %": 2,
    "identifiers of a private language": 0,
    # pytest imports a test file by its name alone.
    "test files with the name of another": 0,
}
# Words that end as participles do, and are none.
_NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed"}
_IRREGULAR = set(
    re.findall(
        r"\w+",
        """
    begun bound bought broken brought built caught chosen cut dealt done drawn driven fallen
    felt forgotten found frozen given gone grown heard held hidden kept known laid led
    left lent lost made meant met overridden paid proven put risen said seen sent
    shown shut slept sought spent split sprung stolen stuck swept taken taught thought told
    torn understood undone unknown unwritten woken won worn written
        """,
    )
)
_PRIVATE_WORDS = {"flight", "flights", "leash", "seat", "seats"}

Graph = Mapping[str, set[str]]


def main() -> int:
    """Print each count beside its limit; 1 where one is passed."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    counts = count(root)
    for name, value in counts.items():
        limit = LIMITS.get(name)
        print(f"{value:>8.4g}  {name}" + (f" (at most {limit})" if limit is not None else ""))
    passed = [name for name, limit in LIMITS.items() if counts[name] > limit]
    for name in passed:
        print(f"too many: {name}", file=sys.stderr)
    return 1 if passed else 0


def count(root: Path) -> dict[str, float]:
    """Make each count by its name; `root` holds the package and pyproject.toml."""
    trees = {
        path.relative_to(root): ast.parse(path.read_text(encoding="utf-8"))
        for folder in (PACKAGE, "tests", "benchmarks")
        for path in sorted((root / folder).rglob("*.py"))
    }
    package = {path: tree for path, tree in trees.items() if path.parts[0] == PACKAGE}
    graph = arrows(package)
    lengths = sorted(node.end_lineno - node.lineno + 1 for node in functions(package))
    return {
        "rooms": len({room(path) for path in package}),
        "arrows between rooms": sum(map(len, graph.values())),
        "arrows that point up": len(pointing_up(graph, read_rows(root))),
        "circles of rooms": int(has_circle(graph)),
        "median lines of a function": median(lengths),
        "95th percentile": lengths[int(0.95 * len(lengths))],
        "longest function": lengths[-1],
        "functions named by participles, %": 100
        * sum(is_participle(node.name) for node in functions(package))
        / len(lengths),
        "identifiers of a private language": sum(map(count_private_words, trees.values())),
        "test files with the name of another": count_namesakes(trees),
        f"lines of {PACKAGE}": sum(
            len((root / path).read_text(encoding="utf-8").splitlines()) for path in package
        ),
    }


def count_namesakes(paths: Iterable[Path]) -> int:
    """Count the test files that another one, in whatever folder, is called like."""
    names = [path.name for path in paths if path.parts[0] == "tests" and path.match("test_*.py")]
    return len(names) - len(set(names))


def room(path: Path) -> str:
    """Return the folder or the file at the top of the package."""
    return Path(path.parts[1]).stem


def arrows(trees: Mapping[Path, ast.Module]) -> Graph:
    """Collect the rooms that each room imports; what the package itself offers is no room's."""
    rooms = {room(path) for path in trees} - {"__init__"}
    graph: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        if room(path) not in rooms:
            continue
        imported = {name for name in imported_rooms(tree) if name in rooms}
        graph[room(path)] |= imported - {room(path)}
    return graph


def imported_rooms(tree: ast.Module) -> Iterator[str]:
    """Yield the first name below the package in each import of it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            names = [f"{PACKAGE}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}."))


def read_rows(root: Path) -> dict[str, int]:
    """Read the row of each room in the first contract, 0 for the top one.

    A room whose modules are in several rows has the highest of them.
    """
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    layers = tomllib.loads(text)["tool"]["importlinter"]["contracts"][0]["layers"]
    rows: dict[str, int] = {}
    for row, layer in enumerate(layers):
        for module in re.split(r"\s*[|:]\s*", layer):
            rows.setdefault(module.split(".")[1], row)
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
    """Tell whether any room imports itself by way of others."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def functions(trees: Mapping[Path, ast.Module]) -> Iterator[ast.FunctionDef]:
    """Yield all functions and methods, those inside of others too."""
    for tree in trees.values():
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def is_participle(name: str) -> bool:
    """Tell whether the first word of a function's name is a past participle."""
    word = name.lstrip("_").partition("_")[0]
    return word in _IRREGULAR or (word.endswith("ed") and word not in _NO_PARTICIPLES)


def count_private_words(tree: ast.Module) -> int:
    """Count how often names of the code hold a word that only this project would understand."""
    return sum(is_private(name) for node in ast.walk(tree) for name in names_of(node))


def names_of(node: ast.AST) -> Iterator[str]:
    """Yield the identifiers that a node of the syntax tree itself has."""
    for field in ("id", "attr", "arg", "name", "asname"):
        if isinstance(name := getattr(node, field, None), str):
            yield name


def is_private(name: str) -> bool:
    """Tell whether one of the words of an identifier is private, or it begins with `told_`."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")
    # What runs now is in flight: anybody says so.
    words = plain.replace("in_flight", "running").split("_")
    return (words[0] == "told" and len(words) > 1) or not _PRIVATE_WORDS.isdisjoint(words)


if __name__ == "__main__":
    sys.exit(main())
