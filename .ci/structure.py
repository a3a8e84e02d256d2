"""Count what import-linter and ruff cannot, print the counts, and fail where a limit is exceeded.

    python .ci/structure.py [ROOT]

A room is a folder or a file at the top of the package. Circles between rooms are forbidden by the
first contract of import-linter; this program finds circles between the modules of one room.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = "raybench"
LIMITS = {
    "rooms with circles inside": 0,
    "types with the name of another": 0,
    "nested comprehensions": 0,
    "functions with more than six parameters": 0,
    "functions of more than 80 lines": 0,
    # pytest imports a test file by its name alone.
    "test files with the name of another": 0,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Graph = Mapping[str, set[str]]
Trees = Mapping[str, ast.Module]


def main() -> int:
    """Print each count beside its limit; return 1 if a limit is exceeded."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    trees = {
        module_name(path.relative_to(root)): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((root / PACKAGE).rglob("*.py"))
    }
    excess = 0
    for name, places in count(trees, root).items():
        value, limit = len(places), LIMITS[name]
        print(f"{value:>8}  {name} (at most {limit})")
        if value > limit:
            excess += 1
            print(f"too many: {name}\n  " + "\n  ".join(places), file=sys.stderr)
    return 1 if excess else 0


def count(trees: Trees, root: Path) -> dict[str, list[str]]:
    """Return each count as the list of places that it counts."""
    tests = [path.name for path in (root / "tests").rglob("test_*.py")]
    return {
        "rooms with circles inside": rooms_with_circles(trees),
        "types with the name of another": repeated_types(trees),
        "nested comprehensions": list(nested_comprehensions(trees)),
        "functions with more than six parameters": list(long_signatures(trees)),
        "functions of more than 80 lines": list(long_functions(trees)),
        "test files with the name of another": sorted(
            {name for name in tests if tests.count(name) > 1}
        ),
    }


def module_name(path: Path) -> str:
    """Return the dotted name of the module in this file."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    """Return the folder or the file at the top of the package; "" for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def rooms_with_circles(trees: Trees) -> list[str]:
    """Return the rooms whose modules import each other in a circle."""
    inside: dict[str, dict[str, set[str]]] = defaultdict(dict)
    for name, tree in trees.items():
        modules = imported_modules(tree, trees) - {name, PACKAGE}
        inside[room(name)][name] = {other for other in modules if room(other) == room(name)}
    return [name for name, graph in inside.items() if has_circle(graph)]


def imported_modules(tree: ast.Module, modules: Mapping[str, object]) -> set[str]:
    """Return the modules of `modules` that a module imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            # A member that is no module is defined in the module itself.
            names |= members if members <= modules.keys() else {node.module, *members}
    return names & modules.keys()


def has_circle(graph: Graph) -> bool:
    """Return whether a node of the graph leads back to itself."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def repeated_types(trees: Trees) -> list[str]:
    """Return names of public classes that two modules define."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(module)
    return [f"{name}: {', '.join(found)}" for name, found in homes.items() if len(found) > 1]


def nested_comprehensions(trees: Trees) -> Iterator[str]:
    """Yield comprehensions with another comprehension inside."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, COMPREHENSIONS):
                inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
                if len(inner) > 1:
                    yield f"{module}:{node.lineno}"


def long_signatures(trees: Trees) -> Iterator[str]:
    """Yield functions with more than six parameters; click passes one for each option."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not is_exempt(node):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(argument.arg not in ("self", "cls") for argument in arguments)
                if count > 6:
                    yield f"{module}:{node.lineno} {node.name} ({count})"


def is_exempt(node: ast.FunctionDef) -> bool:
    """Return whether each parameter is an option of a command or a setting of a workload."""
    return bool(node.decorator_list) or node.name == "__init__"


def long_functions(trees: Trees) -> Iterator[str]:
    """Yield functions of more than 80 lines."""
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > 80:
                    yield f"{module}:{node.lineno} {node.name} ({lines})"


if __name__ == "__main__":
    sys.exit(main())
