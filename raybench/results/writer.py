"""Write, clear and compact the results folder: `results/<table>/<run_id>/<part>.parquet`.

Samples are written before their point, so a point always has its samples. If the driver is killed
in between, samples stay without a point until the run is resumed. A part holds one attempt, or
several that ended while others were written.

Only compacted parts are synced to the disk: a power cut may leave the last parts empty. Readers
name such a part; after removing it, `--resume` runs its point again.
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
from raybench.results.reader import LATEST, LOCK, LOGS, OF_RANK, read_run
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
_UNFINISHED = re.compile(r"\..+\.(parquet|txt|gz)\.\d+")
# A reader that tests the lock holds it for much less, so the lock is then held by a driver.
_READERS_S = 1.0
# Tables whose folders each run has from its start.
_WRITTEN = ("points", "samples", "devices", "runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStore:
    """Writes one run, which `create` makes; `hold_run` locks it.

    Its methods raise ResultsError if they cannot write, or if the folder of the run is gone.
    """

    root: Path
    run_id: str
    # What the job asks for; a point that falls short of it gets a doubt.
    measure: Measure
    # What the workers load; None: unknown.
    code: Code | None = None

    @classmethod
    def create(cls, root: Path, run: Run, measure: Measure, code: Code | None = None) -> RunStore:
        """Make the folders of a new run, write its row, and return its store.

        The run must be held.

        Raises:
            ResultsError: the run exists, or its id is invalid.
        """
        _check_run_id(run.run_id)
        store = cls(root=root, run_id=run.run_id, measure=measure, code=code)
        if store._folder("runs").joinpath("run.parquet").exists():
            raise ResultsError(f"{root}: run {run.run_id} is already there; choose another run_id")
        for table in _WRITTEN:
            with os_errors_in_one_line(store._folder(table)):
                store._folder(table).mkdir(parents=True, exist_ok=True)
        store.write_run(run)
        return store

    def remove(self) -> None:
        """Delete the folders that `create` makes, as far as possible."""
        for table in _WRITTEN:
            shutil.rmtree(self._folder(table), ignore_errors=True)

    def write_run(self, run: Run) -> None:
        """Write the row of the run, replacing the earlier row."""
        self._write("runs", "run", arrow_table("runs", [to_row(run)]))

    def write_devices(self, devices: Sequence[Device], part: str = "devices") -> None:
        """Write devices; without devices, write nothing.

        Args:
            part: name of the file without `.parquet`; an existing part is replaced.
        """
        self._write_of_run("devices", part, devices)

    def write_health(self, findings: Sequence[Finding]) -> None:
        """Write the findings of a health check, replacing earlier findings."""
        self._write_of_run("health", "health", findings)

    def write_summary(self, rows: Sequence[SummaryRow]) -> None:
        """Write the summary of the run, replacing the earlier summary."""
        self._write_of_run("summary", "summary", rows)

    def write_records(self, batch: Sequence[tuple[int, Record]]) -> list[Record]:
        """Write attempts with samples, profiles and logs; return their records in the same order.

        A record that cannot be written becomes an error without measurements.

        Args:
            batch: (index, record); the index is the position among all trials, and sorts parts.
        """
        import pyarrow as pa

        # Convert all records before writing, because samples without a row are useless.
        made = []
        for index, record in batch:
            try:
                made.append((index, record, self._make_tables(record)))
            except Exception as error:
                # The other records must be written whatever the error is.
                unwritten = replace(
                    record,
                    status=Status.ERROR,
                    measurements=(),
                    doubts=(),
                    error_type=type(error).__name__,
                    error_message="raybench cannot keep what was measured, which is its bug: "
                    f"{brief(error)}",
                    error_detail=traceback_of(error),
                )
                made.append((index, unwritten, self._make_tables(unwritten)))
        # Write traces and logs.
        self._check_there()
        for index, record, _ in made:
            name = _part_name([(index, record)])
            for measurement in record.measurements:
                if profile := measurement.profile:
                    trace = self.traces / f"{name}-rank{measurement.rank}.json.gz"
                    replace_file(trace, profile.trace)
            for rank, output in enumerate(record.outputs):
                if output:
                    log = self._folder(LOGS) / f"{name}-rank{rank}.txt"
                    replace_file(log, f"{output}\n".encode("utf-8", "replace"))
        # Write the point last: its row means that everything else is there.
        for table in ("samples", "modules", "regions", "points"):
            if parts := [tables[table] for *_, tables in made if table in tables]:
                self._write(table, _part_name(batch), pa.concat_tables(parts))
        return [record for _, record, _ in made]

    def _make_tables(self, record: Record) -> dict[str, pa.Table]:
        """Return the rows of a record by table, without empty tables."""
        import pyarrow as pa

        rows = {
            "modules": module_rows(self.run_id, record),
            "regions": region_rows(self.run_id, record),
            "points": [to_row(point_row(self.run_id, record, self.measure, self.code))],
        }
        made = {}
        for table, table_rows in rows.items():
            if table_rows:
                made[table] = arrow_table(table, table_rows)
        if columns := sample_columns(self.run_id, record):
            made["samples"] = pa.table(columns, schema("samples"))
        return made

    def write_telemetry(
        self, batch: Sequence[tuple[int, Record]], samples: Sequence[DeviceSample]
    ) -> None:
        """Write the samples of devices that were taken until these attempts ended.

        Args:
            batch: as in `write_records`; its first attempt names the part.
        """
        import pyarrow as pa

        if samples:
            # Convert by column: thousands of devices have many samples.
            columns: dict[str, list[Any]] = {}
            for name in DeviceSample.__dataclass_fields__:
                columns[name] = [getattr(sample, name) for sample in samples]
            # Convert each distinct text once: these columns repeat few texts many times.
            for name in ("node_id", "uuid", "throttle_reasons"):
                texts = {value: storable(value) for value in set(columns[name])}
                columns[name] = [texts[value] for value in columns[name]]
            columns["run_id"] = [self.run_id] * len(samples)
            self._write("telemetry", _part_name(batch), pa.table(columns, schema("telemetry")))

    @property
    def traces(self) -> Path:
        """Folder of the traces; it does not exist before the first trace."""
        return self._folder("traces")

    def _folder(self, table: str) -> Path:
        return self.root.joinpath(table, self.run_id)

    def _write_of_run(self, table: str, part: str, records: Sequence[Any]) -> None:
        """Write dataclasses as rows with run_id as their first column."""
        if records:
            rows = [{"run_id": self.run_id, **to_row(record)} for record in records]
            self._write(table, part, arrow_table(table, rows))

    def _write(self, table: str, part: str, whole: pa.Table) -> None:
        self._check_there()
        write_part(self._folder(table) / f"{part}.parquet", table, whole)

    def _check_there(self) -> None:
        """Raise ResultsError if the folder of the run is gone."""
        if not self._folder("runs").is_dir():
            raise ResultsError(
                f"{self.root}: the folders of run {self.run_id} are gone: they were removed or "
                "moved meanwhile; put them back and use --resume, or start a new run"
            )


def _part_name(batch: Sequence[tuple[int, Record]]) -> str:
    """Return the name of a part: its first attempt, which is unique, and how many more."""
    index, first = batch[0]
    return _name_together(f"{index:05d}-{first.point.point_id}-{first.attempt}", len(batch))


def _name_together(first: str, count: int) -> str:
    """Return the name of a part with `count` attempts; `first` names the first attempt."""
    return first if count == 1 else f"{first}-and-{count - 1}-more"


@contextmanager
def hold_run(root: Path, run_id: str) -> Iterator[None]:
    """Hold the lock of a run inside the `with` block: only one driver may write it.

    Creates the folder of the run and the lock file; both stay. The system frees the lock when the
    process dies. On a file system without flock, a file `.driver.held` replaces the lock; after a
    kill the user must remove it.

    Raises:
        ResultsError: the id is invalid, the run stays held for a second, a link leads out of
            `root`, or the lock file cannot be created.
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
        deadline_s = time.monotonic() + _READERS_S
        claim: AbstractContextManager[None] = nullcontext()
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
                claim = _claim_run(root, run_id)
                break
        with claim:
            yield


