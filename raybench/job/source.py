"""A job file's data, the `--set` overrides applied to it, and where each value was given."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raybench.errors import JobError
from raybench.job.problems import KeyPath, Position, Problem, key_text, quote
from raybench.job.yaml_tree import Tree, parse_tree, position_after

MAX_FILE_BYTES = 100_000  # far above any real job; the parser needs seconds for more
_LABEL_CHARACTERS = 60
_MOST_LINES = 50


@dataclass(slots=True, kw_only=True)
class YamlSource:
    """A file and its overrides as one mapping, which turns problems into located lines.

    problems: what is wrong with the YAML itself. overrides: the `--set` text for each path.
    """

    name: str
    text: str
    data: dict[str, Any]
    tree: Tree
    problems: list[Problem]
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def explain(self, problem: Problem) -> str:
        """`file:line:col: dotted.key: message`, or `--set KEY=VALUE: ...` for an override."""
        subject = f"{key_text(problem.path)}: " if problem.path else ""
        override = self._override_of(problem)
        if override is not None:
            return f"{_label(override)}: {subject}{problem.message}"
        line, column = self._position(problem)
        return f"{self.name}:{line}:{column}: {subject}{problem.message}"

    def explain_all(self, problems: Iterable[Problem]) -> str:
        """One line per problem, in the order of the file, overrides last; the rest is counted."""

        def order(problem: Problem) -> tuple[bool, Position]:
            return self._override_of(problem) is not None, self._position(problem)

        lines = list(dict.fromkeys(map(self.explain, sorted(problems, key=order))))
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"{self.name}: and {len(lines) - _MOST_LINES:,} more"]
        return "\n".join(lines)

    def _override_of(self, problem: Problem) -> str | None:
        if problem.position is not None:
            return None
        path = problem.path
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return self.overrides[path[:length]]
        # A section that the file does not have: an override of a key in it made it up.
        while path and path not in self.tree.key_positions:
            for known, text in self.overrides.items():
                if known[: len(path)] == path:
                    return text
            path = path[:-1]
        return None

    def _position(self, problem: Problem) -> Position:
        if problem.position is not None:
            return problem.position
        tree, path = self.tree, problem.path
        positions = tree.key_positions if problem.at_key else tree.value_positions
        while path and path not in positions:
            path = path[:-1]
        return positions.get(path) or tree.value_positions.get(path, (1, 1))


def read_source(path: Path, overrides: Sequence[str] = ()) -> YamlSource:
    """Read the file at `path` and put each `KEY=VALUE` of `overrides` in place, in their order.

    Raises JobError when the file cannot be read or is no mapping, or an override has no sense.
    What else is wrong with the YAML is in `problems`, and the data goes as far as it can.
    """
    text = _read_text(path)
    tree = parse_tree(text)
    source = YamlSource(name=str(path), text=text, data={}, tree=tree, problems=tree.problems)
    if tree.is_complete and isinstance(tree.data, dict):
        source.data = tree.data
    elif tree.is_complete:
        given = {type(None): "an empty file", list: "a list"}.get(type(tree.data), "one value")
        rule = f"a job file is a mapping of keys to values, given {given}"
        tree.problems.insert(
            0, Problem(message=f"{rule}; `raybench init` writes one to start from")
        )
    failures = [line for text in overrides if (line := _override(source, text)) is not None]
    if not isinstance(tree.data, dict) or not tree.is_complete or failures:
        lines = [source.explain_all(source.problems), *failures]
        raise JobError("\n".join(line for line in lines if line))
    return source


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # To read it could wait without end, and a resumed run reads the file again.
            raise JobError(f"{path}:1:1: a job is a regular file; save it to one first")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        # ValueError: a name with a null character in it.
        reason = error.strerror if isinstance(error, OSError) else error
        raise JobError(f"{path}:1:1: the job file cannot be read: {reason}") from error
    if len(content) > MAX_FILE_BYTES:
        raise JobError(f"{path}:1:1: a job file has at most {MAX_FILE_BYTES:,} bytes")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = position_after(content[: error.start].decode("utf-8", errors="replace"))
        byte = f"the byte 0x{content[error.start]:02x}"
        message = f"a job file is UTF-8, given {byte}; save it as UTF-8"
        raise JobError(f"{path}:{line}:{column}: {message}") from error


def _override(source: YamlSource, text: str) -> str | None:
    """Apply one override; the answer is what is wrong with it."""
    key, equals, value = text.partition("=")
    path: KeyPath = tuple(key.strip().split("."))
    if not equals or not all(path):
        return f"{_label(text)}: must be KEY=VALUE, as in matrix.world_size=1,2"
    tree = _parse_value(value)
    if tree.problems or tree.data is None:
        problem = tree.problems[0] if tree.problems else Problem(message="no value given")
        is_told = not value.strip() or ", given " in problem.message
        given = "" if is_told else f", given {quote(value)}"
        return f"{_label(text)}: {key_text((*path, *problem.path))}: {problem.message}{given}"
    container = source.data
    for depth, name in enumerate(path[:-1], start=1):
        container = container.setdefault(str(name), {})
        if not isinstance(container, dict):
            return f"{_label(text)}: {key_text(path[:depth])} is not a mapping"
    container[str(path[-1])] = tree.data
    for known in [known for known in source.overrides if known[: len(path)] == path]:
        del source.overrides[known]
    source.overrides[path] = text
    return None


def _parse_value(value: str) -> Tree:
    """YAML, and `1,2` is the list `[1, 2]`."""
    is_list = "," in value and value.strip()[0] not in "[{\"'"
    return parse_tree(f"[{value}]" if is_list else value)


def _label(override: str) -> str:
    fits = override.isprintable() and len(override) <= _LABEL_CHARACTERS
    return f"--set {override if fits else quote(override)}"
