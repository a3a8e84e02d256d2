"""Is raybench as fast as bare torchrun? The same steps by both, on the same devices, in turns.

    python -m benchmarks.parity [--device cpu|cuda] [--world-size 2] [--starts 5] [--only WORD]
        [--script] [-o FILE.json]

torchrun runs `benchmarks/bare.py`, a plain loop; raybench runs a sweep on a private Ray. Every
start of either side is in new processes, and the order turns round from pair to pair (torchrun,
raybench, raybench, torchrun, ...), so that a drift of the devices favours neither. A first sweep
that is not counted tells the devices and the environment of the workers, which torchrun gets.
--script: raybench runs bare.py too, as the workload `script`; only of steps that train.

ratio: of the geometric means over the starts, raybench's over torchrun's, with Welch's 95 % t
interval on the logarithms (Biometrika 34, 1947); with few starts a bootstrap would be too narrow.
It is `equal` where the interval lies inside the margin, `differs` where it lies outside, else
`undecided`. CPU workers share their cores with everything else, so they show this only roughly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import ttest_ind

import raybench
from benchmarks.common import options, sweep, write_result
from raybench.records.environment import variables_that_matter

BARE = Path(__file__).with_name("bare.py")
WARMUP = 20
# raybench ends a script when it has measured enough.
ENDLESS = 100_000


class Case(NamedTuple):
    """Steps to compare. axis: the setting in which those of one start differ, and its values.

    margin: by how much the ratio may leave 1 and still be equal.
    """

    name: str
    workload: Mapping[str, Any]
    axis: tuple[str, Sequence[int]]
    iterations: int
    margin: float


def mlp(hidden: int, layers: int) -> dict[str, Any]:
    return {"kind": "mlp", "hidden": hidden, "layers": layers}


# Python gets slower by tens of percent for a quarter of a second at a time: more steps of it.
PYTHON_BOUND = Case("Python-bound", mlp(64, 24), ("batch_size", [64]), 1000, 0.05)
SUM = {"kind": "collective", "operation": "all_reduce"}
CASES = {
    "cuda": [
        Case("GPU-bound", mlp(4096, 8), ("batch_size", [1024]), 100, 0.01),
        PYTHON_BOUND,
        Case("all_reduce", SUM, ("size_bytes", [2**15, 2**20, 2**24, 2**28]), 100, 0.05),
    ],
    "cpu": [
        Case("compute-bound", mlp(512, 4), ("batch_size", [64]), 100, 0.01),
        PYTHON_BOUND,
        Case("all_reduce", SUM, ("size_bytes", [2**12, 2**18, 2**23]), 100, 0.05),
    ],
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--starts", type=int, default=5, help="of each side; at least 2")
    parser.add_argument("--only", default="", help="steps with this in their name")
    parser.add_argument("--script", action="store_true")
    chosen = parser.parse_args()
    steps: list[dict[str, Any]] = []
    for case in CASES[chosen.device]:
        needless = case.workload is SUM and (chosen.script or chosen.world_size < 2)
        if chosen.only in case.name and not needless:
            steps += compare(case, chosen)
    write_result({"steps": steps}, chosen.output)


def compare(case: Case, chosen: Any) -> Iterator[dict[str, Any]]:
    """Run both sides so often; a ratio for each value of the axis."""
    devices = by_raybench(case, chosen)[1]
    ours = dict(devices["environment"].iloc[0])
    spec = specification(case, chosen.device, list(devices["index"]))
    found: dict[str, list[Sequence[float]]] = {"torchrun": [], "raybench": []}
    for pair in range(chosen.starts):
        for side in ("torchrun", "raybench")[:: 1 if pair % 2 == 0 else -1]:
            if side == "raybench":
                found[side].append(by_raybench(case, chosen)[0])
            else:
                bare = by_torchrun(spec, chosen.world_size, ours)
                found[side].append(bare["step_ms"])
            times = ", ".join(f"{time_ms:.3f}" for time_ms in found[side][-1])
            print(f"{case.name}: {side} {pair + 1} of {chosen.starts}: {times} ms", flush=True)
    if chosen.device == "cuda" and bare["uuids"] != list(devices["uuid"]):
        raise SystemExit("torchrun ran on other devices than raybench")
    ours |= {"niceness": str(devices["niceness"].iloc[0])}
    pairs = {name: [bare["environment"].get(name), ours.get(name)] for name in ours}
    for place, value in enumerate(case.axis[1]):
        times_ms = {side: [start[place] for start in starts] for side, starts in found.items()}
        yield {
            "step": case.name,
            "workload": {**case.workload, case.axis[0]: value},
            "devices": list(devices["name"]),
            "differing": {name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
            "step_ms": times_ms,
            "margin": case.margin,
            **verdict(times_ms["raybench"], times_ms["torchrun"], case.margin),
        }


def verdict(new: Sequence[float], base: Sequence[float], margin: float) -> dict[str, Any]:
    """Return the ratio of `new` to `base`, its 95 % interval, and whether they are equal."""
    logs = [np.log(times) for times in (new, base)]
    interval = ttest_ind(*logs, equal_var=False).confidence_interval(0.95)
    low, high = np.exp(interval.low), np.exp(interval.high)
    is_equal = 1 - margin <= low and high <= 1 + margin
    differs = high < 1 - margin or low > 1 + margin
    return {
        "ratio": round(float(np.exp(logs[0].mean() - logs[1].mean())), 4),
        "interval": [round(float(end), 4) for end in (low, high)],
        "is": "equal" if is_equal else "differs" if differs else "undecided",
    }


def specification(case: Case, device: str, indexes: Sequence[int]) -> dict[str, Any]:
    """Return what `bare.py` is to time."""
    axis, values = case.axis
    steps = [
        {"workload": case.workload, "batch_size": value}
        if axis == "batch_size"
        else {"workload": {**case.workload, axis: value}}
        for value in values
    ]
    where = {"device": device, "indexes": [int(index) for index in indexes]}
    return {**where, "steps": steps, "warmup": WARMUP, "iterations": case.iterations}


def by_torchrun(
    spec: Mapping[str, Any], world_size: int, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run `bare.py` once in this environment; what its rank 0 answers."""
    with tempfile.TemporaryDirectory(prefix="bare") as folder:
        path, output = Path(folder, "spec.json"), Path(folder, "answer.json")
        path.write_text(json.dumps({**spec, "output": str(output)}), encoding="utf-8")
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
        ours = variables_that_matter()
        rest = {name: value for name, value in os.environ.items() if name not in ours}
        done = subprocess.run(
            [sys.executable, *launcher, str(BARE), str(path)],
            env={**rest, **environment},
            capture_output=True,
            text=True,
        )
        if not output.exists():
            raise SystemExit(f"torchrun: {done.stderr}")
        answer: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return answer


