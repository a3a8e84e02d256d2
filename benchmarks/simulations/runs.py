"""How right the intervals of `raybench report` and the verdicts of `raybench compare` are.

    python -m benchmarks.simulations.runs [--comparisons 400] [--reports 60] [--jobs 2]

Runs whose true step times are known are written as Parquet, and the real commands read them. Of
the comparisons one in 20 goes through the command; it must say what the function behind it says,
which judges all of them. The logarithm of a point's step in a start is its level, plus a deviation
of the point (start sd), plus a shift of the whole start (run shift). In every comparison each side
has three runs of one round.

held: share of the printed 95 % intervals that hold the truth; half: the median of half of one.
false: share of comparisons without any change that exit with 1. found: share of the points called
slower where all are slower by 5 %; stall: the same where one step in 16 takes twice as long, which
the median does not see. same: share of the points called the same where all are slower by twice
the threshold.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import options
from benchmarks.made_up import START, devices, run
from benchmarks.simulations.commands import run_command
from benchmarks.store_scale import records
from raybench.analysis.compare import compare
from raybench.job.model import Measure
from raybench.results.columns import to_row
from raybench.results.point_row import PointRow
from raybench.results.record_rows import point_row
from raybench.results.tables import schema
from raybench.results.writer import RunStore

STARTS = (0.005, 0.015, 0.03)
SHIFTS = (0.0, 0.005, 0.02)
POINTS = (1, 5, 36)
THRESHOLD = 0.015
RUNS = 3
EVERY = 20
LEVEL_MS = 10.0
STALL = 1 / 16


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--comparisons", type=int, default=400)
    parser.add_argument("--reports", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args()
    cells = list(itertools.product(POINTS, STARTS, SHIFTS))
    with ProcessPoolExecutor(chosen.jobs) as pool:
        for title, measure in (
            ("report, three rounds", partial(reports, chosen.reports)),
            ("compare, three runs a side", partial(comparisons, chosen.comparisons)),
        ):
            found = pd.DataFrame(pool.map(measure, cells))
            print(f"{title}\n{found.to_string(index=False)}\n", flush=True)


# As a sweep writes it; what differs is filled in by `point_rows`.
ROW = point_row("", next(records(1, 40)), Measure())
COLUMNS = schema("points")


def write(root: Path, run_id: str, medians_ms: Sequence[Sequence[float]], stall: float) -> None:
    """Write a run. medians_ms: rounds x points. stall: by which share the mean is longer."""
    made = run(run_id, len(medians_ms[0]), START + timedelta(hours=len(list(root.glob("runs/*")))))
    store = RunStore.create(
        root, replace(made, tags={"side": run_id.rstrip("0123456789")}), Measure()
    )
    store.write_devices(devices(1, per_node=1))
    folder = root / "points" / run_id
    folder.mkdir(parents=True, exist_ok=True)
    content = list(map(to_row, point_rows(run_id, medians_ms, stall)))
    pq.write_table(pa.Table.from_pylist(content, COLUMNS), folder / "all.parquet")


def point_rows(
    run_id: str, medians_ms: Sequence[Sequence[float]], stall: float
) -> Iterator[PointRow]:
    """Yield the rows of `points` of a run. medians_ms, stall: as of `write`."""
    for number, of_round in enumerate(medians_ms, 1):
        for place, median_ms in enumerate(of_round):
            mean_ms = median_ms * (1 + stall)
            yield replace(
                ROW,
                run_id=run_id,
                point_id=f"{place:012x}",
                batch_size=place + 1,
                attempt=number,
                round=number if len(medians_ms) > 1 else None,
                step_ms_p50=median_ms,
                step_ms_mean=mean_ms,
                throughput=1000 / mean_ms,
                params={"layer": str(place)},
            )


def draw(rng: np.random.Generator, starts: int, cell: tuple[int, float, float]) -> Any:
    """Draw the medians of some starts in ms, starts x points."""
    count, start_sd, shift = cell
    common = shift * rng.standard_normal((starts, 1))
    return LEVEL_MS * np.exp(start_sd * rng.standard_normal((starts, count)) + common)


def reports(count: int, cell: tuple[int, float, float]) -> dict[str, float]:
    """Hold the intervals of reports of three rounds against the true level."""
    rng = np.random.default_rng(zlib.crc32(repr(cell).encode()))
    held, halves = [], []
    for _ in range(count * (12 if cell[0] == 1 else 3 if cell[0] < 10 else 1)):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), "run", draw(rng, 3, cell), 0.0)
            text = run_command("report", "run", "--json", "--results", folder)[1]
        for point in json.loads(text)["points"]:
            held.append(point["step_ms_low"] <= LEVEL_MS <= point["step_ms_high"])
            halves.append((point["step_ms_high"] - point["step_ms_low"]) / 2 / LEVEL_MS)
    return _named(cell) | {"held": np.mean(held).round(3), "half": np.median(halves).round(4)}


def comparisons(count: int, cell: tuple[int, float, float]) -> dict[str, float]:
    """Count the verdicts of comparisons with a known change."""
    rng = np.random.default_rng(zlib.crc32(repr(cell).encode()))
    few = max(1, count // 4)
    kinds = {
        "false": (count, 0.0, 0.0),
        "found": (few, 0.05, 0.0),
        "stall": (few, 0.0, STALL),
        "same": (few, 2 * THRESHOLD, 0.0),
    }
    found = {name: _compare(rng, cell, *settings) for name, settings in kinds.items()}
    return _named(cell) | {
        "false": np.mean([of["slower"] > 0 for of in found["false"]]).round(4),
        "found": np.mean([of["slower"] for of in found["found"]]).round(3) / cell[0],
        "stall": np.mean([of["slower"] for of in found["stall"]]).round(3) / cell[0],
        "same": np.mean([of["same"] for of in found["same"]]).round(4) / cell[0],
    }


def _compare(
    rng: np.random.Generator,
    cell: tuple[int, float, float],
    count: int,
    change: float,
    stall: float,
) -> list[Counter[str]]:
    """Compare so often; return how many points have each verdict."""
    results = []
    for number in range(count):
        sides = {
            side: [
                (f"{side}{run}", draw(rng, 1, cell) * (1 + change * is_new), stall * is_new)
                for run in range(RUNS)
            ]
            for side, is_new in (("base", False), ("new", True))
        }
        base, new = ([list(point_rows(*run)) for run in runs] for runs in sides.values())
        verdicts = Counter(point.verdict for point in compare(base, new, threshold=THRESHOLD))
        if number % EVERY == 0:
            code, told = check_command(sides)
            assert Counter(told) == verdicts
            assert (code == 1) == bool(verdicts["slower"])
        results.append(verdicts)
    return results


def check_command(sides: dict[str, Any]) -> tuple[int, list[str]]:
    """Return the exit code of `raybench compare --fail-on regression`, and all verdicts.

    Args:
        sides: name -> what `write` takes of each run.
    """
    with tempfile.TemporaryDirectory() as folder:
        for run in itertools.chain(*sides.values()):
            write(Path(folder), *run)
        words = ("compare", "side=base", "side=new", "--json", "--fail-on", "regression")
        code, text = run_command(*words, "--results", folder)
    return code, [point["verdict"] for point in json.loads(text)["points"]]


def _named(cell: tuple[int, float, float]) -> dict[str, float]:
    return dict(zip(("points", "start sd", "run shift"), cell, strict=True))


if __name__ == "__main__":
    main()
