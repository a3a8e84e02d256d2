"""Collectives seen, timed and replaced, whoever issues them: two ranks on gloo."""

from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from collective_steps import (
    CPU,
    WAYS,
    Fails,
    ReducesInTurn,
    SleepThenReduce,
    SumOfRanks,
    context_of,
    gradient_through_a_reused_buffer,
    slow_all_reduce,
)
from forked import answers_of_ranks, gloo
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from docs.examples.sharded import Sharded
from raybench.measure.breakdown import Extent, break_down
from raybench.measure.collectives import CollectiveCall, LocalCopies, add_up, replace_collectives
from raybench.measure.instruments import Timer
from raybench.records.doubts import DoubtKind, NotMeasured
from raybench.records.measurement import Breakdown
from raybench.workloads.base import Context, Workload

RANKS = 2
GROUPS = ("_start_coalescing", "_end_coalescing", "recv_anysource")
WIDTH, LAYERS = 8, 2
OWN_MS, DELAY_MS = 4.0, 12.0
# Message and bus bytes of 12 floats by nccl-tests' formulas.
MESSAGE = 12 * 4
EXPECTED = {
    "all_gather_into": {"all_gather": (RANKS * MESSAGE, (RANKS - 1) * MESSAGE)},
    "all_gather_in_place": {"all_gather": (RANKS * MESSAGE, (RANKS - 1) * MESSAGE)},
    "all_gather_lists": {"all_gather": (RANKS * MESSAGE, (RANKS - 1) * MESSAGE)},
    "reduce_scatter": {"reduce_scatter": (MESSAGE, MESSAGE * (RANKS - 1) / RANKS)},
    "all_to_all": {"all_to_all": (MESSAGE, MESSAGE * (RANKS - 1) / RANKS)},
    "all_to_all_uneven": {"all_to_all": (MESSAGE, MESSAGE * (RANKS - 1) / RANKS)},
    "all_reduce": {"all_reduce": (MESSAGE, 2 * MESSAGE * (RANKS - 1) / RANKS)},
    "broadcast": {"broadcast": (MESSAGE, MESSAGE)},
    "scatter": {"scatter": (RANKS * MESSAGE, MESSAGE * (RANKS - 1))},
    "ring": {"send": (MESSAGE, MESSAGE), "recv": (MESSAGE, MESSAGE)},
    "from_any_rank": {"send": (MESSAGE, MESSAGE), "recv": (MESSAGE, MESSAGE)},
    # Its indices have 8 bytes.
    "all_reduce_sparse": {"all_reduce": (3 * MESSAGE, 6 * MESSAGE * (RANKS - 1) / RANKS)},
}


def watch(way: str) -> SimpleNamespace:
    issue, seen = WAYS[way], []
    real = issue(RANKS).tolist()
    with replace_collectives(LocalCopies(seen)):
        local = issue(RANKS).tolist()
    again = issue(RANKS).tolist()
    return SimpleNamespace(real=real, local=local, real_again=again, traffic=add_up(seen))


