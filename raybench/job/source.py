"""Read a job file as data with the position of each value, and apply `--set`.

Anchors, aliases, merge keys, tags and further documents are rejected: with aliases, a short text
could stand for a huge one.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

# `measure: quick` stands for `measure: {seconds: 0.5}`. As an override, it also replaces a count of
# iterations, which may take hours.
QUICK, QUICK_SECONDS = "quick", 0.5
# On clusters without GPUs, the section CPU replaces keys of the sections REPLACEABLE.
CPU = "cpu"
REPLACEABLE = (
    *("question", "answer", "workload", "matrix", "zip", "env", "exclude", "include", "baseline"),
    *("measure", "placement"),
)
MAX_FILE_BYTES = 100_000  # far above any real job; the parser needs seconds for more
_MOST_LINES = 50
_INT64_MAX = 2**63 - 1  # what the result tables can hold
# Sort key of messages: whether an override is wrong, and the position in the file.
Order = tuple[bool, Position]
_CORE = "tag:yaml.org,2002:"
# Beginning of a message of the parser -> advice.
_SYNTAX_ADVICE = {
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
    """A YAML text as dicts, lists and scalars, with the line and column of each."""

    name: str
    text: str
    # With the overrides applied; None for an empty text.
    data: Any = None
    # Mistakes in the YAML itself.
    problems: list[JobProblem] = field(default_factory=list)
    # False if a syntax error ended the parsing.
    is_complete: bool = True
    # Path -> its `--set` text.
    overrides: dict[KeyPath, str] = field(default_factory=dict)
    # Path -> option of the command that gave the value; empty for a file.
    options: Mapping[KeyPath, str] = field(default_factory=dict)
    # Whether the section `cpu` applies.
    on_cpu: bool = False
    # Whether the section `cpu` has replaced any key.
    uses_cpu: bool = False
    # Path that the section `cpu` replaces -> path in that section. Overrides remove entries.
    replaced: dict[KeyPath, KeyPath] = field(default_factory=dict)
    # Path -> positions of its key and of its value; an entry of a list is its own key.
    _places: dict[KeyPath, tuple[Position, Position]] = field(default_factory=dict)

    def explain(self, problem: JobProblem) -> str:
        """Return `file:line:col: dotted.key: message`.

        If the file did not give the value, the message begins with `--set KEY=VALUE` or an option.
        """
        problem = self._with_path_in_file(problem)
        subject = f"{key_text(problem.path)}: " if problem.path else ""
        override = self._override_of(problem)
        if override is not None:
            return f"{_label(override)}: {subject}{problem.message}"
        for path in _prefixes(problem.path):
            if path in self.options:
                return f"{self.options[path]}: {problem.message}"
        if self.options:  # there is no file, so no line
            return f"{self.name}: {subject}{problem.message}"
        line, column = self._position(problem)
        return f"{self.name}:{line}:{column}: {subject}{problem.message}"

    def explain_all(
        self, problems: Iterable[JobProblem], other_lines: Iterable[tuple[Order, str]] = ()
    ) -> str:
        """Return a line for each problem in the order of the file; after 50 lines, how many more.

        Problems of overrides come last.

        Args:
            other_lines: sort keys and messages from `ordered_lines` of another source.
        """
        ordered = sorted([*self.ordered_lines(problems), *other_lines], key=lambda entry: entry[0])
        lines = list(dict.fromkeys(line for _, line in ordered))
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"{self.name}: and {len(lines) - _MOST_LINES:,} more"]
        return "\n".join(lines)

    def ordered_lines(self, problems: Iterable[JobProblem]) -> list[tuple[Order, str]]:
        """Return the sort key and the message of each problem."""
        lines = []
        for problem in map(self._with_path_in_file, problems):
            # Problems of overrides come last.
            sort_key = self._override_of(problem) is not None, self._position(problem)
            lines.append((sort_key, self.explain(problem)))
        return lines

    @property
    def has_cpu(self) -> bool:
        """Whether there is a section `cpu`."""
        return isinstance(self.data, dict) and CPU in self.data

    @property
    def replaced_keys(self) -> list[KeyPath]:
        """Paths of keys that the section `cpu` has replaced and `--set` has not."""
        keys = []
        for path in self.replaced:
            # Omit a section such as ("measure",): `replaced` also has the path of each of its keys.
            is_section = len(path) == 1 and isinstance(self.data[CPU][path[0]], dict)
            if not is_section:
                keys.append(path)
        return keys

    def path_in_file(self, path: KeyPath) -> KeyPath:
        """Return where the file gives a value: `path`, or the path in `cpu` that replaced it."""
        for prefix in _prefixes(path):
            if replacement := self.replaced.get(prefix):
                return (*replacement, *path[len(prefix) :])
        return path

    def _with_path_in_file(self, problem: JobProblem) -> JobProblem:
        """Return the problem with its `path_in_file`, unless an override gave the value."""
        if any(prefix in self.overrides for prefix in _prefixes(problem.path)):
            return problem
        return replace(problem, path=self.path_in_file(problem.path))

    def _override_of(self, problem: JobProblem) -> str | None:
        """Return the `--set` text that gave the value; None if the file gave it."""
        if problem.position is not None:  # only mistakes in the text of the file have a position
            return None
        for path in _prefixes(problem.path):
            if path in self.overrides:
                return self.overrides[path]
        # The problem may be a missing key in a section that exists only because an override gave
        # another key of the section.
        for path in _prefixes(problem.path):
            if path in self._places:
                break  # the file has this section
            for overridden, text in self.overrides.items():
                if overridden[: len(path)] == path:
                    return text
        return None

    def _position(self, problem: JobProblem) -> Position:
        """Return line and column of a problem; a missing key has the position of its section."""
        if problem.position is not None:
            return problem.position
        path = problem.path
        while path and path not in self._places:
            path = path[:-1]
        key_position, value_position = self._places.get(path, ((1, 1), (1, 1)))
        return key_position if problem.at_key else value_position

    def _read(self, node: Any, path: KeyPath, yaml: YAML, key_node: Any = None) -> Any:
        """Return the value of a YAML node, and store the position of each value in the node."""
        at = _position(node)
        # An entry of a list and the document itself have no key.
        self._places[path] = _position(key_node or node), at
        if node.anchor is not None:
            # An alias may make the node contain itself, so read an empty text in its place.
            rule = "anchors (&) and aliases (*) are not supported; write the value out each time"
            self._add_problem(path, rule, at)
            node.anchor, node = None, ScalarNode(f"{_CORE}str", "", node.start_mark)
        if not str(node.tag).startswith(_CORE):
            self._add_problem(path, f"tags are not supported, given {quote(str(node.tag))}", at)
        if isinstance(node, SequenceNode):
            return [self._read(entry, (*path, i), yaml) for i, entry in enumerate(node.value)]
        if not isinstance(node, MappingNode):
            return self._read_scalar(node, path, yaml)
        mapping: dict[str, Any] = {}
        for name_node, value_node in node.value:
            name_at = _position(name_node)
            if not isinstance(name_node, ScalarNode) or name_node.anchor is not None:
                self._add_problem(path, "a key must be a plain word", name_at)
                continue
            key = _encodable(name_node.value)
            value_path = (*path, key)
            if key in mapping:
                (line, _), _ = self._places[value_path]
                message = f"duplicate key, first given on line {line}; keep one of them"
                self._add_problem(value_path, message, name_at)
            if key == "<<":
                message = "merge keys are not supported; write the values out"
                self._add_problem(value_path, message, name_at)
            mapping[key] = self._read(value_node, value_path, yaml, name_node)
        return mapping

    def _read_scalar(self, node: Any, path: KeyPath, yaml: YAML) -> Any:
        """Return a scalar as None, bool, int, float or str; an invalid number becomes 0."""
        # The type in YAML, such as `null` or `int`, and the text as written.
        kind, written = str(node.tag).removeprefix(_CORE), node.value
        key_at, at = self._places[path]
        if kind == "null":
            # Report the position of the key: the parser is already at the next line.
            self._add_problem(path, "no value given; give one or remove the key", key_at)
            return None
        # Numbers of `env` stay texts: a number would turn 12.10 into 12.1.
        is_variable = path[:1] == ("env",) and len(path) > 1
        is_number = kind in ("int", "float")
        if (is_number and is_variable) or not (is_number or kind == "bool"):
            if (text := _encodable(written)) != written:
                self._add_problem(path, f"not a text that can be kept: {text}", at)
            return text
        try:
            value = getattr(yaml.constructor, f"construct_yaml_{kind}")(node)
        except (LookupError, ValueError):
            # Python raises for thousands of digits, and for "0x_".
            self._add_problem(path, f"not a number that can be read: {quote(written)}", at)
            return 0
        if kind == "int" and abs(value) > _INT64_MAX:
            # Python may refuse to print the value, so other code gets 0.
            self._add_problem(path, f"an integer must fit into 64 bits, given {quote(written)}", at)
            return 0
        if kind == "float" and not math.isfinite(value):
            self._add_problem(path, f"must be finite, given {quote(written)}", at)
        return value

    def _add_problem(self, path: KeyPath, message: str, at: Position) -> None:
        self.problems.append(JobProblem(path=path, position=at, message=message))


def _prefixes(path: KeyPath) -> list[KeyPath]:
    """Return the path, then the paths of the sections around it, the innermost first."""
    return [path[:length] for length in range(len(path), 0, -1)]


def _position(node: Node) -> Position:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _encodable(text: str) -> str:
    """Return the text, escaped if files or processes cannot hold it."""
    is_damaged = "\0" in text or any("\ud800" <= char <= "\udfff" for char in text)
    # str(): ruamel.yaml returns a subclass of str.
    return ascii(text) if is_damaged else str(text)


def read_source(path: Path, overrides: Sequence[str] = (), *, on_cpu: bool = False) -> YamlSource:
    """Read and parse a job file.

    Args:
        overrides, on_cpu: see `parse_source`.

    Raises:
        JobError: see `parse_source`; also if the file is not a regular one, too long, or not UTF-8.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # Reading a pipe could block, and a resumed run reads the file again.
            raise JobError(f"{path}:1:1: a job is a regular file; save it to one first")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        # ValueError: the name contains a null character.
        reason = error.strerror if isinstance(error, OSError) else error
        template = files("raybench").joinpath("jobs", path.name)
        if isinstance(error, FileNotFoundError) and template.is_file():
            reason = f"{reason}; `raybench init --template {path.stem}` writes {path.name}"
        elif isinstance(error, FileNotFoundError):
            job_files = [*path.parent.glob("*.yaml"), *path.parent.glob("jobs/*.yaml")]
            by_stem = {file.stem: file for file in job_files}
            for similar in difflib.get_close_matches(path.stem, by_stem, n=1):
                reason = f"{reason}; did you mean {by_stem[similar]}?"
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
    return parse_source(str(path), text, overrides, on_cpu=on_cpu)