@contextmanager
def _claim_run(root: Path, run_id: str) -> Iterator[None]:
    """Hold a run by a file that only one process can create."""
    path = root / "runs" / run_id / f"{LOCK}.held"
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    with os_errors_in_one_line(path):
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(holder)
        except FileExistsError:
            other = path.read_text(encoding="utf-8", errors="replace")
            raise ResultsError(
                f"{root}: run {run_id} is being written by {quote(other)}, and this file system "
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
    """Raise ResultsError if `root` cannot be written or created. Writes nothing."""
    with os_errors_in_one_line(root):
        paths = (root, *root.absolute().parents)
        nearest = next(path for path in paths if path.is_symlink() or path.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"no permission to write to {nearest}")


def clear_leftovers(root: Path, run_id: str) -> None:
    """Delete unfinished files, and samples, traces and logs of attempts without a row in `points`.

    The run must be held.

    Raises:
        ResultsError: its folder in `points` is missing, or files cannot be read or deleted.
    """
    points = root / "points" / run_id
    # Without this folder, all attempts would lack a row.
    try:
        list(points.iterdir())
    except OSError as error:
        raise ResultsError(f"{points}: cannot be read, put it back: {error.strerror}") from error
    for folder in (*TABLES, "traces", LOGS):
        for path in (root / folder / run_id).glob(".*"):
            if _UNFINISHED.fullmatch(path.name):
                delete_file(path)
    # A part with a part of the same name in `points` is complete. Other parts are doubtful: their
    # attempts have no row, or a row in a compacted part.
    point_parts = {path.name for path in parts_of(root, "points", run_id)}
    doubtful: dict[Path, frozenset[tuple[str, int]]] = {}
    for table in ("samples", "modules", "regions"):
        for path in parts_of(root, table, run_id):
            if path.name not in point_parts:
                doubtful[path] = attempts_in([path], table)
    for folder in ("traces", LOGS):
        for path in (root / folder / run_id).glob("*-*-*-rank*"):
            if (name := OF_RANK.fullmatch(path.name)) and path.is_file():
                doubtful[path] = frozenset({(name[2], int(name[3]))})
    if doubtful:
        with_row = attempts_in(parts_of(root, "points", run_id), "points")
        for path, attempts in doubtful.items():
            if not attempts & with_row:
                delete_file(path)


# Tables whose parts are named after attempts. `points` must be merged last, because readers find
# the rows of other tables by its rows.
_BY_ATTEMPT = ("samples", "modules", "regions", "telemetry", "points")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """Number and total size of the parts of a run, before and after."""

    parts_before: int
    parts_after: int
    bytes_before: int
    bytes_after: int


def compact_run(root: Path, run_id: str) -> Compaction:
    """Merge the parts of a run into one per table, with the same rows in the same order.

    Clears leftovers first, and holds the run. If the process is killed, raybench still reads each
    row once, and the next `compact` cleans up; pandas sees duplicate rows until then.

    Args:
        run_id: whole id.

    Raises:
        ResultsError: the run is missing, running or held, or its parts are damaged, newer or cannot
            be written.
    """
    if read_run(root, run_id).status is RunStatus.RUNNING:
        raise ResultsError(f"{root}: run {run_id} is still running; compact it when it has ended")
    with hold_run(root, run_id):
        before = _part_sizes(root, run_id)
        clear_leftovers(root, run_id)
        if points := parts_of(root, "points", run_id):
            name = points[0].stem
            if len(points) > 1:
                count = len(attempts_in(points, "points"))
                name = _name_together(name.partition("-and-")[0], count)
            for table in _BY_ATTEMPT:
                _merge(table, parts_of(root, table, run_id), name)
        _merge("devices", parts_of(root, "devices", run_id), "devices")
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

    Parts of other tables stay: they may not fit into memory. The run must be held and have points.

    Raises:
        ResultsError: parts cannot be read, written or deleted.
    """
    parts = parts_of(root, "points", run_id)
    whole = read_parts(parts, "points", schema("points"))
    first = parts[0].stem.partition("-and-")[0]
    _put_together("points", parts, whole, _name_together(first, whole.num_rows))


def _merge(table: str, parts: Sequence[Path], name: str) -> None:
    """Merge these parts into a part of this name; a single part stays."""
    if len(parts) > 1:
        _put_together(table, parts, read_parts(parts, table, schema(table)), name)


def _put_together(table: str, parts: Sequence[Path], whole: pa.Table, name: str) -> None:
    """Replace `parts` by one part that holds `whole`."""
    path = parts[0].with_name(f"{name}.parquet")
    others = [part for part in parts if part != path]
    merged = {MERGED: "/".join(part.name for part in others).encode()}
    write_part(path, table, whole.replace_schema_metadata(schema(table).metadata | merged))
    # fsync first: a power cut would otherwise lose the rows of all parts.
    with os_errors_in_one_line(path), path.open("rb") as file:
        os.fsync(file.fileno())
    for part in others:
        delete_file(part)
