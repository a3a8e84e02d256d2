"""The results folder: `results/<table>/<run_id>/<part>.parquet`, written, cleared and compacted.

A point's samples are written before the point: a point that is there has its samples. The samples
of an attempt whose driver was killed between the two are there without a row, until the run goes
on. A part has one attempt at a point, or those that ended while others were written.

Nothing but a compacted part is synced to the disk: a part outlives its driver the moment it is
renamed, but a power cut may leave the last ones empty. Readers name such a part; remove it, and
`--resume` runs its point.
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

# No separator, no leading dot: a run_id is one folder name that cannot leave the results. Not
# all digits, or readers take it for a number.
_RUN_ID = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]*")
_UNFINISHED = re.compile(r"\..+\.(parquet|txt|gz)\.\d+")  # as `replace_file` names them
_READERS_S = 1.0  # a reader that tests the lock of a run has it for far less
_WRITTEN = ("points", "samples", "devices", "runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStore:
    """Writes one run, which `create` makes. It takes no lock itself (see `hold_run`).

    What writes raises ResultsError if it cannot, or if the run's folder in `runs` is gone.
    measure: what the job asks for; points that fall short of it get a warning.
    code: what the workers load, which each point names; None: not known.
    """

    root: Path
    run_id: str
    measure: Measure
    code: Code | None = None

    @classmethod
    def create(cls, root: Path, run: Run, measure: Measure, code: Code | None = None) -> RunStore:
        """Make the folders of a new run, write its row, and return its store.

        The run must be held. Raises ResultsError if its row exists, or `hold_run` refuses its id.
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
        """Delete only the folders that `create` makes; raises nothing if one cannot be deleted."""
        for table in _WRITTEN:
            shutil.rmtree(self._folder(table), ignore_errors=True)

    def write_run(self, run: Run) -> None:
        """Write the row of the store's run, in place of an earlier one."""
        self._write("runs", "run", arrow_table("runs", [to_row(run)]))

    def write_devices(self, devices: Sequence[Device], part: str = "devices") -> None:
        """Write devices beside those of other parts of the run; without devices, write nothing.

        part: the file's name without `.parquet`; it replaces one of this name.
        """
        self._write_of_run("devices", part, devices)

    def write_health(self, findings: Sequence[Finding]) -> None:
        """Write a health check's findings, in place of earlier ones; if none, earlier ones stay."""
        self._write_of_run("health", "health", findings)

    def write_summary(self, rows: Sequence[SummaryRow]) -> None:
        """Write the run's summary, in place of an earlier one; without rows, that one stays."""
        self._write_of_run("summary", "summary", rows)

    def write_records(self, batch: Sequence[tuple[int, Record]]) -> list[Record]:
        """Write attempts with samples, profiles and logs; return their records as they were kept.

        In the batch's order; one of which no row can be made has status error and no measurements.
        batch: (index, record), the index being the place among all trials, by which parts sort.
        """
        import pyarrow as pa

        made = []
        for index, record in batch:
            # Before anything is written: samples without a row would be of no use.
            try:
                made.append((index, record, self._make_tables(record)))
            except Exception as error:  # whatever it is, it may not cost the other points
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
        # The row of a point last: it says that all else is there.
        for table in ("samples", "modules", "regions", "points"):
            if found := [tables[table] for *_, tables in made if table in tables]:
                self._write(table, _part_name(batch), pa.concat_tables(found))
        return [record for _, record, _ in made]

    def _make_tables(self, record: Record) -> dict[str, pa.Table]:
        """Return the rows of a record by table, without the tables that have none."""
        import pyarrow as pa

        rows = {
            "modules": module_rows(self.run_id, record),
            "regions": region_rows(self.run_id, record),
            "points": [to_row(point_row(self.run_id, record, self.measure, self.code))],
        }
        made = {table: arrow_table(table, found) for table, found in rows.items() if found}
        if columns := sample_columns(self.run_id, record):
            made["samples"] = pa.table(columns, schema("samples"))
        return made

    def write_telemetry(
        self, batch: Sequence[tuple[int, Record]], samples: Sequence[DeviceSample]
    ) -> None:
        """Write the samples of devices taken until these attempts ended; nothing for none.

        Samples from between two points are in the part of the second. batch: as `write_records` got
        it, one attempt or more, which name the part.
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
            self._write("telemetry", _part_name(batch), pa.table(columns, schema("telemetry")))

    @property
    def traces(self) -> Path:
        """The folder of the run's traces; it does not exist before one is written."""
        return self._folder("traces")

    def _folder(self, table: str) -> Path:
        return self.root.joinpath(table, self.run_id)

    def _write_of_run(self, table: str, part: str, records: Sequence[Any]) -> None:
        """Write dataclasses as rows with the run_id as their first column; no file without any."""
        if records:
            rows = [{"run_id": self.run_id, **to_row(record)} for record in records]
            self._write(table, part, arrow_table(table, rows))

    def _write(self, table: str, part: str, whole: pa.Table) -> None:
        self._check_there()
        write_part(self._folder(table) / f"{part}.parquet", table, whole)

    def _check_there(self) -> None:
        """Raise ResultsError where somebody has removed the run: it would be half of one."""
        if not self._folder("runs").is_dir():
            raise ResultsError(
                f"{self.root}: the folders of run {self.run_id} are gone: they were removed or "
                "moved meanwhile; put them back and use --resume, or start a new run"
            )


