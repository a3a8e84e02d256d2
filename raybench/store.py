"""The results folder: `results/<table>/<run_id>/<part>.parquet`, how it is written and read.

A part is written to a dot-file beside its place and renamed, so that no reader sees half of
one. A point's samples are written before the point: a point that is there has its samples.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench import rows
from raybench.errors import ResultsError
from raybench.messages import did_you_mean
from raybench.records import Device, Record, Run
from raybench.schemas import TABLES, schema, units

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from raybench.job import Measure

__all__ = ["RunStore", "check_writable", "find_run", "load", "read_runs", "units"]

# No separator, no leading dot: a run_id is one folder name that cannot leave the results. Not
# all digits, or readers take it for a number.
_RUN_ID = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]*")
_WRITTEN = ("points", "samples", "devices", "runs")
_LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStore:
    """Writes one run. Every method raises ResultsError when the folder cannot be written."""

    root: Path
    run_id: str
    measure: Measure

    @classmethod
    def create(cls, root: Path, run: Run, measure: Measure) -> RunStore:
        """Make the folders of a new run and write its row.

        measure: what the job asks for; points that fall short of it get a warning.
        Raises ResultsError also when the run exists, or its id is no plain name.
        """
        if not _RUN_ID.fullmatch(run.run_id) or run.run_id == _LATEST:
            raise ResultsError(
                f"run_id: must be letters, digits, '.', '_' or '-', not all digits and not "
                f"'{_LATEST}', got {run.run_id!r}"
            )
        store = cls(root=root, run_id=run.run_id, measure=measure)
        if store._part("runs", "run").exists():
            raise ResultsError(f"{root}: run {run.run_id} is already there; choose another run_id")
        for table in _WRITTEN:
            with _one_line(store._folder(table)):
                store._folder(table).mkdir(parents=True, exist_ok=True)
        store.write_run(run)
        return store

    def write_run(self, run: Run) -> None:
        """Write the row of the run, in place of what was there."""
        self._write("runs", "run", [rows.run_row(run)])

    def write_devices(self, devices: Sequence[Device]) -> None:
        """Write the devices of the run, in place of what was there."""
        self._write("devices", "devices", [rows.device_row(self.run_id, d) for d in devices])

    def write_record(self, index: int, record: Record) -> None:
        """Write one attempt at a point: its samples, if there are any, then its row.

        index: the point's position in the plan; parts sort in this order.
        """
        part = f"{index:05d}-{record.point.point_id}-{record.attempt}"
        if record.measurements:
            self._write("samples", part, rows.sample_rows(self.run_id, record))
        self._write("points", part, [rows.point_row(self.run_id, record, self.measure)])

    def _folder(self, table: str) -> Path:
        return self.root / table / self.run_id

    def _part(self, table: str, part: str) -> Path:
        return self._folder(table) / f"{part}.parquet"

    def _write(self, table: str, part: str, content: Iterable[rows.Row]) -> None:
        import pyarrow as pa

        whole = pa.Table.from_pylist(list(content), schema=schema(table))
        path = self._part(table, part)
        with _one_line(path):
            _write_part(whole, path, table)


def _write_part(whole: pa.Table, path: Path, table: str) -> None:
    import pyarrow.parquet as pq

    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # Through a file of Python's: its errors name the reason alone, Arrow's a paragraph.
        with aside.open("wb") as file:
            pq.write_table(whole, file, **_parquet_options(table))
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _parquet_options(table: str) -> dict[str, Any]:
    """How parts stay small. Dictionaries and statistics cost more than they save at this size.

    A part of `points` is one row: compressing values of a few bytes makes them longer.
    """
    options: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
    if table == "points":
        return options | {"compression": "none"}
    options |= {"compression": "zstd", "compression_level": 9}
    if table == "samples":
        names = ("iteration", "start_ns", "step_ns", "host_ns", "data_ns")
        options["column_encoding"] = dict.fromkeys(names, "DELTA_BINARY_PACKED")
    return options


def check_writable(root: Path) -> None:
    """Raises ResultsError where it can be told at once that no run can be kept in `root`."""
    with _one_line(root):
        nearest = next(path for path in (root, *root.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"no permission to write to {nearest}")


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    """What the operating system refuses, as one line for the user."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise ResultsError(f"{path}: cannot be written: {reason}; choose another folder") from error


def load(root: str | Path, table: str, run_id: str | None = None) -> pd.DataFrame:
    """One table as a pandas DataFrame, of all runs or of one.

    root: the results folder. table: runs, points, samples, devices or telemetry. run_id: as
    `raybench report` takes it: an id, its unique prefix, `latest`, or a path.
    Columns are those of today's schema, also for parts of an older one (missing: null); maps
    are dicts. `raybench.units(table)` tells the units. Raises ResultsError for a table that
    does not exist and for a file that is not a part of it.
    """
    frame: pd.DataFrame = read_table(root, table, run_id).to_pandas(maps_as_pydicts="strict")
    return frame


