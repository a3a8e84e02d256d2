"""The workload `smoke` and the digest of `same_bits`, on three ranks with gloo."""

from typing import Any

import pytest
import torch.distributed as dist
from builders import make_context, outcome_of_check
from forked import gloo, run_ranks

from raybench.workloads.kernels import SameBits
from raybench.workloads.training.smoke import Smoke


class BentGradients(Smoke):
    """One rank changes a gradient after all have reduced them."""

    def step(self) -> None:
        super().step()
        if dist.get_rank() == 2:
            next(self.model.parameters()).grad[0, 0] += 1


def observe(rank: int, world_size: int, store: str) -> dict[str, Any]:
    with gloo(rank, world_size, store):
        here = make_context(rank, world_size)
        seen = {kind.__name__: outcome_of(kind(here)) for kind in (Smoke, BentGradients)}
        same = SameBits(here, size=64)
        same.step()
        same.check()
        return {**seen, "digest": same.digest}


def outcome_of(workload: Smoke) -> str:
    """The outcome of the check after 20 steps."""
    for _ in range(20):
        workload.step()
    return outcome_of_check(workload)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(observe, 3, 3, str(tmp_path_factory.mktemp("group") / "store"))


def test_the_rank_whose_gradients_differ_is_named(ranks):
    assert [rank["Smoke"] for rank in ranks] == ["right"] * 3
    assert [rank["BentGradients"] for rank in ranks] == [
        "right",
        "right",
        "rank 2: its gradients differ from those of 2 other ranks after the same step",
    ]


def test_the_same_product_has_the_same_digest_on_each_rank(ranks):
    assert len({rank["digest"] for rank in ranks}) == 1
