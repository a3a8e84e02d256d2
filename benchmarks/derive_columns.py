"""Derive step times, intervals, marks and rates of committed runs again from their samples.

    python -m benchmarks.derive_columns [RESULTS]      (default: results/examples)

Columns that follow from `samples` get the values of today's rules; all other columns stay. Run it
after a change of these rules; a second call changes nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from raybench.conversion import BYTES_PER_GB, MS_PER_S
from raybench.job.model import Measure
from raybench.job.point import Point
from raybench.job.source import overrides_in, parse_source
from raybench.measure.stopping import StoppingPolicy, TimingProgress
from raybench.records.doubts import Doubt, DoubtKind, worst_of_each
from raybench.records.measurement import Measurement, Repetition, Samples
from raybench.records.record import Record
from raybench.records.status import Status
from raybench.results.breakdown import split_rest
from raybench.results.columns import from_row, to_row, write_part
from raybench.results.doubts import DERIVED_FROM_COLUMNS, column_doubts
from raybench.results.metrics import step_columns
from raybench.results.point_row import PointRow
from raybench.results.reader import read_run
from raybench.results.tables import schema
from raybench.stats.summary import step_series

POLICY = StoppingPolicy(settings=Measure())
STEP_COLUMNS = (
    *("step_ms_mean", "step_ms_p50", "step_ms_p90", "step_ms_p95", "step_ms_p99", "step_ms_min"),
    *("step_ms_max", "step_ms_std", "step_ms_ci_low", "step_ms_ci_high", "skew_ms_p50", "stable"),
)
RATES = (
    *("throughput", "achieved_tflops_per_device", "mfu_pct", "mfu_6n_pct", "gemm_share_pct"),
    *("algbw_gb_s", "busbw_gb_s", "memory_gb_s"),
)
# Rates whose amount per step is a whole number, with their unit.
WHOLE = {
    "throughput": 1.0,
    "algbw_gb_s": BYTES_PER_GB,
    "memory_gb_s": BYTES_PER_GB,
    "achieved_tflops_per_device": 1e12,
}
# Columns that the older runs lack.
NEW_COLUMNS = ("parts_step_ms", "unexplained_ms", "doubts")
# Doubts that follow from the samples.
OF_SAMPLES = DERIVED_FROM_COLUMNS | {DoubtKind.TOO_FEW_STEPS}
# A column that differs by less was computed in another order.
ROUNDING = 1e-9


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "results/examples")
    for run, changes in derive_runs(root).items():
        print(run, *changes, sep="\n  ")


def derive_runs(root: Path) -> dict[str, list[str]]:
    """Rewrite the parts of `points` whose columns change; return the changes by run."""
    changed = {}
    for path in sorted(root.glob("points/*/*.parquet")):
        run = path.parent.name
        parts = sorted(root.glob(f"samples/{run}/*.parquet"))
        samples = pd.concat(map(pd.read_parquet, parts))
        attempts = dict(iter(samples.groupby(["point_id", "attempt"])))
        is_count_fixed = has_fixed_count(root, run)
        table = pq.read_table(path)
        rows = table.to_pylist(maps_as_pydicts="strict")
        derived = []
        for row in rows:
            own = attempts.get((row["point_id"], row["attempt"]))
            if row["status"] == Status.OK and own is not None:
                derived.append(derive(row, own, is_count_fixed))
            else:
                derived.append(row)
        if changes := describe_changes(rows, derived):
            changed[run] = changes
            write_part(path, "points", replace_columns(table, derived))
    return changed


def has_fixed_count(root: Path, run_id: str) -> bool:
    """Return whether the job of a run set a count of iterations."""
    run = read_run(root, run_id)
    job = parse_source(
        "job", run.job_text, overrides_in(run.argv), on_cpu=bool(run.cpu_section)
    ).data
    measure = job.get("measure")
    return isinstance(measure, dict) and isinstance(measure.get("iterations"), int)


def derive(row: Mapping[str, Any], samples: pd.DataFrame, is_count_fixed: bool) -> dict[str, Any]:
    """Return a row of `points` with the columns that follow from its samples.

    Args:
        row: of an attempt that is ok.
        samples: its rows of `samples`, of all ranks and repeats.
        is_count_fixed: the job set a count of iterations.
    """
    steps = step_columns(record_of(row, samples))
    values = {name: getattr(steps, name) for name in STEP_COLUMNS if name in row}
    over_ms = row[rate_base(row)]
    for name in RATES:
        if row.get(name) is not None:
            values[name] = row[name] * over_ms / values["step_ms_mean"]
    values |= parts_beside(row, values["step_ms_p50"])
    found = {**row, **{name: v for name, v in values.items() if not is_same(v, row.get(name))}}
    typed = from_row(PointRow, found)
    doubts = [doubt for doubt in typed.doubts or () if doubt.kind not in OF_SAMPLES]
    doubts += column_doubts(typed)
    if typed.stable is None and not is_count_fixed:
        doubts.append(Doubt(kind=DoubtKind.TOO_FEW_STEPS, value=typed.iterations))
    stored = to_row(replace(typed, doubts=worst_of_each(doubts)))["doubts"]
    known = row.get("doubts")
    # Their order has no meaning.
    if known is not None and sorted(known, key=str) == sorted(stored, key=str):
        return found
    return {**found, "doubts": stored}


def parts_beside(row: Mapping[str, Any], step_ms: float) -> dict[str, Any]:
    """Return the columns on parts that follow from the step time; {} without a breakdown."""
    if row["local_step_ms"] is None:
        return {}
    exposed_ms, unexplained_ms = split_rest(
        step_ms - row["local_step_ms"],
        row["comm_ms"],
        has_peers=row["comm_exposed_ms"] is not None,
        is_counted=bool(row.get("comm_calls")),
    )
    return {
        "comm_exposed_ms": exposed_ms,
        "unexplained_ms": unexplained_ms,
        "parts_step_ms": step_ms,
    }


def rate_base(row: Mapping[str, Any]) -> str:
    """Return the column that the rates of a row divide by: the mean step, in older runs the median.

    It is the one with which samples, bytes and FLOPs per step are whole numbers.
    """
    for name in ("step_ms_mean", "step_ms_p50"):
        amounts = [
            row[rate] * unit * row[name] / MS_PER_S
            for rate, unit in WHOLE.items()
            if row.get(rate) is not None
        ]
        if all(abs(amount - round(amount)) <= 1e-9 + 1e-12 * amount for amount in amounts):
            return name
    raise ValueError(f"{row['run_id']} {row['point_id']}: rates over neither mean nor median step")


def is_same(value: Any, other: Any) -> bool:
    """Return whether two values of a column are equal but for rounding."""
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=ROUNDING, abs_tol=ROUNDING)
    return bool(value == other)


def record_of(row: Mapping[str, Any], samples: pd.DataFrame) -> Record:
    """Return a record with the samples of the ranks that have a share of the step."""
    shares = row.get("share_by_rank")
    inner = row.get("inner_iterations") or 1
    by_rank: list[list[Repetition]] = []
    for rank, own in samples.groupby("rank"):
        if shares is None or shares[rank]:
            repeats = [repeat for _, repeat in own.groupby("repeat")]
            by_rank.append([repetition(steps, inner) for steps in repeats])
    is_graph = bool(row.get("cuda_graph"))
    settled = [has_settled(ranks, is_graph) for ranks in zip(*by_rank, strict=True)]
    measurements = [
        Measurement(
            rank=rank,
            items_per_step=None,
            repetitions=tuple(
                replace(one, settled=mark) for one, mark in zip(repeats, settled, strict=True)
            ),
        )
        for rank, repeats in enumerate(by_rank)
    ]
    point = Point(
        workload=row["workload"],
        params={},
        batch_size=None,
        global_batch_size=None,
        scaling=None,
    )
    return Record(
        point=point,
        attempt=row["attempt"],
        status=Status.OK,
        started_at=row["started_at"],
        duration_s=0.0,
        measurements=tuple(measurements),
    )


def repetition(steps: pd.DataFrame, inner: int) -> Repetition:
    """Return a rank's samples of one build, warm-up and timed, in the order of their iterations."""
    ordered = steps.sort_values("iteration")
    warmup, timed = (
        Samples(step_ns=tuple(ordered["step_ns"][ordered["is_warmup"] == is_warmup]))
        for is_warmup in (True, False)
    )
    return Repetition(warmup=warmup, timed=timed, inner_iterations=inner)