def by_raybench(case: Case, chosen: Any) -> tuple[list[float], pd.DataFrame]:
    """Sweep once; the step times in ms by the values of the axis, and the devices."""
    axis, values = case.axis
    workload = dict(case.workload)
    with tempfile.TemporaryDirectory(prefix="parity") as name:
        folder = Path(name)
        if chosen.script:
            spec = specification(case, chosen.device, range(chosen.world_size))
            path = folder / "spec.json"
            path.write_text(json.dumps({**spec, "iterations": ENDLESS}), encoding="utf-8")
            workload = {"kind": "script", "path": str(BARE), "args": str(path)}
        job = {
            "workload": workload,
            "matrix": {"world_size": [chosen.world_size], axis: list(values)},
            "placement": {"oversubscribe": chosen.device == "cpu"},
            "measure": {
                "warmup": WARMUP,
                "iterations": case.iterations,
                "max_seconds": 200,
                "breakdown": False,
            },
        }
        points = sweep(folder, job, chosen.device)
        devices = raybench.load(folder / "results", "devices")
    # By the value of the axis: a plan may have another order.
    of = points[axis] if axis in points else points["params"].map(lambda params: params[axis])
    by_value = dict(zip(of.astype(int), points["step_ms_p50"], strict=True))
    return [float(by_value[value]) for value in values], devices


if __name__ == "__main__":
    main()
