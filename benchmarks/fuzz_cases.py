"""The cases of `benchmarks.fuzz`: each follows from a seed and its number alone."""

from __future__ import annotations

import random
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

from builders import make_device, make_failed, make_measure, make_point, make_record, make_run

from raybench.results.writer import RunStore

_REPOSITORY = Path(__file__).parents[1]
# A plan of a mutated job is cheap, a report takes a tenth of a second.
_WEIGHTS = {"filters": 12, "jobs": 12, "options": 4, "parts": 2}
_NASTY = (
    *("", " ", "0", "-1", "1e400", "nan", "inf", "-0.0", "1_000", "0x" + "f" * 5000, "9" * 5000),
    *("true", "null", "~", "no", "[]", "{}", "[[]]", "{a: {b: {c: 1}}}", "&a [*a, *a]", "*a"),
    *("!!python/object:os.system x", "!!binary aGk=", "2026-11-22", "|", ">", "'", '"', "%", "@"),
    *("\x00", "\x1b[31m", "\u202e", "\ud7ff", "\U0001f600", "a" * 10_000, "../../etc", "/dev/null"),
    *("torch:nn", "x:y", ":", "mlp", "collective", "no_such_module:Class", "bf16", "fp8", "cuda"),
    *("=1+1", "-o", "--", "latest", "%s%n", "${HOME}", "$(id)", "`id`", "<b>", "|x|", "1:2:3"),
)
_NAMES = ("world_size", "batch_size", "precision", "hidden", "layers", "workload", "x", "params")
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "<<", ">>", "&", "|", "^", "<", "<=", "==", "!=")
_WORDS = (" and ", " or ", " in ", " not in ", " is ", " is not ", " if 1 else ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command line and the files that it finds. results: the folder `r` is made of these runs."""

    kind: str
    args: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    results: Callable[[Path], None] | None = None

    def prepare(self, folder: Path) -> None:
        """Put the files where the command looks for them."""
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        if self.results is not None:
            shutil.rmtree(folder / "r", ignore_errors=True)
            self.results(folder / "r")


def make_case(seed: int, number: int, kinds: tuple[str, ...]) -> Case:
    """Make the case of this number."""
    chance = random.Random(f"{seed}:{number}")
    [kind] = chance.choices(kinds, [_WEIGHTS[kind] for kind in kinds])
    makers = {"filters": _filter, "jobs": _job, "options": _options, "parts": _parts}
    return makers[kind](chance)


@cache
def _jobs() -> tuple[str, ...]:
    paths = [*(_REPOSITORY / "jobs").glob("*.yaml"), _REPOSITORY / "raybench/job_template.yaml"]
    return tuple(path.read_text(encoding="utf-8") for path in sorted(paths))


def _job(chance: random.Random) -> Case:
    text = chance.choice(_jobs())
    for _ in range(chance.randint(1, 6)):
        text = chance.choice(_TEXT_MUTATIONS)(chance, text)
    content = text.encode("utf-8", "surrogatepass")
    if chance.random() < 0.1:
        content = _flipped(chance, content)
    return Case(
        kind="jobs", args=("plan", "job.yaml", *_extras(chance)), files={"job.yaml": content}
    )


def _extras(chance: random.Random) -> tuple[str, ...]:
    """Options of `plan`."""
    some: list[str] = []
    if chance.random() < 0.2:
        some.append("--json")
    if chance.random() < 0.2:
        key = chance.choice(("matrix.world_size", "measure", "workload.hidden", "name", "zip", ""))
        some += ["--set", f"{key}={_argument(chance)}"]
    return tuple(some)


def _argument(chance: random.Random) -> str:
    """As a shell can give it: without NUL."""
    return chance.choice(_NASTY).replace("\x00", "\\0")


def _no_line(chance: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True) or [""]
    lines.pop(chance.randrange(len(lines)))
    return "".join(lines)


def _line_twice(chance: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True) or [""]
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(lines))
    return "".join(lines)


def _indented(chance: random.Random, text: str) -> str:
    lines = text.splitlines(keepends=True) or [""]
    place = chance.randrange(len(lines))
    lines[place] = chance.choice(("  ", "\t", "- ", "# ")) + lines[place]
    return "".join(lines)


def _word_changed(chance: random.Random, text: str) -> str:
    words = text.split(" ")
    words[chance.randrange(len(words))] = chance.choice((*_NASTY, chance.choice(words)))
    return " ".join(words)


def _cut(chance: random.Random, text: str) -> str:
    return text[: chance.randrange(len(text) + 1)]


def _inserted(chance: random.Random, text: str) -> str:
    place = chance.randrange(len(text) + 1)
    return text[:place] + chance.choice(_NASTY) + text[place:]


