"""`batch_size: auto` as a user runs it: real Ray, and a workload that runs out of memory."""

import pytest

from tests.integration.sweeps import cpu_sweep, table, write_text

# Two workers get the smaller limit: each series has its own.
WORKLOAD = """\
class Limited:
    def __init__(self, context, *, limit: int = 21):
        self.items_per_step = context.batch_size
        if context.batch_size > limit // context.world_size:
            raise MemoryError(f"{context.batch_size} rows do not fit")

    def step(self):
        sum(range(1000))
"""
JOB = """\
workload: {kind: "limited:Limited"}
matrix: {world_size: [1, 2], batch_size: {start: 4, max: 100}}
measure: {warmup: 1, iterations: 3, breakdown: false}
on_error: stop
"""
ONE = [4, 8, 16, 32, 24, 20, 22, 21]
TWO = [4, 8, 16, 12, 10, 11]


@pytest.mark.long
def test_each_series_ends_with_its_largest_batch_and_a_row_for_each_try(tmp_path):
    (tmp_path / "limited.py").write_text(WORKLOAD)
    write_text(tmp_path, JOB)
    done = cpu_sweep(tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    points = table(tmp_path)
    for world_size, batches, limit in ((1, ONE, 21), (2, TWO, 10)):
        mine = points[points["world_size"] == world_size].sort_values("started_at")
        assert list(mine["batch_size"]) == batches
        expected = ["ok" if batch <= limit else "oom" for batch in batches]
        assert list(mine["status"]) == expected
        assert (mine["global_batch_size"] == mine["batch_size"] * world_size).all()
    text = " ".join(done.stdout.split())
    assert "Largest batch that fits, per device" in text
    assert "fp32, 1 worker 21; 22 runs out of memory" in text
    assert "fp32, 2 workers 10; 11 runs out of memory" in text
