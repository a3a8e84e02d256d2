"""Write, clear and compact the results folder: `results/<table>/<run_id>/<part>.parquet`.

Samples are written before their point, so a point always has its samples. If the driver is killed
in between, samples stay without a point until the run is resumed. A part holds one attempt, or
several attempts that ended while other attempts were written.

Only compacted parts are synced to the disk, so a power cut may leave the last parts empty. Readers
name an empty part; after its removal, `--resume` runs its point again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raybench.errors import ResultsError, brief, traceback_of
from raybench.job.problems import quote
from raybench.records.device import Device
from raybench.records.devices import DeviceSample
from raybench.records.record import Record
from raybench.records.status import RunStatus, Status
from raybench.results.columns import (
    MERGED,
    TABLE_NAMES,
    attempts_in,
    delete_file,
    os_errors_in_one_line,
    parts_of,
    read_parts,
    replace_file,
    to_row,
    write_part,
)
from raybench.results.reader import LATEST, LOCK, LOGS, RANK_FILE, read_run
from raybench.results.record_rows import module_rows, point_row, region_rows, sample_columns
from raybench.results.tables import TABLES, Run, SummaryRow, arrow_table, schema, storable

if TYPE_CHECKING:
    import pyarrow as pa

    from raybench.job.model import Measure
    from raybench.records.code import Code
    from raybench.records.devices import Finding

# A run_id is a folder name that cannot leave the results. All digits would be parsed as a number.
_RUN_ID = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]*")
# Temporary names of `replace_file`.
_TEMPORARY_NAME = re.compile(r"\..+\.(parquet|txt|gz)\.\d+")
# A reader holds the lock for much less than a second while it tests the lock.
_LOCK_TIMEOUT_S = 1.0
# Tables whose folders each run has from its start.
_TABLES_OF_EACH_RUN = ("points", "samples", "devices", "runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStore:
    """Writes the tables of one run, whose lock (`hold_run`) the caller holds.

    All methods raise ResultsError if they cannot write, or if the folder of the run is gone.
    """

    root: Path
    run_id: str
    # What the job asks for; a shorter measurement gets a doubt.
    measure: Measure
    # The code that the workers load; None: unknown.
    code: Code | None = None

    @classmethod
    def create(cls, root: Path, run: Run, measure: Measure, code: Code | None = None) -> RunStore:
        """Make the folders of a new run, write its row, and return its store.

        Raises:
            ResultsError: the run exists, or its id is invalid.
        """
        _check_run_id(run.run_id)
        store = cls(root=root, run_id=run.run_id, measure=measure, code=code)
        if store._folder("runs").joinpath("run.parquet").exists():
            raise ResultsError(f"{root}: run {run.run_id} is already there; choose another run_id")
        for table in _TABLES_OF_EACH_RUN:
            with os_errors_in_one_line(store._folder(table)):
                store._folder(table).mkdir(parents=True, exist_ok=True)
        store.write_run(run)
        return store

    def remove(self) -> None:
        """Delete the folders that `create` makes; ignore errors."""
        for table in _TABLES_OF_EACH_RUN:
            shutil.rmtree(self._folder(table), ignore_errors=True)

    def write_run(self, run: Run) -> None:
        """Write the row of the run, replacing the earlier row."""
        self._write("runs", "run", arrow_table("runs", [to_row(run)]))

    def write_devices(self, devices: Sequence[Device], part: str = "devices") -> None:
        """Write devices; do nothing if there are none.

        Args:
            part: name of the file without `.parquet`; an existing part is replaced.
        """
        self._write_dataclasses("devices", part, devices)

    def write_health(self, findings: Sequence[Finding]) -> None:
        """Write the findings of a health check, replacing earlier findings."""
        self._write_dataclasses("health", "health", findings)

    def write_summary(self, rows: Sequence[SummaryRow]) -> None:
        """Write the summary of the run, replacing the earlier summary."""
        self._write_dataclasses("summary", "summary", rows)

    def write_records(self, batch: Sequence[tuple[int, Record]]) -> list[Record]:
        """Write attempts with samples, profiles and logs; return the records as written.

        A record that cannot be converted is written as an error without measurements.

        Args:
            batch: (index, record) of each attempt. The index is the position of its trial in the
                run; names of parts begin with it.
        """
        import pyarrow as pa

        # Convert all records before writing, because samples without a row are useless.
        converted = []
        for index, record in batch:
            try:
                converted.append((index, record, self._make_tables(record)))
            except Exception as error:
                # The other records must be written whatever the error is.
                failed = replace(
                    record,
                    status=Status.ERROR,
                    measurements=(),
                    doubts=(),
                    error_type=type(error).__name__,
                    error_message="raybench cannot keep what was measured, which is its bug: "
                    f"{brief(error)}",
                    error_detail=traceback_of(error),
                )
                converted.append((index, failed, self._make_tables(failed)))
        # Write traces and logs.
        self._check_folder()
        for index, record, _ in converted:
            # Each attempt has files of its own.
            name = _part_name([(index, record)])
            for measurement in record.measurements:
                if profile := measurement.profile:
                    trace = self.traces / f"{name}-rank{measurement.rank}.json.gz"
                    replace_file(trace, profile.trace)
            for rank, output in enumerate(record.outputs):
                if output:
                    log = self._folder(LOGS) / f"{name}-rank{rank}.txt"
                    replace_file(log, f"{output}\n".encode("utf-8", "replace"))
        # Write the point last: its row means that the rows of all other tables are written.
        for table in ("samples", "modules", "regions", "points"):
            if rows := [tables[table] for *_, tables in converted if table in tables]:
                self._write(table, _part_name(batch), pa.concat_tables(rows))
        return [record for _, record, _ in converted]

    def _make_tables(self, record: Record) -> dict[str, pa.Table]:
        """Return the rows of a record by table, without empty tables."""
        import pyarrow as pa

        rows = {
            "modules": module_rows(self.run_id, record),
            "regions": region_rows(self.run_id, record),
            "points": [to_row(point_row(self.run_id, record, self.measure, self.code))],
        }
        tables = {}
        for table, table_rows in rows.items():
            if table_rows:
                tables[table] = arrow_table(table, table_rows)
        if columns := sample_columns(self.run_id, record):
            tables["samples"] = pa.table(columns, schema("samples"))
        return tables

    def write_telemetry(
        self, batch: Sequence[tuple[int, Record]], samples: Sequence[DeviceSample]
    ) -> None:
        """Write the samples of devices that were taken until these attempts ended.

        Args:
            batch: (index, record) of each attempt; the first attempt names the part.
        """
        import pyarrow as pa

        if not samples:
            return
        # Convert by column, because thousands of devices have many samples.
        columns: dict[str, list[Any]] = {}
        for name in DeviceSample.__dataclass_fields__:
            columns[name] = [getattr(sample, name) for sample in samples]
        # Convert each distinct text once, because these columns repeat few texts many times.
        for name in ("node_id", "uuid", "throttle_reasons"):
            storable_values = {value: storable(value) for value in set(columns[name])}
            columns[name] = [storable_values[value] for value in columns[name]]
        columns["run_id"] = [self.run_id] * len(samples)
        self._write("telemetry", _part_name(batch), pa.table(columns, schema("telemetry")))

    @property
    def traces(self) -> Path:
        """Folder of the traces; it does not exist before the first trace."""
        return self._folder("traces")

    def _folder(self, table: str) -> Path:
        return self.root.joinpath(table, self.run_id)

    def _write_dataclasses(self, table: str, part: str, records: Sequence[Any]) -> None:
        """Write dataclasses as rows, with the run_id added; do nothing if there are none."""
        if records:
            rows = [{"run_id": self.run_id, **to_row(record)} for record in records]
            self._write(table, part, arrow_table(table, rows))

    def _write(self, table: str, part: str, rows: pa.Table) -> None:
        self._check_folder()
        write_part(self._folder(table) / f"{part}.parquet", table, rows)

    def _check_folder(self) -> None:
        """Raise ResultsError if the folder of the run is gone."""
        if not self._folder("runs").is_dir():
            raise ResultsError(
                f"{self.root}: the folders of run {self.run_id} are gone: they were removed or "
                "moved meanwhile; put them back and use --resume, or start a new run"
            )


def _part_name(
    batch: Sequence[tuple[int, Record]],  # (position of its trial in the run, attempt)
) -> str:
    """Return the name of the part that holds these attempts."""
    index, first = batch[0]
    return _name_of_attempts(f"{index:05d}-{first.point.point_id}-{first.attempt}", len(batch))


def _name_of_attempts(first_attempt: str, attempts: int) -> str:
    """Return the name of a part with so many attempts, by the name of the first attempt."""
    return first_attempt if attempts == 1 else f"{first_attempt}-and-{attempts - 1}-more"


def _name_of_first_attempt(parts: Sequence[Path]) -> str:
    # A part of several attempts is named `ATTEMPT-and-N-more`.
    return parts[0].stem.partition("-and-")[0]


@contextmanager
def hold_run(root: Path, run_id: str) -> Iterator[None]:
    """Hold the lock of a run inside the `with` block, so that only one driver writes the run.

    Creates the folder of the run and the lock file; both stay. The system frees the lock when the
    process dies. On a file system without flock, a file `.driver.held` replaces the lock; after a
    kill the user must remove this file.

    Raises:
        ResultsError: the id is invalid, another driver holds the lock, a link leads out of `root`,
            or the lock file cannot be created.
    """
    _check_run_id(run_id)
    for table in (*TABLE_NAMES, "traces", LOGS):
        folder = root / table / run_id
        for path in (folder, folder / LOCK):
            # Path.resolve raises for circular links.
            if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
                raise ResultsError(f"{path}: a link that leads out of {root}; remove it")
    path = root / "runs" / run_id / LOCK
    with os_errors_in_one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
        replacement_lock: AbstractContextManager[None] = nullcontext()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ResultsError(
                        f"{root}: run {run_id} is being written by another sweep; wait for its "
                        "end, or stop it"
                    ) from None
                time.sleep(0.05)
            except OSError:
                # The file system has no locks: NFS without its daemon, Lustre without `-o flock`.
                replacement_lock = _hold_by_file(root, run_id)
                break
        with replacement_lock:
            yield


@contextmanager
def _hold_by_file(root: Path, run_id: str) -> Iterator[None]:
    """Hold a run by a file that only one process can create."""
    path = root / "runs" / run_id / f"{LOCK}.held"
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    with os_errors_in_one_line(path):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(holder)
        except FileExistsError:
            other_holder = quote(path.read_text(encoding="utf-8", errors="replace"))
            raise ResultsError(
                f"{root}: run {run_id} is being written by {other_holder}, and this file system "
                f"has no locks to tell whether that sweep has ended; if it has, remove {path}"
            ) from None
    try:
        yield
    finally:
        delete_file(path)


def _check_run_id(run_id: str) -> None:
    if not _RUN_ID.fullmatch(run_id) or run_id == LATEST:
        raise ResultsError(
            "run_id: must be of A-Z, a-z, 0-9, '.', '_' and '-', begin with a letter or a digit, "
            f"and not be all digits or '{LATEST}', got {run_id!r}"
        )


def check_writable(root: Path) -> None:
    """Raise ResultsError if `root` is not writable and cannot be created; writes nothing."""
    with os_errors_in_one_line(root):
        paths = (root, *root.absolute().parents)
        nearest_existing = next(path for path in paths if path.is_symlink() or path.exists())
        if not nearest_existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest_existing} is not a folder")
        if not os.access(nearest_existing, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"no permission to write to {nearest_existing}")


def clear_leftovers(root: Path, run_id: str) -> None:
    """Delete unfinished files, and samples, traces and logs of attempts without a row in `points`.

    The caller must hold the run (`hold_run`).

    Raises:
        ResultsError: the run's folder in `points` is missing, or files cannot be read or deleted.
    """
    points = root / "points" / run_id
    # Without this folder, all attempts would lack a row.
    try:
        list(points.iterdir())
    except OSError as error:
        raise ResultsError(f"{points}: cannot be read, put it back: {error.strerror}") from error
    for folder in (*TABLES, "traces", LOGS):
        for path in (root / folder / run_id).glob(".*"):
            if _TEMPORARY_NAME.fullmatch(path.name):
                delete_file(path)
    # A part is complete if `points` has a part of the same name. For other files look for the rows
    # of their attempts, because compaction may have moved these rows to another part.
    point_parts = {path.name for path in parts_of(root, "points", run_id)}
    attempts_of_file: dict[Path, frozenset[tuple[str, int]]] = {}
    for table in ("samples", "modules", "regions"):
        for path in parts_of(root, table, run_id):
            if path.name not in point_parts:
                attempts_of_file[path] = attempts_in([path], table)
    for folder in ("traces", LOGS):
        for path in (root / folder / run_id).glob("*-*-*-rank*"):
            match = RANK_FILE.fullmatch(path.name)
            if match and path.is_file():
                _trial, point_id, attempt, _rank = match.groups()
                attempts_of_file[path] = frozenset({(point_id, int(attempt))})
    if not attempts_of_file:
        return
    attempts_with_row = attempts_in(parts_of(root, "points", run_id), "points")
    for path, attempts in attempts_of_file.items():
        if attempts.isdisjoint(attempts_with_row):
            delete_file(path)


# Tables whose parts are named after attempts. `points` must be merged last, because readers find
# the rows of other tables by the rows of `points`.
_TABLES_BY_ATTEMPT = ("samples", "modules", "regions", "telemetry", "points")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Number and total size of the parts of a run, before and after."""

    parts_before: int
    parts_after: int
    bytes_before: int
    bytes_after: int