def _part_name(batch: Sequence[tuple[int, Record]]) -> str:
    """Return the name of a part, by which readers find an attempt; of several: the first, and more.

    No two parts of a run have the same first attempt.
    """
    index, first = batch[0]
    return _name_together(f"{index:05d}-{first.point.point_id}-{first.attempt}", len(batch))


def _name_together(first: str, count: int) -> str:
    return first if count == 1 else f"{first}-and-{count - 1}-more"


@contextmanager
def hold_run(root: Path, run_id: str) -> Iterator[None]:
    """Hold the lock of a run inside the `with` block: only one driver may write it.

    Makes the run's folder in `runs` and the lock file; both stay. The system frees the lock if the
    process dies. On a file system without locks (flock), a file `.driver.held` takes its place;
    after a kill that file stays, and the user must remove it. Raises ResultsError for an id with
    other characters than a-z, A-Z, 0-9, '.', '_' and '-', one that begins with one of these three,
    is empty, all digits or `latest`; if the run stays held for a second, also by the caller; if a
    link leads one of its folders or its lock file out of `root`; or if that file cannot be made.
    """
    _check_run_id(run_id)
    for table in (*TABLE_NAMES, "traces", LOGS):
        folder = root / table / run_id
        for path in (folder, folder / LOCK):
            # Path.resolve would raise for links in a circle.
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
            except OSError:  # no locks: NFS without its lock daemon, Lustre without `-o flock`
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
    """Raise ResultsError for an id that `hold_run` refuses."""
    if not _RUN_ID.fullmatch(run_id) or run_id == LATEST:
        raise ResultsError(
            "run_id: must be of A-Z, a-z, 0-9, '.', '_' and '-', begin with a letter or a digit, "
            f"and not be all digits or '{LATEST}', got {run_id!r}"
        )


def check_writable(root: Path) -> None:
    """Raise ResultsError if `root` is no folder that the user may write or make. Writes nothing."""
    with os_errors_in_one_line(root):
        paths = (root, *root.absolute().parents)  # a link that leads nowhere is there too
        nearest = next(path for path in paths if path.is_symlink() or path.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"no permission to write to {nearest}")


