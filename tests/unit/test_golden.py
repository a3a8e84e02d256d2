"""What is reported of the committed runs has the numbers that it had before.

`golden/numbers.json` keeps a digest of the numbers in each output, in their order; words may
change. Where a number is meant to change: python tests/unit/test_golden.py
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from raybench import cli

RESULTS = Path(__file__).parents[2] / "results" / "examples"
GOLDEN = Path(__file__).parent / "golden" / "numbers.json"
# Between them they have all that is reported: ranks, messages, products, a search, an old schema.
JOBS = ("collectives", "ddp_linear", "ddp_scaling", "gemm", "largest_batch")
RUNS = sorted(folder.name for job in JOBS for folder in (RESULTS / "points").glob(f"{job}-2*"))
OUTPUTS = [
    *(("report", "--format", kind) for kind in ("terminal", "json", "html")),
    *(("export", "--format", kind) for kind in ("csv", "junit")),
]
# What the digests were made with; a later version of the tables is no other number.
VERSION = '"schema_version": 5'
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")


def numbers_of(text: str) -> str:
    """How many numbers a text has, and a digest of them, as far as all machines agree on them."""
    text = re.sub(r'"schema_version": \d+', VERSION, text)
    texts = NUMBER.findall(re.sub(r"<(style|script)\b.*?</\1>", "", text, flags=re.DOTALL))
    found = [f"{float(text.replace(',', '')):.6g}" for text in texts]
    return f"{len(found)} {hashlib.sha256(' '.join(found).encode()).hexdigest()[:16]}"


def output(*words: str) -> str:
    done = CliRunner().invoke(cli.raybench, words, catch_exceptions=False)
    assert done.exit_code in (0, None), done.output
    return done.stdout


def reported(run_id: str) -> dict[str, str]:
    """The numbers of each output about one run."""
    return {
        f"{run_id} {command} {kind}": numbers_of(
            output(command, run_id, option, kind, "--results", str(RESULTS))
        )
        for command, option, kind in OUTPUTS
    }


def compared(run_id: str, folder: Path) -> dict[str, str]:
    """The numbers of a comparison of a run with a copy of it that took other times."""
    for table in ("runs", "devices", "points", "samples", "telemetry"):
        source = RESULTS / table / run_id
        for part in source.glob("*.parquet"):
            rows = pq.read_table(part, partitioning=None)
            write(rows, folder / table / run_id / part.name)
            changed = scaled(renamed(rows, f"{run_id}-new"))
            write(changed, folder / table / f"{run_id}-new" / part.name)
    words = ("compare", run_id, f"{run_id}-new", "--results", str(folder))
    return {
        f"{run_id} compare {kind}": numbers_of(output(*words, "--format", kind))
        for kind in ("terminal", "json")
    }


def write(rows: pa.Table, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path)


def renamed(rows: pa.Table, run_id: str) -> pa.Table:
    place = rows.schema.get_field_index("run_id")
    return rows.set_column(place, rows.schema.field(place), pa.array([run_id] * len(rows)))


def scaled(rows: pa.Table) -> pa.Table:
    """The rows with all step times multiplied, those of each attempt by another factor."""
    if "point_id" not in rows.column_names:
        return rows
    attempts = list(zip(*(rows[name].to_pylist() for name in ("point_id", "attempt")), strict=True))
    places = {attempt: place for place, attempt in enumerate(dict.fromkeys(attempts))}
    factors = pa.array([1 + 0.02 * (places[attempt] % 5 - 2) for attempt in attempts])
    for place, field in enumerate(rows.schema):
        if field.name.startswith("step_ms") or field.name == "step_ns":
            times = pc.multiply(pc.cast(rows.column(place), pa.float64()), factors)
            rows = rows.set_column(
                place, field, pc.cast(pc.round(times, 6), field.type, safe=False)
            )
    return rows


@pytest.mark.parametrize("run_id", RUNS)
def test_reports_and_exports_of_a_committed_run_have_the_numbers_that_they_had(run_id: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    today = reported(run_id)
    assert today == {name: golden[name] for name in today}


@pytest.mark.parametrize("run_id", RUNS)
def test_a_comparison_with_a_committed_run_has_the_numbers_that_it_had(
    run_id: str, tmp_path: Path
) -> None:
    golden = json.loads(GOLDEN.read_text())
    today = compared(run_id, tmp_path)
    assert today == {name: golden[name] for name in today}


def main() -> None:
    """Write what the outputs of today have."""
    numbers = {name: text for run_id in RUNS for name, text in reported(run_id).items()}
    for run_id in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            numbers |= compared(run_id, Path(folder))
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(numbers, indent=1) + "\n")


if __name__ == "__main__":
    main()