def read_table(root: str | Path, table: str, run_id: str | None = None) -> pa.Table:
    """As `load`, as an Arrow table."""
    import pyarrow as pa

    if table not in TABLES:
        guess = did_you_mean(table, TABLES)
        raise ResultsError(f"table: must be one of {', '.join(TABLES)}, got {table!r}{guess}")
    paths = _parts(Path(root), table, run_id)
    return pa.concat_tables(
        [schema(table).empty_table(), *(_read_part(path, table) for path in paths)]
    ).combine_chunks()


def _parts(root: Path, table: str, run_id: str | None) -> list[Path]:
    """All files of a table, by run and name; those that start with . or _ are not ours to read."""
    if not root.is_dir():
        what = "a file, not a folder" if root.exists() else "no such folder"
        raise ResultsError(f"{root}: {what} of results; `raybench sweep JOB` makes one")
    if run_id and not any((root / name / run_id).is_dir() for name in TABLES):
        root, run_id = find_run(root, run_id)
    folder = root / table / run_id if run_id else root / table
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    hidden = (".", "_")
    return [p for p in found if not any(n.startswith(hidden) for n in p.relative_to(root).parts)]


def _read_part(path: Path, table: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        part = pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise ResultsError(f"{path}: {_unreadable(error)}; remove or restore it") from error
    metadata = part.schema.metadata or {}
    if metadata.get(b"table") != table.encode() or b"schema_version" not in metadata:
        raise ResultsError(f"{path}: not a part of the table {table}; move it elsewhere")
    return _as_today(part, path, table)


def _unreadable(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return "not a Parquet file, or a damaged one"


def _as_today(part: pa.Table, path: Path, table: str) -> pa.Table:
    """The part with today's columns: older parts lack some, newer ones have more."""
    import pyarrow as pa

    wanted = schema(table)
    if part.schema.equals(wanted, check_metadata=False):
        return part.replace_schema_metadata(wanted.metadata).cast(wanted)
    try:
        columns = [
            part[field.name].cast(field.type)
            if field.name in part.column_names
            else pa.nulls(part.num_rows, field.type)
            for field in wanted
        ]
    except pa.ArrowException as error:
        raise ResultsError(f"{path}: its columns are not those of {table}: {error}") from error
    return pa.Table.from_arrays(columns, schema=wanted)


def read_runs(root: str | Path) -> list[Run]:
    """All runs, oldest first."""
    found = [rows.run_from_row(row) for row in _run_rows(Path(root))]
    return sorted(found, key=lambda run: (run.started_at, run.run_id))


def _run_rows(root: Path) -> list[dict[str, Any]]:
    table = read_table(root, "runs")
    content: list[dict[str, Any]] = table.to_pylist(maps_as_pydicts="strict")
    return content


def find_run(root: str | Path, text: str) -> tuple[Path, str]:
    """The results folder and the run_id that `text` means.

    text: an id in `root`, its unique prefix, `latest`, or the path of a run in any results folder.
    Raises ResultsError, naming the candidates, when it means none or several.
    """
    path = Path(text)
    if os.sep in text and path.is_dir() and path.resolve().parent.name in TABLES:
        root, text = path.resolve().parents[1], path.resolve().name
    ids = [run.run_id for run in read_runs(root)]
    if not ids:
        raise ResultsError(f"{root}: no runs yet; `raybench sweep JOB` makes one")
    if text == _LATEST:
        return Path(root), ids[-1]
    wanted = _run_of_path(Path(root), text) if os.sep in text else text
    return Path(root), pick(wanted, ids, kind="run", where=str(root))


def pick(prefix: str, ids: Sequence[str], *, kind: str, where: str) -> str:
    """The one id that is `prefix` or starts with it. Raises ResultsError naming the candidates."""
    if prefix in ids:
        return prefix
    found = [known for known in ids if prefix and known.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ResultsError(f"{where}: {kind} {prefix!r} is ambiguous: {_some(found)}")
    guess = did_you_mean(prefix, ids) or f"; there are: {_some(ids)}"
    raise ResultsError(f"{where}: no {kind} {prefix!r}{guess}")


def _run_of_path(root: Path, text: str) -> str:
    path = Path(text).resolve()
    inside = path.relative_to(root.resolve()).parts if path.is_relative_to(root.resolve()) else ()
    if len(inside) < 2 or inside[0] not in TABLES:
        raise ResultsError(
            f"{text}: not a run of {root}; give {root}/runs/RUN_ID, or the folder with --results"
        )
    return inside[1]


def _some(ids: Sequence[str], most: int = 5) -> str:
    """The last few ids: runs are in order of time, and the newest are the likeliest."""
    shown = ", ".join(ids[-most:])
    return f"{shown} and {len(ids) - most} more" if len(ids) > most else shown
