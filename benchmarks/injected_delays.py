"""Is the slow rank found, and what it costs, where one rank is delayed on purpose?

    python benchmarks/injected_delays.py [--device cpu|cuda] [--world-sizes 2,4] [--brief]
        [--results DIR] [-o FILE.json]

Runs one real sweep of an mlp in three shapes: a step that the device bounds, a long one on a
saturated device, and one that the host bounds. One rank (first, middle, last) is delayed by 1 to
10 ms in each step, on the device or on the host, with clean points in between. What a delay really
costs is how much longer the step takes than the median of the clean points of its shape: timed
steps, of which the rule for slow ranks knows nothing.

A point must be marked where its delay costs more than 2 % of the step, and must not where it costs
less. It is not judged within half a percent of that, or within what the clean points scatter. A
mark on a point whose delay costs nothing, and which says that its cost may be nothing, is counted
apart: the delay is there, and communication hides it. Delays of the host that a device never
notices are among the trials. The cost is told right where the step grew by what the row says, to
20 % or 0.3 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from raybench import load
from raybench.results.quality import is_slowed_by_one_rank, straggler_cost_ms

WORKLOAD = "benchmarks.delayed_mlp:DelayedMlp"
DELAYS_MS = (1.0, 2.0, 5.0, 10.0)
MARK, CLOSE = 0.02, 0.005
MS, SHARE = 0.3, 0.2
# Delayed points between two clean ones.
BETWEEN = 2

Row = Mapping[str, Any]
Case = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A step. is_long: it has fewer trials."""

    name: str
    hidden: int
    layers: int
    precision: str
    batch_size: int
    is_long: bool = False


