"""The results folder: `results/<table>/<run_id>/<part>.parquet`, and how it is written.

A part is written to a dot-file beside its place and renamed, so that no reader sees half of
one. A point's samples are written before the point: a point that is there has its samples. The
samples of an attempt whose driver was killed between the two are there without a row, until the run
goes on. A part has one attempt at a point, or those that ended while others were written.

Nothing is synced to the disk: a part outlives its driver the moment it is renamed, but a power cut
may leave the last ones empty. Readers name such a part; remove it, and `--resume` runs its point.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench.errors import ResultsError
from raybench.records import Device, DeviceSample, Record
from raybench.results.columns import to_row
from raybench.results.lock import LOGS, check_run_id, one_line
from raybench.results.parts import attempts_in
from raybench.results.point_row import make_unwritten, point_row
from raybench.results.run import Run
from raybench.results.tables import (
    TABLES,
    SummaryRow,
    arrow_table,
    module_rows,
    region_rows,
    sample_columns,
    schema,
    storable,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from raybench.job.model import Measure
    from raybench.records.environment import Code
    from raybench.records.health import Finding

_WRITTEN = ("points", "samples", "devices", "runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStore:
    """Writes one run. Every method raises ResultsError when the folder cannot be written."""

    root: Path
    run_id: str
    measure: Measure
    code: Code | None = None

    @classmethod
    def create(cls, root: Path, run: Run, measure: Measure, code: Code | None = None) -> RunStore:
        """Make the folders of a new run and write its row.

        measure: what the job asks for; points that fall short of it get a warning.
        code: what the workers load; each point tells of it.
        Raises ResultsError also when the run exists, or its id is no plain name.
        """
        check_run_id(run.run_id)
        store = cls(root=root, run_id=run.run_id, measure=measure, code=code)
        if store._part("runs", "run").exists():
            raise ResultsError(f"{root}: run {run.run_id} is already there; choose another run_id")
        for table in _WRITTEN:
            with one_line(store._folder(table)):
                store._folder(table).mkdir(parents=True, exist_ok=True)
        store.write_run(run)
        return store

    def remove(self) -> None:
        """Remove the run, of which nothing is measured yet."""
        for table in _WRITTEN:
            shutil.rmtree(self._folder(table), ignore_errors=True)

    def write_run(self, run: Run) -> None:
        """Write the row of the run; replaces an earlier one."""
        self._write_rows("runs", "run", [to_row(run)])

    def write_devices(self, devices: Sequence[Device], part: str = "devices") -> None:
        """Write devices of the run; replaces the part of this name."""
        self._write_rows("devices", part, [self._of_run(device) for device in devices])

    def write_records(self, batch: Sequence[tuple[int, Record]]) -> list[Record]:
        """Write attempts at points: their samples and profiles, if there are any, then their rows.

        batch: each with the point's position in the plan; parts sort in this order.
        Return them as they were kept: one of which no row can be made is an error in its row.
        """
        import pyarrow as pa

        made = [(index, *self._make_tables(record)) for index, record in batch]
        for index, record, _ in made:
            name = _part_name([(index, record)])
            for measurement in record.measurements:
                if profile := measurement.profile:
                    trace = self.traces / f"{name}-rank{measurement.rank}.json.gz"
                    self._write_file(trace, profile.trace)
            for rank, output in enumerate(record.outputs):
                if output:
                    log = self._folder(LOGS) / f"{name}-rank{rank}.txt"
                    self._write_file(log, f"{output}\n".encode("utf-8", "replace"))
        # The row of a point last: it says that all else is there.
        for table in ("samples", "modules", "regions", "points"):
            if found := [whole for *_, tables in made if (whole := tables[table]) is not None]:
                self._write(table, _part_name(batch), pa.concat_tables(found))
        return [record for _, record, _ in made]

    @property
    def traces(self) -> Path:
        """The folder of the traces of profiled points, which is made with the first."""
        return self._folder("traces")

    def _make_tables(self, record: Record) -> tuple[Record, dict[str, pa.Table | None]]:
        """Return the record as it is kept, and its rows by table; None where a table has none.

        They are made before anything is written: samples without a row would be of no use.
        """
        try:
            return record, self._rows_by_table(record)
        except Exception as error:  # whatever it is, it may not cost the other points
            unwritten = make_unwritten(record, error)
            return unwritten, self._rows_by_table(unwritten)

    def _rows_by_table(self, record: Record) -> dict[str, pa.Table | None]:
        import pyarrow as pa

        columns = sample_columns(self.run_id, record)
        rows: dict[str, Sequence[Any]] = {
            "modules": module_rows(self.run_id, record),
            "regions": region_rows(self.run_id, record),
            "points": [point_row(self.run_id, record, self.measure, self.code)],
        }
        return {
            "samples": pa.table(columns, schema("samples")) if columns else None,
            **{table: _table(table, list(map(to_row, found))) for table, found in rows.items()},
        }

    def _of_run(self, record: Any) -> dict[str, Any]:
        """Return the row of a dataclass, with the run_id as its first column."""
        return {"run_id": self.run_id, **to_row(record)}

    def write_telemetry(
        self, batch: Sequence[tuple[int, Record]], samples: Sequence[DeviceSample]
    ) -> None:
        """Write the samples of devices taken until these attempts ended; no file without any.

        Samples from between two points are in the part of the second.
        """
        import pyarrow as pa

        if samples:
            # By column: of thousands of devices they are many.
            columns = {
                name: [getattr(sample, name) for sample in samples]
                for name in DeviceSample.__dataclass_fields__
            }
            for name in ("node_id", "uuid", "throttle_reasons"):  # few different ones, many times
                kept = {value: storable(value) for value in set(columns[name])}
                columns[name] = [kept[value] for value in columns[name]]
            columns["run_id"] = [self.run_id] * len(samples)
            whole = pa.table(columns, schema("telemetry"))
            self._write("telemetry", _part_name(batch), whole)

    def write_health(self, findings: Sequence[Finding]) -> None:
        """Write the findings of a health check; replaces earlier ones."""
        self._write_rows("health", "health", list(map(self._of_run, findings)))

    def write_summary(self, rows: Sequence[SummaryRow]) -> None:
        """Write the summary of the run, in place of what was there."""
        self._write_rows("summary", "summary", [to_row(row) for row in rows])

    def _folder(self, table: str) -> Path:
        return self.root.joinpath(table, self.run_id)

    def _part(self, table: str, part: str) -> Path:
        return self.root.joinpath(table, self.run_id, f"{part}.parquet")

    def _write_rows(self, table: str, part: str, content: list[dict[str, Any]]) -> None:
        if (whole := _table(table, content)) is not None:
            self._write(table, part, whole)

    def _write(self, table: str, part: str, whole: pa.Table) -> None:
        self._write_file(self._part(table, part), _as_parquet(whole, table))

    def _write_file(self, path: Path, content: pa.Buffer | bytes) -> None:
        if not self._folder("runs").is_dir():
            raise ResultsError(
                f"{self.root}: the folders of run {self.run_id} are gone: they were removed or "
                "moved meanwhile; put them back and use --resume, or start a new run"
            )
        with one_line(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_aside(content, path)


def _table(table: str, content: list[dict[str, Any]]) -> pa.Table | None:
    return arrow_table(table, content) if content else None


def _part_name(batch: Sequence[tuple[int, Record]]) -> str:
    """Return the name of a part, by which readers find an attempt; of several: the first, and more.

    No two parts of a run have the same first attempt.
    """
    index, first = batch[0]
    return name_together(f"{index:05d}-{first.point.point_id}-{first.attempt}", len(batch))


def name_together(first: str, count: int) -> str:
    """Name a part of this many attempts after the first of them."""
    return first if count == 1 else f"{first}-and-{count - 1}-more"


def _write_aside(content: pa.Buffer | bytes, path: Path) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.unlink(missing_ok=True)  # a link there would lead elsewhere
        aside.write_bytes(content)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _as_parquet(whole: pa.Table, table: str) -> pa.Buffer:
    """Return the table as the bytes of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # In memory: to a file, Arrow makes many small writes, and it wraps the errors.
    sink = pa.BufferOutputStream()
    pq.write_table(whole, sink, **_parquet_options(table, whole.num_rows))
    return sink.getvalue()