def clear_leftovers(root: Path, run_id: str) -> None:
    """Delete unfinished files, and files on attempts none of which has a row in `points`.

    Their telemetry stays. The run must be held. Raises ResultsError if its folder in `points` is
    missing, a folder or part that it needs cannot be read, or a file cannot be deleted.
    """
    points = root / "points" / run_id
    try:  # else all attempts would be without a row
        list(points.iterdir())
    except OSError as error:
        raise ResultsError(f"{points}: cannot be read, put it back: {error.strerror}") from error
    for folder in (*TABLES, "traces", LOGS):
        for path in (root / folder / run_id).glob(".*"):
            if _UNFINISHED.fullmatch(path.name):
                delete_file(path)
    # Parts without one of the same name in `points`, whose rows may be in another part, as after
    # `compact`; and all traces and logs.
    twins = {path.name for path in parts_of(root, "points", run_id)}
    doubtful = {
        path: attempts_in([path], table)
        for table in ("samples", "modules", "regions")
        for path in parts_of(root, table, run_id)
        if path.name not in twins
    }
    for folder in ("traces", LOGS):
        for path in (root / folder / run_id).glob("*-*-*-rank*"):
            if (ours := OF_RANK.fullmatch(path.name)) and path.is_file():
                doubtful[path] = frozenset({(ours[2], int(ours[3]))})
    if doubtful:
        known = attempts_in(parts_of(root, "points", run_id), "points")
        for path, attempts in doubtful.items():
            if not attempts & known:
                delete_file(path)


# Tables whose parts are named after attempts at points; parts of one batch have one name in all.
# `points` is the last: until it is merged, readers look for the others by the rows that they have.
_BY_ATTEMPT = ("samples", "modules", "regions", "telemetry", "points")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compaction:
    """How many parts a run had and has, and their sizes in all."""

    parts_before: int
    parts_after: int
    bytes_before: int
    bytes_after: int


def compact_run(root: Path, run_id: str) -> Compaction:
    """Merge the parts of a run into one per table; return how many parts it had and has.

    Rows and their order stay, but leftovers are cleared first. A table with one part stays
    unchanged. Holds the run meanwhile. run_id: the whole id.

    If the command is killed, raybench still reads each row once, and the next `compact` removes
    what was left; pandas sees some rows twice until then. A reader that listed the folder before
    finds the old parts gone.

    Raises ResultsError for a run that is not there or running (see `read_run`), for parts to merge
    that are damaged or of a newer raybench, for what cannot be written, and as `hold_run` and
    `clear_leftovers` do.
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
    """Return the sizes of all parts of a run, in bytes."""
    return [path.lstat().st_size for table in TABLES for path in parts_of(root, table, run_id)]


def compact_points(root: Path, run_id: str) -> None:
    """Put the parts of `points` into one, which a report reads in a quarter of the time.

    The parts of other tables stay: readers take them one by one, as all may not fit into memory.
    The run must be held and have a part of `points`. Raises ResultsError for parts that cannot be
    read, written or deleted.
    """
    parts = parts_of(root, "points", run_id)
    whole = read_parts(parts, "points", schema("points"))
    first = parts[0].stem.partition("-and-")[0]
    _put_together("points", parts, whole, _name_together(first, whole.num_rows))


def _merge(table: str, parts: Sequence[Path], name: str) -> None:
    """Put the rows of these parts into one of this name, and remove the others; one part stays."""
    if len(parts) > 1:
        _put_together(table, parts, read_parts(parts, table, schema(table)), name)


def _put_together(table: str, parts: Sequence[Path], whole: pa.Table, name: str) -> None:
    """Write a part of this name in place of the parts whose rows `whole` has."""
    path = parts[0].with_name(f"{name}.parquet")
    others = [part for part in parts if part != path]
    merged = {MERGED: "/".join(part.name for part in others).encode()}
    write_part(path, table, whole.replace_schema_metadata(schema(table).metadata | merged))
    # fsync first: a power cut would otherwise lose the rows of all parts.
    with os_errors_in_one_line(path), path.open("rb") as file:
        os.fsync(file.fileno())
    for part in others:
        delete_file(part)