def compact_run(root: Path, run_id: str) -> Compaction:
    """Merge the parts of a run into one per table, with the same rows in the same order.

    Leftovers are cleared first. If the process is killed, raybench still reads each row once, but
    pandas sees duplicate rows until the next `compact`.

    Args:
        run_id: whole id.

    Raises:
        ResultsError: the run is missing or running, another process holds its lock, or its parts
            are damaged, of a newer raybench, or cannot be written.
    """
    if read_run(root, run_id).status is RunStatus.RUNNING:
        raise ResultsError(f"{root}: run {run_id} is still running; compact it when it has ended")
    with hold_run(root, run_id):
        before = _part_sizes(root, run_id)
        clear_leftovers(root, run_id)
        if points := parts_of(root, "points", run_id):
            # Parts with the same attempts have the same name in all tables.
            merged_name = points[0].stem
            if len(points) > 1:
                attempts = len(attempts_in(points, "points"))
                merged_name = _name_of_attempts(_name_of_first_attempt(points), attempts)
            for table in _TABLES_BY_ATTEMPT:
                _merge_parts(table, parts_of(root, table, run_id), merged_name)
        _merge_parts("devices", parts_of(root, "devices", run_id), "devices")
        after = _part_sizes(root, run_id)
    return Compaction(
        parts_before=len(before),
        parts_after=len(after),
        bytes_before=sum(before),
        bytes_after=sum(after),
    )


