"""What `raybench ab` says of code that did not change, and of code that became slower.

    python -m benchmarks.gate_trial [--jobs 10] [--points 4] [--changes 0 0.1] [--device cpu]

Each job is a repository of its own with one to four points, products of matrices. The new side does
more products in each step; all jobs run for each change. A change of 0 compares equal code. A row a
job: the verdict, the verdicts of the points, pairs, minutes, what it says it detects, and the
largest difference from the truth in any point, in percent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pandas as pd

from benchmarks.common import options

CLASS = """\
import torch


class Products:
    takes_batch_size = False

    def __init__(self, context, *, n: int = 256):
        self.a = torch.rand(n, n, device=context.device)

    def step(self):
        for _ in range({products}):
            self.a @ self.a
"""
JOB = """\
version: 1
name: products
workload: {{kind: "products:Products"}}
matrix: {{world_size: [1], n: {sizes}}}
measure: {{seconds: {seconds}}}
"""
# Sizes, products of a step, and seconds: steps of about 10 ms.
KINDS = {
    "cpu": ((224, 256, 288, 320), 20, 0.5),
    "cuda": ((1280, 1344, 1408, 1472), 100, 1.0),
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--points", type=int, choices=range(1, 5), default=4)
    parser.add_argument("--changes", type=float, nargs="+", default=[0.0, 0.1])
    parser.add_argument("--device", choices=[*KINDS], default="cpu")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--address", default="local")
    chosen = parser.parse_args()
    rows = []
    words = ["--max-minutes", str(chosen.minutes), "--address", chosen.address]
    words += ["--device", chosen.device]
    for change in chosen.changes:
        for number in range(chosen.jobs):
            found = trial(chosen.device, chosen.points, change, words)
            rows.append({"change": f"{change:.1%}", "job": number + 1} | found)
            print(rows[-1], file=sys.stderr, flush=True)
    print(pd.DataFrame(rows).to_string(index=False))


def trial(device: str, points: int, change: float, words: list[str]) -> dict[str, object]:
    """Run one job, and return its row."""
    sizes, products, seconds = KINDS[device]
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder, "products.py")
        code.write_text(CLASS.format(products=products))
        Path(folder, "ci.yaml").write_text(JOB.format(sizes=[*sizes[:points]], seconds=seconds))
        identity = ("-c", "user.name=raybench", "-c", "user.email=raybench@localhost")
        for git in (("init", "-q"), ("add", "--all"), (*identity, "commit", "-q", "-m", "old")):
            subprocess.run(["git", *git], cwd=folder, check=True)
        changed_products = round(products * (1 + change))
        code.write_text(CLASS.format(products=changed_products))
        command = [sys.executable, "-m", "raybench", "ab", "ci.yaml", "--json"]
        command += ["--old", "HEAD", "--new", "WORKTREE", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode not in (0, 1, 5):
            raise SystemExit(done.stderr)
    verdict = json.loads(done.stdout)
    truth = products / changed_products - 1
    counts = Counter(point["verdict"] for point in verdict["points"])
    changes = [point["change"] for point in verdict["points"] if point["change"] is not None]
    return {
        "verdict": verdict["verdict"],
        "points": ", ".join(f"{count} {name}" for name, count in counts.items()),
        "pairs": verdict["pairs"],
        "minutes": round(verdict["minutes"], 1),
        "detects": verdict["detectable"] and f"{verdict['detectable']:.1%}",
        "error": f"{max((abs(value - truth) for value in changes), default=0):.1%}",
    }


if __name__ == "__main__":
    main()