def has_settled(ranks: Sequence[Repetition], is_graph: bool) -> bool | None:
    """Return whether the step time of one build stayed at one level, by today's rule."""
    progress = TimingProgress(
        warmup_ns=step_series([one.warmup.step_ns for one in ranks]).tolist(),
        sample_ns=step_series([one.timed.step_ns for one in ranks]).tolist(),
        inner=ranks[0].inner_iterations,
        is_graph=is_graph,
    )
    return POLICY.has_settled(progress)


def replace_columns(table: pa.Table, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the table with the columns that differ in the rows, and with those that are new.

    Types and metadata stay.
    """
    for place, field in enumerate(table.schema):
        values = pa.array([row[field.name] for row in rows], field.type)
        if not values.equals(table.column(place).combine_chunks()):
            table = table.set_column(place, field, values)
    for name in NEW_COLUMNS:
        values = [row.get(name) for row in rows]
        if name not in table.column_names and any(value is not None for value in values):
            field = schema("points").field(name)
            table = table.append_column(field, pa.array(values, field.type))
    return table


def describe_changes(before: Sequence[Mapping[str, Any]], after: Sequence[Any]) -> list[str]:
    """Return a line for each column that changes: in how many rows, and by how much at most."""
    lines = []
    for name in (*before[0], *(name for name in NEW_COLUMNS if name not in before[0])):
        pairs = [(old.get(name), new.get(name)) for old, new in zip(before, after, strict=True)]
        pairs = [(old, new) for old, new in pairs if old != new]
        sizes = [abs(new / old - 1) for old, new in pairs if old and isinstance(new, float)]
        if pairs:
            most = f", by up to {max(sizes):.3%}" if sizes else ""
            lines.append(f"{name}: {len(pairs)} rows{most}")
    return lines


if __name__ == "__main__":
    main()