def _part_sizes(root: Path, run_id: str) -> list[int]:
    return [path.lstat().st_size for table in TABLES for path in parts_of(root, table, run_id)]


def compact_points(root: Path, run_id: str) -> None:
    """Merge the parts of `points`, so that a report reads them four times faster.

    Parts of other tables stay, because they may not fit into memory. The caller must hold the run
    (`hold_run`), and the run must have points.

    Raises:
        ResultsError: parts cannot be read, written or deleted.
    """
    parts = parts_of(root, "points", run_id)
    rows = read_parts(parts, "points", schema("points"))
    name = _name_of_attempts(_name_of_first_attempt(parts), rows.num_rows)
    _replace_parts("points", parts, rows, name)


def _merge_parts(table: str, parts: Sequence[Path], name: str) -> None:
    """Merge these parts into a part of this name; a single part stays."""
    if len(parts) > 1:
        _replace_parts(table, parts, read_parts(parts, table, schema(table)), name)


def _replace_parts(table: str, parts: Sequence[Path], rows: pa.Table, name: str) -> None:
    """Replace `parts` by one part of this name that holds `rows`."""
    path = parts[0].with_name(f"{name}.parquet")
    replaced = [part for part in parts if part != path]
    # Readers skip the replaced parts if this process is killed before their deletion.
    replaced_names = {MERGED: "/".join(part.name for part in replaced).encode()}
    write_part(path, table, rows.replace_schema_metadata(schema(table).metadata | replaced_names))
    # fsync before the deletion, because a power cut would otherwise lose the rows of all parts.
    with os_errors_in_one_line(path), path.open("rb") as file:
        os.fsync(file.fileno())
    for part in replaced:
        delete_file(part)
