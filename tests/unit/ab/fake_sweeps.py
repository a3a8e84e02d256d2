"""Commands of git, and sweeps that write rows without measuring: `fake_sweep`.

`steps.json` in the folder of a side has the mean step of each point in ms, or an error. The
variable FAKE_SLOWER multiplies all steps. The file `broken` names sides whose sweeps fail.
"""

import json
import re
import secrets
import socket
import subprocess
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq

from raybench.job.model import Measure
from raybench.records.device import Device
from raybench.records.status import RunStatus, Status
from raybench.results.columns import to_row
from raybench.results.point_row import PointRow
from raybench.results.tables import Run, arrow_table
from raybench.results.writer import RunStore

DEVICE = Device(
    kind="cpu",
    node_id="node",
    host=socket.gethostname(),
    address="127.0.0.1",
    index=0,
    uuid="cpu-0",
    name="fake",
    process_id=1,
    cpu_count=1,
    niceness=0,
    omp_num_threads=1,
)


IDENTITY = ("-c", "user.name=somebody", "-c", "user.email=somebody@localhost")


def git(folder, *words):
    done = subprocess.run(["git", *IDENTITY, *words], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def write_steps(folder, **steps):
    (folder / "steps.json").write_text(json.dumps(steps))


def values_of(words, option):
    return [value for name, value in pairwise(words) if name == option]


def point_row(run_id, number, name, step):
    is_error = isinstance(step, str)
    return PointRow(
        run_id=run_id,
        point_id=name,
        attempt=1,
        status=Status.ERROR if is_error else Status.OK,
        error_message=step if is_error else None,
        started_at=datetime.now(UTC),
        workload="fake",
        params={"layer": name},
        device_type="cpu",
        batch_size=number + 1,
        step_ms_mean=None if is_error else step * (1 + 0.0005 * (secrets.randbelow(3) - 1)),
    )


def fake_sweep(words, checkout, log):
    output = Path(values_of(words, "-o")[0])
    with (output / "starts.jsonl").open("a") as starts:
        starts.write(json.dumps([str(checkout.folder), *words]) + "\n")
    log.parent.mkdir(exist_ok=True)
    log.write_text("address: no cluster there\n")
    side, *_ = [tag.split("=")[1] for tag in values_of(words, "--tag")]
    broken = checkout.folder / "broken"
    if broken.exists() and side in broken.read_text().split():
        return 3
    factor = float(checkout.env.get("FAKE_SLOWER", "1"))
    steps = {
        name: step if isinstance(step, str) else step * factor
        for name, step in json.loads((checkout.folder / "steps.json").read_text()).items()
    }
    chosen = values_of(words, "--filter")
    names = re.findall(r"'(\w+)'", chosen[0]) if chosen else [*steps]
    now = datetime.now(UTC)
    run = Run(
        run_id=f"fake-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(4)}",
        job_name="fake",
        job_text="",
        job_sha256="",
        argv=("raybench", "sweep"),
        status=RunStatus.OK,
        started_at=now,
        finished_at=now,
        points_total=len(names),
        cluster="",
        host=socket.gethostname(),
        tags=dict(tag.split("=") for tag in values_of(words, "--tag")),
    )
    store = RunStore.create(output, run, Measure())
    store.write_devices([DEVICE])
    rows = []
    for number, name in enumerate(names):
        rows.append(to_row(point_row(run.run_id, number, name, steps[name])))
    pq.write_table(arrow_table("points", rows), output / "points" / run.run_id / "all.parquet")
    return 0


def starts(folder):
    """The working folder and the words of each sweep."""
    [path] = folder.glob("results/ab/*/starts.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]
