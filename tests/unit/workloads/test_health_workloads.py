"""The workloads of a health check, alone on a CPU and on three ranks with gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import make_context, outcome_of_check
from forked import gloo, run_ranks

from raybench.errors import UsageError
from raybench.job.point import Precision
from raybench.workloads.communication.collective import GroupedCollective
from raybench.workloads.communication.pairs import Pairs
from raybench.workloads.compute.host_copy import HostCopy
from raybench.workloads.compute.launch import Launch
from raybench.workloads.compute.same_bits import SameBits, digest_of
from raybench.workloads.training.smoke import Smoke

DIRECTIONS = ("forward", "backward", "both", "round_trip")


class BentGradients(Smoke):
    """One rank changes a gradient after all have reduced them."""

    def step(self) -> None:
        super().step()
        if dist.get_rank() == 2:
            next(self.model.parameters()).grad[0, 0] += 1


def observe(rank: int, world_size: int) -> dict[str, Any]:
    here = make_context(rank, world_size)
    seen: dict[str, Any] = {}
    for direction in DIRECTIONS:
        for turn in range(3):
            pairs = Pairs(here, turn=turn, direction=direction, size_bytes=4096)
            untouched = outcome_of_check(pairs)
            pairs.step()
            seen[direction, turn] = (pairs.pair, untouched, outcome_of_check(pairs))
    named = Pairs(here, partners="0-2", size_bytes=64)
    named.step()
    seen["named"] = (named.pair, outcome_of_check(named))
    grouped = GroupedCollective(here, groups="0+2", size_bytes=4096)
    seen["grouped"] = []
    for _ in range(2):
        grouped.step()
        seen["grouped"].append(outcome_of_check(grouped))
    seen["factor"] = grouped.busbw_factor
    smoke = Smoke(here)
    for _ in range(20):
        smoke.step()
    seen["smoke"] = outcome_of_check(smoke)
    bent = BentGradients(here)
    for _ in range(3):
        bent.step()
    seen["bent"] = outcome_of_check(bent)
    same = SameBits(here, size=64)
    same.step()
    same.check()
    seen["digest"] = same.digest
    return seen


def run_rank(rank: int, world_size: int, store: str) -> dict[str, Any]:
    with gloo(rank, world_size, store):
        return observe(rank, world_size)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(run_rank, 3, 3, str(tmp_path_factory.mktemp("group") / "store"))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_message_arrives_at_each_partner_and_one_rank_sits_out(direction, ranks):
    for turn in range(3):
        seen = [rank[direction, turn] for rank in ranks]
        assert [after for *_, after in seen] == ["right"] * 3
        assert sum(pair is None for pair, *_ in seen) == 1
        receives = {"forward": [1], "backward": [0]}.get(direction, [0, 1])
        for rank, (pair, untouched, _) in enumerate(seen):
            if pair is not None and pair.index(rank) in receives:
                assert untouched.startswith(f"ranks {pair[0]} and {pair[1]}: a message from rank")
                assert untouched.endswith("arrived with a wrong payload")
            else:
                assert untouched == "right"


def test_pairs_can_be_named_and_a_group_leaves_the_others_alone(ranks):
    told = [rank["named"] for rank in ranks]
    assert told == [((0, 2), "right"), (None, "right"), ((0, 2), "right")]
    assert [rank["grouped"] for rank in ranks] == [["right"] * 2] * 3
    # 2 (n - 1) / n of a group of two.
    assert [rank["factor"] for rank in ranks] == [1.0] * 3


def test_the_rank_whose_gradients_differ_is_named(ranks):
    assert [rank["smoke"] for rank in ranks] == ["right"] * 3
    assert len({rank["digest"] for rank in ranks}) == 1
    assert [rank["bent"] for rank in ranks] == [
        "right",
        "right",
        "rank 2: its gradients differ from those of 2 other ranks after the same step",
    ]


def test_a_digest_is_of_every_bit_and_fits_into_a_double():
    tensor = torch.arange(1000, dtype=torch.float32)
    before = digest_of(tensor)
    tensor.view(torch.int32)[77] ^= 1
    assert digest_of(tensor) != before
    assert before == int(float(before))


def test_a_product_that_changes_on_one_device_is_counted():
    workload = SameBits(make_context(), size=64)
    for bent in (False, False, True):
        workload.step()
        if bent:
            workload.product[3, 4] += 1
        workload.check()
    assert workload.changed_products == 1


def test_launches_are_counted_on_the_device():
    workload = Launch(make_context(), wait=True)
    for _ in range(5):
        workload.step()
    assert outcome_of_check(workload) == "right"
    workload.number += 1
    assert outcome_of_check(workload) == "rank 0: 5 additions of 1 came to 6"


@pytest.mark.parametrize("direction", ["h2d", "d2h", "both"])
def test_a_copy_that_moves_nothing_is_found_out(direction):
    workload = HostCopy(make_context(), direction=direction, size_bytes=4096)
    assert "arrived with other bytes than were sent" in outcome_of_check(workload)
    workload.step()
    assert outcome_of_check(workload) == "right"
    assert workload.memory_bytes == (8192 if direction == "both" else 4096)


def test_only_the_local_rank_that_is_named_copies():
    idle = HostCopy(make_context(rank=1, world_size=2), local_rank=0, size_bytes=4096)
    idle.step()
    assert outcome_of_check(idle) == "right"
    assert idle.memory_bytes == 0


def test_what_cannot_be_done_is_said_in_one_line():
    with pytest.raises(UsageError, match="wait: true cannot be had with cuda_graph"):
        Launch(make_context(cuda_graph=True), wait=True)
    with pytest.raises(UsageError, match="needs at least 2 ranks"):
        Pairs(make_context())
    with pytest.raises(UsageError, match="between the memories of two GPUs"):
        Pairs(make_context(world_size=2), transport="copy")
    with pytest.raises(UsageError, match="means nothing to a message"):
        Pairs(make_context(world_size=2, precision=Precision.BF16))