SHAPES = {
    "cuda": (
        Shape(name="6.5 ms", hidden=4096, layers=8, precision="bf16", batch_size=1024),
        Shape(name="host-bound", hidden=256, layers=24, precision="bf16", batch_size=64),
        Shape(
            name="64 ms",
            hidden=4096,
            layers=8,
            precision="fp32",
            batch_size=3328,
            is_long=True,
        ),
    ),
    "cpu": (
        Shape(name="short", hidden=64, layers=4, precision="fp32", batch_size=64),
        Shape(name="long", hidden=512, layers=4, precision="fp32", batch_size=256, is_long=True),
    ),
}
# What the audit of November 2026 tried, on two devices: shape, where, ms, rank.
AUDIT = [
    (shape, where, delay_ms, rank)
    for shape in ("6.5 ms", "64 ms")
    for delay_ms, rank in ((5.0, 1), (2.0, 0))
    for where in ("device", "host")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A point with what is known of it, and what its row says.

    delayed_rank: -1 for a clean one. grew_ms: its step against the clean ones, known to ± noise_ms.
    verdict: right, wrong, hidden or unjudged. is_cost_right: None where there is no mark.
    """

    shape: str
    world_size: int
    where: str
    delay_ms: float
    delayed_rank: int
    step_ms: float
    grew_ms: float
    noise_ms: float
    is_marked: bool
    slowest_rank: int | None
    straggler_ms: float | None
    straggler_error_ms: float | None
    straggler_device_ms: float | None
    cost_ms: tuple[float, float] | None
    comm_exposed_ms: float | None
    comm_ms: float | None
    hooked_step_ms: float | None
    wait_ms: float | None
    verdict: str
    is_cost_right: bool | None
    is_place_right: bool | None


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--world-sizes", default="2", help="separated by commas")
    options.add_argument(
        "--brief", action="store_true", help="the audit's trials and a few that the host bounds"
    )
    options.add_argument("--results", type=Path, help="where the sweep's results are kept")
    options.add_argument("-o", "--output", type=Path)
    chosen = options.parse_args()
    sizes = [int(size) for size in chosen.world_sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        results = chosen.results or Path(folder, "results")
        sweep(Path(folder), results, chosen.device, sizes, chosen.brief)
        points = load(results, "points")
    result = judged([row for row in points.to_dict("records") if row["status"] == "ok"])
    result["points_failed"] = int((points["status"] != "ok").sum())
    text = json.dumps(result, indent=1)
    print(json.dumps({name: told for name, told in result.items() if name != "trials"}, indent=1))
    if chosen.output:
        chosen.output.write_text(text + "\n")


def sweep(folder: Path, results: Path, device: str, sizes: Sequence[int], brief: bool) -> None:
    """Run all trials in one sweep."""
    job = folder / "job.json"
    job.write_text(json.dumps(job_of(device, sizes, brief)))
    command = [sys.executable, "-m", "raybench", "sweep", str(job), "--device", device]
    subprocess.run([*command, "-o", str(results)], check=True, stdout=sys.stderr)


def job_of(device: str, sizes: Sequence[int], brief: bool) -> dict[str, Any]:
    """One axis holds shape, place, rank and delay: no product has clean points in between."""
    points = [
        {**case, "world_size": size, **_settings(shape)}
        for size in sizes
        for shape in SHAPES[device]
        for case in cases(delays(size, shape, brief=brief))
    ]
    names = list(points[0])
    return {
        "version": 1,
        "name": "injected_delays",
        "workload": {"kind": WORKLOAD},
        "matrix": {},
        "baseline": {},
        "placement": {"isolation": "cluster"},
        "zip": [{name: [point[name] for point in points] for name in names}],
        "measure": {
            "warmup": 5,
            "iterations": {"min": 20, "max": 100},
            "min_seconds": 1,
            "target_ci": 0.05,
        },
    }


def _settings(shape: Shape) -> dict[str, Any]:
    return {
        "hidden": shape.hidden,
        "layers": shape.layers,
        "precision": shape.precision,
        "batch_size": shape.batch_size,
    }


def cases(delayed: Sequence[Case]) -> Iterator[Case]:
    """Delays with clean points between them, the first and the last one too."""
    for place, case in enumerate(delayed):
        if place % BETWEEN == 0:
            yield {"where": "nowhere", "delay_ms": 0.0, "delayed_rank": 0, "trial": place}
        yield {**case, "trial": place}
    if delayed:
        end = len(delayed)
        yield {"where": "nowhere", "delay_ms": 0.0, "delayed_rank": 0, "trial": end}


def delays(world_size: int, shape: Shape, *, brief: bool) -> list[Case]:
    """Which rank is delayed where, and for how long."""
    ranks = sorted({0, world_size // 2, world_size - 1})
    every = [
        {"where": where, "delay_ms": delay_ms, "delayed_rank": rank}
        for delay_ms, where, rank in product(DELAYS_MS, ("device", "host"), ranks)
    ]
    if brief and shape.name in {case[0] for case in AUDIT}:
        known = [case[1:] for case in AUDIT if case[0] == shape.name and world_size == 2]
        return [case for case in every if tuple(case.values()) in known]
    if brief:
        chosen = [("host", 5.0, rank) for rank in ranks] + [("host", 10.0, world_size - 1)]
        return [case for case in every if tuple(case.values()) in chosen]
    if not shape.is_long:
        return every
    # Each delay in each place once; 2 ms on the first and 5 ms on the last rank, as in AUDIT.
    usual = {1.0: ranks[len(ranks) // 2], 2.0: 0, 5.0: world_size - 1, 10.0: 0}
    return [case for case in every if case["delayed_rank"] == usual[case["delay_ms"]]]


def judged(rows: Sequence[Row]) -> dict[str, Any]:
    """All trials, and what they come to."""
    trials = [trial(row, [clean for clean in rows if _is_clean_of(clean, row)]) for row in rows]
    delayed = [one for one in trials if one.delayed_rank >= 0]
    clean = [one for one in trials if one.delayed_rank < 0]
    decided = [one for one in delayed if one.verdict in ("right", "wrong")]
    told = [one for one in delayed if one.is_cost_right is not None]
    return {
        "delayed": len(delayed),
        "judged": len(decided),
        "right": sum(one.verdict == "right" for one in decided),
        "hidden": sum(one.verdict == "hidden" for one in delayed),
        "unjudged": sum(one.verdict == "unjudged" for one in delayed),
        "clean": len(clean),
        "clean_marked": sum(one.is_marked for one in clean),
        "costs_told": len(told),
        "costs_right_by_excess": sum(_is_near(one.grew_ms, _excess(one)) for one in told),
        "costs_right": sum(bool(one.is_cost_right) for one in told),
        "places_told": sum(one.is_place_right is not None for one in delayed),
        "places_right": sum(bool(one.is_place_right) for one in delayed),
        "wrong": [_in_short(one) for one in decided if one.verdict == "wrong"],
        "wrong_costs": [_in_short(one) for one in told if not one.is_cost_right],
        "wrong_clean": [_in_short(one) for one in clean if one.is_marked],
        "audit": [_in_short(one) for case in AUDIT for one in delayed if _is_case(one, case)],
        "trials": [asdict(one) for one in trials],
    }


def _is_case(one: Trial, case: tuple[str, str, float, int]) -> bool:
    return one.world_size == 2 and case == (one.shape, one.where, one.delay_ms, one.delayed_rank)


def _excess(one: Trial) -> tuple[float, float]:
    """Find the most that is told of a cost: the excess of the slow rank, as one figure."""
    assert one.cost_ms is not None
    return (one.cost_ms[1], one.cost_ms[1])


def _in_short(one: Trial) -> str:
    cost = "no mark"
    if one.cost_ms is not None:
        cost = f"rank {one.slowest_rank} marked, costs {one.cost_ms[0]:.2f} to {one.cost_ms[1]:.2f}"
    return (
        f"{one.verdict}: {one.shape} on {one.world_size}, {one.where} {one.delay_ms:g} ms, "
        f"rank {one.delayed_rank}: step {one.step_ms:.2f} ms grew {one.grew_ms:+.2f} "
        f"(±{one.noise_ms:.2f}), E {_ms(one.straggler_ms)} ± {_ms(one.straggler_error_ms)} "
        f"(device {_ms(one.straggler_device_ms)}), {cost}"
    )


def _ms(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


def _shape(row: Row) -> tuple[Any, ...]:
    return (row["world_size"], row["precision"], row["batch_size"], row["params"]["hidden"])


def _is_clean_of(clean: Row, row: Row) -> bool:
    is_same = clean["point_id"] == row["point_id"]
    return clean["params"]["where"] == "nowhere" and _shape(clean) == _shape(row) and not is_same


def trial(row: Row, clean: Sequence[Row]) -> Trial:
    """Tell what became of a point. clean: the other points of its shape without a delay."""
    params = row["params"]
    usual_ms = [one["step_ms_p50"] for one in clean]
    level_ms = median(usual_ms)
    noise_ms = 1.4826 * median(abs(ms - level_ms) for ms in usual_ms)
    is_clean, is_marked = params["where"] == "nowhere", is_slowed_by_one_rank(row)
    grew_ms = row["step_ms_p50"] - level_ms
    cost_ms = straggler_cost_ms(row) if is_marked else None
    found = None if row["slowest_rank"] != row["slowest_rank"] else row["slowest_rank"]
    rank = -1 if is_clean else int(params["delayed_rank"])
    return Trial(
        shape=next(
            shape.name
            for shapes in SHAPES.values()
            for shape in shapes
            if (shape.precision, shape.batch_size, str(shape.hidden))
            == (row["precision"], row["batch_size"], params["hidden"])
        ),
        world_size=int(row["world_size"]),
        where=params["where"],
        delay_ms=float(params["delay_ms"]),
        delayed_rank=rank,
        step_ms=row["step_ms_p50"],
        grew_ms=grew_ms,
        noise_ms=noise_ms,
        is_marked=is_marked,
        slowest_rank=None if found is None else int(found),
        **{name: _known(row[name]) for name in _FIGURES},
        cost_ms=cost_ms,
        verdict=_verdict(row, grew_ms, noise_ms, rank, cost_ms),
        is_cost_right=None if cost_ms is None or is_clean else _is_near(grew_ms, cost_ms),
        is_place_right=_is_place_right(row) if is_marked and not is_clean else None,
    )


_FIGURES = (
    *("straggler_ms", "straggler_error_ms", "straggler_device_ms", "comm_exposed_ms", "comm_ms"),
    *("hooked_step_ms", "wait_ms"),
)


def _known(value: Any) -> float | None:
    return None if value is None or value != value else float(value)


def _verdict(
    row: Row, grew_ms: float, noise_ms: float, rank: int, cost_ms: tuple[float, float] | None
) -> str:
    step_ms = row["step_ms_p50"]
    unsure_ms = max(CLOSE * step_ms, 2 * noise_ms)
    is_named = cost_ms is not None and int(row["slowest_rank"]) == rank
    if rank < 0:
        return "right" if cost_ms is None else "wrong"
    if grew_ms > MARK * step_ms + unsure_ms:
        return "right" if is_named else "wrong"
    if grew_ms > MARK * step_ms - unsure_ms:
        return "unjudged"
    if cost_ms is None:
        return "right"
    return "hidden" if is_named and cost_ms[0] <= max(0.0, grew_ms) + MS else "wrong"


def _is_near(grew_ms: float, cost_ms: tuple[float, float]) -> bool:
    """Whether the growth of the step lies in what was told, to 20 % or 0.3 ms."""
    low, high = cost_ms
    off_ms = max(low - grew_ms, grew_ms - high, 0.0)
    return off_ms <= max(MS, SHARE * abs(grew_ms))


def _is_place_right(row: Row) -> bool | None:
    """Whether most of the excess is where the delay is; None on a CPU, which has no device."""
    device_ms, excess_ms = _known(row["straggler_device_ms"]), float(row["straggler_ms"])
    if device_ms is None:
        return None
    return (device_ms > excess_ms / 2) == (row["params"]["where"] == "device")


if __name__ == "__main__":
    main()