def parse_source(
    name: str,
    text: str,
    overrides: Sequence[str] = (),
    options: Mapping[KeyPath, str] | None = None,
    *,
    on_cpu: bool = False,
) -> YamlSource:
    """Parse a YAML text and apply the overrides (`KEY=VALUE`) in their order.

    Wrong values become `problems`, and placeholders in `data`.

    Args:
        name: file name for messages.
        options: see `YamlSource`.
        on_cpu: apply the section `cpu`, after overrides of its keys and before all others.

    Raises:
        JobError: the text is no YAML or no mapping, or an override cannot be applied.
    """
    source = parse_yaml(text, name)
    source.options, source.on_cpu = options or {}, on_cpu
    # A syntax error leaves the data incomplete.
    is_mapping = source.is_complete and isinstance(source.data, dict)
    if not is_mapping:
        if source.is_complete:
            kind = {type(None): "an empty file", list: "a list"}.get(type(source.data), "one value")
            rule = f"a job file is a mapping of keys to values, given {kind}"
            message = f"{rule}; `raybench init` writes one to start from"
            source.problems.insert(0, JobProblem(message=message))
        source.data = {}
    else:
        _expand_measure_quick(source.data)
        _expand_measure_quick(source.data.get(CPU))
    cpu_overrides = [text for text in overrides if text.lstrip().startswith(f"{CPU}.")]
    failures = _apply_overrides(source, cpu_overrides)
    # An override may be cpu.measure=quick.
    _expand_measure_quick(source.data.get(CPU))
    if on_cpu:
        _apply_cpu(source)
    other_overrides = [text for text in overrides if text not in cpu_overrides]
    failures += _apply_overrides(source, other_overrides)
    if not is_mapping or failures:
        lines = [source.explain_all(source.problems), *failures]
        raise JobError("\n".join(line for line in lines if line))
    return source


