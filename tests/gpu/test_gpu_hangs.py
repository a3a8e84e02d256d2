"""Ten ways to hang on two GPUs: `pytest -m gpu tests/gpu/test_gpu_hangs.py -s`."""

import pytest
import torch

from tests.hang_runs import Case, results, run, write_job
from tests.hang_workloads import KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("is_script", [False, True], ids=["class", "script"])
def test_the_rank_that_hangs_is_named(tmp_path, is_script):
    cases = [Case(kind=kind, rank=number % 2) for number, kind in enumerate(KINDS)]
    cases.append(Case(kind="evaluate", pause_s=30.0))
    write_job(tmp_path, cases, world_size=2, is_script=is_script)
    printed = run(tmp_path, "cuda", 580)
    *hung, healthy = results(tmp_path, cases)
    assert len(hung) == len(KINDS)
    print(printed, *hung, sep="\n")
    assert sum(result.is_rank_right for result in hung) >= len(KINDS) - 1
    assert sum(result.is_cause_right for result in hung) >= len(KINDS) - 1
    assert (healthy.row["status"], healthy.row["hang"]) == ("ok", None)
    assert printed.count("hangs    ") == len(KINDS)
