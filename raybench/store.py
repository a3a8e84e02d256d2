"""The results folder: `results/<table>/<run_id>/<part>.parquet`, and how it is written.

A part is written to a dot-file beside its place and renamed, so that no reader sees half of
one. A point's samples are written before the point: a point that is there has its samples.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from raybench import rows
from raybench.arrow_schemas import schema
from raybench.errors import ResultsError
from raybench.records import Device, DeviceSample, Record
from raybench.run import Run

if TYPE_CHECKING:
    import pyarrow as pa

    from raybench.job import Measure

# No separator, no leading dot: a run_id is one folder name that cannot leave the results. Not
# all digits, or readers take it for a number.
_RUN_ID = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]*")
_WRITTEN = ("points", "samples", "devices", "runs")
_LOCK = ".driver"  # in the run's folder of `runs`; always empty
_READERS_S = 1.0  # a reader that tests the lock has it for far less
LATEST = "latest"  # means the newest run, so no run may be named so


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
        if not _RUN_ID.fullmatch(run.run_id) or run.run_id == LATEST:
            raise ResultsError(
                f"run_id: must be letters, digits, '.', '_' or '-', not all digits and not "
                f"'{LATEST}', got {run.run_id!r}"
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

    def write_devices(self, devices: Sequence[Device], part: str = "devices") -> None:
        """Write devices of the run, in place of what was in this part."""
        self._write("devices", part, [rows.device_row(self.run_id, d) for d in devices])

    def write_record(self, index: int, record: Record) -> None:
        """Write one attempt at a point: its samples and profiles, if there are any, then its row.

        index: the point's position in the plan; parts sort in this order.
        """
        part = _part_name(index, record)
        if record.measurements:
            self._write("samples", part, rows.sample_rows(self.run_id, record))
        self._write_profiles(part, record)
        self._write("points", part, [rows.point_row(self.run_id, record, self.measure)])

    @property
    def traces(self) -> Path:
        """The folder of the traces of profiled points, which is made with the first."""
        return self._folder("traces")

    def _write_profiles(self, part: str, record: Record) -> None:
        """A trace per profiled rank, for Perfetto, and their times by module as a table."""
        if any(measurement.profile for measurement in record.measurements):
            with _one_line(self.traces):
                self.traces.mkdir(parents=True, exist_ok=True)
        for measurement in record.measurements:
            if measurement.profile:
                path = self.traces / f"{part}-rank{measurement.rank}.json.gz"
                with _one_line(path):
                    path.write_bytes(measurement.profile.trace)
        if modules := list(rows.module_rows(self.run_id, record)):
            self._write("modules", part, modules)

    def write_telemetry(self, index: int, record: Record, samples: Sequence[DeviceSample]) -> None:
        """Write what was sampled of the devices until the end of this attempt, if anything was.

        Samples from between two points are in the part of the second.
        """
        if samples:
            content = (rows.telemetry_row(self.run_id, sample) for sample in samples)
            self._write("telemetry", _part_name(index, record), content)

    def _folder(self, table: str) -> Path:
        return self.root / table / self.run_id

    def _part(self, table: str, part: str) -> Path:
        return self._folder(table) / f"{part}.parquet"

    def _write(self, table: str, part: str, content: Iterable[rows.Row]) -> None:
        import pyarrow as pa

        whole = pa.Table.from_pylist(list(content), schema=schema(table))
        path = self._part(table, part)
        with _one_line(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_part(whole, path, table)


@contextmanager
def hold_run(root: Path, run_id: str) -> Iterator[None]:
    """Be the one driver that writes this run; the system lets go of it when the process dies.

    Raises ResultsError when another driver has it. Where files cannot be locked nothing is held.
    """
    path = root / "runs" / run_id / _LOCK
    with _one_line(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    with file:
        if not _locked(file):
            raise ResultsError(
                f"{root}: run {run_id} is being written by another sweep; wait for its end, "
                "or stop it"
            )
        yield


def _locked(file: IO[bytes]) -> bool:
    deadline_s = time.monotonic() + _READERS_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.05)
        except OSError:
            # A file system without locks must not keep anyone from a sweep.
            return True
        else:
            return True


def has_driver(root: Path, run_id: str) -> bool | None:
    """Whether a driver holds the run; None where that cannot be told."""
    try:
        with (root / "runs" / run_id / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _part_name(index: int, record: Record) -> str:
    return f"{index:05d}-{record.point.point_id}-{record.attempt}"


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