def _apply_cpu(source: YamlSource) -> None:
    """Replace keys of other sections by keys of the section `cpu`; lists are replaced whole."""
    section = source.data.get(CPU)
    for name in REPLACEABLE if isinstance(section, dict) else ():
        if name not in section:
            continue
        # Copy, because later overrides must not change the section `cpu`.
        replacement, path = copy.deepcopy(section[name]), (name,)
        original = source.data.setdefault(name, {})
        if not (isinstance(replacement, dict) and isinstance(original, dict)):
            source.data[name], source.replaced[path] = replacement, (CPU, name)
            continue
        if path not in source._places:
            # The file has this section only inside the section `cpu`.
            source.replaced[path] = (CPU, name)
        source.data[name] = {**original, **replacement}
        if name == "measure" and "seconds" in replacement and "iterations" not in replacement:
            # A count of iterations would make `seconds` of the section `cpu` useless.
            _drop_iterations(source)
        source.replaced |= {(name, key): (CPU, name, key) for key in replacement}
    source.uses_cpu = bool(source.replaced)


def _expand_measure_quick(section: object) -> None:
    """Write out `measure: quick` of a job or of its section `cpu`."""
    if isinstance(section, dict) and section.get("measure") == QUICK:
        section["measure"] = {"seconds": QUICK_SECONDS}


