"""A YAML text as plain data that knows the line and column of every key and value.

YAML 1.2, cut down to what a job file needs: one document, no anchors, aliases, tags or merge
keys, so that a text means what it looks like and cannot explode. What is wrong is a `Problem`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ruamel.yaml import YAML, events
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import ReaderError

from raybench.job.problems import KeyPath, Position, Problem, quote

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
        text = quote(event.value)
        match str(tag):
            case tag_name if tag_name == _NULL:
                return None, "no value given; give one or remove the key"
            case tag_name if tag_name == _BOOL:
                return self._constructor.construct_yaml_bool(node), None
            case tag_name if tag_name == _INT:
                return self._integer(node, text)
            case tag_name if tag_name == _FLOAT:
                number = self._constructor.construct_yaml_float(node)
                complaint = None if math.isfinite(number) else f"must be finite, given {text}"
                return number, complaint
        complaint = None if _is_encodable(event.value) else f"not a Unicode text: {text}"
        return str(event.value), complaint

    def _integer(self, node: ScalarNode, text: str) -> tuple[int, str | None]:
        try:
            number = int(self._constructor.construct_yaml_int(node))
        except ValueError:
            # Python refuses to read thousands of digits; "0x_" is no number either.
            return 0, f"not an integer that can be read: {text}"
        if abs(number) > _INT64_MAX:
            # Not the number: Python refuses to write one of thousands of digits into a message.
            return 0, f"an integer must fit into 64 bits, given {text}"
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
