"""Shares by probes, on two ranks of gloo whose steps sleep as long as their samples say."""

import time
from collections.abc import Mapping

import pytest
import torch
from builders import make_context, make_point
from forked import answers_of_ranks, gloo

from raybench.errors import UsageError
from raybench.job.point import Point, Scalar, SlowBy
from raybench.measure.uneven import GroupProbe, share_out
from raybench.records.doubts import Doubt, DoubtKind
from raybench.records.measurement import RankShare
from raybench.workloads.base import Context, Workload
from raybench.workloads.part import WorkloadPart
from raybench.workloads.uneven import DividedStep, Idle

pytestmark = pytest.mark.alone

FIXED_S, SAMPLE_S = 0.004, 0.0002
BATCH = 100
CASES = ("equal", "fast", "by_speed", "150/50")
WITH_BATCH_NORM = "150/50"


class Sleeping(Workload):
    """Takes so long as it has samples; more where it is to be slow."""

    weighs_loss = True
    built = 0

    def __init__(self, context: Context, *, grad_accumulation: int = 1) -> None:
        Sleeping.built += 1
        items = context.batch_size * grad_accumulation
        self._sleep_s = (FIXED_S + SAMPLE_S * items) * (1 + context.extra_work)
        self.items_per_step = items
        self.model = torch.nn.BatchNorm1d(1) if context.seed else torch.nn.Linear(1, 1)

    def step(self) -> None:
        time.sleep(self._sleep_s)

    def gradient_error(self) -> float:
        return 0.5


def make(context: Context, params: Mapping[str, Scalar]) -> Workload:
    return Sleeping(context, grad_accumulation=int(params["grad_accumulation"]))


def point_of(shares: str, **settings: object) -> Point:
    passes = 10
    given: dict[str, object] = {
        "world_size": 2,
        "batch_size": BATCH // passes,
        "global_batch_size": 2 * BATCH,
        "params": {"grad_accumulation": passes},
        "shares": shares,
        "slow_ratio": 0.5,
    }
    return make_point(**{**given, **settings})


def context_of(rank: int, point: Point, seed: int = 0) -> Context:
    return make_context(
        rank, point.world_size, batch_size=point.batch_size or 1, seed=seed, **point.execution
    )


Found = tuple[RankShare, tuple[int, ...], tuple[Doubt, ...], tuple[int, float, int, bool], int]


def plain(part: WorkloadPart) -> Found:
    context = part.context
    about = (context.batch_size, context.loss_weight, context.world_size)
    is_idle = isinstance(part.build(), Idle)
    return part.share, part.kind.shares, part.doubts, (*about, is_idle), Sleeping.built


def run_rank(rank: int, store: str) -> dict[str, Found]:
    with gloo(rank, 2, store):
        known: dict[object, GroupProbe] = {}
        found = {}
        for shares in CASES:
            point = point_of(shares)
            context = context_of(rank, point, seed=int(shares == WITH_BATCH_NORM))
            found[shares] = plain(share_out(make, context, point, "group", known))
        return found


ranks = answers_of_ranks(run_rank, 2)


def test_shares_by_probed_speed_finish_together(ranks):
    first, second = (rank["by_speed"][0] for rank in ranks)
    assert first.slow_ratio is None
    assert second.slow_ratio == pytest.approx(0.5, rel=0.1)
    assert first.items_per_s / second.items_per_s == pytest.approx(2, rel=0.2)
    assert first.items_per_s == pytest.approx(1 / SAMPLE_S, rel=0.2)
    # Both are done after 32 ms: 140 samples at 0.2 ms after 4 ms, 60 at 0.4 ms after 8 ms.
    assert first.items + second.items == 2 * BATCH
    assert first.items == pytest.approx(140, abs=25)
    assert first.predicted_step_ms == pytest.approx(32 + first.exchange_ms, rel=0.2)


def test_all_ranks_agree_on_all_shares(ranks):
    for shares in CASES:
        (_, first, *_), (_, second, *_) = (rank[shares] for rank in ranks)
        assert first == second
        assert sum(first) == 2 * BATCH
    assert ranks[0]["equal"][1] == (BATCH, BATCH)
    assert ranks[0]["fast"][1] == (2 * BATCH, 0)
    assert ranks[0]["150/50"][1] == (150, 50)


def test_shares_weight_losses_and_zero_shares_stay_idle(ranks):
    assert [rank["150/50"][3] for rank in ranks] == [(15, 1.5, 2, False), (5, 0.5, 2, False)]
    # The others are a group of their own.
    assert [rank["fast"][3][2:] for rank in ranks] == [(1, False), (1, True)]


def test_devices_are_probed_once_for_all_shares(ranks):
    counts = [ranks[0][shares][4] for shares in ("equal", "fast", "by_speed")]
    # Four sizes and the exchange, the step alone, the check of gradients, and the one looked at.
    assert counts[0] == 8
    assert counts[1] - counts[0] == 3


def test_emulation_wrong_gradients_and_batch_norm_raise_doubts(ranks):
    emulated, *_ = ranks[1]["equal"][2]
    assert (emulated.kind, emulated.limit) == (DoubtKind.EMULATED, 0.5)
    assert emulated.subject == "rank 1"
    for rank, doubts in enumerate(one["equal"][2] for one in ranks):
        assert (doubts[-1].kind, doubts[-1].value) == (DoubtKind.OTHER_GRADIENTS, 0.5)
        assert len(doubts) == 1 + rank
        assert ranks[rank][WITH_BATCH_NORM][2][-1] == Doubt(kind=DoubtKind.BATCH_NORM)


def test_multiprocessors_can_be_taken_away_on_cuda_only():
    point = point_of("equal", world_size=1, global_batch_size=BATCH, slow_by=SlowBy.SMS)
    with pytest.raises(UsageError, match="slow_by: sms needs CUDA devices; take slow_by: compute"):
        share_out(make, context_of(0, point), point, None, {})


def test_batches_by_speed_are_multiples_of_fast_sizes(ranks):
    # Of 10 samples in a pass each is one; of 1024, sixteen are.
    assert ranks[0]["by_speed"][1][0] % 10 == 0
    point = point_of("by_speed", batch_size=1024, global_batch_size=20480)
    step = DividedStep(context=context_of(0, point), point=point)
    assert step.unit == 16 * 10
    assert step.size(1040 * 10) == (1040, point.params)
    # Shares by passes have batches of one size.
    point = point_of("by_speed_accumulation")
    step = DividedStep(context=context_of(0, point), point=point)
    assert step.unit == BATCH // 10
    assert step.size(14 * step.unit) == (BATCH // 10, {"grad_accumulation": 14})
