"""Parts that older versions of raybench have written, with the columns of today.

What reads a folder of Parquet without raybench needs one schema in all of its files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raybench.errors import ResultsError
from raybench.results.parts import MERGED, as_today, version_of
from raybench.results.run import check_folder, run_folders
from raybench.results.schema import GONE, SCHEMA_VERSION, TABLES, schema
from raybench.results.writer import has_driver, parts_of, replace_part

if TYPE_CHECKING:
    import pyarrow as pa

# In the metadata of a part: the schema that its values are of. Its newer columns are null.
WRITTEN_AS = b"written_as_schema"


def upgrade(root: str | Path) -> list[Path]:
    """Write the older parts of a results folder again with today's columns; which ones.

    Columns that a part lacks are null, and those of `GONE` are dropped. Values stay as they are,
    and `written_as_schema` in the part's metadata says of which version they are. Parts of a later
    version, and of a run that a sweep is writing, stay as they are. Raises
    ResultsError for a part that cannot be read, or that has a column which would be lost.
    """
    root = Path(root)
    check_folder(root)
    return [
        path
        for table in TABLES
        for run_id in run_folders(root / table)
        if not has_driver(root, run_id)
        for path in parts_of(root, table, run_id)
        if _upgrade_part(path, table)
    ]


def _upgrade_part(path: Path, table: str) -> bool:
    """Write one part again where it differs from today's schema; whether it did."""
    part = _read_raw(path)
    whole = _as_written_today(part, path, table)
    if whole is None or part.schema.equals(whole.schema, check_metadata=True):
        return False
    replace_part(path, table, whole)
    return True


def read_as_today(path: Path, table: str) -> pa.Table:
    """Read a part with today's columns; its metadata says of which version the values are.

    Raises ResultsError for a part that cannot be read, that would lose a column, or that a later
    version of raybench has written.
    """
    whole = _as_written_today(_read_raw(path), path, table)
    if whole is None:
        raise ResultsError(f"{path}: written by a later version of raybench; use that version")
    return whole


def _read_raw(path: Path) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise ResultsError(f"{path}: not a Parquet file, or a damaged one") from error


def _as_written_today(part: pa.Table, path: Path, table: str) -> pa.Table | None:
    """Give a part the schema of today; None for one of a later version."""
    known, today = part.schema.metadata or {}, schema(table)
    version = version_of(known, table)
    if version is None:
        raise ResultsError(f"{path}: not a part of the table {table}; move it elsewhere")
    if version > SCHEMA_VERSION:
        return None
    rows, unfit = as_today(part, today)
    known_names = (*today.names, *GONE.get(table, ()))
    if lost := [*unfit, *(name for name in part.column_names if name not in known_names)]:
        raise ResultsError(f"{path}: would lose {', '.join(lost)}; it was left as it is")
    metadata = today.metadata | {key: known[key] for key in (MERGED,) if key in known}
    written_as = known.get(WRITTEN_AS, str(version).encode())
    if int(written_as) < SCHEMA_VERSION:
        metadata[WRITTEN_AS] = written_as
    return rows.replace_schema_metadata(metadata)