def gradients_alone(way: str, rank: int) -> list[float]:
    """Of a model under DDP whose ranks do not reduce, by DDP's hook or by local copies."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    rows = torch.full((4, 3), float(rank + 1))
    if way == "hook":
        model.register_comm_hook(None, noop_hook)
    with nullcontext() if way == "hook" else replace_collectives(LocalCopies()):
        model(rows).square().sum().backward()
    # DDP divides by the ranks before it sums; its hook that does nothing does not.
    scale = 1.0 if way == "hook" else float(RANKS)
    return [value * scale for p in model.parameters() for value in p.grad.flatten().tolist()]


def objects_alone() -> list[int | None]:
    """What a rank has after collectives of Python objects: two from rank 0, one from all."""
    rank = dist.get_rank()
    with replace_collectives(LocalCopies()):
        dist.broadcast_object_list(told := [rank + 1], src=0)
        dist.scatter_object_list(dealt := [rank + 1], [5, 6] if rank == 0 else None, src=0)
        dist.all_gather_object(gathered := [None] * RANKS, rank)
    return [*told, *dealt, *gathered]


def sum_after_error() -> float:
    one = torch.ones(1)
    with suppress(ValueError), replace_collectives(LocalCopies()):
        dist.all_reduce(one)
        raise ValueError("the step failed")
    dist.all_reduce(one)
    return one.item()


def taken_apart(workload: Workload, context: Context) -> Breakdown:
    workload.step()
    return break_down(workload, Timer(CPU), context, Extent(samples=4))


def break_all_down(rank: int) -> dict[str, Breakdown]:
    context = context_of(rank)
    found = {}
    with slow_all_reduce(DELAY_MS):
        found["slow"] = taken_apart(SleepThenReduce(context, OWN_MS), context)
    found["sharded"] = taken_apart(Sharded(context, width=WIDTH, layers=LAYERS), context)
    found["in turn"] = taken_apart(ReducesInTurn(context), context)
    found["failing"] = taken_apart(Fails(1), context)
    found["uncounted"] = taken_apart(Fails(0, 1), context)
    collective = SleepThenReduce(context, 0.0)
    collective.message_bytes = 64
    found["collective"] = taken_apart(collective, context)
    return found


def run_rank(rank: int, store: str) -> SimpleNamespace:
    with gloo(rank, 2, store):
        before = [vars(dist.ProcessGroup)[name] for name in GROUPS]
        with replace_collectives(LocalCopies()):
            saved = gradient_through_a_reused_buffer()
        summing = SumOfRanks()
        taken_apart(summing, context_of(rank))
        return SimpleNamespace(
            ways={way: watch(way) for way in WAYS},
            gradients={way: gradients_alone(way, rank) for way in ("hook", "copies")},
            after_error=sum_after_error(),
            saved=saved,
            objects=objects_alone(),
            last_sum=summing.total.item(),
            breakdowns=break_all_down(rank),
            groups_are_as_before=before == [vars(dist.ProcessGroup)[name] for name in GROUPS],
        )


answers = answers_of_ranks(run_rank, RANKS)


@pytest.mark.parametrize("way", WAYS)
def test_calls_and_bytes_follow_the_closed_forms(way, answers):
    for answer in answers:
        found = {one.kind: one for one in answer.ways[way].traffic}
        sizes = {kind: (one.message_bytes, one.bus_bytes) for kind, one in found.items()}
        assert sizes == EXPECTED[way]
        assert {(one.calls, one.ranks) for one in found.values()} == {(1, RANKS)}


@pytest.mark.parametrize("way", WAYS)
def test_local_copies_fill_outputs_with_own_data_only(way, answers):
    for rank, answer in enumerate(answers):
        seen = answer.ways[way]
        assert len(seen.local) == len(seen.real)
        assert all(value != 0 for value in seen.local)
        if way not in ("ring", "from_any_rank") and (way, rank) != ("scatter", 1):
            # Only this rank's own hundred.
            assert {round(value) // 100 for value in seen.local} == {rank + 1}


def test_collectives_are_real_again_after_local_steps(answers):
    for way in WAYS:
        for answer in answers:
            assert answer.ways[way].real == answer.ways[way].real_again
        first, second = (answer.ways[way] for answer in answers)
        assert way == "broadcast" or first.local != first.real or second.local != second.real
    assert [answer.after_error for answer in answers] == [RANKS, RANKS]
    assert all(answer.groups_are_as_before for answer in answers)


def test_ddp_gradients_agree_between_copies_and_hook(answers):
    for answer in answers:
        assert answer.gradients["copies"] == pytest.approx(answer.gradients["hook"])
    assert answers[0].gradients["copies"] != answers[1].gradients["copies"]
    # What autograd has saved may be written.
    assert [answer.saved for answer in answers] == [8.0] * RANKS


def test_python_objects_of_peers_are_none(answers):
    assert [answer.objects for answer in answers] == [[1, 5, 0, 0], [None, None, 1, 1]]


def test_fsdp_communication_is_measured_without_declarations(answers):
    layer = WIDTH * WIDTH * 4
    for found in (answer.breakdowns["sharded"] for answer in answers):
        assert all(found.local_ms)
        assert found.optimizer_ms is not None
        sizes = {one.kind: (one.calls, one.message_bytes) for one in found.traffic}
        # Each layer is gathered forward and, but for the last, once more backward.
        assert sizes["reduce_scatter"] == (LAYERS, LAYERS * layer)
        calls, message_bytes = sizes["all_gather"]
        assert LAYERS <= calls <= 2 * LAYERS
        assert message_bytes == calls * layer
        assert "local copies" in found.methods["local_step_ms"]


def test_local_steps_exclude_a_slow_collective(answers):
    for answer in answers:
        slow = answer.breakdowns["slow"]
        assert OWN_MS <= min(slow.local_ms[0]) < OWN_MS + DELAY_MS / 2
        # A workload ends with a step among its peers.
        assert answer.last_sum == sum(range(1, RANKS + 1))


def test_gradients_reduced_in_some_steps_have_no_time(answers):
    for found in (answer.breakdowns["in turn"] for answer in answers):
        assert found.comm_ms == found.hooked_ms == ()
        assert all(found.local_ms)
        assert found.not_measured["comm_ms"] is NotMeasured.NO_GRADIENTS_REDUCED


def test_all_ranks_report_a_step_that_fails_alone(answers):
    failing = [answer.breakdowns["failing"] for answer in answers]
    reasons = [one.not_measured["comm_exposed_ms"] for one in failing]
    assert reasons == [NotMeasured.FAILS_ALONE] * RANKS
    doubts = [doubt for one in failing for doubt in one.doubts]
    assert [doubt.kind for doubt in doubts] == [DoubtKind.CHECK_FAILED] * RANKS
    assert "on another rank" in doubts[0].subject
    assert "ValueError: a peer is missing" in doubts[1].subject
    assert all(one.local_ms == () for one in failing)
    assert "counted" in failing[0].methods["comm_calls"]
    uncounted = answers[0].breakdowns["uncounted"]
    assert uncounted.not_measured["comm_calls"] is NotMeasured.FAILS_ALONE
    assert "a peer is missing" in uncounted.doubts[0].subject


def test_steps_of_only_or_no_communication_stay_whole(answers):
    class Silent(Workload):
        def step(self) -> None: ...

    found = answers[0].breakdowns["collective"]
    assert found.local_ms == ()
    assert found.not_measured["comm_exposed_ms"] is NotMeasured.COMMUNICATION
    found = break_down(Silent(), Timer(CPU), context_of(0), Extent(samples=3))
    assert found.local_ms == ()
    assert found.not_measured["local_step_ms"] is NotMeasured.NO_COLLECTIVES


@pytest.mark.parametrize(
    ("dtype", "is_random"),
    [(torch.bfloat16, True), (torch.float8_e4m3fn, True), (torch.int64, False)],
)
def test_data_of_peers_is_random_and_integers_zero(dtype, is_random):
    outputs = [torch.ones(64).to(dtype) for _ in range(2)]
    copies = LocalCopies()
    for output in outputs:
        copies(CollectiveCall(kind="recv", ranks=2, message_bytes=64, copies=[(output, None)]))
    first, second = (output.float() for output in outputs)
    assert first.equal(second)
    assert (len(first.unique()) > 8) is is_random
    assert is_random or not first.any()
    # What others would add is not zero either where this rank has nothing.
    output, source = torch.ones(64), torch.zeros(64)
    for kind in ("all_gather", "reduce_scatter"):
        copies(CollectiveCall(kind=kind, ranks=2, message_bytes=64, copies=[(output, source)]))
        assert output.count_nonzero() == (64 if kind == "reduce_scatter" else 0)
    assert output.abs().max() < 0.1