def _value_changed(chance: random.Random, text: str) -> str:
    lines = text.splitlines() or [""]
    place = chance.randrange(len(lines))
    key, colon, _ = lines[place].partition(":")
    lines[place] = f"{key}{colon} {chance.choice(_NASTY)}"
    return "\n".join(lines) + "\n"


def _nested(chance: random.Random, text: str) -> str:
    depth = chance.choice((10, 100, 1000))
    opening, closing = chance.choice(("[]", "{}"))
    return f"{text}\nx{depth}: {opening * depth}{closing * depth}\n"


_TEXT_MUTATIONS = (
    *(_no_line, _line_twice, _indented, _word_changed, _word_changed, _cut, _inserted),
    *(_value_changed, _value_changed, _nested),
)


def _flipped(chance: random.Random, content: bytes) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(chance.randint(1, 8)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def _filter(chance: random.Random) -> Case:
    text = _expression(chance, chance.randint(0, 5))
    if chance.random() < 0.5:
        text = f"{chance.choice(_NAMES[:4])} {chance.choice(_OPERATORS[-5:])} {text}"
    if chance.random() < 0.15:
        text = _inserted(chance, text)
    job = _JOB if chance.random() < 0.9 else chance.choice(_jobs())
    expression = text.replace("\x00", "\\0")
    args = ("plan", "job.yaml", "--filter", expression)
    return Case(kind="filters", args=args, files={"job.yaml": job.encode()})


_JOB = """\
version: 1
name: small
workload: {kind: mlp, hidden: 8, layers: 1}
matrix: {world_size: [1, 2], precision: [fp32, bf16], batch_size: [4, 8]}
baseline: {world_size: 1}
"""


def _expression(chance: random.Random, depth: int) -> str:
    if depth <= 0:
        return chance.choice(
            (*_NAMES, "1", "-2", "0", "1e308", "'bf16'", "'x'", "None", "True", "[]")
        )
    left, right = (_expression(chance, depth - chance.randint(1, 2)) for _ in range(2))
    forms = (
        f"{left} {chance.choice(_OPERATORS)} {right}",
        f"({left}){chance.choice(_WORDS)}({right})",
        f"[{left}, {right}]",
        f"({left},) * {right}",
        f"{left}[{right}]",
        f"{left}[{right}:]",
        f"not {left}",
        f"-{left}",
        f"~({left})",
        f"{left}.{right}",
        f"{left}({right})",
        f"[x for x in {left}]",
        f"lambda: {left}",
        f"{{{left}: {right}}}",
        f"f'{{{left}}}'",
        f"({left} := {right})",
        f"{left} if {right} else {left}",
    )
    return chance.choice(forms)


_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "plan": ("--set", "--filter", "--json"),
    "sweep": (
        "--set",
        "--filter",
        "--tag",
        "--resume",
        "--wait",
        "--profile",
        "--json",
        "--shared",
    ),
    "report": ("--results", "--format", "--width"),
    "list": ("--results", "--long", "--json", "--tag", "--last"),
    "show": ("--results", "--json", "--timeline"),
    "compare": ("--results", "--threshold", "--fail-on", "--format"),
    "history": ("--results", "--point", "--json", "--last"),
    "export": ("--results", "--format"),
    "workloads": ("--json",),
    "schema": (),
    "nonsense": ("--x",),
}
_FORMATS = ("terminal", "md", "html", "json", "csv", "junit", "github-benchmark", "yaml")


def _options(chance: random.Random) -> Case:
    command = chance.choice(tuple(_COMMANDS))
    args = [command]
    for _ in range(chance.choice((0, 1, 1, 2))):
        args.append(chance.choice(("job.yaml", "run-a", "run", "latest", _argument(chance))))
    for option in chance.sample(
        _COMMANDS[command], min(len(_COMMANDS[command]), chance.randint(0, 3))
    ):
        args.append(option)
        if chance.random() < 0.9:
            value = chance.choice(_FORMATS) if option == "--format" else _argument(chance)
            args.append("r" if option == "--results" and chance.random() < 0.8 else value)
    if command == "sweep":
        args.append("--dry-run")
    return Case(
        kind="options",
        args=tuple(args),
        files={"job.yaml": _JOB.encode()},
        results=_written if command not in ("plan", "workloads", "schema") else None,
    )


def _written(root: Path) -> None:
    shutil.copytree(_results(), root)