def _parquet_options(table: str, row_count: int) -> dict[str, Any]:
    """Return options that keep parts small: dictionaries and statistics cost more than they save.

    Compressing one row of `points` or `runs`, values of a few bytes, makes them longer, and
    reading them again takes twice as long.
    """
    options: dict[str, Any] = {"use_dictionary": False, "write_statistics": False}
    if table in ("points", "runs") and row_count == 1:
        return options | {"compression": "none"}
    options |= {"compression": "zstd", "compression_level": 9}
    if table == "samples":
        times = ("start_ns", "step_ns", "host_ns", "data_ns")
        split = dict.fromkeys(times, "BYTE_STREAM_SPLIT")
        options["column_encoding"] = {"iteration": "DELTA_BINARY_PACKED", **split}
    return options


def check_writable(root: Path) -> None:
    """Raise ResultsError where it can be told at once that no run can be kept in `root`."""
    with one_line(root):
        nearest = next(path for path in (root, *root.absolute().parents) if path.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"no permission to write to {nearest}")


def replace_part(path: Path, table: str, whole: pa.Table) -> None:
    """Write a part of a table anew, in place of what was there."""
    with one_line(path):
        _write_aside(_as_parquet(whole, table), path)


_Attempts = frozenset[tuple[str, int]]


def clear_leftovers(root: Path, run_id: str) -> None:
    """Remove files that were not finished, and all files of attempts without a row in `points`.

    The run must be held: those attempts are made again. Raises ResultsError for damaged parts.
    """
    for table in TABLES:
        for path in (root / table / run_id).glob(".*.parquet.*"):
            path.unlink(missing_ok=True)
    doubtful = {**dict(_parts_without_twins(root, run_id)), **dict(_files_of_ranks(root, run_id))}
    if doubtful:
        known = attempts_in(parts_of(root, "points", run_id), "points")
        for path, attempts in doubtful.items():
            if not attempts & known:
                path.unlink(missing_ok=True)


def _parts_without_twins(root: Path, run_id: str) -> Iterator[tuple[Path, _Attempts]]:
    """Yield the parts, with their attempts, that have no part of the same name in `points`.

    The rows of their points may be in another part, as after `raybench compact`.
    """
    twins = {path.name for path in parts_of(root, "points", run_id)}
    for table in ("samples", "modules", "regions"):
        for path in parts_of(root, table, run_id):
            if path.name not in twins:
                yield path, attempts_in([path], table)


def _files_of_ranks(root: Path, run_id: str) -> Iterator[tuple[Path, _Attempts]]:
    for folder in ("traces", LOGS):
        for path in (root / folder / run_id).glob("*-*-*-rank*"):
            _, point_id, attempt, _ = path.name.split("-", 3)
            yield path, frozenset({(point_id, int(attempt))})


def parts_of(root: Path, table: str, run_id: str) -> list[Path]:
    """List the parts of a run, in the order in which they are read."""
    return sorted((root / table / run_id).glob("[!._]*.parquet"))
