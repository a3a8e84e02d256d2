"""Five kernels on a GPU, timed by raybench.measure, torch.utils.benchmark.Timer and do_bench.

    python -m benchmarks.timers [-o FOLDER] [--rounds N] [--seconds S]

The timers take turns, so that a drift of the clocks meets all of them. `Timer` repeats a step in a
loop and waits at its end: it is held against raybench.measure as it is. `triton.testing.do_bench`
empties the L2 cache before each step: it is held against raybench.measure(flush_l2=True). The table
has the median over rounds of each timer's median, and how far they lie apart. FOLDER gets
timers.json, and timers.parquet with a row for each kernel, timer and round.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch.utils.benchmark import Timer

import raybench
from benchmarks.common import write_result

WITHIN = 0.01
PAIRS = (("raybench", "Timer"), ("raybench, flushed", "do_bench"))
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.timers: needs a GPU, and torch finds none")
    timers = make_timers(chosen.seconds)
    rows: list[dict[str, Any]] = []
    for kernel, step in make_kernels().items():
        for number in range(chosen.rounds):
            for timer, time_ms in timers.items():
                rows.append({"kernel": kernel, "timer": timer, "round": number} | time_ms(step))
    frame = pd.DataFrame(rows)
    table = compare(frame)
    print(torch.cuda.get_device_name())
    print(table.to_string(index=False))
    doubts = frame.explode("doubts").dropna(subset="doubts").groupby("kernel")["doubts"].unique()
    for kernel, texts in doubts.items():
        print(f"{kernel}: {'; '.join(texts)}")
    if chosen.output is not None:
        chosen.output.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(chosen.output / "timers.parquet")
        facts = {"device": torch.cuda.get_device_name(), "kernels": table.to_dict("records")}
        write_result(facts, chosen.output / "timers.json")


def make_kernels() -> dict[str, Step]:
    """Return five steps: bound by launches, by the L2 cache, by memory and by arithmetic."""
    device, bf16 = torch.device("cuda"), torch.bfloat16
    one = torch.zeros(1, device=device)
    # Both inputs and the output of the small sum stay in the L2 cache of an H200, 50 MiB.
    small = [torch.zeros(2**20, device=device) for _ in range(3)]
    large = [torch.zeros(2**28, device=device) for _ in range(3)]
    a, b, out = (torch.randn(8192, 8192, device=device, dtype=bf16) for _ in range(3))
    query, key, value = (torch.randn(4, 16, 4096, 128, device=device, dtype=bf16) for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention
    return {
        "add_ of 1 element": partial(one.add_, 1),
        "sum of 2 x 4 MiB": partial(torch.add, small[0], small[1], out=small[2]),
        "sum of 2 x 1 GiB": partial(torch.add, large[0], large[1], out=large[2]),
        "matmul 8192 bf16": partial(torch.matmul, a, b, out=out),
        "attention 4096 bf16": partial(attention, query, key, value, is_causal=True),
    }


def make_timers(seconds: float) -> dict[str, Callable[[Step], dict[str, Any]]]:
    """Return functions that time a step and return its median in ms, and what they doubt."""
    from triton.testing import do_bench

    def by_raybench(step: Step, *, flush_l2: bool) -> dict[str, Any]:
        timing = raybench.measure(step, seconds=seconds, device="cuda", flush_l2=flush_l2)
        return {"ms": timing.median_ms, "method": timing.method, "doubts": list(timing.doubts)}

    def by_timer(step: Step) -> dict[str, Any]:
        timed = Timer("step()", globals={"step": step}).blocked_autorange(min_run_time=seconds)
        return {"ms": 1e3 * timed.median, "method": f"{timed.number_per_run} steps a loop"}

    def by_do_bench(step: Step) -> dict[str, Any]:
        rep_ms = round(1e3 * seconds)
        ms = do_bench(step, warmup=rep_ms // 4, rep=rep_ms, return_mode="median")
        return {"ms": ms, "method": f"rep={rep_ms}"}

    return {
        "raybench": partial(by_raybench, flush_l2=False),
        "Timer": by_timer,
        "raybench, flushed": partial(by_raybench, flush_l2=True),
        "do_bench": by_do_bench,
    }


def compare(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each kernel: the medians in us, and how raybench differs from the others."""
    rows = []
    for kernel, of_kernel in frame.groupby("kernel", sort=False):
        medians = of_kernel.groupby("timer")["ms"].median()
        row: dict[str, Any] = {"kernel": kernel}
        for ours, theirs in PAIRS:
            apart = medians[ours] / medians[theirs] - 1
            row |= {f"{ours} us": f"{1e3 * medians[ours]:,.2f}"}
            row |= {f"{theirs} us": f"{1e3 * medians[theirs]:,.2f}"}
            row[f"to {theirs}"] = f"{apart:+.2%}{'' if abs(apart) <= WITHIN else ' !'}"
        spreads = of_kernel.groupby("timer")["ms"].agg(lambda ms: ms.max() / ms.min() - 1)
        row["rounds apart"] = f"{statistics.median(spreads):.2%}"
        rows.append(row)
    return pd.DataFrame(rows)


if __name__ == "__main__":
    main()
