"""A job file as data that knows where each value was given, with the `--set` overrides applied.

The YAML is 1.2, cut down to what a job file needs: one document, no anchors, aliases, tags or merge
keys, so that a text means what it looks like and cannot explode. What is wrong is a `Problem`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import ReaderError

from raybench.errors import JobError
from raybench.job.problems import KeyPath, Position, Problem, key_text, quote

MAX_FILE_BYTES = 100_000  # far above any real job; the parser needs seconds for more
_LABEL_CHARACTERS = 60
_MOST_LINES = 50
MAX_DEPTH = 16  # far above any real job
_INT64_MAX = 2**63 - 1  # what the result tables can hold
_NULL, _BOOL, _INT, _FLOAT = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float")
)
# How a message of the parser begins -> what to do.
_SYNTAX = {
    "found character '\\t'": "a tab cannot indent; use spaces",
    "expected ',' or '}'": "expected ',' or '}'; does the mapping from line {line} end?",
    "expected ',' or ']'": "expected ',' or ']'; does the list from line {line} end?",
    "expected <block end>": "the line does not go on with what is above it; "
    "is it indented as its neighbours, are all brackets and quotes closed?",
    "mapping values are not allowed here": "a ':' cannot stand here; "
    "is the line indented as its neighbours, or does a text with ': ' lack its quotes?",
    "could not find expected ':'": "a key without its ':'; write key: value",
    "expected the node content": "a value is expected here",
    "sequence entries are not allowed here": "a '-' of a list cannot stand here; "
    "put it on a line of its own",
    "mapping keys are not allowed here": "a '?' cannot stand here",
    "found unexpected end of stream": "the file ends inside a quoted text; close the quotes",
    "found unexpected document separator": "'---' or '...' inside a quoted text; close the quotes",
    "expected '<document start>'": "one mapping only; is this line indented as its neighbours?",
    "found character": "this character cannot begin a value; put the text into quotes",
    "expected alphabetic or numeric character": "an anchor (&) or alias (*) without a name; "
    "put the text into quotes",
}


@dataclass(slots=True, kw_only=True)
class Tree:
    """What a YAML text says, as dicts, lists and scalars, and where each of them stands.

    is_complete: False where a problem ended the reading.
    """

    data: Any = None
    key_positions: dict[KeyPath, Position] = field(default_factory=dict)
    value_positions: dict[KeyPath, Position] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    is_complete: bool = True


@dataclass(slots=True, kw_only=True)
class YamlSource:
    """A file and its overrides as one mapping, which turns problems into located lines.

    problems: what is wrong with the YAML itself. overrides: the `--set` text for each path.
    options: where the text was made from options of a command, the one behind each path.
    """

    name: str
    text: str
    data: dict[str, Any]
    tree: Tree
    problems: list[Problem]
    overrides: dict[KeyPath, str] = field(default_factory=dict)
    options: Mapping[KeyPath, str] = field(default_factory=dict)

    def explain(self, problem: Problem) -> str:
        """`file:line:col: dotted.key: message`, or `--set KEY=VALUE: ...` for an override.

        Of a text that nobody wrote, the option that it is from: `--script train.py: ...`.
        """
        subject = f"{key_text(problem.path)}: " if problem.path else ""
        override = self._override_of(problem)
        if override is not None:
            return f"{_label(override)}: {subject}{problem.message}"
        if self.options:
            option = self.options.get(problem.path)
            return f"{option or self.name}: {'' if option else subject}{problem.message}"
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
    """Read the file at `path` as `parse_source` does. Raises JobError also where it cannot."""
    return parse_source(str(path), _read_text(path), overrides)


def parse_source(
    name: str,
    text: str,
    overrides: Sequence[str] = (),
    options: Mapping[KeyPath, str] | None = None,
) -> YamlSource:
    """Parse a text and put each `KEY=VALUE` of `overrides` in place, in their order.

    options: as of a YamlSource.
    Raises JobError when it is no mapping, or an override has no sense.
    What else is wrong with the YAML is in `problems`, and the data goes as far as it can.
    """
    tree = parse_tree(text)
    source = YamlSource(name=name, text=text, data={}, tree=tree, problems=tree.problems)
    source.options = options or {}
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


def overrides_in(argv: Sequence[str]) -> list[str]:
    """Return the values of `--set` in a command line of raybench, such as a run keeps."""
    overrides = []
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if word == "--":
            break  # what follows is the script's
        if word == "--set":
            overrides.append(following)
        elif word.startswith("--set="):
            overrides.append(word.removeprefix("--set="))
    return overrides


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
    # `1,2` is the list `[1, 2]`.
    is_list = "," in value and value.strip()[0] not in "[{\"'"
    tree = parse_tree(f"[{value}]" if is_list else value)
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


def _label(override: str) -> str:
    fits = override.isprintable() and len(override) <= _LABEL_CHARACTERS
    return f"--set {override if fits else quote(override)}"


def position_after(text: str) -> Position:
    """Line and column of the character that follows `text`."""
    return text.count("\n") + 1, len(text) - text.rfind("\n")


def parse_tree(text: str) -> Tree:
    """Read one YAML document of any shape. Raises nothing, whatever `text` says."""
    yaml = YAML(typ="safe", pure=True)
    builder = _TreeBuilder(yaml)
    try:
        for event in yaml.parse(text):
            builder.take(event)
    except _ReadingEndsError:
        builder.tree.is_complete = False
    except (YAMLError, ValueError, OverflowError) as error:
        # ValueError and OverflowError: an escape such as "\Uffffffff" that is no character.
        builder.tree.problems.append(_syntax_problem(error, text))
        builder.tree.is_complete = False
    return builder.tree


def _syntax_problem(error: Exception, text: str) -> Problem:
    position = (1, 1)
    start = 1
    reason = str(error)
    if isinstance(error, ReaderError):
        position = position_after(text[: error.position])
        reason = f"the character {quote(text[error.position])} is not allowed"
    elif isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        position = (mark.line + 1, mark.column + 1) if mark else position
        start = error.context_mark.line + 1 if error.context_mark else start
        reason = str(error.problem or error.context)
    reason = _in_plain_words(" ".join(reason.split()), start)
    return Problem(position=position, message=f"not YAML: {reason}")


def _in_plain_words(reason: str, line: int) -> str:
    """Word what the parser says, without the names of its tokens. line: where it began to look."""
    known = (
        text.replace("{line}", str(line))
        for start, text in _SYNTAX.items()
        if reason.startswith(start)
    )
    # The rest are of escapes, tags and directives, and name characters alone.
    return next(known, reason)


class _ReadingEndsError(Exception):
    """What follows in the text has no meaning after the problem just noted."""


@dataclass(slots=True, kw_only=True)
class _Frame:
    """A mapping or list that is still open. key: the one whose value comes next."""

    container: dict[str, Any] | list[Any]
    path: KeyPath
    key: str | None = None

    @property
    def awaits_key(self) -> bool:
        return isinstance(self.container, dict) and self.key is None


class _TreeBuilder:
    """Builds a `Tree` from parser events, with a stack of its own instead of recursion."""

    def __init__(self, yaml: YAML) -> None:
        self.tree = Tree()
        self._resolver = yaml.resolver
        self._constructor = yaml.constructor
        self._stack: list[_Frame] = []
        self._documents = 0

    def take(self, event: Any) -> None:
        if isinstance(event, events.DocumentStartEvent):
            self._start_document(event)
        elif isinstance(event, events.CollectionEndEvent):
            self._stack.pop()
        elif isinstance(event, events.NodeEvent):
            frame = self._stack[-1] if self._stack else None
            if frame is not None and frame.awaits_key:
                self._take_key(frame, event)
            else:
                self._take_value(event)

    def _start_document(self, event: Any) -> None:
        self._documents += 1
        if self._documents > 1:
            self._end(event, "one document only; remove what follows '---'")
        if event.version not in (None, (1, 2)):
            self._end(event, "job files are YAML 1.2; remove the %YAML line")

    def _take_key(self, frame: _Frame, event: Any) -> None:
        if not isinstance(event, events.ScalarEvent):
            self._end(event, "a key must be a plain word")
        key = _printable_key(event.value)
        path = (*frame.path, key)
        if key in frame.container:
            line, _ = self.tree.key_positions[path]
            self._note(path, event, f"duplicate key, first given on line {line}; keep one of them")
        if key == "<<":
            self._note(path, event, "merge keys are not supported; write the values out")
        frame.key = key
        self.tree.key_positions[path] = _position(event)
        self._check_decoration(path, event)

    def _take_value(self, event: Any) -> None:
        if isinstance(event, events.ScalarEvent):
            value, complaint = self._scalar(event)
            path = self._add(value, event)
            if complaint:
                # No value has no place of its own: the parser is already at the next line.
                at = self.tree.key_positions.get(path) if value is None else None
                self._note(path, event, complaint, at)
        elif isinstance(event, events.CollectionStartEvent):
            path = self._open(event)
        else:
            path = self._add(None, event)
            self._note(path, event, "aliases (*) are not supported; write the value out")
            return
        self._check_decoration(path, event)

    def _open(self, event: Any) -> KeyPath:
        if len(self._stack) >= MAX_DEPTH:
            self._end(event, f"nested more than {MAX_DEPTH} levels deep")
        container: dict[str, Any] | list[Any]
        container = {} if isinstance(event, events.MappingStartEvent) else []
        path = self._add(container, event)
        self._stack.append(_Frame(container=container, path=path))
        return path

    def _add(self, value: Any, event: Any) -> KeyPath:
        """Place `value` where the text has come to."""
        path: KeyPath = ()
        if not self._stack:
            self.tree.data = value
        else:
            frame = self._stack[-1]
            if isinstance(frame.container, dict):
                assert frame.key is not None
                path = (*frame.path, frame.key)
                frame.container[frame.key] = value
                frame.key = None
            else:
                path = (*frame.path, len(frame.container))
                frame.container.append(value)
                self.tree.key_positions[path] = _position(event)
        self.tree.value_positions[path] = _position(event)
        return path

    def _scalar(self, event: Any) -> tuple[Any, str | None]:
        """Return the value, and what is wrong with it."""
        tag = self._resolver.resolve(ScalarNode, event.value, event.implicit)
        node = ScalarNode(tag, event.value)
        match str(tag):
            case tag_name if tag_name == _NULL:
                return None, "no value given; give one or remove the key"
            case tag_name if tag_name == _BOOL:
                return self._constructor.construct_yaml_bool(node), None
            case tag_name if tag_name == _INT:
                return self._integer(node)
            case tag_name if tag_name == _FLOAT:
                number = self._constructor.construct_yaml_float(node)
                complaint = (
                    None if math.isfinite(number) else f"must be finite, given {quote(node.value)}"
                )
                return number, complaint
        complaint = (
            None if _is_encodable(event.value) else f"not a Unicode text: {quote(node.value)}"
        )
        return str(event.value), complaint

    def _integer(self, node: ScalarNode) -> tuple[int, str | None]:
        try:
            number = int(self._constructor.construct_yaml_int(node))
        except ValueError:
            # Python refuses to read thousands of digits; "0x_" is no number either.
            return 0, f"not an integer that can be read: {quote(node.value)}"
        if abs(number) > _INT64_MAX:
            # Not the number: Python refuses to write one of thousands of digits into a message.
            return 0, f"an integer must fit into 64 bits, given {quote(node.value)}"
        return number, None

    def _check_decoration(self, path: KeyPath, event: Any) -> None:
        if event.anchor is not None:
            self._note(path, event, "anchors (&) are not supported; write the value out each time")
        if event.tag is not None:
            self._note(path, event, f"tags are not supported, given {quote(str(event.tag))}")

    def _note(self, path: KeyPath, event: Any, message: str, at: Position | None = None) -> None:
        problem = Problem(path=path, position=at or _position(event), message=message)
        self.tree.problems.append(problem)

    def _end(self, event: Any, message: str) -> NoReturn:
        path = self._stack[-1].path if self._stack else ()
        self._note(path[:3], event, message)
        raise _ReadingEndsError


def _position(event: Any) -> Position:
    return event.start_mark.line + 1, event.start_mark.column + 1


def _is_encodable(text: str) -> bool:
    """Whether `text` is free of lone surrogates, which no file or terminal can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _printable_key(text: str) -> str:
    return text if _is_encodable(text) else ascii(text)
