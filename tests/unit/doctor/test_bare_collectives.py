"""The plain loop of all_reduces under torchrun: what it answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_answer_is_one_time_by_size_however_many_iterations_there_are(tmp_path: Path) -> None:
    output = tmp_path / "answer.json"
    spec = {"device": "cpu", "steps": [[4096, 2, 3], [8192, 2, 40]], "output": str(output)}
    rank = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    subprocess.run(
        [sys.executable, "-m", "raybench.doctor.bare_collectives", json.dumps(spec)],
        env={**os.environ, **rank},
        check=True,
        timeout=200,
    )
    told = json.loads(output.read_text(encoding="utf-8"))
    assert list(told) == ["4096", "8192"]
    assert all(isinstance(time_ms, float) and time_ms > 0 for time_ms in told.values())
