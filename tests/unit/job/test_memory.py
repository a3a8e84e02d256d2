"""What a point that does not fit into memory is told."""

from pathlib import Path

from jobs import HEAD, plan
from raybench.job.memory import estimate, explain_oom
from raybench.job.point import Point

GIB = 2**30


def point_of(text: str, **settings: object) -> Point:
    matrix = ", ".join(f"{name}: [{value}]" for name, value in settings.items())
    (point,) = plan(f"{HEAD}workload: {text}\nmatrix: {{{matrix}}}").points
    return point


def test_the_largest_batch_that_fits_and_the_first_other_setting_are_named():
    text = "{kind: transformer, preset: 350m, seq_len: 4096}"
    point = point_of(text, batch_size=64, precision="bf16", world_size=1)
    needed = estimate(point)
    found = explain_oom(point, needed, 216 * GIB)
    assert found.startswith("estimated 344 of 216 GiB; what fits by the estimate: batch_size 32 (")
    assert " or activation_checkpointing full (" in found
    tiny = explain_oom(point, needed, GIB)
    assert tiny == "estimated 344 of 1 GiB; by the estimate no single setting makes it fit"
    # Where the estimate said that it fits, something smaller is proposed.
    assert "batch_size 32 (" in explain_oom(point, needed, 1000 * GIB)


def test_a_workload_that_does_not_estimate_or_fails_to_has_none(tmp_path, monkeypatch):
    assert estimate(point_of("{kind: gemm}", m=1024)) is None
    monkeypatch.chdir(tmp_path)
    Path("guessing.py").write_text(
        "class Guess:\n"
        "    def __init__(self, context, *, length: int = 1): ...\n"
        "    def step(self): self.items_per_step = 1\n"
        "    @classmethod\n"
        "    def estimate_memory(cls, settings): return 1 / 0\n"
    )
    assert estimate(point_of('{kind: "guessing:Guess"}', batch_size=1)) is None
