"""A job file as data that knows where each value was given, with the `--set` overrides applied.

The YAML is 1.2, cut down to what a job file needs: one document, no anchors, aliases, merge keys
or tags but YAML's own, so that a text means what it looks like and cannot explode. What is wrong is
a `JobProblem`. Sizes such as 4KiB, which may stand in place of bytes, are read here too.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import ComposerError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from raybench.errors import JobError
from raybench.job.problems import JobProblem, KeyPath, Position, key_text, quote

# `measure: quick` stands for `measure: {seconds: 0.5}`, in a file and in an override; in place of
# a count of iterations, too, which may take hours.
QUICK, QUICK_SECONDS = "quick", 0.5
MAX_FILE_BYTES = 100_000  # far above any real job; the parser needs seconds for more
_MOST_LINES = 50
_INT64_MAX = 2**63 - 1  # what the result tables can hold
_CORE = "tag:yaml.org,2002:"
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
    "found unexpected end of stream": "the file ends inside a quoted text; close the quotes",
    "expected '<document start>'": "one mapping only; is this line indented as its neighbours?",
    "found character": "this character cannot begin a value; put the text into quotes",
    "but found another document": "one document only; remove what follows '---'",
}

_UNITS = {
    **dict.fromkeys(("", "B"), 1),
    **{f"{letter}iB": 2 ** (10 * power) for power, letter in enumerate("KMGT", start=1)},
    **{f"{letter}B": 10 ** (3 * power) for power, letter in enumerate("kMGT", start=1)},
}
_SIZE = re.compile(r"(\d{1,19}(?:\.\d+)?) ?([KMGT]iB|[kMGT]?B|)")
_RANGE = re.compile(r"([^:]+):([^:]+):x(\d{1,19})")


@dataclass(slots=True, kw_only=True)
class YamlSource:
    """A YAML text as dicts, lists and scalars; it knows the line and column of each.

    data: the value of the text, with the overrides in it; None for an empty text. problems: what
    is wrong with the YAML itself. is_complete: False where a problem ended the reading.
    overrides: the `--set` text for each path. options: where the text was made from options of a
    command, the one behind each path.
    """

    name: str
    text: str
    data: Any = None
    problems: list[JobProblem] = field(default_factory=list)
    is_complete: bool = True
    overrides: dict[KeyPath, str] = field(default_factory=dict)
    options: Mapping[KeyPath, str] = field(default_factory=dict)
    # Of each path the place of its key and that of its value; an entry of a list is its own key.
    _places: dict[KeyPath, tuple[Position, Position]] = field(default_factory=dict)

    def explain(self, problem: JobProblem) -> str:
        """Return `file:line:col: dotted.key: message`, or `--set KEY=VALUE: ...` for an override.

        If options of a command made the text: `--script train.py: message` with the option of the
        value, else `name: dotted.key: message`. A missing key has the place of the key above it.
        """
        subject = f"{key_text(problem.path)}: " if problem.path else ""
        override = self._override_of(problem)
        if override is not None:
            return f"{_label(override)}: {subject}{problem.message}"
        if self.options:
            paths = [problem.path[:length] for length in range(len(problem.path), 0, -1)]
            option = next((self.options[path] for path in paths if path in self.options), None)
            return f"{option or self.name}: {'' if option else subject}{problem.message}"
        line, column = self._position(problem)
        return f"{self.name}:{line}:{column}: {subject}{problem.message}"

    def explain_all(self, problems: Iterable[JobProblem]) -> str:
        """Return a line per problem, each once, in the order of the file, overrides last.

        Of more than 50 lines the 50 first, and how many more there are; "" for no problem.
        """

        def order(problem: JobProblem) -> tuple[bool, Position]:
            return self._override_of(problem) is not None, self._position(problem)

        lines = list(dict.fromkeys(map(self.explain, sorted(problems, key=order))))
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"{self.name}: and {len(lines) - _MOST_LINES:,} more"]
        return "\n".join(lines)

    def _override_of(self, problem: JobProblem) -> str | None:
        """Return the `--set` text that gave the value with the problem; None: the file gave it."""
        if problem.position is not None:
            return None
        path = problem.path
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return self.overrides[path[:length]]
        # A section that the file does not have: an override of a key in it made it up.
        while path and path not in self._places:
            for known, text in self.overrides.items():
                if known[: len(path)] == path:
                    return text
            path = path[:-1]
        return None

    def _position(self, problem: JobProblem) -> Position:
        """Return line and column of a problem; where the file lacks its path, of the key above."""
        if problem.position is not None:
            return problem.position
        path = problem.path
        while path and path not in self._places:
            path = path[:-1]
        key, value = self._places.get(path, ((1, 1), (1, 1)))
        return key if problem.at_key else value

    def _read(self, node: Any, path: KeyPath, yaml: YAML, key_node: Any = None) -> Any:
        """Return the value of a node, and keep the places of all that is in it.

        What is wrong goes into `problems`, with None, 0 or a text in its place. Of a key that is
        given twice, the last value counts.
        """
        at = _position(node)
        self._places[path] = _position(key_node or node), at
        if node.anchor is not None:
            # A node that aliases stand for is read once: it may contain itself.
            rule = "anchors (&) and aliases (*) are not supported; write the value out each time"
            self._note(path, rule, at)
            node.anchor, node = None, ScalarNode(f"{_CORE}str", "", node.start_mark)
        if not str(node.tag).startswith(_CORE):
            self._note(path, f"tags are not supported, given {quote(str(node.tag))}", at)
        if isinstance(node, SequenceNode):
            return [self._read(one, (*path, i), yaml) for i, one in enumerate(node.value)]
        if not isinstance(node, MappingNode):
            return self._read_scalar(node, path, yaml)
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode) or key_node.anchor is not None:
                self._note(path, "a key must be a plain word", _position(key_node))
                continue
            key = _encodable(key_node.value)
            below = (*path, key)
            if key in found:
                (line, _), _ = self._places[below]
                message = f"duplicate key, first given on line {line}; keep one of them"
                self._note(below, message, _position(key_node))
            if key == "<<":
                message = "merge keys are not supported; write the values out"
                self._note(below, message, _position(key_node))
            found[key] = self._read(value_node, below, yaml, key_node)
        return found

    def _read_scalar(self, node: Any, path: KeyPath, yaml: YAML) -> Any:
        """Return a scalar as None, bool, int, float or str; 0 for a number that cannot be kept."""
        kind, given = str(node.tag).removeprefix(_CORE), node.value
        key_at, at = self._places[path]
        if kind == "null":
            # It has no place of its own: the parser is already at the next line.
            self._note(path, "no value given; give one or remove the key", key_at)
            return None
        # A number of `env` stays as it is written: 12.10 is not 12.1.
        is_of_env = path[:1] == ("env",) and len(path) > 1
        if kind not in ("bool", "int", "float") or (is_of_env and kind != "bool"):
            if (text := _encodable(given)) != given:
                self._note(path, f"not a text that can be kept: {text}", at)
            return text
        try:
            value = getattr(yaml.constructor, f"construct_yaml_{kind}")(node)
        except (LookupError, ValueError):
            # Python refuses to read thousands of digits; "0x_" and "" are no numbers either.
            self._note(path, f"not a number that can be read: {quote(given)}", at)
            return 0
        if kind == "int" and abs(value) > _INT64_MAX:
            # Python refuses to write a number of thousands of digits into a message.
            self._note(path, f"an integer must fit into 64 bits, given {quote(given)}", at)
            return 0
        if kind == "float" and not math.isfinite(value):
            self._note(path, f"must be finite, given {quote(given)}", at)
        return value

    def _note(self, path: KeyPath, message: str, at: Position) -> None:
        self.problems.append(JobProblem(path=path, position=at, message=message))


def _position(node: Node) -> Position:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _encodable(text: str) -> str:
    """Return the text; with escapes where files or processes cannot take it as it is."""
    is_damaged = "\0" in text or any("\ud800" <= one <= "\udfff" for one in text)
    return ascii(text) if is_damaged else str(text)


def read_source(path: Path, overrides: Sequence[str] = ()) -> YamlSource:
    """Return the file at `path`, parsed by `parse_source`; its name is the path.

    Raises JobError as that does, and where the file cannot be read, is too long, no regular file,
    or not UTF-8.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # To read it could wait without end, and a resumed run reads the file again.
            raise JobError(f"{path}:1:1: a job is a regular file; save it to one first")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        # ValueError: a name with a null character in it.
        reason = error.strerror if isinstance(error, OSError) else error
        template = files("raybench").joinpath("jobs", path.name)
        if isinstance(error, FileNotFoundError) and template.is_file():
            reason = f"{reason}; `raybench init --template {path.stem}` writes {path.name}"
        elif isinstance(error, FileNotFoundError):
            there = {
                one.stem: one for at in ("*.yaml", "jobs/*.yaml") for one in path.parent.glob(at)
            }
            for near in difflib.get_close_matches(path.stem, there, n=1):
                reason = f"{reason}; did you mean {there[near]}?"
        raise JobError(f"{path}:1:1: the job file cannot be read: {reason}") from error
    if len(content) > MAX_FILE_BYTES:
        raise JobError(f"{path}:1:1: a job file has at most {MAX_FILE_BYTES:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, column = _position_after(content[: error.start].decode("utf-8", errors="replace"))
        byte = f"the byte 0x{content[error.start]:02x}"
        message = f"a job file is UTF-8, given {byte}; save it as UTF-8"
        raise JobError(f"{path}:{line}:{column}: {message}") from error
    return parse_source(str(path), text, overrides)


def parse_source(
    name: str,
    text: str,
    overrides: Sequence[str] = (),
    options: Mapping[KeyPath, str] | None = None,
) -> YamlSource:
    """Return the YAML text as data, with the overrides (`KEY=VALUE`) applied in their order.

    name: for messages. options: as in `YamlSource`. Raises JobError where the text is no YAML or no
    mapping, and where an override cannot be applied. Other mistakes are in `problems`; `data` has
    None, 0 or a text in place of a value that cannot be read. It lacks keys that are no words.
    """
    source = parse_yaml(text, name)
    source.options = options or {}
    is_mapping = source.is_complete and isinstance(source.data, dict)
    if not is_mapping:
        if source.is_complete:
            kind = {type(None): "an empty file", list: "a list"}.get(type(source.data), "one value")
            rule = f"a job file is a mapping of keys to values, given {kind}"
            message = f"{rule}; `raybench init` writes one to start from"
            source.problems.insert(0, JobProblem(message=message))
        source.data = {}
    elif source.data.get("measure") == QUICK:
        source.data["measure"] = {"seconds": QUICK_SECONDS}
    failures = [line for text in overrides if (line := _override(source, text)) is not None]
    if not is_mapping or failures:
        lines = [source.explain_all(source.problems), *failures]
        raise JobError("\n".join(line for line in lines if line))
    return source


def overrides_in(argv: Sequence[str]) -> list[str]:
    """Return the values of `--set` in a command line of raybench, up to `--`."""
    overrides = []
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if word == "--":
            break  # what follows is the script's
        if word == "--set":
            overrides.append(following)
        elif word.startswith("--set="):
            overrides.append(word.removeprefix("--set="))
    return overrides


def _override(source: YamlSource, text: str) -> str | None:
    """Put an override into the source's data; return what is wrong with it, None where nothing."""
    key, equals, value = text.partition("=")
    path: KeyPath = tuple(key.strip().split("."))
    if not equals or not all(path):
        return f"{_label(text)}: must be KEY=VALUE, as in matrix.world_size=1,2"
    # `1,2` is the list `[1, 2]`, where a list can stand; a variable keeps its commas.
    is_list = path[0] in ("matrix", "answer") and "," in value
    is_list = is_list and value.strip()[0] not in "[{\"'"
    tree = parse_yaml(f"[{value}]" if is_list else value, at=path)
    if tree.problems or tree.data is None:
        problem = tree.problems[0] if tree.problems else JobProblem(message="no value given")
        is_told = not value.strip() or ", given " in problem.message
        given = "" if is_told else f", given {quote(value)}"
        return f"{_label(text)}: {key_text(problem.path or path)}: {problem.message}{given}"
    if path == ("measure",) and tree.data == QUICK:
        # Keys of the file's section that do not say how long to time stay.
        path, tree.data = ("measure", "seconds"), QUICK_SECONDS
        if isinstance(section := source.data.get("measure"), dict):
            section.pop("iterations", None)
        source.overrides.pop(("measure", "iterations"), None)
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
    fits = override.isprintable() and len(override) <= 60
    return f"--set {override if fits else quote(override)}"


def _position_after(text: str) -> Position:
    """Return line (by newlines) and column, from 1, of the character that follows `text`."""
    return text.count("\n") + 1, len(text) - text.rfind("\n")


def parse_yaml(text: str, name: str = "", at: KeyPath = ()) -> YamlSource:
    """Return one YAML document of any shape; what is wrong with it is in `problems`.

    name: of the file, for messages. at: the path of the document in a job. Raises nothing.
    """
    yaml, source = YAML(typ="safe", pure=True), YamlSource(name=name, text=text)
    try:
        root = yaml.compose(text)
        source.data = None if root is None else source._read(root, at, yaml)
    except (YAMLError, ValueError, OverflowError, RecursionError, AssertionError) as error:
        # ValueError, OverflowError: the escape "\\Uffffffff". AssertionError: the line `%YAML 1.0`.
        source.problems.append(_syntax_problem(error, text))
        source.is_complete = False
    return source


def _syntax_problem(error: Exception, text: str) -> JobProblem:
    """Return where and why the parser ended, in our words where `_SYNTAX` has them."""
    position, start, reason = (1, 1), 1, str(error)
    if isinstance(error, RecursionError):
        reason = "nested too deep"
    elif isinstance(error, ReaderError):
        position = _position_after(text[: error.position])
        reason = f"the character {quote(text[error.position])} is not allowed"
    elif isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        position = (mark.line + 1, mark.column + 1) if mark else position
        # Where the parser began to look.
        start = error.context_mark.line + 1 if error.context_mark else start
        reason = " ".join(str(error.problem or error.context).split())
    known = (
        advice.replace("{line}", str(start))
        for beginning, advice in _SYNTAX.items()
        if reason.startswith(beginning)
    )
    # The messages that are not in `_SYNTAX` name characters alone, but for tokens at their end.
    reason = next(known, reason.partition(", but ")[0])
    is_yaml = isinstance(error, ComposerError)
    return JobProblem(position=position, message=reason if is_yaml else f"not YAML: {reason}")


def read_bytes(text: str) -> float | None:
    """Return the bytes that a text such as 4KiB, 1.5MB or 64 means; None for another text.

    KiB is 1024, kB 1000, KB no unit. None too for 0 and above 2^63 - 1. Parts of bytes are kept.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        return None
    number, unit = found.groups()
    count = float(number) * _UNITS[unit] if "." in number else int(number) * _UNITS[unit]
    return count if 0 < count <= _INT64_MAX else None


def _read_sizes(value: Any) -> Any:
    """Return a size as a whole number of bytes, a range of sizes as a list of them.

    Of a list, one list of the sizes of all entries. What is no size stays as it is.
    """
    if isinstance(value, list):
        read = [_read_sizes(one) for one in value]
        return [size for one in read for size in (one if isinstance(one, list) else [one])]
    if not isinstance(value, str):
        return value
    found = _RANGE.fullmatch(value)
    ends = [read_bytes(end) for end in (found.group(1, 2) if found else (value, value))]
    factor = int(found[3]) if found else 2
    if factor < 2 or any(end is None or end != int(end) for end in ends):
        return value
    low, high = (int(end or 0) for end in ends)
    sizes = []
    while low <= high:
        sizes.append(low)
        low *= factor
    return (sizes if found else sizes[0]) or value


def with_sizes(group: object) -> object:
    """Return a copy of a mapping with its settings `*_bytes` in bytes, ranges as lists of them.

    A size is a text as of `read_bytes` that means whole bytes; a range is a text such as
    "8:1GiB:x2": 8, and twice the last up to 1 GiB. Lists of lists or ranges become one flat list.
    Any other value stays as it is, for its type to refuse; so does what is no dict.
    """
    if not isinstance(group, dict):
        return group
    return {
        name: _read_sizes(value) if str(name).endswith("_bytes") else value
        for name, value in group.items()
    }
