"""Parts that older versions of raybench have written, with the columns of today.

What reads a folder of Parquet without raybench needs one schema in all of its files.
"""

from __future__ import annotations

from pathlib import Path

from raybench.errors import ResultsError
from raybench.results.parts import as_today, version_of
from raybench.results.run import check_folder, run_folders
from raybench.results.schema import SCHEMA_VERSION, TABLES, schema
from raybench.results.writer import has_driver, replace_part

# In the metadata of a part: the schema that its values are of. Its newer columns are null.
WRITTEN_AS = b"written_as_schema"


def upgrade(root: str | Path) -> list[Path]:
    """Write the older parts of a results folder again with today's columns; which ones.

    Columns that a part lacks are null, values stay as they are, and `written_as_schema` in the
    part's metadata says of which version they are. Parts of a later version, and of a run that a
    sweep is writing, stay as they are. Raises ResultsError for a part that cannot be read, or that
    has a column which would be lost.
    """
    root = Path(root)
    check_folder(root)
    return [
        path
        for table in TABLES
        for run_id in run_folders(root / table)
        if not has_driver(root, run_id)
        for path in sorted((root / table / run_id).glob("[!._]*.parquet"))
        if _upgrade_part(path, table)
    ]


def _upgrade_part(path: Path, table: str) -> bool:
    """Write one part again where it differs from today's schema; whether it did."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        part = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise ResultsError(f"{path}: not a Parquet file, or a damaged one") from error
    version, today = version_of(part.schema.metadata or {}, table), schema(table)
    if version is None:
        raise ResultsError(f"{path}: not a part of the table {table}; move it elsewhere")
    if version > SCHEMA_VERSION or part.schema.equals(today, check_metadata=True):
        return False
    rows, unfit = as_today(part, today)
    if lost := [*unfit, *(name for name in part.column_names if name not in today.names)]:
        raise ResultsError(f"{path}: would lose {', '.join(lost)}; it was left as it is")
    written_as = part.schema.metadata.get(WRITTEN_AS, str(version).encode())
    metadata = today.metadata | (
        {WRITTEN_AS: written_as} if int(written_as) < SCHEMA_VERSION else {}
    )
    whole = rows.replace_schema_metadata(metadata)
    if part.schema.equals(whole.schema, check_metadata=True):
        return False
    replace_part(path, table, whole)
    return True
