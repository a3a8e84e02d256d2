"""Programs that call raybench from Python, as users write them."""

from pathlib import Path
from typing import Any

# Points of about a second each, so that a signal comes between two of them.
JOB: dict[str, Any] = {
    "name": "small",
    "workload": {"kind": "mlp", "hidden": 64, "layers": 2},
    "matrix": {"world_size": [1, 2], "batch_size": [8]},
    "measure": {"warmup": 3, "iterations": 10, "breakdown": False},
}
LONG_JOB = JOB | {
    "name": "long",
    "matrix": {"batch_size": [1, 2, 4, 8, 16, 32, 64, 128]},
    "baseline": {},
    "measure": {"seconds": 1.0, "breakdown": False},
}

# `Count` and `step` are those of a notebook or a script: no worker can import them.
SWEEP_AND_MEASURE = f"""
import os, sys
import raybench

with open("times_run", "a") as file:
    file.write("x")

JOB = {JOB!r}

class Count:
    def __init__(self, context):
        import torch.distributed as dist

        self.seen = (context.rank, dist.get_rank(), dist.get_world_size())

def step(count):
    assert count.seen[0] == count.seen[1] and count.seen[2] == 2, count.seen
    sum(range(1000))

run = raybench.sweep(JOB, set={{"matrix.world_size": [1, 2]}}, device="cpu")
assert run.status == "ok" and list(run.summary["status"]) == ["ok", "ok"], run
assert set(run.samples["rank"]) == {{0, 1}}
timing = raybench.measure(step, items=1000, workers=2, setup=Count, seconds=0.2, device="cpu")
assert set(timing.samples["rank"]) == {{0, 1}} and timing.items_per_s > 0, timing
assert "2 ranks" in timing.method, timing.method
here = raybench.measure(sum, setup=lambda: range(1000), seconds=0.2)
assert here.median_ms > 0
"""

EVERYTHING = f"""{SWEEP_AND_MEASURE}
again = raybench.sweep("job.yaml", filter="world_size == 2", device="cpu", tags={{"driver": 580}})
compared = again.compare(run)
assert list(compared.points["verdict"].dropna()) == ["unclear"], compared.points
assert raybench.open_run("latest") == again
assert again.compare(run.run_id).points["change"].notna().sum() == 1
again.save_page("page.html")

def fails():
    raise LookupError("mine")

try:
    raybench.measure(fails, workers=1, seconds=0.2, device="cpu")
except raybench.errors.StepError as error:
    assert str(error).startswith("fails: rank 0"), error
    assert "LookupError: mine, at script.py:" in str(error), error
else:
    raise AssertionError("no error came")
"""

# What was measured is returned, and the program goes on; another Ctrl-C ends nothing by itself.
INTERRUPTED = f"""
import raybench

run = raybench.sweep({LONG_JOB!r}, device="cpu", results={{results!r}}, address={{address!r}})
statuses = list(run.points["status"])
with open("statuses", "w") as file:
    file.write(" ".join([run.status, *statuses]))
try:
    import os, signal
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    with open("went_on", "w") as file:
        file.write("yes")
"""


def interrupted_program(results: Path, address: str = "auto") -> str:
    """Return the program that is interrupted while it sweeps into `results`."""
    return INTERRUPTED.replace("{results!r}", repr(str(results))).replace(
        "{address!r}", repr(address)
    )