def _drop_iterations(source: YamlSource) -> None:
    """Remove `measure.iterations`, because seconds were given later."""
    if isinstance(section := source.data.get("measure"), dict):
        section.pop("iterations", None)
    source.overrides.pop(("measure", "iterations"), None)


def overrides_in(argv: Sequence[str]) -> list[str]:
    """Return the values of `--set` in a command line of raybench."""
    overrides = []
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if word == "--":
            break  # the rest is the command of a script
        if word == "--set":
            overrides.append(following)
        elif word.startswith("--set="):
            overrides.append(word.removeprefix("--set="))
    return overrides


def _apply_overrides(source: YamlSource, overrides: Iterable[str]) -> list[str]:
    """Apply overrides in their order, and return an error message for each that is wrong."""
    errors = (_apply_override(source, text) for text in overrides)
    return [error for error in errors if error is not None]


def _apply_override(source: YamlSource, text: str) -> str | None:
    """Apply the text of an override; return an error message, or None without an error."""
    key, equals, value = text.partition("=")
    path: KeyPath = tuple(key.strip().split("."))
    if not equals or not all(path):
        return f"{_label(text)}: must be KEY=VALUE, as in matrix.world_size=1,2"
    section = path[1] if path[0] == CPU and len(path) > 1 else path[0]
    # `1,2` means `[1, 2]` for an axis or an answer; a variable keeps its commas.
    is_list = section in ("matrix", "answer") and "," in value
    # The value may already be a list, a mapping or a quoted text.
    is_list = is_list and value.strip()[0] not in "[{\"'"
    tree = parse_yaml(f"[{value}]" if is_list else value, at=path)
    if tree.problems or tree.data is None:
        problem = tree.problems[0] if tree.problems else JobProblem(message="no value given")
        is_value_quoted = ", given " in problem.message
        given = f", given {quote(value)}" if value.strip() and not is_value_quoted else ""
        return f"{_label(text)}: {key_text(problem.path or path)}: {problem.message}{given}"
    if path == ("measure",) and tree.data == QUICK:
        # Set only `seconds`, and keep the other keys of the section. A count of iterations is
        # removed, because the count would make `seconds` useless.
        path, tree.data = ("measure", "seconds"), QUICK_SECONDS
        _drop_iterations(source)
    # Set the value, and create missing sections.
    container = source.data
    for depth, name in enumerate(path[:-1], start=1):
        container = container.setdefault(str(name), {})
        if not isinstance(container, dict):
            return f"{_label(text)}: {key_text(path[:depth])} is not a mapping"
    container[str(path[-1])] = tree.data
    # Forget where earlier values of this key, and of keys below it, came from.
    origins: dict[KeyPath, Any]
    for origins in (source.overrides, source.replaced):
        for earlier in list(origins):
            if earlier[: len(path)] == path:
                del origins[earlier]
    source.overrides[path] = text
    return None


