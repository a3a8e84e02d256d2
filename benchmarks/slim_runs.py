"""Copy runs to commit them: small files, without logs and folders of their machine.

    python -m benchmarks.slim_runs FOLDER RUN...      (from results, to FOLDER)

The parts of each table become one. Each file loses the copy of its schema that Arrow adds, half of
a small file. Tracebacks keep the names of files and lose their folders.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raybench.results.reader import LOCK
from raybench.results.tables import schema
from raybench.results.writer import compact_run

RESULTS = Path("results")
# Not the summary, which follows from the points, and no logs.
TABLES = ("runs", "devices", "points", "samples", "modules", "regions", "telemetry")
TEXTS = ("error_message", "error_detail")
_folders = re.compile(r"""(?<![^\s"'(=])/(?:[^\s/"':]+/)+(?=[^\s/"':])""")


def main() -> None:
    folder, *runs = sys.argv[1:]
    for run in runs:
        slim(run, Path(folder))


def slim(run: str, folder: Path) -> None:
    """Copy the tables of a run to a results folder and make their files small."""
    for table in TABLES:
        if (RESULTS / table / run).is_dir():
            shutil.copytree(RESULTS / table / run, folder / table / run)
    compact_run(folder, run)
    (folder / "runs" / run / LOCK).unlink(missing_ok=True)
    for path in folder.glob(f"*/{run}/*.parquet"):
        rows = without_folders(pq.read_table(path))
        options = {"compression": "zstd", "compression_level": 19, "store_schema": False}
        options |= {"use_dictionary": False, "write_statistics": False}
        with pq.ParquetWriter(path, rows.schema, **options) as file:
            file.write_table(rows)
            file.add_key_value_metadata(schema(path.parents[1].name).metadata)


def without_folders(rows: pa.Table) -> pa.Table:
    """Return the rows with file names in place of absolute paths in what failed points say."""
    for name in TEXTS:
        if name in rows.column_names:
            texts = [text and _folders.sub("", text) for text in rows[name].to_pylist()]
            place = rows.schema.get_field_index(name)
            rows = rows.set_column(place, rows.schema.field(name), pa.array(texts, pa.string()))
    return rows


if __name__ == "__main__":
    main()