@cache
def _results() -> Path:
    """Two small runs, written once a process."""
    import atexit
    import tempfile

    root = Path(tempfile.mkdtemp(prefix="fuzz-results"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for name, ms in (("run-a", 8.0), ("run-b", 9.0)):
        store = RunStore.create(root, make_run(name), make_measure())
        store.write_devices([make_device(rank) for rank in range(2)])
        for index, size in enumerate((1, 2)):
            store.write_records([(index, make_record(make_point(world_size=size), step_ms=ms))])
        store.write_records([(2, make_failed(make_point(world_size=4)))])
    return root


def _parts(chance: random.Random) -> Case:
    state = chance.getrandbits(64)

    def damage(root: Path) -> None:
        _written(root)
        again = random.Random(state)
        for _ in range(again.randint(1, 3)):
            _damage(again, root)

    reading = (
        ("report", "run-a", "--results", "r", "--format", chance.choice(_FORMATS[:4])),
        ("list", "--results", "r"),
        ("list", "--results", "r", "--json"),
        ("show", "run-a", "--results", "r"),
        ("compare", "run-a", "run-b", "--results", "r"),
        ("history", "--results", "r"),
        ("export", "run-a", "--results", "r", "--format", chance.choice(_FORMATS[4:7])),
        ("sweep", "job.yaml", "--resume", "run-a", "-o", "r", "--dry-run"),
    )
    return Case(
        kind="parts", args=chance.choice(reading), files={"job.yaml": _JOB.encode()}, results=damage
    )


def _damage(chance: random.Random, root: Path) -> None:
    """Of one part: its bytes, its rows, its columns or its metadata."""
    path = chance.choice(sorted(root.glob("*/*/*.parquet")))
    if chance.random() < 0.3:
        content = path.read_bytes()
        damaged = (content[: chance.randrange(len(content) + 1)], _flipped(chance, content), b"")
        path.write_bytes(chance.choice(damaged))
        return
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError):
        return  # damaged already
    for _ in range(chance.randint(1, 3)):
        table = chance.choice(_TABLE_MUTATIONS)(chance, table)
    pq.write_table(table, path)


def _no_column(chance: random.Random, table: pa.Table) -> pa.Table:
    # By its place: there may be two of a name.
    place = chance.randrange(table.num_columns)
    return table.remove_column(place) if table.num_columns > 1 else table


def _nulls(chance: random.Random, table: pa.Table) -> pa.Table:
    place = chance.randrange(table.num_columns)
    column = table.schema.field(place)
    nulls = pa.nulls(table.num_rows, column.type)
    return table.set_column(place, column.with_nullable(True), nulls)


def _other_type(chance: random.Random, table: pa.Table) -> pa.Table:
    place = chance.randrange(table.num_columns)
    values: tuple[Any, ...] = (
        *("", "\x1b[2J", "\u202e" * 50, "x" * 100_000, "=cmd()", 0, -1, 2**62, 1e308, -1e308),
        *(float("nan"), float("inf"), True, b"\xff", [1], ["a", None], {"a": 1}),
    )
    value = chance.choice(values)
    return table.set_column(place, table.column_names[place], pa.array([value] * table.num_rows))


def _extreme(chance: random.Random, table: pa.Table) -> pa.Table:
    """Of its own type, as a mistake or an enemy would write it."""
    place = chance.randrange(table.num_columns)
    column = table.schema.field(place)
    values: Mapping[str, tuple[Any, ...]] = {
        "int64": (0, -1, 2**63 - 1, -(2**63), 10**6),
        "double": (0.0, -0.0, -1.0, 1e308, 5e-324, float("nan"), float("inf"), -float("inf")),
        "string": ("", "\x00", "\x1b]0;x\x07", "unheard", "a" * 70_000, "../..", "ok", "<script>"),
        "bool": (True, False),
    }
    choices = values.get(str(column.type))
    if choices is None:
        return _nulls(chance, table)
    return table.set_column(
        place, column, pa.array([chance.choice(choices)] * table.num_rows, column.type)
    )


def _rows_twice(chance: random.Random, table: pa.Table) -> pa.Table:
    return pa.concat_tables([table, table])


def _no_rows(chance: random.Random, table: pa.Table) -> pa.Table:
    return table.slice(0, 0)


def _new_column(chance: random.Random, table: pa.Table) -> pa.Table:
    return table.append_column("new_in_9", pa.array(["x"] * table.num_rows))


def _metadata(chance: random.Random, table: pa.Table) -> pa.Table:
    version = chance.choice((b"", b"0", b"999", b"-1", b"\xff", b"9" * 5000, b"4.0"))
    return table.replace_schema_metadata({b"schema_version": version})


_TABLE_MUTATIONS = (
    *(_no_column, _nulls, _other_type, _extreme, _extreme, _rows_twice, _no_rows, _new_column),
    _metadata,
)