def _label(override: str) -> str:
    """Return an override for a message, quoted if it is long or unprintable."""
    fits = override.isprintable() and len(override) <= 60
    return f"--set {override if fits else quote(override)}"


def _position_after(text: str) -> Position:
    """Return line and column, from 1, of the character after `text`."""
    return text.count("\n") + 1, len(text) - text.rfind("\n")


def parse_yaml(text: str, name: str = "", at: KeyPath = ()) -> YamlSource:
    """Parse one YAML document of any shape; mistakes are in `problems`.

    Args:
        name: file name for messages.
        at: path of the document in a job.
    """
    yaml, source = YAML(typ="safe", pure=True), YamlSource(name=name, text=text)
    try:
        root = yaml.compose(text)
        source.data = None if root is None else source._read(root, at, yaml)
    except (YAMLError, ValueError, OverflowError, RecursionError, AssertionError) as error:
        # ValueError, OverflowError: the escape "\\Uffffffff". AssertionError: `%YAML 1.0`.
        source.problems.append(_syntax_problem(error, text))
        source.is_complete = False
    return source


def _syntax_problem(error: Exception, text: str) -> JobProblem:
    """Return where and why the parser stopped."""
    position, first_line, reason = (1, 1), 1, str(error)
    if isinstance(error, RecursionError):
        reason = "nested too deep"
    elif isinstance(error, ReaderError):
        position = _position_after(text[: error.position])
        reason = f"the character {quote(text[error.position])} is not allowed"
    elif isinstance(error, MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        position = (mark.line + 1, mark.column + 1) if mark else position
        # The unfinished mapping, list or text begins at this line.
        first_line = error.context_mark.line + 1 if error.context_mark else first_line
        reason = " ".join(str(error.problem or error.context).split())
    # Without advice, cut off the list of tokens at the end of the message.
    message = reason.partition(", but ")[0]
    for beginning, advice in _SYNTAX_ADVICE.items():
        if reason.startswith(beginning):
            message = advice.replace("{line}", str(first_line))
            break
    # A ComposerError, such as for a second document, means valid YAML that is not supported.
    is_yaml = isinstance(error, ComposerError)
    return JobProblem(position=position, message=message if is_yaml else f"not YAML: {message}")


def read_bytes(text: str) -> float | None:
    """Return the bytes of a size such as 4KiB (4096), 4kB (4000), 1.5MB or 64; None if invalid."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, unit = match.groups()
    count = float(number) * _UNITS[unit] if "." in number else int(number) * _UNITS[unit]
    return count if 0 < count <= _INT64_MAX else None


def _read_sizes(value: Any) -> Any:
    """Convert a size, a range of sizes, or a list of both to bytes; other values stay as given."""
    if isinstance(value, list):
        sizes = []
        for entry in map(_read_sizes, value):
            sizes += entry if isinstance(entry, list) else [entry]
        return sizes
    if not isinstance(value, str):
        return value
    match = _RANGE.fullmatch(value)
    if match is None:
        return _whole_bytes(value) or value
    size, last, factor = _whole_bytes(match[1]), _whole_bytes(match[2]), int(match[3])
    if size is None or last is None or factor < 2:
        return value
    sizes = []
    while size <= last:
        sizes.append(size)
        size *= factor
    return sizes or value


def _whole_bytes(text: str) -> int | None:
    """Return the bytes of a size; None if the size is invalid or no whole number of bytes."""
    count = read_bytes(text)
    return None if count is None or count != int(count) else int(count)


def with_sizes(group: object) -> object:
    """Return a copy of a mapping with the sizes in its settings `*_bytes` converted to bytes.

    A range such as "8:1GiB:x2" becomes a list: 8, 16, ... up to 1 GiB. Invalid sizes stay texts,
    which the validation rejects.
    """
    if not isinstance(group, dict):
        return group
    return {
        name: _read_sizes(value) if str(name).endswith("_bytes") else value
        for name, value in group.items()
    }
